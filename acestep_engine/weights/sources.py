"""Where one role of a model lies: which files, under which prefix, in which style of names.

What a file is, is read from the tensors in it, never from its name alone. Reads headers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import BadCheckpoint, ModelNotFound
from ..types import ModelSpec
from .files import CONFIG, MODEL_STEMS, Header, read_config, read_headers, weight_files
from .keymaps import BASES, MARKS, QWEN3_MARK, QWEN3_NOT, Style
from .parts import PARTS, ROLES, Role, cure
from .shapes import check_config

Layout = Literal["official", "comfy_split", "comfy_aio", "diffusers"]

TEXT_ROWS = 151_669  # vocabulary of Qwen3-Embedding-0.6B; the first audio code has this id
CODE_ROWS = TEXT_ROWS + 64_000  # a language model needs at least these to write codes

_AIO_BASES = ("model.diffusion_model.", "vae.", "first_stage_model.", "text_encoders.")


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one role. `config` is its config.json, empty where there is none."""

    role: Role
    files: tuple[Path, ...]
    layout: Layout
    style: Style
    prefix: str
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """The file, or the folder of several, for messages."""
        return str(self.files[0] if len(self.files) == 1 else self.files[0].parent)


@dataclass(frozen=True, slots=True)
class Holding:
    """How a file holds a role."""

    style: Style
    base: str


def recognise(header: Header) -> dict[Role, Holding]:
    """The roles that the tensors of `header` make up."""
    found: dict[Role, Holding] = {}
    for base in BASES:
        for mark in MARKS:
            if any(base + name in header for name in mark.names):
                found.setdefault(mark.role, Holding(mark.style, base))
    for base, rows in _qwen3_tables(header).items():
        if (role := role_of_rows(rows)) is not None:
            found.setdefault(role, Holding("official", base))
    return found


def role_of_rows(rows: int) -> Role | None:
    """What a Qwen3 with a vocabulary of `rows` is here; None for a Qwen3 of another purpose."""
    if rows >= CODE_ROWS:
        return "lm"
    return "text_encoder" if rows == TEXT_ROWS else None


def locate(spec: ModelSpec, role: Role) -> Source:
    """The files of `role` in `spec`, known by their headers to hold it.

    Raises ModelNotFound where there is no file, BadCheckpoint where it holds something else.
    """
    part = PARTS[role]
    chosen = getattr(spec, part.field)
    if not chosen:
        raise ModelNotFound(f"No {part.label} is chosen. {cure(role)}")
    path = Path(chosen).expanduser()
    files = find_files(path, role)
    header = read_headers(files)
    holding = recognise(header).get(role)
    if holding is None:
        raise BadCheckpoint(_not_held(path, role, header))
    in_folder = path.is_dir() or path.stem in MODEL_STEMS
    folders = dict.fromkeys(file.parent for file in reversed(files)) if in_folder else ()
    config: dict[str, Any] = {}
    for folder in folders:
        own = read_config(folder)
        check_config(own, folder / CONFIG)
        config |= own
    if role == "condition_encoder":
        config |= _xl_width(path, header, holding)
    layout = _layout(files[0], in_folder, holding)
    return Source(role, files, layout, holding.style, holding.base, config)


def find_files(path: Path, role: Role) -> tuple[Path, ...]:
    """The safetensors files of `role` at `path`: the file itself, or those of its model folder."""
    part = PARTS[role]
    if path.is_file():
        return (path,)
    if not path.is_dir():
        raise ModelNotFound(f"The {part.label} was to be at {path}, but nothing is. {cure(role)}")
    if part.diffusers and (files := weight_files(path / part.diffusers)):
        if role == "audio_detokenizer":  # its first layer is stored with the tokenizer
            files += weight_files(path / PARTS["audio_tokenizer"].diffusers)
        return files
    if files := weight_files(path):
        return files
    inside = sorted(item.name for item in path.iterdir())
    listing = f"only {', '.join(inside[:6])}" if inside else "nothing"
    raise ModelNotFound(
        f"The folder {path} holds no weights of the {part.label} (model.safetensors, or its shards "
        f"with model.safetensors.index.json), but {listing}. {cure(role)}"
    )


def is_model_folder(folder: Path) -> bool:
    """Whether a folder is one model (or a diffusers set of them) rather than a collection."""
    if any((folder / f"{stem}.safetensors").is_file() for stem in MODEL_STEMS):
        return True
    if any((folder / f"{stem}.safetensors.index.json").is_file() for stem in MODEL_STEMS):
        return True
    return (folder / "transformer" / "config.json").is_file()


def _qwen3_tables(header: Header) -> dict[str, int]:
    """Rows of the token table of every Qwen3 in the file, by base."""
    last = QWEN3_MARK[0]
    bases = [key.removesuffix(last) for key in header if key.endswith(last)]
    return {
        base: header[base + last].shape[0]
        for base in bases
        if all(base + name in header for name in QWEN3_MARK) and base + QWEN3_NOT not in header
    }


def _layout(first: Path, in_folder: bool, holding: Holding) -> Layout:
    if holding.base.startswith(_AIO_BASES):
        return "comfy_aio"
    if not in_folder:
        return "comfy_split"
    siblings = first.parent.parent
    is_set = (siblings / "transformer").is_dir() or (siblings / "model_index.json").is_file()
    return "diffusers" if is_set else "official"


def _xl_width(path: Path, header: Header, holding: Holding) -> dict[str, int]:
    """{"encoder_hidden_size": E} where the DiT beside this encoder is wider than it (XL)."""
    if holding.style == "diffusers":
        folder = path / PARTS["dit"].diffusers
        name, header = "condition_embedder.weight", read_headers(weight_files(folder))
    else:
        name = f"{holding.base}decoder.condition_embedder.weight"
    if name not in header or len(header[name].shape) != 2:
        return {}
    width, encoder_width = header[name].shape
    return {} if width == encoder_width else {"encoder_hidden_size": encoder_width}


def _not_held(path: Path, role: Role, header: Header) -> str:
    """Why `path` cannot serve as `role`, by what it really is."""
    label = PARTS[role].label
    rows = next(iter(_qwen3_tables(header).values()), 0)
    held = [PARTS[other].label for other in ROLES if other in recognise(header)]
    if role == "lm" and rows == TEXT_ROWS:
        reason = (
            "it is the text encoder Qwen3-Embedding-0.6B: its vocabulary of 151,669 rows ends "
            "where the audio codes begin, so it cannot write any"
        )
    elif role == "text_encoder" and rows >= CODE_ROWS:
        reason = (
            f"it is a language model ({rows:,} rows, codes included), but the diffusion model "
            "was trained on the states of Qwen3-Embedding-0.6B"
        )
    elif rows and not held:
        reason = (
            f"it is a Qwen3 of another purpose: {rows:,} rows, where the text encoder has "
            f"{TEXT_ROWS:,} and a language model at least {CODE_ROWS:,}"
        )
    elif held:
        reason = f"it holds {', '.join(held)}"
    else:
        names = ", ".join(list(header)[:3]) or "no tensors at all"
        reason = f"its tensors belong to no part of ACE-Step 1.5 ({names})"
    return f"{path} cannot be used as {label}: {reason}. {cure(role)}"
