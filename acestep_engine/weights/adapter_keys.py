"""Keys of adapter files: which layer a key changes, in which role, and which piece of it it holds.

Trainers spell one layer in many ways: with the name of a wrapper before it, relative to the DiT or
to the whole model, with the names of diffusers, or with underscores for dots. What an underscore
stands for is found in a table of the real names. Knows no files and no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .keymaps import KEYMAPS
from .parts import Role

Piece = str
"""`down` and `up`: A and B of a LoRA. `w1`, `w2`: factors of a LoKr, or `w1_a`, `w1_b` and so on
where a factor is a product itself. `alpha`, `scalar`: numbers. `dora_scale`, or PEFT's `magnitude`:
the lengths of a DoRA."""

_NAMED = r"(?:\.[^.]+)?"  # PEFT may put the name of the adapter here
_PIECES: tuple[tuple[re.Pattern[str], Piece | None], ...] = (
    (re.compile(rf"\.lora_(?:A|down){_NAMED}\.weight$"), "down"),
    (re.compile(rf"\.lora_(?:B|up){_NAMED}\.weight$"), "up"),
    (re.compile(rf"\.lora_magnitude_vector{_NAMED}(?:\.weight)?$"), "magnitude"),
    (re.compile(r"\.lokr_(w[12](?:_[ab])?)$"), None),  # the piece is called like the group
    (re.compile(r"\.(alpha|scalar|dora_scale)$"), None),
)

PEFT = "base_model.model."
_WRAPPERS = (PEFT, "model.diffusion_model.", "diffusion_model.", "transformer.")
_FLAT_WRAPPERS = ("lycoris_", "lora_unet_")
_ROLES: tuple[tuple[str, tuple[Role, ...]], ...] = (
    ("decoder", ("dit",)),
    ("encoder", ("condition_encoder",)),
    ("tokenizer", ("audio_tokenizer",)),
    ("detokenizer", ("audio_detokenizer",)),
)
_SHARED = "quantizer.project_out"  # the tokenizer's last layer is also the detokenizer's first


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer as an adapter means it: the parts that may have it, and its name there.

    `name` has underscores for dots where `flat`.
    """

    roles: tuple[Role, ...]
    name: str
    flat: bool


def split(key: str) -> tuple[str, Piece] | None:
    """The layer as the file spells it and the piece that `key` holds; None for any other key."""
    for pattern, piece in _PIECES:
        if match := pattern.search(key):
            return key[: match.start()], piece or match[1]
    return None


def layer_of(spelled: str) -> Layer:
    """What a file means by `spelled`; whether a model has such a layer is not said."""
    name, flat = spelled, False
    while wrapper := next((w for w in _WRAPPERS if name.startswith(w)), None):
        name = name.removeprefix(wrapper)
    for wrapper in _FLAT_WRAPPERS:
        if name.startswith(wrapper):
            name, flat = name.removeprefix(wrapper), True
    roles: tuple[Role, ...] = ("dit",)  # what names no part is relative to the DiT
    for part, owners in _ROLES:
        if name.startswith((f"{part}_",) if flat else (f"{part}.",)):
            name, roles = name[len(part) + 1 :], owners
    if not flat:
        name = _official(name)
    if roles == ("audio_tokenizer",) and name == (flattened(_SHARED) if flat else _SHARED):
        roles = ("audio_tokenizer", "audio_detokenizer")
    return Layer(roles, name, flat)


def weight_names(names: Iterable[str]) -> dict[str, str]:
    """Weights among `names`, the official ones of one role, by their layers' dotted and flat names.

    A flat name never has a dot, and a layer without dots is flat as it is.
    """
    found: dict[str, str] = {}
    for name in names:
        if name.endswith(".weight"):
            layer = name.removesuffix(".weight")
            found[layer] = found[flattened(layer)] = name
    return found


def flattened(name: str) -> str:
    return name.replace(".", "_")


def _official(name: str) -> str:
    """The official name of a layer that may have its name of diffusers."""
    dotted = f"{name}."
    for pattern, new in KEYMAPS["dit", "diffusers"].renames:
        dotted = re.sub(pattern, new, dotted)
    return dotted[:-1]
