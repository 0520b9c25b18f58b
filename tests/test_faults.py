"""Faults on tiny real models: memory that runs out, stops, broken scores, many calls, two threads.

After each of them the engine works on, and its results are those of an engine that met no fault.
"""

from __future__ import annotations

import gc
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from acestep_engine.engine import Engine
from acestep_engine.errors import Cancelled, NonFinite, OutOfMemory
from acestep_engine.host import LocalHost, Progress
from acestep_engine.types import (
    AnswerOptions,
    Audio,
    Codes,
    ComposeOptions,
    DiTSampling,
    Latents,
    LMSampling,
    Metadata,
    ModelSpec,
    Plan,
    PlanOptions,
    Request,
)

PLAN = Plan("calm piano", "la", Metadata(90, None, 3, "C major", "en", "4"), 3.0)
LONG = replace(PLAN, lyrics="la di da " * 20, duration=2.0)
SAMPLING = LMSampling(seed=5)
SHORT = AnswerOptions(max_tokens=30, sampling=SAMPLING)
CODES = Codes((tuple(range(0, 60_000, 4_000)), tuple(range(1, 60_000, 4_000))))
SOUND = Audio(torch.linspace(-1, 1, 2 * 96_000).sin().view(1, 2, 96_000))
LATENTS = Latents(torch.linspace(-2, 2, 120 * 64).sin().view(1, 120, 64))

Call = Callable[[Engine, ModelSpec], Any]
CALLS: dict[str, Call] = {
    "plan": lambda engine, model: engine.plan(
        model, Request("a", bpm=90, keyscale="C major"), PlanOptions(rewrite_caption=False)
    ),
    "compose": lambda engine, model: engine.compose(model, PLAN, ComposeOptions(2)),
    "compose plans": lambda engine, model: engine.compose(model, (PLAN, LONG)),
    "write": lambda engine, model: engine.write(model, "calm", options=SHORT),
    "rewrite": lambda engine, model: engine.rewrite(
        model, Request("a", "b", 20, 90, "C major", "4", "en"), SHORT
    ),
    "understand": lambda engine, model: engine.understand(model, CODES, SHORT),
    "score": lambda engine, model: engine.score(model, CODES, PLAN),
    "render": lambda engine, model: engine.render(model, PLAN, CODES).values.tolist(),
    "decode": lambda engine, model: engine.decode(model, LATENTS, 32).waveform.tolist(),
    "encode": lambda engine, model: engine.encode(model, SOUND, 20).values.tolist(),
    "tokenize": lambda engine, model: engine.tokenize(model, LATENTS),
}
OF_THE_LM = ("plan", "compose", "compose plans", "write", "rewrite", "understand", "score")
STEPS = {"plan": 3, "compose": 15, "score": 20, "render": 16, "decode": 5, "encode": 3}


class Pressed(BaseException):
    """The stop of a host of its own; no error handler for errors may catch it."""


class WatchfulBar:
    def __init__(self, host: WatchfulHost) -> None:
        self._host = host
        host.open_bars += 1
        host.most_bars = max(host.most_bars, host.open_bars)

    def update(self, done: int) -> None:
        self._host.updates.append(done)
        self._host.check_interrupt()

    def close(self) -> None:
        self._host.open_bars -= 1


class WatchfulHost(LocalHost):
    """Raises at look number `stop_at` for the stop button, and knows which bars are open."""

    def __init__(self) -> None:
        super().__init__(show=False)
        self.looks, self.stop_at, self.open_bars, self.most_bars = 0, -1, 0, 0
        self.updates: list[int] = []

    def progress(self, stage: str, total: int) -> Progress:
        return WatchfulBar(self)

    def check_interrupt(self) -> None:
        self.looks += 1
        if self.looks == self.stop_at:
            raise Pressed


@pytest.fixture(scope="module")
def reference(tiny_model: ModelSpec, short_captions: None) -> dict[str, Any]:
    """What each call gives on an engine that met no fault."""
    engine = Engine(LocalHost(show=False))
    return {name: call(engine, tiny_model) for name, call in CALLS.items()}


