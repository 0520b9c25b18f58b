"""Errors a user can read: what happened (with values), why, and what to do now."""

from __future__ import annotations


class AceStepError(Exception):
    """Base of every error that this package raises on purpose; its text is meant for the user."""


class InvalidRequest(AceStepError, ValueError):
    """A value given by the user is outside what the models accept."""


class ModelNotFound(AceStepError, FileNotFoundError):
    """A model part has no file; the text names the part, where to get it and where to put it."""

    def __str__(self) -> str:  # FileNotFoundError would print a bare tuple
        return str(self.args[0]) if self.args else ""


class BadCheckpoint(AceStepError):
    """A file was found but is damaged, of another model, or has missing or misshapen tensors."""


class OutOfMemory(AceStepError):
    """The work does not fit; the text has the numbers (needed and free) and the cure."""


class NonFinite(AceStepError):
    """A stage produced NaN or infinity; the text names the stage and what to try."""


class UnsupportedRuntime(AceStepError):
    """An explicit device, precision or mode wish cannot be met on this machine."""


class Cancelled(AceStepError):
    """The user stopped the work (standalone; inside ComfyUI the host's own interrupt is raised)."""


MEMORY_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "Output channels > 65536",  # a limit of Metal on the length, which a smaller tile keeps
    "Insufficient Memory",  # this and the rest are MLX's
    "OutOfMemory",
    "maximum allowed buffer size",
    "Unable to allocate",
)


def lacks_memory(error: BaseException) -> bool:
    """Whether a device says with `error`, by its class or its text, that memory ran out."""
    import torch  # here, because the policy in `runtime` is to be read without it

    known = isinstance(error, (OutOfMemory, torch.OutOfMemoryError))
    return known or any(sign in str(error) for sign in MEMORY_SIGNS)
