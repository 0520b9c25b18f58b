"""The metadata of a song: which values exist, what users write for them, and the `<think>` text.

`normalise` turns what a user wrote into what the models know. `dump` and `parse` are the YAML of
the `<think>` block and undo each other. Knows no tokens and no model.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import fields, replace

import yaml

from ..errors import InvalidRequest
from ..types import MAX_DURATION, MIN_DURATION, Metadata, Request

logger = logging.getLogger(__name__)

FIELDS = ("bpm", "caption", "duration", "keyscale", "language", "timesignature")  # as in training
MIN_BPM, MAX_BPM = 30, 300
MIN_WRITTEN_DURATION = 10  # seconds; the language model never decides on less
TIMESIGNATURES = ("2", "3", "4", "6")
_CODES = (
    "ar az bg bn ca cs da de el en es fa fi fr he hi hr ht hu id is it ja ko la lt ms ne nl no pa "
    "pl pt ro ru sa sk sr sv sw ta te th tl tr uk ur vi yue zh unknown"
)
LANGUAGES = tuple(_CODES.split())
KEYS = tuple(
    f"{note}{accidental} {mode}"
    for note in "ABCDEFG"
    for accidental in ("", "#", "b", "♯", "♭")
    for mode in ("major", "minor")
)
INSTRUMENTAL = "[Instrumental]"

_UNSET = ("", "0", "auto", "none", "n/a", "unknown")
_KEY = re.compile(r"([a-g])\s*(#|♯|sharp|b|♭|flat)?\s*(major|maj|minor|min|m)?", re.IGNORECASE)
_ACCIDENTALS = {"#": "#", "♯": "#", "sharp": "#", "b": "b", "♭": "b", "flat": "b"}
_WHOLE = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
_FIELD_LINE = re.compile(r"([A-Za-z_]+)[ \t]*:(.*)", re.DOTALL)


def normalise(request: Request) -> Request:
    """`request` in the models' own words: values not given are None, the rest is one they know.

    Raises InvalidRequest with the value. bpm is rounded. Empty lyrics stay empty: the models then
    decide whether anyone sings; `instrumental` replaces the lyrics by their marker for that.
    """
    return replace(
        request,
        caption=_lines(request.caption),
        lyrics=INSTRUMENTAL if request.instrumental else _lines(request.lyrics),
        duration=_duration(request.duration),
        bpm=_bpm(request.bpm),
        keyscale=_keyscale(request.keyscale),
        timesignature=_timesignature(request.timesignature),
        language=_language(request.language),
    )


def stated(request: Request) -> Metadata:
    """What a normalised request says itself, in whole seconds."""
    return Metadata(
        bpm=request.bpm,
        duration=None if request.duration is None else math.ceil(request.duration),
        keyscale=request.keyscale,
        language=request.language,
        timesignature=request.timesignature,
    )


def merge(request: Request, generated: Metadata) -> Metadata:
    """`generated` with the values of a normalised request over it; differences are logged."""
    user = stated(request)
    kept = {}
    for name in FIELDS:
        wanted, found = getattr(user, name), getattr(generated, name)
        if wanted is not None and found not in (None, wanted):
            logger.warning("The language model wrote %s %r; your %r is kept.", name, found, wanted)
        kept[name] = found if wanted is None else wanted
    return Metadata(**kept)


def dump(metadata: Metadata) -> str:
    """The text inside `<think>`: field after field, without those that are None or empty."""
    values = {
        field.name: _as_yaml(field.name, getattr(metadata, field.name))
        for field in fields(metadata)
        if getattr(metadata, field.name) not in (None, "")
    }
    if not values:
        return ""
    return yaml.safe_dump(values, allow_unicode=True, sort_keys=True).rstrip("\n")


def parse(text: str) -> Metadata:
    """The fields found in a `<think>` block or its inside; None where missing or unreadable.

    A field goes from its unindented `name:` to the next one. Unindented lines that open with `<`
    are tags. Only quoted and block scalars are read as YAML: models write colons and hashes bare.
    """
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.split("\n"):
        match = _FIELD_LINE.fullmatch(line)
        if line.startswith("</think>"):
            break
        if line.startswith("<"):
            continue
        if match:
            current = found.setdefault(match[1].lower(), [])
            current.append(match[2])
        elif current is not None:
            current.append(line)
    texts = {name: _scalar(found[name]) or None for name in FIELDS if name in found}
    timesignature = texts.get("timesignature")
    return Metadata(
        bpm=_number(texts.get("bpm")),
        caption=texts.get("caption"),
        duration=_number(texts.get("duration")),
        keyscale=texts.get("keyscale"),
        language=texts.get("language"),
        timesignature=timesignature and timesignature.removesuffix("/4"),
    )


def _as_yaml(name: str, value: str | int) -> str | int:
    """Digits become numbers, as in training, where the number reads the same."""
    text = str(value)
    if name == "timesignature":
        text = text.removesuffix("/4")
    return int(text) if _WHOLE.fullmatch(text) else text


def _scalar(lines: list[str]) -> str:
    raw = "\n".join(lines)
    if raw.lstrip(" \t")[:1] in ("'", '"', "|", ">"):
        try:
            return str(yaml.load(f"value:{raw}", yaml.BaseLoader)["value"])
        except yaml.YAMLError:
            pass  # quotes in the middle of a sentence, not around it
    stripped = (line.strip(" \t") for line in lines)
    return " ".join(line for line in stripped if line)


def _number(text: str | None) -> int | None:
    match = re.match(r"\d+", text or "", re.ASCII)
    return int(match[0][:18]) if match else None


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n")


def _duration(seconds: float | None) -> float | None:
    if seconds is None or seconds <= 0:
        return None
    if not MIN_DURATION <= seconds <= MAX_DURATION:
        raise InvalidRequest(
            f"duration is {seconds} seconds, but a song lasts {MIN_DURATION:g} to "
            f"{MAX_DURATION:g} seconds. Choose a length in that range, or 0 for automatic."
        )
    return round(float(seconds), 6)  # arithmetic leaves 30.000000000000004, which is no 31 s


def _bpm(bpm: float | None) -> int | None:
    if bpm is None or bpm <= 0:
        return None
    if not MIN_BPM <= bpm <= MAX_BPM:
        raise InvalidRequest(
            f"bpm is {bpm}, but the models know {MIN_BPM} to {MAX_BPM}. "
            "Choose a tempo in that range (halve or double it), or 0 for automatic."
        )
    return round(bpm)


def _keyscale(text: str | None) -> str | None:
    """One of KEYS in ASCII; a note alone is major, "Am" and "a min" are minor."""
    written = (text or "").strip()
    if written.lower() in _UNSET:
        return None
    match = _KEY.fullmatch(written)
    if match is None:
        raise InvalidRequest(
            f"keyscale is {text!r}, which is no key. Write a note A to G, # or b if needed, and "
            'major or minor, such as "F# minor" or "Am", or leave it empty for automatic.'
        )
    note, accidental, mode = match.groups()
    minor = mode is not None and (mode == "m" or mode.lower().startswith("min"))
    sign = _ACCIDENTALS[accidental.lower()] if accidental else ""
    return f"{note.upper()}{sign} {'minor' if minor else 'major'}"


def _timesignature(text: str | int | None) -> str | None:
    written = "" if text is None else str(text).strip()
    if written.lower() in _UNSET:
        return None
    beats = {f"{beats}/{8 if beats == '6' else 4}": beats for beats in TIMESIGNATURES}
    if written not in (*beats, *TIMESIGNATURES):
        raise InvalidRequest(
            f"timesignature is {text!r}, but the models know {', '.join(beats)}. "
            "Choose one of them, or leave it empty for automatic."
        )
    return beats.get(written, written)


def _language(text: str | None) -> str | None:
    code = (text or "").strip().lower()
    if code in _UNSET:
        return None
    if code not in LANGUAGES:
        raise InvalidRequest(
            f"language is {text!r}, but the models know the codes {' '.join(LANGUAGES)}. "
            "Choose one of them, or leave it empty for automatic."
        )
    return code
