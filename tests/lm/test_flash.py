"""Attention by flash-attn equals attention by torch. The package needs a GPU, so a stand-in keeps
its documented contract in plain torch; where there is a GPU with the package, the real one runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from acestep_engine.backends.torch_graph import GraphLanguageModel
from acestep_engine.backends.torch_lm import TorchLanguageModel
from acestep_engine.config import Qwen3Config
from acestep_engine.models_torch import flash
from acestep_engine.models_torch.qwen3 import Qwen3Model
from acestep_engine.runtime import has_flash_attn

CONFIG = Qwen3Config(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
RAGGED = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]


class StandIn(ModuleType):
    """The two functions that are called, for the arguments that are given, and their calls."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.calls: list[str] = []
        self.splits: list[int] = []

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert q.dtype is k.dtype is v.dtype
        self.calls.append("prefill")
        seen_B = torch.full((len(q),), k.shape[1])
        return self._attention(q, k, v, seen_B, causal)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        causal: bool = False,
        num_splits: int = 0,
    ) -> Tensor:
        assert k is None
        assert v is None
        assert cache_seqlens is not None
        assert (cache_seqlens.dtype, cache_seqlens.shape) == (torch.int32, (len(q),))
        assert cache_seqlens.is_contiguous()
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert q.dtype is k_cache.dtype is v_cache.dtype
        self.calls.append("decode")
        self.splits.append(num_splits)
        return self._attention(q, k_cache, v_cache, cache_seqlens, causal)

    @staticmethod
    def _attention(q: Tensor, k: Tensor, v: Tensor, seen_B: Tensor, causal: bool) -> Tensor:
        """Head h reads head h // (H / G); the causal mask is aligned to the bottom right."""
        shared = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(shared, dim=2) for x in (k, v))
        scores = torch.einsum("blhk,bthk->bhlt", q.float(), k.float()) * q.shape[3] ** -0.5
        places_T, rows_L = torch.arange(k.shape[1]), torch.arange(q.shape[1])
        last_BL = seen_B[:, None] - (q.shape[1] - rows_L if causal else 0)
        hidden = places_T > (last_BL if causal else last_BL - 1)[:, None, :, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("bhlt,bthk->blhk", weights, v.float()).to(q.dtype)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The stand-in as the installed package, and the CPU as a device that it takes."""
    module = StandIn()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(flash, "DEVICES", ("cpu",))
    monkeypatch.setattr(flash, "DTYPES", (torch.bfloat16, torch.float32))
    flash.package.cache_clear()
    yield module
    flash.package.cache_clear()


def model(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Qwen3Model:
    module = Qwen3Model(CONFIG)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 0.2 if parameter.ndim > 1 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    module.fuse()
    return module.to(device, dtype)


def states(backend: type[TorchLanguageModel], module: Qwen3Model, prompts: list[list[int]]):
    """Final states after the prompts, after four steps, two ragged tokens more and four steps."""
    device = module.embed_tokens.weight.device
    lm = backend(module, device, module.embed_tokens.weight.dtype)
    session = lm.open(len(prompts), 24)
    found = [session.feed(prompts)]

    def choose(hidden_BD: Tensor, uniform_N1: Tensor) -> Tensor:
        seen_BD.copy_(hidden_BD)
        return hidden_BD[:, 0]

    seen_BD = torch.zeros_like(found[0])
    for _ in range(2):
        step = session.record(choose)
        for token in range(4):
            ids_B1 = torch.full((len(prompts), 1), 20 + token, device=device)
            step(ids_B1, torch.zeros(1, 1, device=device))
            found.append(seen_BD.clone())
        found.append(session.feed([[30], [31, 32], [33]][: len(prompts)]))
    return torch.stack(found)


@pytest.mark.parametrize("backend", [TorchLanguageModel, GraphLanguageModel])
@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2, 3], [4, 5, 6]], RAGGED])
def test_every_span_gives_what_torch_gives(
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    backend: type[TorchLanguageModel],
    prompts: list[list[int]],
) -> None:
    module = model()
    found = states(backend, module, prompts)
    assert {"prefill", "decode"} == set(stand_in.calls)
    monkeypatch.setattr(flash, "DEVICES", ())
    assert (found - states(TorchLanguageModel, module, prompts)).abs().max() < 1e-5


def test_in_bf16_the_difference_is_that_of_rounding(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = model(torch.bfloat16)
    found = states(TorchLanguageModel, module, RAGGED)
    assert stand_in.calls
    monkeypatch.setattr(flash, "DEVICES", ())
    theirs = states(TorchLanguageModel, module, RAGGED)
    assert F.cosine_similarity(found, theirs, dim=-1).min() > 0.999


def test_a_plain_step_and_a_replayed_one_are_the_same_calls(stand_in: StandIn) -> None:
    module = model()
    plain = states(TorchLanguageModel, module, RAGGED)
    assert torch.equal(plain, states(GraphLanguageModel, module, RAGGED))


def test_the_order_of_the_sum_does_not_depend_on_the_company(stand_in: StandIn) -> None:
    module = model()
    for prompts in ([[1, 2]], [[1, 2]] * 3):
        states(TorchLanguageModel, module, prompts)
    assert set(stand_in.splits) == {flash.SPLITS}


def test_tokens_side_by_side_of_unequal_number_stay_with_torch(stand_in: StandIn) -> None:
    session = TorchLanguageModel(model(), "cpu", torch.float32).open(2, 24)
    session.feed([[1, 2], [3, 4]])
    assert stand_in.calls == ["prefill"] * CONFIG.num_hidden_layers
    session.feed([[5, 6], [7]])
    session.feed([[5, 6], [7, 8]])
    assert stand_in.calls == ["prefill"] * CONFIG.num_hidden_layers
    session.feed([[9], [9]])
    assert stand_in.calls[3:] == ["decode"] * CONFIG.num_hidden_layers


def test_cpus_and_wide_floats_do_not_ask_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", StandIn())
    assert not flash.usable(torch.zeros(1, dtype=torch.bfloat16))
    assert not flash.usable(torch.zeros(1))


def test_a_package_that_cannot_be_imported_is_told_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flash_attn.py").write_text("from math import flash_of_another_build")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(flash, "DEVICES", ("cpu",))
    flash.package.cache_clear()
    assert not flash.usable(torch.zeros(1, dtype=torch.bfloat16))
    assert not has_flash_attn()
    assert caplog.text.count("flash_of_another_build") == 1
    flash.package.cache_clear()


def test_the_policy_and_the_models_import_the_package_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    (tmp_path / "flash_attn.py").write_text("import flash_imports\nflash_imports.n += 1")
    (tmp_path / "flash_imports.py").write_text("n = 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    flash.package.cache_clear()
    assert has_flash_attn()
    assert flash.package() is sys.modules.pop("flash_attn")
    assert has_flash_attn()
    assert sys.modules.pop("flash_imports").n == 1
    flash.package.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_package_itself_gives_what_torch_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flash.package.cache_clear()
    if flash.package() is None:
        pytest.skip("needs flash-attn")
    module = model(torch.bfloat16, "cuda")
    found = states(TorchLanguageModel, module, RAGGED)
    monkeypatch.setattr(flash, "DEVICES", ())
    theirs = states(TorchLanguageModel, module, RAGGED)
    assert F.cosine_similarity(found, theirs, dim=-1).min() > 0.999
