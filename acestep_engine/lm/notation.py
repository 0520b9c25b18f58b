"""Audio codes as text, for people and other programs: `<|audio_code_7|>` tokens or plain numbers.

Songs of a batch are separated by an empty line. Knows no model.
"""

from __future__ import annotations

import logging
import re
from typing import Literal, get_args

from ..errors import InvalidRequest
from ..types import Codes
from .tokenizer import QWEN3

logger = logging.getLogger(__name__)

Notation = Literal["tokens", "numbers"]
NOTATIONS = get_args(Notation)

_TOKEN = re.compile(r"<\|audio_code_(\d+)\|>")
_NUMBERS = re.compile(r"[\s,;\[\]\d]*")


def write_codes(codes: Codes, notation: Notation = "tokens") -> str:
    """`codes` as text; `read_codes` undoes it, all but the seeds."""
    if notation == "numbers":
        return "\n\n".join(",".join(map(str, song)) for song in codes.items)
    return "\n\n".join("".join(f"<|audio_code_{code}|>" for code in song) for song in codes.items)


def read_codes(text: str) -> Codes:
    """The codes in `text`: of all its code tokens, or else of its numbers.

    Codes above the largest one exist in the vocabulary without a meaning; they become the largest,
    as in the official player, with a warning.
    """
    songs = []
    for part in re.split(r"\n[ \t\r]*\n", text):
        found = _TOKEN.findall(part)
        if "<|audio_code_" not in text:
            found = re.findall(r"\d+", _only_numbers(part))
        if found:
            songs.append(tuple(map(int, found)))
    if not songs:
        raise InvalidRequest(
            "There are no audio codes in the text. Write them as <|audio_code_123|> tokens or as "
            "numbers with commas between them, and an empty line between songs."
        )
    return Codes(tuple(map(_clamped, songs)))


def _only_numbers(text: str) -> str:
    stranger = _NUMBERS.match(text)
    end = stranger.end() if stranger else 0
    if end < len(text):
        raise InvalidRequest(
            f"The text of the audio codes holds {text[end : end + 20]!r}, which is no code. Write "
            "codes as <|audio_code_123|> tokens or as numbers with commas between them."
        )
    return text


def _clamped(song: tuple[int, ...]) -> tuple[int, ...]:
    top = QWEN3.codes - 1
    over = sum(code > top for code in song)
    if over:
        logger.warning(
            "%d of %d audio codes are above %d; %d stands in.", over, len(song), top, top
        )
    return tuple(min(code, top) for code in song)
