"""Root mean square norm for many tokens on a CPU, where torch puts it together from slow parts.

One pass for the lengths and one for each factor, all in float32; half precision is rounded once, at
the end. It knows no model. Dimension key: D width of the norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CpuRMSNorm(nn.Module):
    """`nn.RMSNorm` with the same parameter."""

    def __init__(self, plain: nn.RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        scaled = wide * scale if wide is x else wide.mul_(scale)
        return scaled.mul_(self.weight.float()).to(x.dtype)


def arrange(module: nn.Module) -> None:
    """Put `CpuRMSNorm` in the place of every RMS norm below `module`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.RMSNorm):
                setattr(parent, name, CpuRMSNorm(child))
