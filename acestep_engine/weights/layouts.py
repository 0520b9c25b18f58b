"""Which models a place holds: official folders, ComfyUI files, all-in-one files, diffusers folders.

Finds and chooses; what a file is, `sources` tells. Reads headers only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ..config import Family
from ..errors import AceStepError, BadCheckpoint, ModelNotFound
from ..types import ModelSpec
from .files import read_config, read_headers
from .load import read
from .parts import PARTS, ROLES, Field, Role, cure
from .shapes import config_of, lm_size
from .sources import Layout, Source, find_files, is_model_folder, locate, recognise

__all__ = [
    "ROLES",
    "Layout",
    "Role",
    "Source",
    "discover",
    "entries",
    "family_of",
    "fields_of",
    "locate",
    "size_of",
]

logger = logging.getLogger(__name__)

COMFY_FOLDERS = (
    "acestep",
    "checkpoints",
    "diffusion_models",
    "unet",
    "text_encoders",
    "clip",
    "vae",
)
DEPTH = 3  # folders below the one that is searched
LM_ORDER = ("1.7B", "4B", "0.6B")  # which language model wins where there are several
FAMILIES: tuple[Family, ...] = ("turbo", "sft", "base")


def entries(folder: str | Path) -> list[Path]:
    """Every safetensors file and model folder below `folder`; empty where there is no such folder.

    By names alone, so it is fast enough to fill a list of choices.
    """
    root = Path(folder).expanduser()
    return sorted(_walk(root, DEPTH)) if root.is_dir() else []


def fields_of(path: Path) -> set[Field]:
    """Which paths of a `ModelSpec` the file or model folder `path` can serve."""
    fields: set[Field] = set()
    for role in ROLES:
        try:
            files = find_files(path, role)
            if role in recognise(read_headers(files)):
                fields.add(PARTS[role].field)
        except ModelNotFound:
            continue
    return fields


def discover(path: str | Path) -> ModelSpec:
    """The model at `path`: a file, a model folder, or a folder with several of them.

    A model folder with a DiT is completed from the folders beside it, as the official ones lie.
    Parts that are not there stay empty. Where several would do, the choice is logged.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise ModelNotFound(f"There is nothing at {root}. {cure('dit')}")
    alone = root.is_file() or is_model_folder(root)
    candidates = [root] if alone else _below(root)
    found, refused = _usable(candidates)
    if not found:
        raise ModelNotFound(_nothing(root, candidates, refused))
    if alone and root.is_dir() and "dit" in found:
        here = root.absolute()
        others, faults = _usable(path for path in _walk(here.parent, 1) if path != here)
        found, refused = others | found, refused + faults
    if refused and not {"dit", "text_encoder", "vae"} <= found.keys():
        raise BadCheckpoint(refused[0])  # most likely the part that is missing
    for reason in refused:
        logger.warning("passed over: %s", reason)
    chosen = {field: str(_choose(field, paths)) for field, paths in found.items()}
    return replace(ModelSpec(), **chosen)  # pyright: ignore[reportArgumentType]


def _usable(candidates: Iterable[Path]) -> tuple[dict[Field, list[Path]], list[str]]:
    """Which of `candidates` can serve each path of a `ModelSpec`, and why others cannot."""
    found: dict[Field, list[Path]] = {}
    refused: list[str] = []
    for candidate in candidates:
        try:
            for field in fields_of(candidate):
                _check(candidate, field)
                found.setdefault(field, []).append(candidate)
        except (AceStepError, OSError) as error:
            refused.append(f"{candidate}: {error}")
    return found, refused


