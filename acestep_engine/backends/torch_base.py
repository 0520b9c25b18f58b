"""What the torch backends have in common: a module, where it is, the precision of its work, and
what becomes of a lack of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from ..errors import OutOfMemory, lacks_memory
from ..runtime import Runtime

Model = TypeVar("Model", bound=nn.Module)
Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")

ROOM = "Close other programs, ask for a shorter song, or choose the device 'cpu'. "


class Backend(Generic[Model]):
    @staticmethod
    def finish(module: Any, dtype: torch.dtype) -> None:
        """Prepare a module whose weights have just been loaded; parts may become wider."""

    @staticmethod
    def pack(module: Any, runtime: Runtime) -> None:
        """Bring the weights of a finished module into the form that is fastest on its device."""

    def __init__(self, module: Model, device: torch.device | str, dtype: torch.dtype) -> None:
        self.module = module
        self.device = torch.device(device)
        self.dtype = dtype

    def _in(self, x: Tensor) -> Tensor:
        return x.to(self.device, self.dtype)


def work(
    method: Callable[Concatenate[Any, Inputs], Result],
) -> Callable[Concatenate[Any, Inputs], Result]:
    """`method` of a backend without gradients, where a lack of memory becomes OutOfMemory."""

    @wraps(method)
    def run(self: Any, *args: Inputs.args, **kwargs: Inputs.kwargs) -> Result:
        with torch.inference_mode(), _memory_errors(self.device):
            return method(self, *args, **kwargs)

    return run


@contextmanager
def _memory_errors(device: torch.device) -> Iterator[None]:
    """Every device's way to say that memory ran out, as OutOfMemory."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not lacks_memory(error):
            raise
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfMemory(f"The device {device} ran out of memory. {ROOM}({error})") from error
