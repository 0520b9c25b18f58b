"""From tensors under official names to a filled MLX module, one tensor at a time.

Names are the official ones in MLX too; only the order of axes differs, by one table. It knows no
files: `weights.load` opens them and says how they fit.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from einops import rearrange
from mlx.utils import tree_flatten

from ..errors import BadCheckpoint
from ..models_mlx.oobleck import Snake
from ..weights.load import Report, Tensors, compare
from ..weights.tensors import first_bad
from .mlx import BUILDERS, memory_errors

Bits = Literal[4, 8]

ARRANGEMENTS: dict[tuple[type[nn.Module], str], tuple[str, str]] = {
    (nn.Conv1d, "weight"): ("o i k", "o k i"),
    (nn.ConvTranspose1d, "weight"): ("i o k", "o k i"),
    (Snake, "alpha"): ("1 c 1", "c"),
    (Snake, "beta"): ("1 c 1", "c"),
}
"""Kind of layer and its tensor: the axes in a checkpoint, and in MLX (in, out, kernel, channel)."""

GROUP = 64  # weights that share a scale


@memory_errors()
def build(
    role: str, config: Any, tensors: Tensors, dtype: torch.dtype, bits: Bits | None = None
) -> nn.Module:
    """The model of `role`, loaded and evaluated, ready to run in any thread.

    `bits`: precision of the large products, None for that of `dtype`.
    """
    model_class, backend_class = BUILDERS[role]
    module = model_class(config)
    fill(module, tensors, dtype, bits)
    backend_class.finish(module, dtype)
    mx.eval(module.state)  # whatever is still lazy could run in this thread alone
    return module


def fill(
    module: nn.Module, tensors: Tensors, dtype: torch.dtype, bits: Bits | None = None
) -> Report:
    """Give every tensor of `module` its values, as `dtype`; with `bits`, pack its layers at once.

    Raises BadCheckpoint unless all fit, before any of them is read.
    """
    owners = dict(module.named_modules())
    expected = official_shapes(module)
    report = compare(tensors, expected)
    if not report.fits:
        raise BadCheckpoint(report.text())
    unsound: list[tuple[str, str]] = []
    for name in expected:
        path, _, leaf = name.rpartition(".")
        owner, value = owners[path], tensors[name].to(dtype)
        if fault := first_bad(name, value):
            unsound.append((name, fault))
        if axes := ARRANGEMENTS.get((type(owner), leaf)):
            value = rearrange(value, " -> ".join(axes))
        owner[leaf] = mx.array(value)
        mx.eval(owner[leaf])
        if bits and path.startswith("layers.") and isinstance(owner, nn.Linear):
            _pack(owners, path, bits)
    if unsound:
        raise BadCheckpoint(Report(tensors.source, len(expected), unsound=tuple(unsound)).text())
    return report


def official_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Every tensor of `module` by name, with its shape in a checkpoint."""
    owners = dict(module.named_modules())
    shapes: dict[str, tuple[int, ...]] = {}
    for name, array in _flat(module):
        path, _, leaf = name.rpartition(".")
        axes = ARRANGEMENTS.get((type(owners[path]), leaf))
        outline = np.broadcast_to(np.zeros(()), array.shape)  # a shape without memory
        shapes[name] = (rearrange(outline, " -> ".join(axes[::-1])) if axes else outline).shape
    return shapes


def nbytes(module: nn.Module) -> int:
    """Memory of the weights."""
    return sum(array.nbytes for _, array in _flat(module))


def _flat(module: nn.Module) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))


def _pack(owners: dict[str, nn.Module], path: str, bits: Bits) -> None:
    """Put the quantised form in the place of a layer (without bias) inside the stack of layers.

    What lies around the stack stays as it is: it is small, and its errors reach every layer.
    """
    layer = cast(nn.Linear, owners[path])
    if layer["weight"].shape[-1] % GROUP:
        return
    packed = layer.to_quantized(group_size=GROUP, bits=bits)
    mx.eval(packed.parameters())
    parent, _, leaf = path.rpartition(".")
    owners[parent][leaf] = owners[path] = packed
