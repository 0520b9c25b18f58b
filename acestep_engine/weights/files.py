"""Safetensors files as they lie on the disk: headers, shards, and what is wrong with a bad one.

Reads headers only, never tensors, and knows no model.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadCheckpoint

MODEL_STEMS = ("model", "diffusion_pytorch_model")  # file names inside model folders
CONFIG = "config.json"
MAX_HEADER = 100_000_000  # bytes, the limit of the format
AGAIN = "Download it again; a download that stopped can be resumed."

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}

SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a PyTorch pickle (.pt, .ckpt, .bin); only safetensors are read"),
    (b"\x80", "a Python pickle; only safetensors are read"),
    (b"GGUF", "a GGUF file; only safetensors are read"),
    (b"version https://git-lfs", "a Git LFS pointer: the weights themselves are not there"),
    (b"<", "a web page: the link led to a page instead of the file"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: where it lies and its form, not its values."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str  # as the format spells it: F32, BF16, F8_E4M3, ...


Header = Mapping[str, Entry]

Stamp = tuple[str, int, int]
"""A file with its size and time of change: another value means other content."""


def stamp(path: Path) -> Stamp:
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of one safetensors file; BadCheckpoint where the file is not whole."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(64)
        length = struct.unpack("<Q", start[:8])[0] if size >= 8 else 0
        if not 2 <= length <= MAX_HEADER or start[8:9] != b"{":
            raise BadCheckpoint(_foreign(path, size, start))
        stream.seek(8)
        raw = stream.read(length)
    if len(raw) < length:
        raise BadCheckpoint(
            f"{path} stops inside its header: it has {size:,} bytes, but the header alone takes "
            f"{8 + length:,}. {AGAIN}"
        )
    try:
        table: dict[str, Any] = json.loads(raw)
        table.pop("__metadata__", None)
        spans = [(int(a), int(b)) for a, b in (e["data_offsets"] for e in table.values())]
        header = {
            key: Entry(path, key, tuple(map(int, entry["shape"])), entry["dtype"])
            for key, entry in table.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{path} has an unreadable header ({error}). {AGAIN}") from error
    _check_size(path, size, 8 + length + max((end for _, end in spans), default=0))
    for entry, (begin, end) in zip(header.values(), spans, strict=True):
        needed = math.prod(entry.shape) * ITEM_BYTES.get(entry.dtype, 0)
        if needed and needed != end - begin:
            raise BadCheckpoint(
                f"{path}: tensor '{entry.key}' {list(entry.shape)} {entry.dtype} needs {needed:,} "
                f"bytes, but its header gives it {end - begin:,}. {AGAIN}"
            )
    return header


def read_headers(files: Iterable[Path]) -> dict[str, Entry]:
    """The tensors of all `files` together."""
    header: dict[str, Entry] = {}
    for path in files:
        header.update(read_header(path))
    return header


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder, shards by its index; empty where it has none."""
    for stem in MODEL_STEMS:
        if (single := folder / f"{stem}.safetensors").is_file():
            return (single,)
        if (index := folder / f"{stem}.safetensors.index.json").is_file():
            return _shards(index)
    return ()


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """The JSON object in the file `name` of a model folder; empty where there is none."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadCheckpoint(f"{path} is not valid JSON ({error}). {AGAIN}") from error
    if not isinstance(values, dict):
        raise BadCheckpoint(f"{path} holds no JSON object. {AGAIN}")
    return values


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadCheckpoint(f"{index} is not a readable shard index ({error}). {AGAIN}") from error
    shards = tuple(index.parent / str(name) for name in names)
    if outside := [path.name for path in shards if path.parent != index.parent]:
        raise BadCheckpoint(f"{index} points outside its own folder: {outside[0]}. {AGAIN}")
    if missing := [path.name for path in shards if not path.is_file()]:
        raise BadCheckpoint(
            f"{index.parent} lacks {len(missing)} of {len(shards)} shards: "
            f"{', '.join(missing[:3])}. Download them into this folder."
        )
    return shards


def _check_size(path: Path, size: int, expected: int) -> None:
    if size < expected:
        raise BadCheckpoint(
            f"{path} is cut short: {size:,} of {expected:,} bytes are there "
            f"({100 * size / expected:.0f} %). {AGAIN}"
        )
    if size > expected:
        raise BadCheckpoint(
            f"{path} has {size - expected:,} bytes after its last tensor, so it is damaged. {AGAIN}"
        )


def _foreign(path: Path, size: int, start: bytes) -> str:
    if size < 8:
        return f"{path} has only {size} bytes. {AGAIN}"
    for signature, kind in SIGNATURES:
        if start.startswith(signature):
            return f"{path} is {kind}. Put the .safetensors file in its place."
    return f"{path} is not a safetensors file: its header is missing. {AGAIN}"
