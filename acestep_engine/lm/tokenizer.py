"""The byte-level BPE of Qwen, for the language model and for the text encoder.

It knows text only: no control token can come out of it, whatever the user writes. The ids of
control tokens and audio codes are the numbers of a `Vocabulary`, put in by the prompt builders.

`qwen_merges.npz` holds the merges of the Qwen vocabulary (Alibaba Cloud, Apache-2.0) as pairs of
token ids in rank order: token 256 + i joins pair i, tokens 0..255 are the single bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, normalizers, pre_tokenizers

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Bytes that byte-level BPE writes as themselves; the others become characters from 256 up.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
BYTE_ORDER = _PRINTABLE + _OTHERS  # the byte that each of the first 256 tokens stands for


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which token ids mean what. Ids below `text` are text; codes are one contiguous range."""

    size: int
    text: int
    start: int  # opens a turn
    end: int  # closes a turn; the language model stops with it
    think_open: int
    think_close: int
    first_code: int
    codes: int = 64_000

    @property
    def code_ids(self) -> slice:
        """Ids of the valid audio codes."""
        return slice(self.first_code, self.first_code + self.codes)


QWEN3 = Vocabulary(
    size=217_204,  # 1,535 rows after the codes exist in the checkpoints and mean nothing
    text=151_643,
    start=151_644,
    end=151_645,
    think_open=151_667,
    think_close=151_668,
    first_code=151_669,
)


class Tokenizer:
    """Text to ids and back, built from merges (n, 2) in rank order."""

    def __init__(self, merges: NDArray[np.int32]) -> None:
        pairs: list[list[int]] = merges.tolist()
        pieces = [bytes([byte]) for byte in BYTE_ORDER]
        written = [chr(byte) for byte in _PRINTABLE] + [chr(256 + i) for i in range(len(_OTHERS))]
        for left, right in pairs:
            pieces.append(pieces[left] + pieces[right])
            written.append(written[left] + written[right])
        self._pieces = pieces
        self._bpe = tokenizers.Tokenizer(
            models.BPE(
                vocab={word: token for token, word in enumerate(written)},
                merges=[(written[left], written[right]) for left, right in pairs],
            )
        )
        self._bpe.normalizer = normalizers.NFC()
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def __len__(self) -> int:
        return len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, NFC-normalised; half surrogate pairs become '?'."""
        sound = text.encode("utf-8", errors="replace").decode("utf-8")
        return self._bpe.encode(sound, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; broken UTF-8 is replaced, ids that are no text are left out."""
        known = len(self._pieces)
        joined = b"".join(self._pieces[token] for token in ids if token < known)
        return joined.decode("utf-8", errors="replace")

    def piece(self, token: int) -> bytes:
        """The bytes of one text token."""
        return self._pieces[token]


@cache
def load_tokenizer() -> Tokenizer:
    """The bundled tokenizer, built once per process."""
    with np.load(Path(__file__).with_name("qwen_merges.npz")) as arrays:
        return Tokenizer(arrays["merges"])
