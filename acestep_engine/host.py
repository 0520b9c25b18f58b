"""The border to whoever runs the engine: progress, interrupt, and where components live.

The engine asks; the host decides. `LocalHost` serves the CLI and tests; `nodes/host.py` is the
ComfyUI one. A host knows no model, the engine knows no ComfyUI.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from tqdm import tqdm

from .errors import Cancelled, OutOfMemory, lacks_memory
from .runtime import DeviceInfo, host_memory, probe

MIB = 1 << 20


class Progress(Protocol):
    """A bar of `total` units; `update` may raise the host's interrupt."""

    def update(self, done: int) -> None: ...

    def close(self) -> None: ...


class Resident(Protocol):
    """What a host moves: a loaded component."""

    @property
    def name(self) -> str:
        """For messages, such as "lm"."""
        ...

    module: Any
    """A module of torch, which a host moves; or of another framework, which stays in place."""
    nbytes: int


class Host(Protocol):
    ops: Any  # namespace with Linear, Conv1d, ConvTranspose1d, Embedding, RMSNorm

    def device_info(self) -> DeviceInfo: ...

    def free_memory(self, device: torch.device) -> int:
        """Bytes that new allocations on `device` may take now."""
        ...

    def begin(self) -> None:
        """A call of the engine begins; a stop request from before it may be forgotten."""
        ...

    def progress(self, stage: str, total: int) -> Progress: ...

    def check_interrupt(self) -> None:
        """Raise the host's own interrupt if the user pressed stop."""
        ...

    def place(
        self, component: Resident, device: torch.device, memory_required: int
    ) -> torch.device:
        """Make `component` ready with `memory_required` more bytes free; say where it runs."""
        ...

    def release(self, component: Resident) -> None:
        """Forget `component`: it will not be used again under this identity."""
        ...


class Bar:
    """A progress bar on standard error that also looks for the stop request."""

    def __init__(self, host: LocalHost, stage: str, total: int) -> None:
        self._host = host
        self._bar = tqdm(
            total=total,
            desc=stage,
            file=sys.stderr,
            disable=not host.show,
            bar_format="{desc:<8} {percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt} {elapsed}",
        )

    def update(self, done: int) -> None:
        self._host.check_interrupt()
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


@contextmanager
def watched(host: Host, stage: str, total: int) -> Iterator[Callable[..., None]]:
    """An update function (done, ...) for a loop; it raises where the user stops."""
    bar = host.progress(stage, total)
    try:
        host.check_interrupt()
        yield lambda done, *_: bar.update(done)
    finally:
        bar.close()


class LocalHost:
    """The host of the command line: plain `.to()`, and one stage at a time when memory is short."""

    ops = torch.nn

    def __init__(self, show: bool = True) -> None:
        self.show = show
        self._stop = threading.Event()
        self._placed: list[Resident] = []

    def cancel(self) -> None:
        """Ask the running stage to stop; it raises Cancelled at its next token, step or tile.

        Where nothing runs, there is nothing to stop, and the next call is left alone.
        """
        self._stop.set()

    def begin(self) -> None:
        self._stop.clear()

    def device_info(self) -> DeviceInfo:
        return probe()

    def free_memory(self, device: torch.device) -> int:
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return free + cached
        return host_memory()[0]

    def progress(self, stage: str, total: int) -> Progress:
        return Bar(self, stage, total)

    def check_interrupt(self) -> None:
        if self._stop.is_set():
            self._stop.clear()
            raise Cancelled("Stopped, as you asked. Nothing was written.")

    def place(
        self, component: Resident, device: torch.device, memory_required: int
    ) -> torch.device:
        if device.type == "cpu":  # so it is for MLX, whose modules cannot be moved
            return device
        if component in self._placed:
            self._placed.remove(component)
        self._placed.append(component)
        resident = next(component.module.parameters()).device.type == device.type
        needed = memory_required + (0 if resident else component.nbytes)
        for other in self._placed[:-1]:  # least recently used first
            if self.free_memory(device) >= needed:
                break
            other.module.to("cpu")
        self._bring(component, device)
        return device

    def _bring(self, component: Resident, device: torch.device) -> None:
        try:
            component.module.to(device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not lacks_memory(error):
                raise
            component.module.to("cpu")  # some tensors may have arrived
            if device.type == "cuda":
                torch.cuda.empty_cache()
            raise OutOfMemory(
                f"The weights of {component.name} take {component.nbytes / MIB:.0f} MiB, and "
                f"{self.free_memory(device) / MIB:.0f} MiB are free on {device}. Close other "
                f"programs, or choose a smaller model or the device 'cpu'. ({error})"
            ) from error

    def release(self, component: Resident) -> None:
        if component in self._placed:
            self._placed.remove(component)
