"""Audio codes as material: songs cut, joined, repeated, reversed, and blended into one another.

A code packs six whole numbers, its levels, into one (finite scalar quantisation, Mentzer et al.,
2023). Neighbouring levels mean neighbouring sounds, neighbouring codes do not: so songs are blended
level by level. Batches are worked on song by song; one song meets every song of a batch. Seeds are
left behind, for none of them composes the result. Knows no model and no text.
Dimension key: N codes (5 Hz) · Q dimensions of the quantiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from .config import FSQConfig
from .errors import InvalidRequest
from .models_spec import codebook_size, fsq_basis, fsq_levels_of
from .types import CODE_RATE, MAX_DURATION, Codes

LEVELS = FSQConfig().fsq_input_levels
CODEBOOK = codebook_size(LEVELS)
LONGEST = int(MAX_DURATION * CODE_RATE)  # codes of the longest song

Song = tuple[int, ...]
LevelArray = NDArray[np.int64]


def position_of(seconds: float) -> int:
    """The code that begins nearest to `seconds`; half a code rounds up."""
    if not math.isfinite(seconds):
        raise InvalidRequest(f"A place in a song is {seconds} seconds. Give a finite number.")
    return math.floor(round(seconds * CODE_RATE, 6) + 0.5)


def levels_of(song: Sequence[int]) -> LevelArray:
    """The levels of each code of `song`, (N, Q)."""
    return fsq_levels_of(np.asarray(song, dtype=np.int64), LEVELS)


def song_of(levels_NQ: LevelArray) -> Song:
    """The codes of the given levels; undoes `levels_of`."""
    return tuple((levels_NQ @ fsq_basis(LEVELS)).tolist())


def cut(codes: Codes, start: int = 0, end: int | None = None) -> Codes:
    """The codes `start` to before `end` of every song; `end` None is the song's own end."""
    return _each(codes, lambda song: song[slice(*_span(song, start, end))])


def join(first: Codes, second: Codes) -> Codes:
    """Every song of `first`, and after it that of `second`."""
    return _pairwise(first, second, lambda one, other: one + other)


def repeat(codes: Codes, times: int) -> Codes:
    """Every song `times` times in a row."""
    if not isinstance(times, Integral) or times < 1:
        raise InvalidRequest(
            f"A song cannot be repeated {times} times. Give a whole number, 1 or more."
        )
    return _each(codes, lambda song: song * min(int(times), LONGEST + 1))


def reverse(codes: Codes) -> Codes:
    """The codes of every song in the opposite order; each of them still runs forwards."""
    return _each(codes, lambda song: song[::-1])


def crossfade(first: Codes, second: Codes, start: int = 0, end: int | None = None) -> Codes:
    """`first` up to the code `start`, `second` from the code `end` on, and a straight way between.

    Both lie on one time axis: the result is as long as `second`. The k codes between go over in
    the steps 1/(k+1) .. k/(k+1). `end` None is where the shorter song ends.
    """

    def fade(one: Song, other: Song) -> Song:
        low, high = _span(min(one, other, key=len), start, end)
        weights_N = np.arange(1, high - low + 1) / (high - low + 1)
        return one[:low] + _blend(one[low:high], other[low:high], weights_N) + other[high:]

    return _pairwise(first, second, fade)


def mix(first: Codes, second: Codes, ratio: float) -> Codes:
    """Both songs at once: `ratio` 0 is the first, 1 the second.

    It ends where the shorter one ends: behind it there is nothing to mix.
    """
    if not 0 <= ratio <= 1:
        raise InvalidRequest(f"ratio is {ratio}, but must lie between 0 and 1. Set it inside that.")

    def blend(one: Song, other: Song) -> Song:
        count = min(len(one), len(other))
        return _blend(one[:count], other[:count], np.full(count, ratio))

    return _pairwise(first, second, blend)


def _blend(first: Song, second: Song, weights_N: NDArray[np.float64]) -> Song:
    """Each level on its way from `first` (0) to `second` (1), a half rounded up."""
    first_NQ, second_NQ = levels_of(first), levels_of(second)
    between_NQ = first_NQ + weights_N[:, None] * (second_NQ - first_NQ)
    return song_of(np.floor(between_NQ.round(9) + 0.5).astype(np.int64))  # 9: no noise at a half


def _span(song: Song, start: int, end: int | None) -> tuple[int, int]:
    last = len(song) if end is None else end
    if not 0 <= start < last <= len(song):
        raise InvalidRequest(
            f"The codes {start} to {last} ({start / CODE_RATE:g} to {last / CODE_RATE:g} s) are no "
            f"part of a song of {len(song)} codes ({len(song) / CODE_RATE:g} s). Choose a start "
            "before the end, and both inside the song."
        )
    return start, last


def _each(codes: Codes, change: Callable[[Song], Song]) -> Codes:
    return _made(change(song) for song in _songs(codes))


def _pairwise(first: Codes, second: Codes, change: Callable[[Song, Song], Song]) -> Codes:
    ones, others = _songs(first), _songs(second)
    if 1 not in (len(ones), len(others)) and len(ones) != len(others):
        raise InvalidRequest(
            f"{len(ones)} songs meet {len(others)}: there is no telling which belong together. "
            "Connect as many on both sides, or a single one on either."
        )
    count = max(len(ones), len(others))
    return _made(change(ones[n % len(ones)], others[n % len(others)]) for n in range(count))


def _songs(codes: Codes) -> tuple[Song, ...]:
    """The songs of `codes`, if there are any and all of them can be meant."""
    if not codes.items:
        raise InvalidRequest("There are no audio codes. Connect those of a song.")
    for number, song in enumerate(codes.items, 1):
        if not song:
            raise InvalidRequest(f"Song {number} has no codes. Compose some for it, or leave it.")
        bad = [c for c in song if not (isinstance(c, Integral) and 0 <= c < CODEBOOK)]
        if bad:
            raise InvalidRequest(
                f"Song {number} holds {bad[0]!r}, but a code is a whole number from 0 to "
                f"{CODEBOOK - 1}. Correct it with Codes Text, or compose the song again."
            )
    return codes.items


def _made(songs: Iterable[Song]) -> Codes:
    items = tuple(songs)
    longest = max(map(len, items))
    if longest > LONGEST:
        raise InvalidRequest(
            f"The song would be longer than {LONGEST} codes, and with them {MAX_DURATION:g} s, the "
            "most the models know. Join or repeat less."
        )
    return Codes(items)
