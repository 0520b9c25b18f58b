"""What an adapter adds to one weight: low-rank products (LoRA), Kronecker products (LoKr), and the
split into direction and length (DoRA).

LoRA: arXiv 2106.09685. LoKr: arXiv 2309.14859. DoRA: arXiv 2402.09353. A weight of more than two
dimensions is taken as a matrix whose rows are dimension 0. It knows neither names nor files.
Dimension key: O rows · I columns · R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from .adapter_keys import Piece

Kind = Literal["LoRA", "LoKr"]
Shape = tuple[int, ...]
Shapes = Mapping[Piece, Shape]

LEAST = 1e-12  # length of a row of zeros, which has no direction


def kind_of(shapes: Shapes) -> Kind | None:
    """What the pieces make up; None where some are missing."""
    if "down" in shapes and "up" in shapes:
        return "LoRA"
    return "LoKr" if _has(shapes, "w1") and _has(shapes, "w2") else None


def rank_of(shapes: Shapes) -> int | None:
    """Of a LoRA, or of the factor of a LoKr that is a product itself; None where none is."""
    if "down" in shapes:
        return shapes["down"][0]
    for factor in ("w2", "w1"):
        if factor not in shapes:
            return shapes[f"{factor}_b"][0]
    return None


def matrix_of(shapes: Shapes) -> tuple[int, int]:
    """Rows and columns of the change; ValueError where the pieces do not fit together."""
    if kind_of(shapes) == "LoRA":
        return _product(shapes["up"], shapes["down"])
    left, right = (
        _matrix(shapes[name]) if name in shapes else _product(shapes[a], shapes[b])
        for name, a, b in (("w1", "w1_a", "w1_b"), ("w2", "w2_a", "w2_b"))
    )
    return left[0] * right[0], left[1] * right[1]


def length_shape(shapes: Shapes, weight: Shape) -> Shape | None:
    """The lengths that a DoRA gives to rows or columns, shaped to divide the weight; None if plain.

    ValueError where they are of another number.
    """
    found = shapes.get("magnitude") or shapes.get("dora_scale")
    if found is None:
        return None
    of_rows = "magnitude" in shapes or len(found) == 1
    wanted = (math.prod(found), *(1,) * (len(weight) - 1)) if of_rows else found
    fits = len(wanted) == len(weight) and all(
        size in (1, full) for size, full in zip(wanted, weight, strict=True)
    )
    one_axis = sum(size > 1 for size in wanted) <= 1
    if not (fits and one_axis) or (of_rows and wanted[0] != weight[0]):
        raise ValueError(f"its lengths are {list(found)} for a weight of {list(weight)}")
    return wanted


def delta(tensors: Mapping[Piece, Tensor]) -> Tensor:
    """The unscaled change (O, I) of pieces in float32."""
    if "down" in tensors:
        change_OI = tensors["up"].flatten(1) @ tensors["down"].flatten(1)
    else:
        change_OI = torch.kron(_factor(tensors, "w1"), _factor(tensors, "w2"))
    scalar = tensors.get("scalar")
    return change_OI if scalar is None else change_OI * scalar


def lengthened(changed: Tensor, lengths: Tensor) -> Tensor:
    """`changed` with the given lengths of its rows, or of its columns: those of size 1 go along."""
    along = [axis for axis, size in enumerate(lengths.shape) if size == 1]
    norm = torch.linalg.vector_norm(changed, dim=along, keepdim=True).clamp_min(LEAST)
    return changed * (lengths / norm)


def _has(shapes: Shapes, factor: Literal["w1", "w2"]) -> bool:
    return factor in shapes or (f"{factor}_a" in shapes and f"{factor}_b" in shapes)


def _matrix(shape: Shape) -> tuple[int, int]:
    if len(shape) < 2:
        raise ValueError(f"a factor of shape {list(shape)} is no matrix")
    return shape[0], math.prod(shape[1:])


def _product(left: Shape, right: Shape) -> tuple[int, int]:
    (rows, inner), (rank, columns) = _matrix(left), _matrix(right)
    if inner != rank:
        raise ValueError(f"{list(left)} and {list(right)} have no rank in common")
    return rows, columns


def _factor(tensors: Mapping[Piece, Tensor], name: Literal["w1", "w2"]) -> Tensor:
    if name in tensors:
        return tensors[name].flatten(1)
    return tensors[f"{name}_a"].flatten(1) @ tensors[f"{name}_b"].flatten(1)
