"""The local host: what stays on the device, and what a bar and a stop request do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from acestep_engine.engine import Engine
from acestep_engine.errors import Cancelled, OutOfMemory
from acestep_engine.host import LocalHost, Resident
from acestep_engine.types import Latents, ModelSpec

DEVICE = torch.device("xpu")


class Module:
    """Stands for a torch module on a device that this machine lacks: it knows where it is."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def parameters(self) -> Any:
        return iter([SimpleNamespace(device=self.device)])

    def to(self, device: Any) -> None:
        self.device = torch.device(device)


class Part:
    def __init__(self, name: str, nbytes: int) -> None:
        self.name, self.nbytes, self.module = name, nbytes, Module()

    @property
    def there(self) -> bool:
        return self.module.device == DEVICE


class SmallCard(LocalHost):
    """A device of 100 bytes."""

    def __init__(self, *parts: Part) -> None:
        super().__init__(show=False)
        self.parts = parts

    def free_memory(self, device: torch.device) -> int:
        return 100 - sum(part.nbytes for part in self.parts if part.there)


def test_the_longest_unused_part_leaves_first_and_only_as_many_as_must() -> None:
    lm, text, dit = parts = Part("lm", 40), Part("text", 30), Part("dit", 20)
    host = SmallCard(*parts)
    for part in parts:
        assert host.place(part, DEVICE, 0) == DEVICE
    assert [part.there for part in parts] == [True, True, True]
    host.place(lm, DEVICE, 0)  # used again: now text is the oldest
    host.place(dit, DEVICE, 30)
    assert [part.there for part in parts] == [True, False, True]
    host.place(text, DEVICE, 60)
    assert [part.there for part in parts] == [False, True, False]


def test_a_part_that_is_there_needs_no_room_for_itself() -> None:
    lm, dit = Part("lm", 60), Part("dit", 30)
    host = SmallCard(lm, dit)
    host.place(lm, DEVICE, 0)
    host.place(dit, DEVICE, 0)
    host.place(lm, DEVICE, 10)  # 10 bytes are free
    assert dit.there
    host.place(lm, DEVICE, 11)
    assert not dit.there


def test_a_released_part_is_not_touched_again() -> None:
    lm, dit = Part("lm", 60), Part("dit", 60)
    host = SmallCard(lm, dit)
    host.place(lm, DEVICE, 0)
    host.release(lm)
    host.release(lm)
    host.place(dit, DEVICE, 0)
    assert lm.there


class Heavy(nn.Module):
    """A module that a device has no room for."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__()
        self.weight, self.error = nn.Parameter(torch.ones(3)), error

    def to(self, device: Any) -> Heavy:  # type: ignore[override]
        if torch.device(device) == DEVICE:
            raise self.error
        return super().to(device)


class HeavyPart:
    name, nbytes = "dit", 5 << 20

    def __init__(self, error: RuntimeError) -> None:
        self.module = Heavy(error)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("XPU out of memory, tried 5 MiB")]
)
def test_weights_that_do_not_fit_are_told_with_numbers_and_a_cure(error: RuntimeError) -> None:
    host, part = SmallCard(), HeavyPart(error)
    for _ in range(2):  # once more, as after closing a program
        with pytest.raises(OutOfMemory, match=r"dit take 5 MiB, and 0 MiB .*'cpu'") as caught:
            host.place(part, DEVICE, 0)
        assert caught.value.__cause__ is error
        assert part.module.weight.device.type == "cpu"


def test_other_errors_of_a_move_keep_their_own_words() -> None:
    part = HeavyPart(RuntimeError("invalid device ordinal"))
    with pytest.raises(RuntimeError, match="ordinal"):
        SmallCard().place(part, DEVICE, 0)


def test_on_a_cpu_nothing_moves() -> None:
    lm, dit = Part("lm", 60), Part("dit", 60)
    host = SmallCard(lm, dit)
    for part in (lm, dit):
        assert host.place(part, torch.device("cpu"), 1 << 40) == torch.device("cpu")
    assert not lm.there


def test_a_bar_obeys_the_stop_request_once() -> None:
    host = LocalHost(show=False)
    bar = host.progress("Render", 3)
    host.cancel()
    with pytest.raises(Cancelled, match="Nothing was written"):
        bar.update(1)
    bar.update(2)
    host.check_interrupt()
    bar.close()


def test_a_bar_shows_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    bar = LocalHost().progress("Render", 4)
    for done in (1, 3, 4):
        bar.update(done)
    bar.close()
    assert "Render   100%" in capsys.readouterr().err.splitlines()[-1].split("\r")[-1]


def test_what_the_engine_releases_the_host_forgets(tiny_model: ModelSpec) -> None:
    class Remembering(LocalHost):
        def __init__(self) -> None:
            super().__init__(show=False)
            self.forgotten: list[str] = []

        def release(self, component: Resident) -> None:
            self.forgotten.append(component.name)
            super().release(component)

    host = Remembering()
    engine = Engine(host)
    engine.decode(tiny_model, Latents(torch.ones(1, 20, 64)))
    engine.tokenize(tiny_model, Latents(torch.ones(1, 20, 64)))
    loaded = sorted(part.name for part in engine.store.loaded())
    engine.release(tiny_model)
    assert sorted(host.forgotten) == loaded == ["audio_tokenizer", "vae"]
    assert host._placed == []
