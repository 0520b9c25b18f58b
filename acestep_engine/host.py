"""The border to whoever runs the engine: progress, interrupt, and where components live.

The engine asks; the host decides. `LocalHost` serves the CLI and tests; `nodes/host.py` is the
ComfyUI one. A host knows no model, the engine knows no ComfyUI.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .runtime import DeviceInfo


class Progress(Protocol):
    """A bar of `total` units; `update` may raise the host's interrupt."""

    def update(self, done: int) -> None: ...

    def close(self) -> None: ...


class Resident(Protocol):
    """What a host moves: a loaded component."""

    name: str  # for messages, such as "lm"
    module: torch.nn.Module
    nbytes: int


class Host(Protocol):
    ops: Any  # namespace with Linear, Conv1d, ConvTranspose1d, Embedding, RMSNorm

    def device_info(self) -> DeviceInfo: ...

    def free_memory(self, device: torch.device) -> int:
        """Bytes that new allocations on `device` may take now."""
        ...

    def progress(self, stage: str, total: int) -> Progress: ...

    def check_interrupt(self) -> None:
        """Raise the host's own interrupt if the user pressed stop."""
        ...

    def place(self, component: Resident, device: torch.device, memory_required: int) -> torch.device:
        """Make `component` ready to run with `memory_required` more bytes free; say where it runs."""
        ...

    def release(self, component: Resident) -> None:
        """Forget `component`: it will not be used again under this identity."""
        ...
