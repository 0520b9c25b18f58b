"""An adapter on the disk: its file, its layers by their pieces, and the alpha that scales each.

Reads headers and single numbers, never whole tensors, and knows no model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..errors import BadCheckpoint, ModelNotFound
from .adapter_deltas import Kind, kind_of, rank_of
from .adapter_keys import PEFT, Layer, Piece, layer_of, split
from .files import AGAIN, Entry, Header, Stamp, read_config, read_header, stamp
from .parts import Role

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "lokr_weights.safetensors")  # file names inside folders
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
ALPHAS = ("lora_alpha", "linear_alpha", "ss_network_alpha", "alpha")  # by who wrote the metadata
NESTED = ("lora_adapter_metadata", "lokr_config")  # JSON inside the metadata
UNKNOWN = "no alpha anywhere, so alpha/rank is taken for 1"


@dataclass(frozen=True, slots=True)
class Module:
    """What an adapter holds for one layer. `scale` is what the change is multiplied with."""

    spelled: str
    layer: Layer
    kind: Kind
    pieces: Mapping[Piece, Entry]
    rank: int | None
    alpha: float | None
    scale: float

    @property
    def shapes(self) -> dict[Piece, tuple[int, ...]]:
        return {piece: entry.shape for piece, entry in self.pieces.items()}

    @property
    def is_dora(self) -> bool:
        return "magnitude" in self.pieces or "dora_scale" in self.pieces


@dataclass(frozen=True, slots=True)
class Adapter:
    """The header of an adapter. `strays`: keys of no known kind. `origin`: where alpha is from."""

    path: str
    stamps: tuple[Stamp, ...]
    modules: tuple[Module, ...]
    strays: tuple[str, ...]
    origin: str

    @property
    def roles(self) -> dict[Role, None]:
        """The parts of a model that it may change, in order; the DiT where it names no part."""
        return {r: None for module in self.modules for r in module.layer.roles} or {"dit": None}

    @property
    def is_dora(self) -> bool:
        return any(module.is_dora for module in self.modules)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How layers without an alpha of their own are scaled."""

    alpha: float | None = None
    origin: str = UNKNOWN
    rslora: bool = False
    patterns: Mapping[str, float] = field(default_factory=dict)

    def alpha_of(self, module: str) -> float | None:
        """Of a layer; a pattern is an expression that its name ends with."""
        for pattern, alpha in self.patterns.items():
            if re.fullmatch(rf"(.*\.)?(?:{pattern})", module):
                return alpha
        return self.alpha


def find(path: str) -> tuple[Path, ...]:
    """The weights of the adapter at `path`, a file or folder, and its adapter_config.json, if any.

    ModelNotFound where nothing is, BadCheckpoint where it is in a form that is not read.
    """
    place = Path(path).expanduser()
    if place.is_file():
        weights = place
    elif place.is_dir():
        weights = next((place / name for name in WEIGHTS if (place / name).is_file()), None)
        if weights is None:
            raise BadCheckpoint(_no_weights(place))
    else:
        raise ModelNotFound(
            f"The adapter was to be at {place}, but nothing is. Put it into models/loras (a "
            f".safetensors file, or a folder with {CONFIG} and {WEIGHTS[0]}), or choose another."
        )
    config = weights.parent / CONFIG
    return (weights, config) if config.is_file() else (weights,)


def stamps(path: str) -> tuple[Stamp, ...]:
    """The files of the adapter at `path` as they are now."""
    return tuple(map(stamp, find(path)))


def open_adapter(path: str) -> Adapter:
    """Everything about the adapter at `path` but its tensors."""
    files = find(path)
    header = read_header(files[0])
    scaling = _scaling(files)
    grouped: dict[str, dict[Piece, Entry]] = {}
    strays: list[str] = []
    for key, entry in header.items():
        if parts := split(key):
            grouped.setdefault(parts[0], {})[parts[1]] = entry
        else:
            strays.append(key)
    modules: list[Module] = []
    alphas = _alphas(files[0], header)
    for spelled, pieces in grouped.items():
        shapes = {piece: entry.shape for piece, entry in pieces.items()}
        kind = kind_of(shapes)
        if kind is None:
            strays += [entry.key for entry in pieces.values()]
        else:
            modules.append(_module(spelled, kind, pieces, alphas.get(spelled), scaling))
    own = any("alpha" in module.pieces for module in modules)
    origin = "of each weight" if own else scaling.origin
    return Adapter(path, tuple(map(stamp, files)), tuple(modules), tuple(strays), origin)


