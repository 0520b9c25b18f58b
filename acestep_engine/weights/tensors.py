"""From what a file stores to what a model wants: folded weight norm, shapes, and refused formats.

Works on one tensor at a time and knows neither names of models nor devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import BadCheckpoint
from .files import Entry

_SCALES = re.compile(
    r"(^|\.)(scale_weight|weight_scale(_2)?|scale_input|input_scale|comfy_quant|scaled_fp8"
    r"|weight\.(absmax|quant_map|quant_state\..*|nested_absmax)|qweight|qzeros|scales)$"
)
_NORM = re.compile(r"norm\w*\.weight$")
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def refuse_quantised(entries: Iterable[Entry]) -> None:
    """BadCheckpoint where a tensor shows that the weights are packed or scaled."""
    for entry in entries:
        if _SCALES.search(entry.key) or entry.dtype not in _FLOATS:
            raise BadCheckpoint(
                f"{entry.file} holds quantised weights (tensor '{entry.key}', {entry.dtype}), "
                "which are not read: without their scales the result would be noise. Use the bf16, "
                "fp16 or fp32 file of the same model."
            )


def fold_weight_norm(gain: Tensor, direction: Tensor) -> Tensor:
    """w = g v / |v| in float32, the norm over all dimensions but the first.

    For a transposed convolution (in, out, kernel) that is one gain per input channel.
    """
    v = direction.float()
    norm = v.flatten(1).norm(dim=1).view(-1, *(1,) * (v.dim() - 1))
    return v * (gain.float().view_as(norm) / norm)


def snake_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(1, C, 1) for the snake parameters that some files store as (C,)."""
    return (1, shape[0], 1) if len(shape) == 1 else shape


def first_bad(name: str, tensor: Tensor) -> str | None:
    """What is wrong with the values of a vector, or None. Vectors only: they cost nothing to read.

    A norm of zeros is what a download leaves that reserved its space and never came to an end.
    """
    if tensor.dim() != 1:
        return None
    if not torch.isfinite(tensor).all():
        return "has NaN or infinite values"
    if _NORM.search(name) and not tensor.any():
        return "is all zeros"
    return None