@pytest.mark.parametrize("name", CALLS)
def test_a_stop_is_obeyed_at_every_look_and_leaves_nothing_behind(
    tiny_model: ModelSpec, reference: dict[str, Any], name: str
) -> None:
    host = WatchfulHost()
    engine = Engine(host)
    assert CALLS[name](engine, tiny_model) == reference[name]
    host.looks = 0
    CALLS[name](engine, tiny_model)  # again, with what an engine remembers
    looks = host.looks
    assert looks >= STEPS.get(name, 1)
    # Some looks depend on the clock, so the last ones are not counted on.
    for stop_at in sorted({1, min(2, looks), -(-looks // 2), -(-looks * 8 // 10)}):
        host.looks, host.stop_at = 0, stop_at
        with pytest.raises(Pressed):
            CALLS[name](engine, tiny_model)
        assert host.looks == stop_at  # nothing went on afterwards
        assert host.open_bars == 0
    host.stop_at = -1
    assert CALLS[name](engine, tiny_model) == reference[name]


def test_a_stop_request_without_a_call_is_forgotten(tiny_model: ModelSpec) -> None:
    host = LocalHost(show=False)
    engine = Engine(host)
    host.cancel()
    assert len(engine.compose(tiny_model, PLAN).items[0]) == 15


def test_a_stop_request_from_another_thread_ends_the_running_call_alone(
    tiny_model: ModelSpec, reference: dict[str, Any]
) -> None:
    host = LocalHost(show=False)
    engine = Engine(host)
    engine.compose(tiny_model, PLAN)
    timer = threading.Timer(0.3, host.cancel)
    timer.start()
    with pytest.raises(Cancelled):
        engine.compose(tiny_model, replace(PLAN, duration=600.0), ComposeOptions(8))
    timer.join()
    assert CALLS["compose"](engine, tiny_model) == reference["compose"]


def test_a_stop_request_does_not_outlive_a_call_that_ended_first(tiny_model: ModelSpec) -> None:
    class LateHost(LocalHost):
        def progress(self, stage: str, total: int) -> Progress:
            host, bar = self, super().progress(stage, total)

            class LateBar:
                update = staticmethod(bar.update)

                def close(self) -> None:
                    host.cancel()
                    bar.close()

            return LateBar()

    engine = Engine(LateHost(show=False))
    assert engine.compose(tiny_model, PLAN) == engine.compose(tiny_model, PLAN)


def test_understanding_a_batch_is_one_call(tiny_model: ModelSpec) -> None:
    """A stop between its songs stops it."""

    class BetweenHost(LocalHost):
        bars = 0

        def progress(self, stage: str, total: int) -> Progress:
            self.bars += 1
            if self.bars == 1:
                self.cancel()
            return WatchfulBar(WatchfulHost())

        def check_interrupt(self) -> None:
            if self.bars == 2:
                super().check_interrupt()

    with pytest.raises(Cancelled):
        CALLS["understand"](Engine(BetweenHost(show=False)), tiny_model)


def lm_module(engine: Engine, model: ModelSpec) -> torch.nn.Module:
    return engine.store.backend(model, "lm").module


@pytest.mark.parametrize("name", OF_THE_LM)
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=["device", "cpu"],
)
def test_memory_that_runs_out_at_the_prompt_is_told_with_numbers(
    tiny_model: ModelSpec, reference: dict[str, Any], name: str, error: RuntimeError
) -> None:
    def fail(*_: Any) -> None:
        raise error

    host = WatchfulHost()
    engine = Engine(host)
    hook = lm_module(engine, tiny_model).register_forward_pre_hook(fail)
    with pytest.raises(OutOfMemory) as caught:
        CALLS[name](engine, tiny_model)
    assert error in (caught.value.__cause__, getattr(caught.value.__cause__, "__cause__", None))
    text = str(caught.value)
    for part in ("memory ran out on cpu", "tokens need", "MiB are free now", "smaller language"):
        assert part in text
    assert str(error) in text
    assert host.open_bars == 0
    hook.remove()
    assert CALLS[name](engine, tiny_model) == reference[name]


def test_other_errors_of_a_model_keep_their_own_words(tiny_model: ModelSpec) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("shapes differ")

    engine = Engine(LocalHost(show=False))
    lm_module(engine, tiny_model).register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        engine.compose(tiny_model, PLAN)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("plan", "Plan"),
        ("compose", "Codes"),
        ("write", "Write"),
        ("rewrite", "Rewrite"),
        ("understand", "Understand 1/2"),
        ("score", "Score"),
    ],
)
def test_broken_scores_name_the_stage_and_the_cure(
    tiny_model: ModelSpec, tmp_path: Path, name: str, stage: str
) -> None:
    folder = shutil.copytree(tiny_model.lm, tmp_path / Path(tiny_model.lm).name)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["layers.0.mlp.down_proj.weight"].view(-1)[0] = float("nan")
    save_file(tensors, file)
    host = WatchfulHost()
    with pytest.raises(NonFinite, match=f"^{stage}.*fp32"):
        CALLS[name](Engine(host), replace(tiny_model, lm=str(folder)))
    assert host.open_bars == 0


def test_a_stop_frees_the_memory_of_the_conversation(tiny_model: ModelSpec) -> None:
    host = WatchfulHost()
    engine = Engine(host)
    lm = engine.store.backend(tiny_model, "lm")
    sessions: list[weakref.ref[Any]] = []
    backend = type(lm)

    class Watched(backend):
        def open(self, rows: int, capacity: int) -> Any:
            session = super().open(rows, capacity)
            sessions.append(weakref.ref(session))
            return session

    lm = Watched(lm.module, lm.device, lm.dtype)
    engine.store.backend = lambda *_: lm  # type: ignore[method-assign]
    host.looks, host.stop_at = 0, 10
    with pytest.raises(Pressed):
        engine.compose(tiny_model, PLAN)
    gc.collect()
    assert len(sessions) == 1
    assert sessions[0]() is None


def resident() -> int:
    """Bytes of memory of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fifty_songs_in_a_row_take_no_more_memory_than_fifteen(tiny_model: ModelSpec) -> None:
    engine = Engine(LocalHost(show=False))
    sizes = {}
    for seed in range(50):
        options = ComposeOptions(sampling=LMSampling(seed=seed))
        plan = engine.plan(tiny_model, Request("calm", f"song {seed}", 2, 90, "C major", "4"))
        codes = engine.compose(tiny_model, plan, options)
        if seed % 5 == 0:
            latents = engine.render(tiny_model, plan, codes, DiTSampling(seed=seed))
            engine.decode(tiny_model, latents)
        if seed in (15, 49):
            gc.collect()
            sizes[seed] = resident()
    assert sizes[49] - sizes[15] < 8 << 20


@pytest.mark.parametrize("name", ["compose", "understand", "render"])
def test_two_threads_at_once_are_served_one_after_the_other(
    tiny_model: ModelSpec, reference: dict[str, Any], name: str
) -> None:
    host = WatchfulHost()
    engine = Engine(host)
    names = [name, "compose plans", name, "score"]
    start, found = threading.Barrier(len(names)), {}

    def work(place: int, call: Call) -> None:
        start.wait()
        found[place] = call(engine, tiny_model)

    threads = [
        threading.Thread(target=partial(work, place, CALLS[each]))
        for place, each in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(len(names))] == [reference[each] for each in names]
    assert host.most_bars == 1
