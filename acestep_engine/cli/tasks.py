"""The tasks as options of `song`: cover, repaint, extract, lego and complete a sound that exists.

It knows sound files and the nouns of `remix`, no stage of the flow and no words of the song.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from .. import audio as sound
from ..errors import InvalidRequest
from ..remix import (
    TRACKS,
    Complete,
    Cover,
    Extract,
    Lego,
    Repaint,
    RepaintMode,
    Task,
    edges,
    read_region,
)
from ..splice import CROSSFADE, splice
from ..types import MAX_DURATION, MIN_DURATION, Audio
from ..vae import level

KINDS: dict[str, type[Any]] = {
    "cover": Cover,
    "repaint": Repaint,
    "extract": Extract,
    "lego": Lego,
    "complete": Complete,
}
FITTING = {  # option -> the tasks that it means something to
    "source": tuple(KINDS),
    "region": ("repaint", "lego"),
    "repaint_mode": ("repaint",),
    "crossfade": ("repaint",),
    "strength": ("cover", "repaint"),
    "cover_noise": ("cover",),
    "exact": ("cover",),
    "track": ("extract", "lego", "complete"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One render: the file to write, and where it is no new song, a task and its source."""

    out: Path
    task: Task | None = None
    source: Audio | None = None

    @property
    def seconds(self) -> float | None:
        """Length of the result, where there is a source that the engine will take."""
        if self.task is None or self.source is None:
            return None
        left, right = edges(self.task, self.source.seconds)
        seconds = left + self.source.seconds + right
        return seconds if MIN_DURATION <= seconds <= MAX_DURATION else None


def add_to(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "tasks on a sound that exists",
        "the source decides on the length, and no codes are composed",
    )
    add = group.add_argument
    add("--task", choices=tuple(KINDS), help="extract, lego and complete need a base checkpoint")
    add("--source", metavar="FILE", help="the sound to work on")
    add(
        "--region",
        action="append",
        metavar="START-END",
        help="seconds to repaint, or where lego plays; 12- goes to the end, -3-0 lies before the "
        "beginning; may be given several times",
    )
    add(
        "--repaint-mode",
        choices=get_args(RepaintMode),
        help="how firmly a repaint holds the rest meanwhile; default: balanced",
    )
    add(
        "--strength",
        type=float,
        help="0 to 1; cover: share of the steps that follow the source (default 1); repaint: "
        "freedom of the mode balanced (default 0.5)",
    )
    add("--cover-noise", type=float, help="0 to 1: how much of the source's sound a cover keeps")
    add(
        "--exact",
        action="store_const",
        const=True,
        help="a cover reads the sound itself, not what audio codes keep of it",
    )
    add(
        "--track",
        action="append",
        metavar="NAME",
        help=f"of {', '.join(TRACKS)}; several: extract and lego write a file for each, complete "
        "adds them all",
    )
    add(
        "--crossfade",
        type=float,
        help=f"seconds in which the source goes over into a repaint; default: {CROSSFADE:g}",
    )


def jobs_of(options: argparse.Namespace) -> tuple[Job, ...]:
    """What to render; a task takes several renders where each gives a track of its own."""
    _check(options)
    out = Path(options.out)
    if options.task is None:
        return (Job(out),)
    if options.source is None:
        raise InvalidRequest(f"The task {options.task} has no source. Add --source with a file.")
    kind, source = KINDS[options.task], sound.load(options.source)
    tracks: tuple[str, ...] = tuple(dict.fromkeys(options.track or ()))
    wanted = {
        "regions": options.region and tuple(map(read_region, options.region)),
        "mode": options.repaint_mode,
        "strength": options.strength,
        "noise_strength": options.cover_noise,
        "exact": options.exact,
        "tracks": tracks if kind is Complete else None,
        "track": tracks[0] if tracks and kind is not Complete else None,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    if kind is Complete or len(tracks) < 2:
        return (Job(out, kind(source, **given), source),)
    singles = {track: kind(source, **{**given, "track": track}) for track in tracks}
    return tuple(
        Job(out.with_stem(f"{out.stem}-{track}"), task, source) for track, task in singles.items()
    )


def finished(job: Job, made: Audio, options: argparse.Namespace) -> Audio:
    """What to write of a render: a repaint is put into its source, whose level it keeps.

    Only where the whole would clip it is made quieter. All else gets its peak at -1 dBFS.
    """
    if isinstance(job.task, Repaint) and job.source:
        fade = CROSSFADE if options.crossfade is None else options.crossfade
        whole = splice(job.source, made, job.task.regions, fade)
        return Audio(level.limit_peak(whole.waveform).waveform, whole.sample_rate)
    if options.keep_level:
        return made
    return Audio(level.normalise_peak(made.waveform), made.sample_rate)


def told(task: Task, source: str) -> dict[str, Any]:
    """`task` for a report, with its source by name."""
    knobs = {field.name: getattr(task, field.name) for field in fields(task)}
    return {"name": type(task).__name__.lower(), **knobs, "source": source}


def _check(options: argparse.Namespace) -> None:
    """Raise InvalidRequest where an option would be left unheard."""
    for name, kinds in FITTING.items():
        if getattr(options, name) is not None and options.task not in kinds:
            task = f"the task {options.task}" if options.task else "a song without --task"
            raise InvalidRequest(
                f"--{name.replace('_', '-')} means nothing to {task}: it belongs to "
                f"{', '.join(kinds)}. Leave it out, or choose --task."
            )
