"""What can be done with a sound that exists: the tasks beside making a new song.

One frozen dataclass for each. They say what is wanted in seconds and names; `dit.tasks` turns them
into latents and masks. Dimension key: none, a source keeps its own.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from .checks import check_choice, check_range
from .errors import InvalidRequest
from .types import MAX_DURATION, Audio, Latents

Source = Audio | Latents
"""A recording, encoded when first needed, or latents, used as they are."""

Track = Literal[
    "vocals",
    "backing_vocals",
    "drums",
    "bass",
    "guitar",
    "keyboard",
    "percussion",
    "strings",
    "synth",
    "fx",
    "brass",
    "woodwinds",
]
TRACKS: tuple[Track, ...] = get_args(Track)
RepaintMode = Literal["conservative", "balanced", "aggressive"]


class Region(NamedTuple):
    """Seconds on the time axis of the source. A start below 0 and an end past the source extend it;
    end None is the end of the source."""

    start: float
    end: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Cover:
    """The source played anew. strength: share of the steps that follow it, from the first one on;
    noise_strength: how much of its sound the first step starts from (0: none, as from noise).

    exact: the DiT reads the latents themselves, not what audio codes keep of them.
    """

    source: Source
    strength: float = 1.0
    noise_strength: float = 0.0
    exact: bool = False

    def __post_init__(self) -> None:
        _check_source(self.source)
        check_range("strength of a cover", self.strength, 0.0, 1.0)
        check_range("noise_strength of a cover", self.noise_strength, 0.0, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Repaint:
    """Regions of the source made anew, the rest kept.

    mode: "conservative" holds the rest in place at every step, "aggressive" at none, "balanced" at
    a share of 1 - strength of them.
    """

    source: Source
    regions: tuple[Region, ...] = (Region(0.0),)
    mode: RepaintMode = "balanced"
    strength: float = 0.5

    def __post_init__(self) -> None:
        _check_source(self.source)
        check_range("strength of a repaint", self.strength, 0.0, 1.0)
        _check_regions(self.regions)
        if not self.regions:
            raise InvalidRequest("A repaint has no region. Give at least one, in seconds.")
        check_choice("mode of a repaint", self.mode, RepaintMode)


@dataclass(frozen=True, slots=True, eq=False)
class Extract:
    """One track of the source alone; track None leaves the choice to the model."""

    source: Source
    track: Track | None = None

    def __post_init__(self) -> None:
        _check_source(self.source)
        _check_tracks(() if self.track is None else (self.track,))


@dataclass(frozen=True, slots=True, eq=False)
class Lego:
    """A new track that goes with the source, in `regions` or, without any, all along."""

    source: Source
    track: Track | None = None
    regions: tuple[Region, ...] = ()

    def __post_init__(self) -> None:
        _check_source(self.source)
        _check_tracks(() if self.track is None else (self.track,))
        _check_regions(self.regions)


@dataclass(frozen=True, slots=True, eq=False)
class Complete:
    """The source with `tracks` added to it; without any, what the model finds missing."""

    source: Source
    tracks: tuple[Track, ...] = ()

    def __post_init__(self) -> None:
        _check_source(self.source)
        _check_tracks(self.tracks)


Task = Cover | Repaint | Extract | Lego | Complete


_PLACE = r"-?(?:\d+\.?\d*|\.\d+)"
_REGION = re.compile(rf"\s*({_PLACE})?\s*-\s*({_PLACE})?\s*")


def is_region(text: str) -> bool:
    """Whether `read_region` can read `text`."""
    return text.strip() != "-" and _REGION.fullmatch(text) is not None


def read_region(text: str) -> Region:
    """Seconds as 12-20; 12- ends with the source, -20 begins with it, -3-0 begins before it."""
    match = _REGION.fullmatch(text)
    if match is None or not is_region(text):
        raise InvalidRequest(
            f"The region '{text.strip()}' cannot be read. Write START-END in seconds, such as "
            "12-20.5; 12- goes to the end, -3-0 lies before the beginning."
        )
    return Region(float(match[1] or 0), float(match[2]) if match[2] else None)


def edges(task: Task, seconds: float) -> tuple[float, float]:
    """Seconds that a repaint puts before and after a source of `seconds`."""
    if not isinstance(task, Repaint):
        return 0.0, 0.0
    left = max(0.0, -min(region.start for region in task.regions))
    right = max(0.0, max((region.end or 0.0) - seconds for region in task.regions))
    return left, right


def spans(regions: tuple[Region, ...], left: float, seconds: float) -> list[tuple[float, float]]:
    """`regions` of a source of `seconds` on an axis that begins `left` seconds before it."""
    found = []
    for start, end in regions:
        stop = seconds if end is None else end
        if start >= stop:
            raise InvalidRequest(
                f"The region from {start:g} to {stop:g} s holds nothing of a source of "
                f"{seconds:g} s. Start it earlier, or end it later."
            )
        found.append((start + left, stop + left))
    return found


def _check_source(source: Source) -> None:
    if not isinstance(source, Audio | Latents):
        raise InvalidRequest(
            f"The source is {type(source).__name__}, but must be audio or latents. Connect the "
            "recording to work on."
        )
    songs = (source.waveform if isinstance(source, Audio) else source.values).shape[0]
    if songs != 1:
        raise InvalidRequest(
            f"The source holds {songs} songs, but a task works on one. Pick one of the batch."
        )


def _check_tracks(tracks: tuple[Track, ...]) -> None:
    for track in tracks:
        if track not in TRACKS:
            raise InvalidRequest(f"There is no track {track!r}. Choose of {', '.join(TRACKS)}.")


def _check_regions(regions: tuple[Region, ...]) -> None:
    for start, end in regions:
        for place in (start, 0.0 if end is None else end):
            if not math.isfinite(place) or abs(place) > MAX_DURATION:
                raise InvalidRequest(
                    f"A region reaches to {place} s, but songs last at most {MAX_DURATION:g} s. "
                    "Give places in seconds."
                )
        if end is not None and end <= start:
            raise InvalidRequest(
                f"The region from {start:g} to {end:g} s is empty. End it after its start."
            )
