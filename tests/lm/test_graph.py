"""The recorded step: the same tokens as the eager one, and what becomes of a capture that fails.

On a CPU the step runs over its fixed buffers without a capture; on a CUDA device it is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from acestep_engine.backends import torch_graph
from acestep_engine.backends.torch_graph import GraphLanguageModel
from acestep_engine.backends.torch_lm import TorchLanguageModel
from acestep_engine.config import Qwen3Config
from acestep_engine.errors import InvalidRequest
from acestep_engine.lm.decode import CodesCourse, Task, decode
from acestep_engine.lm.tokenizer import Vocabulary
from acestep_engine.models_torch.qwen3 import Qwen3Model
from acestep_engine.types import LMSampling

SMALL = Vocabulary(
    size=180, text=80, start=5, end=9, think_open=6, think_close=7, first_code=80, codes=100
)
COUNT = 300
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ),
]
WAITS = {  # what a capture forbids: looks at the device, sizes that depend on values
    "aten._local_scalar_dense",
    "aten.bincount",
    "aten.equal",
    "aten.is_nonzero",
    "aten.item",
    "aten.lift_fresh",
    "aten.masked_select",
    "aten.nonzero",
    "aten.repeat_interleave",
    "aten._unique2",
}


def module_on(device: str) -> Qwen3Model:
    module = Qwen3Model(
        Qwen3Config(
            vocab_size=SMALL.size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    module.fuse()
    return module.to(device)


@pytest.fixture(scope="module", params=DEVICES)
def pair(request: pytest.FixtureRequest) -> tuple[TorchLanguageModel, GraphLanguageModel]:
    """The same weights behind both backends."""
    module = module_on(request.param)
    return (
        TorchLanguageModel(module, request.param, torch.float32),
        GraphLanguageModel(module, request.param, torch.float32),
    )


def codes(lm: TorchLanguageModel, host: Any, songs: int, **sampling: Any) -> list[list[int]]:
    """Songs with CFG in step; their prompts have unequal lengths."""
    course = CodesCourse(SMALL, COUNT, COUNT, lm.device)
    conditional = [[1, 2, 3, *range(10, 10 + 3 * song)] for song in range(songs)]
    prompts = (*conditional, *([4] for _ in range(songs)))
    chosen = LMSampling(cfg_scale=2.0, **sampling)
    decode(lm, Task("codes", prompts, chosen, tuple(range(songs))), course, host)
    return [list(song) for song in course.songs]


@pytest.mark.parametrize("songs", [1, 4])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.9, "repetition_penalty": 1.2},
        {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature_last": True},
    ],
)
def test_the_recorded_step_draws_the_same_tokens(
    pair, host, songs: int, sampling: dict[str, Any]
) -> None:
    eager, graph = (codes(lm, host, songs, **sampling) for lm in pair)
    assert graph == eager
    assert [len(song) for song in graph] == [COUNT] * songs
    assert sampling["temperature"] == 0 or all(len(set(song)) > 20 for song in graph)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A capture that fails after its warm-up has written to the cache; how often it was tried."""
    tries: list[int] = []

    def capture(body: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        body()
        tries.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch_graph, "capture", capture)
    return tries


def test_a_capture_that_fails_is_told_once_and_changes_no_token(
    pair, host, broken: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    eager, graph = (codes(lm, host, 2, repetition_penalty=1.2) for lm in pair)
    assert graph == eager
    assert len(broken) == 1
    (record,) = [record for record in caplog.records if "CUDA graph" in record.message]
    assert record.levelname == "WARNING"
    assert "not permitted" in record.message


def take_first(states_BD: Tensor, uniform_N1: Tensor) -> Tensor:
    return states_BD[:1, : SMALL.codes].argmax(-1)


@torch.inference_mode()
def test_positions_beyond_the_capacity_are_refused(pair) -> None:
    for lm in pair:
        session = lm.open(2, 6)
        session.feed([[1, 2, 3], [4]])
        step = session.record(take_first)
        ids_B1, uniform_N1 = (torch.zeros(2, 1, device=lm.device) for _ in range(2))
        for _ in range(3):
            step(ids_B1.long(), uniform_N1)
        with pytest.raises(InvalidRequest, match=r"needs 7 token positions.* opened for 6"):
            step(ids_B1.long(), uniform_N1)


@torch.inference_mode()
def test_a_session_can_be_recorded_again_after_other_tokens(pair) -> None:
    """The state after ragged tokens and a second record is that of one plain feed."""
    found = []
    for lm in pair:
        session = lm.open(2, 20)
        session.feed([[1, 2, 3], [4]])
        states: list[Tensor] = []
        for _ in range(2):
            step = session.record(_remember(states, lm))
            for token in (11, 12):
                ids_B1 = torch.full((2, 1), token, device=lm.device)
                step(ids_B1, torch.zeros(1, 1, device=lm.device))
            session.feed([[20, 21], [22]])
        whole = lm.open(2, 20).feed(
            [
                [1, 2, 3, 11, 12, 20, 21, 11, 12],
                [4, 11, 12, 22, 11, 12],
            ]
        )
        found.append((states[-1], whole))
    for state, whole in found:
        torch.testing.assert_close(state, whole, atol=1e-5, rtol=1e-5)


def _remember(states: list[Tensor], lm: TorchLanguageModel):
    """A choice that leaves the states it saw in the last of `states`."""
    last_BD = torch.zeros(2, 32, device=lm.device)
    states.append(last_BD)

    def choose(states_BD: Tensor, uniform_N1: Tensor) -> Tensor:
        last_BD.copy_(states_BD)
        return take_first(states_BD, uniform_N1)

    return choose


class Spy(TorchDispatchMode):
    """Names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("top_k", [0, 40])
def test_the_step_does_nothing_that_a_capture_forbids(
    host, monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    """Seen by the operations alone, because without a device nothing would fail."""
    spy = Spy()

    def capture(body: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        with spy:
            out = body()
        return lambda: out.copy_(body())

    monkeypatch.setattr(torch_graph, "capture", capture)
    lm = GraphLanguageModel(module_on("cpu"), "cpu", torch.float32)
    options = {"top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "top_k": top_k}
    codes(lm, host, 2, **options)
    assert "aten.searchsorted" in spy.names
    assert not spy.names & WAITS
