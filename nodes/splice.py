"""Splice Audio: what was made anew goes back into the original. It knows no sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io

from ..acestep_engine.remix import Region
from ..acestep_engine.splice import CROSSFADE, splice
from ..acestep_engine.types import MAX_DURATION
from .host import bordered
from .sockets import TaskSocket, audio_from, audio_of


class SpliceAudio(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepSpliceAudio",
            display_name="ACE-Step Splice Audio",
            category="ACE-Step/audio",
            description="Puts a region of new sound into the original, which stays as it was, "
            "sample for sample, everywhere else. For repainted and extended songs.",
            search_aliases=["music", "repaint", "inpaint audio", "crossfade", "extend", "ace step"],
            inputs=_inputs(),
            outputs=[
                io.Audio.Output(
                    "audio", display_name="audio", tooltip="Stereo, at the rate of the original."
                )
            ],
        )

    @classmethod
    @bordered
    def execute(
        cls,
        original: Mapping[str, Any],
        new: Mapping[str, Any],
        start: float,
        end: float,
        crossfade: float,
        task: Any = None,
    ) -> io.NodeOutput:
        by_hand = (Region(start, None if end < 0 else end),)
        regions = by_hand if task is None else getattr(task, "regions", ())
        sound = splice(audio_from(original), audio_from(new), regions, crossfade)
        return io.NodeOutput(audio_of(sound))


def _inputs() -> list[Any]:
    return [
        io.Audio.Input("original", tooltip="The sound that was there first, at any rate."),
        io.Audio.Input(
            "new", tooltip="The whole song with its new part, as VAE Decode (Tiled) gives it."
        ),
        io.Float.Input(
            "start",
            default=0.0,
            min=-MAX_DURATION,
            max=MAX_DURATION,
            step=0.01,
            tooltip="Second of the original where the new part begins. Below 0 it comes before it.",
        ),
        io.Float.Input(
            "end",
            default=-1.0,
            min=-1.0,
            max=2 * MAX_DURATION,
            step=0.01,
            tooltip="Second of the original where the new part ends, or one behind its end. -1: "
            "the end of the original.",
        ),
        io.Float.Input(
            "crossfade",
            default=CROSSFADE,
            min=0.0,
            max=10.0,
            step=0.01,
            tooltip="Seconds outside the region in which the original goes over into the new part. "
            "0: a hard cut.",
        ),
        TaskSocket.Input(
            "task",
            optional=True,
            tooltip="A task with regions, such as a repaint. They take the place of start and end.",
        ),
    ]
