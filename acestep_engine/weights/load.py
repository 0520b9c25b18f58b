"""From files into a model: a lazy mapping of official names, and one strict report.

Tensors are read one by one and only those asked for; the rest of a file is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..errors import BadCheckpoint
from .files import Entry, read_headers
from .keymaps import official_names
from .parts import PARTS, cure
from .silence import read_silence
from .sources import Source
from .tensors import first_bad, fp8_scales, join, refuse_quantised, snake_shape, without_scales

__all__ = ["Report", "Tensors", "compare", "fill", "read", "read_silence"]

SHOWN = 3  # names of each kind in a message


class Tensors(Mapping[str, Tensor]):
    """The tensors of one role by official name, read from the disk when asked for.

    `shapes` is known without reading any. Weight norm is folded, scaled 8-bit floats are multiplied
    out, both in float32; all else comes as it is stored, a view into the file where the system
    allows.
    """

    def __init__(self, source: Source, parts: Mapping[str, tuple[Entry, ...]]) -> None:
        self.source = source
        self.shapes = {name: _shape(name, entries) for name, entries in parts.items()}
        self._parts = parts
        self._files: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        entries = self._parts[name]
        tensors = [self._read(entry) for entry in entries]
        if len(tensors) == 2:
            return join(entries[0].key, *tensors)
        return tensors[0].reshape(self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def _read(self, entry: Entry) -> Tensor:
        if entry.file not in self._files:
            self._files[entry.file] = safe_open(entry.file, framework="pt", device="cpu")
        return self._files[entry.file].get_tensor(entry.key)


@dataclass(frozen=True, slots=True)
class Report:
    """How the tensors of a source fit a model. `misshapen`: name, shape found, shape expected."""

    source: Source
    expected: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    unsound: tuple[tuple[str, str], ...] = ()

    @property
    def fits(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen or self.unsound)

    def text(self) -> str:
        """What is wrong, with the first names of each kind, and the cure."""
        shapes = [f"{n} is {list(a)} instead of {list(b)}" for n, a, b in self.misshapen]
        kinds = (
            ("missing", list(self.missing)),
            ("unexpected", list(self.unexpected)),
            ("misshapen", shapes),
            ("unsound", [f"{name} {fault}" for name, fault in self.unsound]),
        )
        faults = [
            f"{len(names)} {kind} ({', '.join(names[:SHOWN])}{', ...' * (len(names) > SHOWN)})"
            for kind, names in kinds
            if names
        ]
        return (
            f"{self.source.label} does not fit the {PARTS[self.source.role].label}, which has "
            f"{self.expected} tensors: {'; '.join(faults)}. The file is damaged or of another "
            f"model. {cure(self.source.role)}"
        )


def read(source: Source) -> Tensors:
    """The tensors of `source`; opens no tensor yet. BadCheckpoint where they are packed."""
    header = read_headers(source.files)
    size = len(source.prefix)
    names = [key[size:] for key in header if key.startswith(source.prefix)]
    chosen = {
        official: header[source.prefix + name]
        for official, name in official_names(source.role, source.style, names).items()
    }
    scales = fp8_scales(chosen)
    chosen = without_scales(chosen, scales)
    refuse_quantised(chosen.values())
    parts: dict[str, tuple[Entry, ...]] = {}
    for name, entry in chosen.items():
        stem = name.removesuffix("_v")
        if name in scales:
            parts[name] = (scales[name], entry)
        elif name.endswith(".weight_v") and f"{stem}_g" in chosen:
            parts[stem] = (chosen[f"{stem}_g"], entry)
        elif not (name.endswith(".weight_g") and f"{name.removesuffix('_g')}_v" in chosen):
            parts[name] = (entry,)
    return Tensors(source, parts)


def fill(
    module: nn.Module,
    tensors: Tensors,
    dtype: torch.dtype,
    expected: Mapping[str, tuple[int, ...]] | None = None,
    check: Callable[[], None] | None = None,
) -> Report:
    """Give every tensor of `module` (built on the meta device) its values, as `dtype`.

    `expected` says which tensors there must be, for modules that make them as they are loaded; else
    the module itself says. Raises BadCheckpoint unless all fit, before any of them is read. `check`
    is called before each layer and may raise to stop; the module is then of no use.
    """
    if expected is None:
        expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    report = compare(tensors, expected)
    if not report.fits:
        raise BadCheckpoint(report.text())
    owners: dict[str, list[str]] = {}
    for name in expected:
        owner, _, leaf = name.rpartition(".")
        owners.setdefault(owner, []).append(leaf)
    unsound: list[tuple[str, str]] = []
    for owner, leaves in owners.items():
        if check:
            check()
        prefix = f"{owner}." if owner else ""
        values = {leaf: tensors[prefix + leaf].to(dtype) for leaf in leaves}
        faults = ((prefix + leaf, first_bad(prefix + leaf, v)) for leaf, v in values.items())
        unsound += [(name, fault) for name, fault in faults if fault]
        _assign(module.get_submodule(owner), values)
    if unsound:
        raise BadCheckpoint(Report(tensors.source, len(expected), unsound=tuple(unsound)).text())
    left = [name for name, value in module.named_buffers() if value.is_meta]
    assert not left, f"buffers that no file fills: {left}"
    return report


def compare(tensors: Tensors, expected: Mapping[str, tuple[int, ...]]) -> Report:
    """How `tensors` fit the `expected` shapes, without reading any."""
    found = tensors.shapes
    return Report(
        tensors.source,
        len(expected),
        missing=tuple(name for name in expected if name not in found),
        unexpected=tuple(name for name in found if name not in expected),
        misshapen=tuple(
            (name, found[name], tuple(shape))
            for name, shape in expected.items()
            if name in found and found[name] != tuple(shape)
        ),
    )


def _assign(owner: nn.Module, values: Mapping[str, Tensor]) -> None:
    if next(owner.children(), None) is None:  # a host's layers may have a loader of their own
        owner.load_state_dict(values, strict=False, assign=True)
        return
    buffers = dict(owner.named_buffers(recurse=False))
    for leaf, value in values.items():
        setattr(owner, leaf, value if leaf in buffers else nn.Parameter(value, False))


def _shape(name: str, entries: tuple[Entry, ...]) -> tuple[int, ...]:
    """Shape as the model has it; the last entry is the one that tells."""
    shape = entries[-1].shape
    return snake_shape(shape) if name.endswith((".alpha", ".beta")) else shape
