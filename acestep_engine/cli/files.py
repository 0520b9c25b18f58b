"""What commands read and write beside sound: plans, codes, latents, reports. It runs no stage.

A file appears whole or not at all. Where a plan or codes are read, the report of a song does too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch

from .. import audio as sound
from ..errors import InvalidRequest
from ..lm.metadata import merge, normalise
from ..lm.notation import read_codes as codes_of_text
from ..lm.notation import write_codes
from ..types import Audio, Codes, Latents, Metadata, Plan, Request

REPORTS = (".json",)
LATENTS = (".safetensors",)


def read_plan(path: str) -> Plan:
    """A plan as `write_plans` and reports hold it; values edited by hand are checked."""
    values = _read_json(path)
    try:
        values = values.get("plan", values)
        plan = Plan(**{**values, "metadata": Metadata(**values["metadata"])})
        facts = plan.metadata
        stated = Request(
            caption=facts.caption or "",
            duration=plan.duration,
            bpm=facts.bpm,
            keyscale=facts.keyscale,
            timesignature=facts.timesignature,
            language=facts.language,
        )
        return Plan(**{**values, "metadata": merge(normalise(stated), facts)})
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"'{path}' holds no plan ({type(error).__name__}: {error}). Give a file that the "
            "command plan, write, rewrite or understand wrote, or the report of a song."
        ) from error


def write_plans(plans: tuple[Plan, ...], path: str) -> list[Path]:
    """One file for each plan, numbered from the second on."""
    files = numbered(Path(path), len(plans))
    for plan, file in zip(plans, files, strict=True):
        write_json(file, asdict(plan))
    return files


def read_codes(path: str) -> Codes:
    """Audio codes: as text, as `codes --json` writes them, or those in the report of a song."""
    if Path(path).suffix.lower() not in REPORTS:
        return codes_of_text(_read_text(path))
    values = _read_json(path)
    try:
        values = values.get("codes") or values
        written = write_codes(Codes(tuple(map(tuple, values["items"]))), "numbers")
        return replace(codes_of_text(written), seeds=tuple(values["seeds"]))
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"'{path}' holds no audio codes ({type(error).__name__}: {error}). Give a file that "
            "the command codes wrote, or the report of a song that was made with codes."
        ) from error


def save_songs(audio: Audio, out: Path) -> list[Path]:
    """One sound file for each song, numbered from the second on."""
    names = numbered(out, len(audio.waveform))
    return [sound.save(audio, name, item) for item, name in enumerate(names)]


def numbered(path: Path, count: int) -> list[Path]:
    """`path`, and the same with -2, -3 and so on behind its stem."""
    return [path if n == 0 else path.with_stem(f"{path.stem}-{n + 1}") for n in range(count)]


def save_latents(latents: Latents, path: Path) -> None:
    with _whole(path) as temporary:
        safetensors.torch.save_file({"latents": latents.values.contiguous()}, temporary)


def load_latents(path: Path) -> Latents:
    try:
        return Latents(safetensors.torch.load_file(path)["latents"])
    except (OSError, KeyError, safetensors.SafetensorError) as error:
        raise InvalidRequest(
            f"'{path}' holds no latents ({error}). Give a file that the encode command wrote."
        ) from error


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with _whole(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors="replace"))


def _read_json(path: str) -> Mapping[str, Any]:
    try:
        return json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"'{path}' is no JSON: {error}. Correct it there.") from error


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"Cannot read '{path}': {error}. Choose a text file.") from error


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`, which then appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
