"""What the torch backends have in common: a module, where it is, and the precision of its work."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..runtime import Runtime

Model = TypeVar("Model", bound=nn.Module)


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
