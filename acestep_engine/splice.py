"""New sound put into an original, which stays as it was, bit for bit, outside the new regions.

Plain arithmetic on waveforms; knows no model and no latents.
Dimension key: B songs, X audio channels (2), S samples at the rate of the original.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .audio import resample, to_stereo
from .errors import InvalidRequest
from .remix import Region
from .types import FRAME_RATE, Audio

CROSSFADE = 0.05  # seconds


def splice(
    original: Audio, new: Audio, regions: Sequence[Region], crossfade: float = CROSSFADE
) -> Audio:
    """`new` inside the `regions`, `original` outside, in stereo at the rate of the original.

    A straight cross-fade of `crossfade` seconds lies outside each region. A region that begins
    before the original or ends after it makes the result longer, and `new` begins where the result
    does. Gains of `new` are undone, so that both have one level; regions that leave nothing of the
    original leave `new` as it is.
    """
    rate = original.sample_rate
    if not 0 <= crossfade < math.inf:
        raise InvalidRequest(f"crossfade is {crossfade} seconds. Give 0 or more.")
    songs = len(original.waveform), len(new.waveform)
    if 1 not in songs and songs[0] != songs[1]:
        raise InvalidRequest(
            f"The original has {songs[0]} songs, the new sound {songs[1]}. Connect as many on both "
            "sides, or a single one on either."
        )
    spans, sides = _layout(original, regions)
    kept_BXS = pad(to_stereo(original).waveform, sides)
    made = resample(to_stereo(new), rate)
    reach = _reach(spans, made.waveform.shape[-1], kept_BXS.shape[-1], rate)
    weight_S = _weight(spans, reach, round(crossfade * rate))
    if weight_S.min() == 1:
        return Audio(made.waveform[..., :reach], rate, made.gain)
    made_BXS = _without_gain(made).to(kept_BXS)[..., :reach]
    share_S = weight_S.to(kept_BXS)
    mixed_BXS = share_S * made_BXS + (1 - share_S) * kept_BXS[..., :reach]
    inside_BXS = torch.where(share_S > 0, mixed_BXS, kept_BXS[..., :reach])
    rest_BXS = kept_BXS[..., reach:].expand(len(inside_BXS), -1, -1)
    return Audio(torch.cat((inside_BXS, rest_BXS), dim=-1), rate)


def _layout(
    original: Audio, regions: Sequence[Region]
) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Regions in samples of the result, and the samples added on the left and on the right."""
    rate, samples = original.sample_rate, original.waveform.shape[-1]
    if not regions:
        raise InvalidRequest(
            "There is no region to put the new sound into. Give a start and an end, or a task that "
            "has regions."
        )
    spans = []
    for region in regions:
        end = samples / rate if region.end is None else region.end
        inside = -math.inf < region.start < end < math.inf
        if not inside or round(region.start * rate) == round(end * rate):
            raise InvalidRequest(
                f"The region from {region.start:g} to {end:g} s is empty (the original lasts "
                f"{samples / rate:g} s). Choose a start before the end."
            )
        spans.append((round(region.start * rate), round(end * rate)))
    left = max(0, -min(start for start, _ in spans))
    right = max(0, max(end for _, end in spans) - samples)
    return [(start + left, end + left) for start, end in spans], (left, right)


def _reach(spans: list[tuple[int, int]], made: int, wanted: int, rate: int) -> int:
    """Samples that both sounds have; what the new one lacks at its end is less than a frame."""
    start, end = max(spans)[0], max(end for _, end in spans)
    if made <= start or made < end - rate / FRAME_RATE:
        raise InvalidRequest(
            f"The new sound ends at {made / rate:g} s, but is needed until {end / rate:g} s, "
            "counted from its own beginning. Render it as long as the original with what the "
            "regions add to it."
        )
    return min(made, wanted)


def _weight(spans: list[tuple[int, int]], reach: int, fade: int) -> Tensor:
    """The share of the new sound in each sample, (reach,) from 0 to 1."""
    weight_S = torch.zeros(reach)
    for start, end in spans:
        rise, fall = min(fade, start), max(0, min(fade, reach - end))
        for place, ramp_S in ((start - rise, _ramp(rise)), (end, _ramp(fall).flip(0))):
            there_S = weight_S[place : place + len(ramp_S)]
            there_S.copy_(torch.maximum(there_S, ramp_S))
        weight_S[start:end] = 1
    return weight_S


def _ramp(steps: int) -> Tensor:
    """The inner points of a straight way from 0 to 1."""
    return torch.arange(1, steps + 1) / (steps + 1)


def _without_gain(audio: Audio) -> Tensor:
    gain_B = torch.tensor(audio.gain or (1.0,)).to(audio.waveform)
    return audio.waveform / gain_B[:, None, None]
