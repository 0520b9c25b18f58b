"""Tasks: what each kind of render hands to the DiT beside the words.

Pure functions over latents; they know no models. T is never below the 128 frames the DiT was
trained on: a shorter song is cut after decoding.
Dimension key: B songs (1 here), T latent frames (25 Hz), C channels, N stored frames.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidRequest
from ..remix import Complete, Cover, Extract, Lego, Repaint, Task
from ..types import FRAME_RATE, MIN_FRAMES, frames_of
from .course import FADE, Course, Keep
from .silence import take
from .text import INSTRUCTIONS, complete_instruction, extract_instruction, lego_instruction

Spans = Sequence[tuple[float, float]]
"""Start and end of each region, seconds from the first frame."""


@dataclass(frozen=True, slots=True, eq=False)
class Canvas:
    """Source latents and mask (1, T, 64), the instruction, and the way through the steps.

    mask: 1 where the DiT invents, 0 where it keeps the source.
    """

    source_BTC: Tensor
    mask_BTC: Tensor
    instruction: str
    course: Course = Course()

    @property
    def frames(self) -> int:
        return self.source_BTC.shape[1]

    @property
    def context_BTC(self) -> Tensor:
        """What the DiT reads at every frame next to the noise, (1, T, 128)."""
        return torch.cat((self.source_BTC, self.mask_BTC), dim=-1)


def text2music(silence_NC: Tensor, seconds: int | None, hints_BTC: Tensor | None) -> Canvas:
    """A new song: of `seconds`, guided by `hints_BTC` (1, 5 N, 64) where there are codes.

    seconds None takes the length of the hints; hints shorter than `seconds` are filled with
    silence, longer ones are kept.
    """
    if seconds is None and hints_BTC is None:
        raise InvalidRequest(
            "The song has neither a length nor codes to take it from. Set a duration in the plan."
        )
    hints = silence_NC[None, :0] if hints_BTC is None else hints_BTC
    frames = max(hints.shape[1], MIN_FRAMES, frames_of(seconds or 0))
    instruction = INSTRUCTIONS["text2music" if hints_BTC is None else "cover"]
    return _all_new(fill(hints, silence_NC, frames), instruction)


def silent(silence_NC: Tensor, frames: int) -> Canvas:
    """A new song with nothing to lead it, of exactly `frames`."""
    return _all_new(take(silence_NC, frames), INSTRUCTIONS["text2music"])


def fill(latents_BTC: Tensor, silence_NC: Tensor, frames: int = MIN_FRAMES) -> Tensor:
    """`latents_BTC` with silence at its end up to `frames`; longer ones as they are."""
    filling = take(silence_NC, max(0, frames - latents_BTC.shape[1])).to(latents_BTC)
    return torch.cat((latents_BTC, filling.expand(latents_BTC.shape[0], -1, -1)), dim=1)


def extend(latents_BTC: Tensor, silence_NC: Tensor, left: int, right: int) -> Tensor:
    """`latents_BTC` with frames of silence before and after it."""
    before = take(silence_NC, left).to(latents_BTC)
    after = take(silence_NC, right).to(latents_BTC)
    return torch.cat((before, latents_BTC, after), dim=1)


def prepare(
    task: Task, clean_BTC: Tensor, spans: Spans, silence_NC: Tensor, hints_BTC: Tensor | None
) -> Canvas:
    """The canvas of `task` over its filled source; hints only for a cover that follows codes."""
    match task:
        case Cover():
            return cover(task, clean_BTC, hints_BTC, silence_NC)
        case Repaint():
            return repaint(task, clean_BTC, spans, silence_NC)
        case Lego():
            return lego(task, clean_BTC, spans)
        case Extract():
            return _all_new(clean_BTC, extract_instruction(task.track))
        case Complete():
            return _all_new(clean_BTC, complete_instruction(task.tracks))


def cover(task: Cover, clean_BTC: Tensor, hints_BTC: Tensor | None, silence_NC: Tensor) -> Canvas:
    """The source played anew, read as `hints_BTC` or, without them, as it is."""
    frames = clean_BTC.shape[1]
    source = clean_BTC if hints_BTC is None else fill(hints_BTC, silence_NC, frames)[:, :frames]
    origin = clean_BTC if task.noise_strength > 0.0 else None
    course = Course(task.strength, 1.0 - task.noise_strength, origin)
    return _all_new(source, INSTRUCTIONS["cover"], course)


def repaint(task: Repaint, clean_BTC: Tensor, spans: Spans, silence_NC: Tensor) -> Canvas:
    """Regions of the source made anew: silence stands where they are."""
    frames = clean_BTC.shape[1]
    region_BT1 = region_of(spans, frames)
    quiet_BTC = take(silence_NC, frames).to(clean_BTC)
    source = torch.where(region_BT1 > 0, quiet_BTC, clean_BTC)
    course = Course(keep=Keep(clean_BTC, region_BT1, *_hold(task)))
    return Canvas(source, region_BT1.expand_as(source), INSTRUCTIONS["repaint"], course)


def lego(task: Lego, clean_BTC: Tensor, spans: Spans) -> Canvas:
    """A track beside the source, in some regions or all along; the DiT reads all of the source."""
    frames = clean_BTC.shape[1]
    region_BT1 = region_of(spans, frames) if spans else torch.ones(1, frames, 1)
    return Canvas(clean_BTC, region_BT1.expand_as(clean_BTC), lego_instruction(task.track))


def region_of(spans: Spans, frames: int) -> Tensor:
    """1 at every frame that a span touches, else 0, (1, frames, 1); each span has one at least."""
    region = torch.zeros(1, frames, 1)
    for start, end in spans:
        first = min(max(math.floor(round(start * FRAME_RATE, 6)), 0), frames - 1)
        region[:, first : max(frames_of(end), first + 1)] = 1.0
    return region


def _hold(task: Repaint) -> tuple[float, int]:
    """The share of steps that put the rest back, and the frames of the fade."""
    share = {"conservative": 1.0, "balanced": 1.0 - task.strength, "aggressive": 0.0}[task.mode]
    return share, round(FADE * share)


def _all_new(source_BTC: Tensor, instruction: str, course: Course = Course()) -> Canvas:
    return Canvas(source_BTC, torch.ones_like(source_BTC), instruction, course)
