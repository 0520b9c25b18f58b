"""From what a file stores to what a model wants: folded weight norm, 8-bit floats times their
scale, shapes, and refused formats.

Works on one tensor at a time and knows neither names of models nor devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..errors import BadCheckpoint
from .files import Entry

_PACKED = re.compile(
    r"(^|\.)(scale_weight|weight_scale(_2)?|scale_input|input_scale|comfy_quant|scaled_fp8"
    r"|weight\.(absmax|quant_map|quant_state\..*|nested_absmax)|qweight|qzeros|scales)$"
)
_SCALE = re.compile(r"\.(scale_weight|weight_scale)$")
_BESIDE = ("scale_input", "input_scale", "comfy_quant")  # of a scaled weight; nothing needs them
_MARKER = "scaled_fp8"
_NORM = re.compile(r"norm\w*\.weight$")
_FP8 = ("F8_E4M3", "F8_E5M2")
_FLOATS = ("F64", "F32", "F16", "BF16", *_FP8)


def fp8_scales(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The scales of 8-bit float weights by the names of those: one for all, or one for each row."""
    found: dict[str, Entry] = {}
    for name, scale in entries.items():
        weight = _SCALE.sub(".weight", name)
        owner = entries.get(weight)
        if weight == name or owner is None or owner.dtype not in _FP8 or not owner.shape:
            continue
        if scale.dtype in _FLOATS[:4] and math.prod(scale.shape) in (1, owner.shape[0]):
            found[weight] = scale
    return found


def without_scales(entries: Mapping[str, Entry], scales: Mapping[str, Entry]) -> dict[str, Entry]:
    """`entries` less `scales` and what is stored along with them."""
    used = {scale.key for scale in scales.values()}
    beside = {f"{name.removesuffix('weight')}{leaf}" for name in scales for leaf in _BESIDE}
    return {
        name: entry
        for name, entry in entries.items()
        if entry.key not in used and name not in beside and name != _MARKER
    }


def refuse_quantised(entries: Iterable[Entry]) -> None:
    """BadCheckpoint where a tensor shows that the weights are packed or scaled."""
    for entry in entries:
        if _PACKED.search(entry.key) or entry.dtype not in _FLOATS:
            raise BadCheckpoint(
                f"{entry.file} holds quantised weights (tensor '{entry.key}', {entry.dtype}), "
                "which are not read. Use the bf16, fp16, fp32 or scaled fp8 file of the same model."
            )


def join(key: str, first: Tensor, second: Tensor) -> Tensor:
    """One weight of the two tensors that store it; `key` is the first one's in the file."""
    if not _SCALE.search(key):
        return fold_weight_norm(first, second)
    return second.float() * first.float().view(-1, *(1,) * (second.dim() - 1))


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
