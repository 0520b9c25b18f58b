"""The file choices of Load ACE-Step: what the lists offer, and which paths a choice means.

It looks at names only, never into a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from ..acestep_engine.config import Family
from ..acestep_engine.errors import ModelNotFound
from ..acestep_engine.runtime import Wish
from ..acestep_engine.types import ModelSpec
from ..acestep_engine.weights.layouts import discover
from ..acestep_engine.weights.parts import PARTS, Field, cure
from .host import model_file, model_files, model_folders

FROM_DIT = "from the DiT choice"
NONE = "none"
NOTHING = "nothing found: see the help of this node"
FAMILIES = ("auto", *get_args(Family))

FOLDERS: dict[Field, tuple[str, ...]] = {
    "dit": ("diffusion_models", "checkpoints"),
    "text_encoder": ("text_encoders",),
    "lm": ("text_encoders",),
    "vae": ("vae",),
}
SPECIAL: dict[Field, tuple[str, ...]] = {
    "dit": (),
    "text_encoder": (FROM_DIT,),
    "lm": (NONE, FROM_DIT),
    "vae": (FROM_DIT,),
}


def options(part: Field) -> list[str]:
    """What to offer for `part`: likely names first, best first; never empty, never raises."""
    files = [name for folder in FOLDERS[part] for name in model_files(folder)]
    likely = [name for name in files if _is_likely(part, name)]
    usual = PARTS[part].comfy_file.rsplit("/", 1)[-1]
    likely.sort(key=lambda name: name != usual)  # stable: the others keep their order
    likely += [name for name in model_folders() if _part_of_folder(name) == part]
    special = SPECIAL[part] or (() if likely else (NOTHING,))
    return list(dict.fromkeys((*likely, *special, *files)))


def model_of(choice: Mapping[Field, str], family: str, wish: Wish) -> ModelSpec:
    """The model that the choices mean; ModelNotFound says which part is missing, and the cure."""
    dit = _path("dit", choice["dit"])
    whole = discover(dit) if FROM_DIT in choice.values() or Path(dit).is_dir() else ModelSpec(dit)
    paths: dict[str, str] = {"dit": whole.dit or dit}
    for part in ("text_encoder", "lm", "vae"):
        if choice[part] == FROM_DIT:
            paths[part] = getattr(whole, part)
            if not paths[part]:
                raise ModelNotFound(
                    f"'{choice['dit']}', the DiT choice, brings no {PARTS[part].label}. Choose "
                    f"a file for {part}. {cure(part)}"
                )
        else:
            paths[part] = "" if choice[part] == NONE else _path(part, choice[part])
    return ModelSpec(**paths, family=family, wish=wish)  # pyright: ignore[reportArgumentType]


def _path(part: Field, name: str) -> str:
    for folder in FOLDERS[part]:
        if path := model_file(folder, name):
            return path
    if path := model_folders().get(name):
        return path
    places = ", ".join(f"models/{folder}" for folder in (*FOLDERS[part], "acestep"))
    label = PARTS[part].label
    missing = f"No {label} is chosen" if name == NOTHING else f"The {label} '{name}' is missing"
    raise ModelNotFound(
        f"{missing}; {places} were searched. {cure(part)} Then press R to see it in the list, or "
        "choose another one."
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter in "./")


def _part_of_folder(name: str) -> Field:
    last = _plain(name).rsplit("/", 1)[-1]
    if "5hzlm" in last:
        return "lm"
    if "embedding" in last:
        return "text_encoder"
    return "vae" if last == "vae" else "dit"


def _is_likely(part: Field, name: str) -> bool:
    """Whether the file `name` looks like one of ACE-Step 1.5 for `part`."""
    plain = _plain(name)
    if part == "text_encoder":
        return "ace15" in plain and "0.6b" in plain
    if part == "lm":
        return "5hzlm" in plain or ("ace15" in plain and "0.6b" not in plain)
    return "acestep" in plain or (part == "vae" and "ace1.5" in plain)
