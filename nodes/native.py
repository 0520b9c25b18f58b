"""Plan and codes to the CONDITIONING of ComfyUI's own ACE-Step model, and codes back from one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from comfy_api.latest import io

from ..acestep_engine.dit.extent import frames_of, songs_of
from ..acestep_engine.errors import InvalidRequest
from ..acestep_engine.types import CODE_RATE, FRAME_RATE, Codes, DiTSampling, Plan
from ..acestep_engine.types import frames_of as whole_frames
from .handle import ModelHandle
from .host import bordered, engine
from .sockets import (
    CodesSocket,
    ModelSocket,
    PlanSocket,
    codes_from,
    conditioning_of,
    empty_latent,
    latents_from,
)


class ToConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepToConditioning",
            display_name="ACE-Step To Conditioning",
            category="ACE-Step/native",
            description="Plan and codes for ComfyUI's own ACE-Step 1.5 model and KSampler. Only "
            "the text encoder of the model runs here.",
            search_aliases=["music", "native", "ksampler", "prompt", "text encode", "ace step"],
            inputs=_inputs(),
            outputs=[
                io.Conditioning.Output(
                    "conditioning",
                    display_name="conditioning",
                    tooltip="For the positive input of a KSampler. Its negative is this one behind "
                    "a Conditioning Zero Out.",
                ),
                io.Latent.Output(
                    "latent",
                    display_name="latent",
                    tooltip="An empty latent of the right length, with room for each song.",
                ),
            ],
        )

    @classmethod
    @bordered
    def execute(
        cls,
        model: ModelHandle,
        plan: Plan,
        codes: Codes | None = None,
        timbre: Mapping[str, Any] | None = None,
    ) -> io.NodeOutput:
        latent = _room(plan, codes)
        if codes is not None and timbre is not None:
            raise InvalidRequest(BOTH)
        reference = latents_from(timbre) if timbre is not None else None
        led = codes is not None or reference is not None
        words = engine().words(model.spec, plan, "cover" if led else "text2music")
        return io.NodeOutput(conditioning_of(words, codes, reference), latent)


class FromConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepFromConditioning",
            display_name="ACE-Step From Conditioning",
            category="ACE-Step/native",
            description="The audio codes that ComfyUI's own text encode node composed, for the "
            "DiT Sampler, for Codes Text or to be understood.",
            search_aliases=["music", "native", "audio codes", "extract codes", "ace step"],
            inputs=[
                io.Conditioning.Input(
                    "conditioning", tooltip="From TextEncodeAceStepAudio1.5 or a node behind it."
                )
            ],
            outputs=[
                CodesSocket.Output("codes", display_name="codes", tooltip="For the DiT Sampler."),
                io.Float.Output(
                    "duration", display_name="duration", tooltip="Seconds of the first song."
                ),
            ],
        )

    @classmethod
    @bordered
    def execute(cls, conditioning: Iterable[Sequence[Any]]) -> io.NodeOutput:
        codes = codes_from(conditioning)
        return io.NodeOutput(codes, len(codes.items[0]) / CODE_RATE)


BOTH = (
    "Codes and a timbre are connected, but ComfyUI's sampler follows one of them: with a timbre it "
    "would drop the codes. Disconnect one, or use the ACE-Step DiT Sampler, which takes both."
)


def _inputs() -> list[Any]:
    return [
        ModelSocket.Input("model", tooltip="From Load ACE-Step. Its text encoder reads the plan."),
        PlanSocket.Input("plan", tooltip="From the CoT Planner."),
        CodesSocket.Input(
            "codes",
            optional=True,
            tooltip="From the Audio Code Sampler. Without, the model invents the music by itself.",
        ),
        io.Latent.Input(
            "timbre",
            optional=True,
            tooltip="Latents of a recording. ComfyUI's model takes its sound and its melody, as a "
            "cover; it cannot have codes as well.",
        ),
    ]


def _room(plan: Plan, codes: Codes | None) -> dict[str, Any]:
    """An empty LATENT for what plan and codes ask for."""
    frames = frames_of(plan, codes)
    exact = frames == whole_frames(plan.duration)
    seconds = plan.duration if exact else frames / FRAME_RATE
    return empty_latent(songs_of(codes, DiTSampling()), frames, seconds)
