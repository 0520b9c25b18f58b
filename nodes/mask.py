"""Latent Noise Mask: which seconds of a song a sampler makes anew. It runs no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from comfy_api.latest import io

from ..acestep_engine.errors import InvalidRequest
from ..acestep_engine.remix import Region, read_region, spans
from ..acestep_engine.types import FRAME_RATE
from .host import bordered
from .sockets import latents_from, masked


class LatentNoiseMask(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepLatentNoiseMask",
            display_name="ACE-Step Latent Noise Mask",
            category="ACE-Step/native",
            description="Marks seconds of a song to be made anew by a KSampler; everything else "
            "stays as it is. ComfyUI's Set Latent Noise Mask is for images and fails on sound.",
            search_aliases=["music", "inpaint", "repaint", "noise mask", "region", "ace step"],
            inputs=[
                io.Latent.Input("latent", tooltip="Audio latents, of a sampler or a VAE Encode."),
                io.String.Input(
                    "regions",
                    default="0-10",
                    placeholder="12-20, 45.5-60, 90-",
                    tooltip="Seconds to make anew, start and end, separated by commas. An open end "
                    "reaches to the end of the song.",
                ),
                io.Float.Input(
                    "soft_edge",
                    default=0.0,
                    min=0.0,
                    max=30.0,
                    step=0.04,
                    tooltip="Seconds inside each region over which old and new sound are mixed. "
                    "0: a hard cut between latent frames.",
                ),
            ],
            outputs=[
                io.Latent.Output(
                    "latent", display_name="latent", tooltip="The same latent, with the mask."
                )
            ],
        )

    @classmethod
    @bordered
    def execute(cls, latent: Mapping[str, Any], regions: str, soft_edge: float) -> io.NodeOutput:
        frames = latents_from(latent).values.shape[1]
        spans = regions_of(regions, frames / FRAME_RATE)
        return io.NodeOutput(masked(latent, mask(frames, spans, soft_edge)))


def regions_of(text: str, seconds: float) -> list[tuple[float, float]]:
    """The regions in `text`, which lie in a song of `seconds`; ends are cut to it."""
    regions = []
    for start, end in map(read_region, text.split(",")):
        if not 0 <= start < seconds:
            raise InvalidRequest(
                f"A region begins at {start:g} s, which is outside a song of {seconds:g} s. "
                "Correct it."
            )
        ((_, stop),) = spans((Region(start, end),), 0.0, seconds)
        regions.append((start, min(stop, seconds)))
    return regions


def mask(frames: int, regions: Iterable[tuple[float, float]], soft: float = 0.0) -> list[float]:
    """1 inside the regions, 0 outside, for each latent frame; both ends rise over `soft` seconds.

    The edges lie inside, so that nothing outside changes; where the song itself begins or ends
    there is nothing to mix with, hence no edge.
    """
    ramp = round(soft * FRAME_RATE) + 1
    values = [0.0] * frames
    for start, end in regions:
        first = min(round(start * FRAME_RATE), frames - 1)
        last = max(round(end * FRAME_RATE), first + 1)
        for frame in range(first, last):
            rise = ramp if first == 0 else frame - first + 1
            fall = ramp if last >= frames else last - frame
            values[frame] = max(values[frame], min(rise, fall, ramp) / ramp)
    return values
