"""Adapters put on a model: which weights they change, a report of that, and the changed weights.

A change is computed in float32 from the stored weight when that weight is read, so untouched ones
cost nothing and a model without the adapter has its old bits. It knows neither devices nor loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import BadCheckpoint, InvalidRequest
from ..types import LoRA, ModelSpec
from .adapter_deltas import Shape, delta, length_shape, lengthened, matrix_of
from .adapter_files import Adapter, Module, open_adapter
from .adapter_keys import weight_names
from .files import AGAIN
from .load import SHOWN, Tensors, read
from .parts import Role
from .sources import locate

FORMS = (
    "Read are LoRA (PEFT, ComfyUI, kohya, diffusers), LoKr (LyCORIS) and DoRA of the ACE-Step 1.5 "
    "diffusion model"
)


@dataclass(frozen=True, slots=True)
class Match:
    """How an adapter fits a model. `changes`: by part and official name of the weight."""

    lora: LoRA
    adapter: Adapter
    changes: Mapping[tuple[Role, str], Module]
    unmatched: tuple[str, ...]

    @property
    def text(self) -> str:
        """Counts, ranks, alphas and scales, in one line."""
        used = {module.spelled: module for module in self.changes.values()}.values()
        kinds = dict.fromkeys(f"{'DoRA on ' * m.is_dora}{m.kind}" for m in used)
        ranks = [module.rank for module in used if module.rank is not None]
        alphas = [module.alpha for module in used if module.alpha is not None]
        facts = [
            f"matched {len(used)} of {len(used) + len(self.unmatched)} weights",
            ", ".join(kinds),
            f"rank {_span(ranks)}" if ranks else "full rank",
            f"alpha {_span(alphas)} ({self.adapter.origin})" if alphas else self.adapter.origin,
            f"scale {_span([module.scale for module in used])}",
            f"strength {self.lora.strength:g}",
        ]
        text = f"{Path(self.lora.path).name}: {', '.join(facts)}"
        return text + (f"; not in this model: {_first(self.unmatched)}" if self.unmatched else "")


class Merged(Tensors):
    """The tensors of one role as they are with adapters; changed ones come in float32."""

    def __init__(self, base: Tensors, matches: Iterable[Match]) -> None:
        super().__init__(base.source, base._parts)
        role = base.source.role
        self._changes: dict[str, list[tuple[Module, float]]] = {}
        for match in matches:
            for (owner, name), module in match.changes.items():
                if owner == role:
                    change = module, match.lora.strength
                    self._changes.setdefault(name, []).append(change)

    def __getitem__(self, name: str) -> Tensor:
        value = super().__getitem__(name)
        for module, strength in self._changes.get(name, ()):
            value = self._changed(value.float(), module, strength)
        return value

    def _changed(self, weight: Tensor, module: Module, strength: float) -> Tensor:
        pieces = {piece: self._read(entry).float() for piece, entry in module.pieces.items()}
        for piece, entry in module.pieces.items():  # small, unlike what they make
            if not torch.isfinite(pieces[piece]).all():
                raise BadCheckpoint(
                    f"{entry.file}: tensor '{entry.key}' has NaN or infinite values; its training "
                    f"went astray or the file is damaged. {AGAIN}"
                )
        change = delta(pieces).reshape(weight.shape)
        lengths = length_shape(module.shapes, tuple(weight.shape))
        if lengths is None:
            return weight.add(change, alpha=module.scale * strength)
        given = pieces["magnitude" if "magnitude" in pieces else "dora_scale"].reshape(lengths)
        whole = lengthened(weight.add(change, alpha=module.scale), given)
        return torch.lerp(weight, whole, strength)


def fit(spec: ModelSpec, lora: LoRA, adapter: Adapter) -> Match:
    """Which weights of `spec` the adapter changes. Reads headers only.

    BadCheckpoint where it changes none, or weights of another size.
    """
    sources = {role: locate(spec, role) for role in adapter.roles}
    shapes = {role: read(source).shapes for role, source in sources.items()}
    names = {role: weight_names(found) for role, found in shapes.items()}
    changes: dict[tuple[Role, str], Module] = {}
    unmatched: list[str] = []
    for module in adapter.modules:
        layer = module.layer
        owners: list[Role] = [role for role in layer.roles if layer.name in names[role]]
        for role in owners:
            name = names[role][layer.name]
            _check_shape(module, shapes[role][name], sources[role].label)
            changes[role, name] = module
        if not owners:
            unmatched.append(next(iter(module.pieces.values())).key)
    unmatched += adapter.strays
    if not changes:
        base = locate(spec, "dit").label
        raise BadCheckpoint(
            f"{lora.path} fits nothing in {base}: 0 of its {len(unmatched)} weights are there. The "
            f"first are {_first(unmatched) or 'none'}. {FORMS}. Choose an adapter that was trained "
            "on it."
        )
    return Match(lora, adapter, changes, tuple(unmatched))


def inspect(spec: ModelSpec) -> list[Match]:
    """How each adapter of `spec` fits, in order; raises where one does not."""
    return [fit(spec, lora, open_adapter(lora.path)) for lora in spec.loras]


def acting(known: Sequence[tuple[LoRA, Adapter]], role: Role) -> tuple[LoRA, ...]:
    """Those that change `role`, in the order in which they act.

    The order only matters to DoRA. Without one it is made the same whatever the user's, so that
    the sum has the same bits.
    """
    chosen = [(lora, adapter) for lora, adapter in known if role in adapter.roles and lora.strength]
    loras = [lora for lora, _ in chosen]
    if not any(adapter.is_dora for _, adapter in chosen):
        loras.sort(key=lambda lora: (lora.path, lora.strength))
    return tuple(loras)


def parse(text: str) -> LoRA:
    """PATH or PATH:STRENGTH, as a command line gives it."""
    path, colon, number = text.rpartition(":")
    if not colon or Path(text).expanduser().exists():
        return LoRA(text)
    try:
        return LoRA(path, float(number))
    except InvalidRequest:
        raise
    except ValueError:  # the colon belongs to the path
        return LoRA(text)


def _check_shape(module: Module, weight: Shape, label: str) -> None:
    entry = next(iter(module.pieces.values()))
    try:
        rows, columns = matrix_of(module.shapes)
        length_shape(module.shapes, weight)
    except ValueError as error:
        raise BadCheckpoint(
            f"{entry.file}: the pieces for '{module.spelled}' do not fit: {error}. The adapter is "
            f"damaged or of a model of another size. {AGAIN}"
        ) from error
    wanted = weight[0], torch.Size(weight[1:]).numel()
    if (rows, columns) != wanted:
        raise BadCheckpoint(
            f"{entry.file} changes '{module.spelled}' by [{rows}, {columns}], but that weight is "
            f"{list(wanted)} in {label}. It was trained on a model of another size (XL and 2B do "
            "not share adapters): choose the model it is for, or another adapter."
        )


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _first(keys: Sequence[str]) -> str:
    return ", ".join(keys[:SHOWN]) + ", ..." * (len(keys) > SHOWN)
