"""How much a render makes: the number of its songs and of their frames.

It knows the wishes only, neither models nor loops.
"""

from __future__ import annotations

from ..errors import InvalidRequest
from ..lm import planner
from ..types import FRAMES_PER_CODE, Codes, DiTSampling, Plan
from ..types import frames_of as whole_frames


def songs_of(codes: Codes | None, sampling: DiTSampling) -> int:
    """Codes of one song may be rendered with many seeds; codes of several decide the number."""
    if codes is not None and not codes.items:
        raise InvalidRequest("There are no audio codes to render. Connect those of a song.")
    if codes is None or len(codes.items) == 1:
        return sampling.batch
    if sampling.batch not in (1, len(codes.items)):
        raise InvalidRequest(
            f"There are codes for {len(codes.items)} songs, but a batch of {sampling.batch} was "
            "asked for. Set the batch to 1 to render each of them once."
        )
    return len(codes.items)


def frames_of(plan: Plan, codes: Codes | None) -> int:
    """Frames to keep of each song: the exact request, or all that codes of another length hold."""
    lengths = sorted({len(item) for item in codes.items}) if codes else []
    if len(lengths) > 1:
        raise InvalidRequest(
            f"The songs of this batch have different numbers of codes ({lengths}), which cannot "
            "share one latent. Render them one after the other."
        )
    if lengths and lengths[0] != planner.codes_for(plan.whole_seconds):
        return lengths[0] * FRAMES_PER_CODE
    return whole_frames(plan.duration)
