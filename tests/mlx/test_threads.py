"""MLX ties lazy arrays to the thread that made them; models, caches and conditions are not lazy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from acestep_engine.backends.mlx_device import available, clear_streams, metal, trouble
from acestep_engine.engine import Engine
from acestep_engine.host import LocalHost
from acestep_engine.lm.metadata import stated
from acestep_engine.runtime import Wish
from acestep_engine.types import Codes, Latents, ModelSpec, Plan, Request

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, threading, torch
from acestep_engine.backends.mlx import MLXCodec
from acestep_engine.backends.mlx_device import clear_streams
from acestep_engine.backends.mlx_load import build
from acestep_engine.types import ModelSpec
from acestep_engine.weights.load import read
from acestep_engine.weights.shapes import config_of
from acestep_engine.weights.sources import locate

torch.set_num_threads(1)
source = locate(ModelSpec("", "", "", sys.argv[1]), "vae")
tensors = read(source)
module = build("vae", config_of("vae", tensors.shapes, source.config), tensors, torch.float32)
found = []

def work():
    try:
        found.append(MLXCodec(module, "cpu", torch.float32).decode(torch.ones(1, 64, 4)))
    finally:
        clear_streams()

worker = threading.Thread(target=work)
worker.start()
worker.join()
print(tuple(found[0].shape))
"""


def elsewhere(work: Callable[[], Any]) -> Any:
    """The result of `work` in a thread of its own, which leaves as it should."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        finally:
            clear_streams()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (result,) = results
    return result


def use(role: str, backend: Any) -> Any:
    """A small piece of work of each part."""
    text, timbre = torch.ones(1, 5, 16), torch.ones(1, 750, 64)
    works: dict[str, Callable[[], Any]] = {
        "lm": lambda: backend.logits(backend.open(2, 20).feed([[1, 2], [3]]), slice(0, 9)),
        "text_encoder": lambda: backend.states(torch.tensor([[1, 2]])),
        "condition_encoder": lambda: backend.encode(text, text, timbre),
        "audio_tokenizer": lambda: backend.tokenize(timbre),
        "audio_detokenizer": lambda: backend.detokenize(torch.tensor([[7]])),
        "dit": lambda: backend(
            timbre, 0.5, torch.ones(1, 750, 128), backend.prepare(torch.ones(1, 3, 32))
        ),
        "vae": lambda: backend.decode(torch.ones(1, 64, 3)),
    }
    return works[role]()


ROLES = ("lm", "text_encoder", "condition_encoder", "audio_tokenizer", "audio_detokenizer")


@pytest.mark.parametrize("role", [*ROLES, "dit", "vae"])
def test_a_model_loaded_in_one_thread_runs_in_another(stored, twins, role) -> None:
    tensors, config = stored(role)
    _, in_mlx = twins
    here = in_mlx(role, config, tensors, torch.float32)
    there = elsewhere(lambda: in_mlx(role, config, tensors, torch.float32))
    expected = use(role, here)
    assert torch.equal(elsewhere(lambda: use(role, here)), expected)
    assert torch.equal(use(role, there), expected)


def test_what_a_call_leaves_behind_serves_other_threads(pair, randn) -> None:
    _, velocity = pair("dit")
    _, lm = pair("lm")
    x, context, words = randn(1, 8, 64), randn(1, 8, 128), randn(1, 3, 32)
    prepared = elsewhere(lambda: velocity.prepare(words))
    expected = velocity(x, 0.3, context, velocity.prepare(words))
    assert torch.equal(velocity(x, 0.3, context, prepared), expected)
    session, other = elsewhere(lambda: lm.open(2, 20)), lm.open(2, 20)
    for feed in ([[1, 2], [3]], torch.tensor([[4], [5]])):
        states = elsewhere(lambda feed=feed: session.feed(feed))
        assert torch.equal(states, other.feed(feed))


def test_an_engine_loads_in_one_thread_and_runs_in_others(tiny_model: ModelSpec) -> None:
    """As in ComfyUI, where a thread of its own runs the nodes."""
    model = replace(tiny_model, wish=Wish("mlx", "fp32"))
    plan, latents = (
        Plan("calm", "la", stated(Request("calm", duration=2)), 2.0),
        Latents(torch.ones(1, 20, 64)),
    )
    codes = Codes((tuple(range(10)),))
    works: list[Callable[[Engine], Any]] = [
        lambda engine: engine.compose(model, plan),
        lambda engine: engine.render(model, plan, codes).values,
        lambda engine: engine.decode(model, latents).waveform,
        lambda engine: engine.tokenize(model, latents),
    ]
    engines = [Engine(LocalHost(show=False)) for _ in range(2)]
    here, there = (
        [work(engines[0]) for work in works],
        elsewhere(lambda: [work(engines[1]) for work in works]),
    )
    again = (
        [work(engines[1]) for work in works],
        elsewhere(lambda: [work(engines[0]) for work in works]),
    )
    for results in (there, *again):
        for ours, expected in zip(results, here, strict=True):
            same = (
                torch.equal(ours, expected) if isinstance(ours, torch.Tensor) else ours == expected
            )
            assert same


def test_a_process_whose_thread_used_mlx_ends_in_peace(tiny_model: ModelSpec) -> None:
    """In a process of its own, because the abort comes at exit; here layers are compiled, too."""
    environment = {k: v for k, v in os.environ.items() if k != "MLX_DISABLE_COMPILE"}
    command = [sys.executable, "-c", PROGRAM, tiny_model.vae]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 2, 7680)"


def test_availability_is_what_an_import_says() -> None:
    assert available()
    assert trouble() is None
    assert metal() is (sys.platform == "darwin")


def test_a_broken_library_is_not_available(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)  # as an import without its library fails
    assert not available()
    assert not metal()
    assert "mlx.core" in str(trouble())