def family_of(spec: ModelSpec) -> tuple[Family, str]:
    """How `spec` is to be sampled, and the reason: no tensor tells it.

    Order: the user's word, config.json, the name of the file or folder; else turbo, with a warning.
    """
    if spec.family != "auto":
        return spec.family, "asked for"
    if not spec.dit:
        return "turbo", "no DiT is chosen"
    path = Path(spec.dit).expanduser()
    folder = path if path.is_dir() else path.parent if path.stem == "model" else None
    config = {}
    if folder is not None:
        config = read_config(folder) or read_config(folder / PARTS["dit"].diffusers)
    version = _family_in(str(config.get("model_version") or ""))
    named, name = _family_by_name(path)
    if config.get("is_turbo") is True:
        return "turbo", "config.json says is_turbo"
    if version:
        return version, f"config.json says model_version '{config['model_version']}'"
    if config.get("is_turbo") is False:
        if named in ("sft", "base"):
            return named, f"config.json says it is not turbo, and '{name}' names it {named}"
        return "base", "config.json says it is not turbo, and nothing says sft"
    if named:
        return named, f"'{name}' names it {named}"
    logger.warning(
        "Nothing says whether '%s' is a turbo, sft or base model: it is taken for turbo. If the "
        "sound is poor, set the family to sft or base.",
        path,
    )
    return "turbo", "nothing tells the family; turbo is the most common"


def size_of(spec: ModelSpec) -> str:
    """Size of the language model of `spec`: "0.6B", "1.7B", "4B" or its width."""
    return lm_size(read(locate(spec, "lm")).shapes)


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if is_model_folder(folder):
        yield folder
        return
    for item in sorted(folder.iterdir()):
        if item.name.startswith("."):
            continue
        if item.is_file() and item.suffix == ".safetensors":
            yield item
        elif item.is_dir() and depth:
            yield from _walk(item, depth - 1)


def _below(root: Path) -> list[Path]:
    """What to look at below `root`; of a ComfyUI models folder only where our parts may lie."""
    comfy = [root / name for name in COMFY_FOLDERS if (root / name).is_dir()]
    is_comfy = any(folder.name not in ("vae", "acestep") for folder in comfy)
    return [entry for folder in (comfy if is_comfy else [root]) for entry in entries(folder)]


def _check(path: Path, field: Field) -> None:
    """Raise where the part is quantised, or is of a relative of ACE-Step 1.5."""
    role: Role = field
    source = locate(replace(ModelSpec(), **{field: str(path)}), role)
    config_of(role, read(source).shapes, source.config)


def _choose(field: Field, paths: list[Path]) -> Path:
    ranked = sorted(paths, key=lambda path: (_rank(field, path), path.name, str(path)))
    if len(ranked) > 1:
        others = ", ".join(str(path) for path in ranked[1:])
        logger.info("%s: chose %s, not %s", PARTS[field].label, ranked[0], others)
    return ranked[0]


def _rank(field: Field, path: Path) -> tuple[int, int]:
    if field == "lm":
        size = size_of(ModelSpec(lm=str(path)))
        return (LM_ORDER.index(size) if size in LM_ORDER else len(LM_ORDER), 0)
    if field == "dit":
        family, _ = _family_by_name(path)
        return (FAMILIES.index(family) if family else 1, "xl" in path.name.lower())
    return (0, 0)


def _family_in(text: str) -> Family | None:
    return next(
        (name for name in FAMILIES if re.search(rf"(?<![a-z]){name}(?![a-z])", text.lower())), None
    )


def _family_by_name(path: Path) -> tuple[Family | None, str]:
    """The family that the file, its folder, or the repository of a hub snapshot is named after."""
    names = [path.name, path.parent.name]
    if "snapshots" in path.parts:
        names.append(path.parts[path.parts.index("snapshots") - 1])
    for name in names:
        if family := _family_in(name.removesuffix(".safetensors")):
            return family, name
    return None, path.name


def _nothing(root: Path, candidates: list[Path], refused: list[str]) -> str:
    if refused:
        return f"No usable model at {root}. {refused[0]}"
    if candidates:
        names = ", ".join(path.name for path in candidates[:6])
        return f"Nothing at {root} belongs to ACE-Step 1.5 (looked at {names}). {cure('dit')}"
    return (
        f"The folder {root} holds no model (no .safetensors file, no model folder). {cure('dit')}"
    )