def _module(
    spelled: str,
    kind: Kind,
    pieces: Mapping[Piece, Entry],
    own: float | None,
    scaling: Scaling,
) -> Module:
    shapes = {piece: entry.shape for piece, entry in pieces.items()}
    if empty := [entry.key for entry in pieces.values() if 0 in entry.shape]:
        file = next(iter(pieces.values())).file
        raise BadCheckpoint(f"{file}: tensor '{empty[0]}' is empty. {AGAIN}")
    rank = rank_of(shapes)
    alpha = scaling.alpha_of(spelled.removeprefix(PEFT)) if own is None else own
    scale = 1.0
    if alpha is not None and rank is not None:
        scale = alpha / (math.sqrt(rank) if own is None and scaling.rslora else rank)
    return Module(spelled, layer_of(spelled), kind, pieces, rank, alpha, scale)


def _alphas(file: Path, header: Header) -> dict[str, float]:
    """The alpha that layers have of their own."""
    found: dict[str, float] = {}
    with safe_open(file, framework="pt", device="cpu") as tensors:
        for key, entry in header.items():
            if key.endswith(".alpha") and math.prod(entry.shape) == 1:
                found[key.removesuffix(".alpha")] = float(tensors.get_tensor(key))
    return found


def _scaling(files: tuple[Path, ...]) -> Scaling:
    """From the metadata of the file, else from the configuration beside it."""
    with safe_open(files[0], framework="pt", device="cpu") as tensors:
        metadata: dict[str, Any] = tensors.metadata() or {}
    for name in NESTED:
        metadata = metadata | _nested(metadata.get(name))
    if (alpha := _alpha(metadata)) is not None:
        return _scaling_of(metadata, alpha, "from its metadata")
    if len(files) == 1:
        return Scaling()
    config = read_config(files[1].parent, CONFIG)
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise BadCheckpoint(
            f"{files[1]} is of an adapter of kind {kind!r}; of PEFT's, only LORA (with or without "
            "DoRA) is read. Convert it, or train a LoRA or a LyCORIS LoKr."
        )
    alpha = _alpha(config)
    return Scaling() if alpha is None else _scaling_of(config, alpha, f"from {CONFIG}")


def _scaling_of(values: Mapping[str, Any], alpha: float, origin: str) -> Scaling:
    patterns = values.get("alpha_pattern")
    numbers = {
        pattern: number
        for pattern, value in (patterns.items() if isinstance(patterns, dict) else ())
        if (number := _number(value)) is not None and _is_expression(pattern)
    }
    rslora = str(values.get("use_rslora")).lower() == "true"
    return Scaling(alpha, origin, rslora, numbers)


def _nested(text: Any) -> dict[str, Any]:
    """Values of a JSON object in the metadata; diffusers puts the component before each name."""
    try:
        values = json.loads(text or "{}")
    except (ValueError, TypeError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {name.removeprefix("transformer."): value for name, value in values.items()}


def _alpha(values: Mapping[str, Any]) -> float | None:
    numbers = (_number(values.get(name)) for name in ALPHAS)
    return next((number for number in numbers if number is not None), None)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _is_expression(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _no_weights(folder: Path) -> str:
    names = sorted(item.name for item in folder.iterdir())
    pickled = [name for name in names if name.endswith(PICKLES)]
    if pickled:
        return (
            f"{folder} holds {pickled[0]}, a Python pickle, which can run code when it is opened; "
            f"only safetensors are read. Save the adapter as {WEIGHTS[0]}."
        )
    listing = f"only {', '.join(names[:6])}" if names else "nothing"
    return f"The folder {folder} holds no adapter ({' or '.join(WEIGHTS)}), but {listing}. {AGAIN}"
