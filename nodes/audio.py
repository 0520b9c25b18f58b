"""VAE Decode and Encode (Tiled): latents to sound and back. They know no tile border."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io

from ..acestep_engine.types import FRAME_RATE
from .handle import ModelHandle
from .host import bordered, engine
from .sockets import ModelSocket, audio_from, audio_of, latent_of, latents_from

MIB = 1 << 20


class VAEDecodeTiled(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepVAEDecodeTiled",
            display_name="ACE-Step VAE Decode (Tiled)",
            category="ACE-Step/vae",
            description="Latents to 48 kHz stereo sound, piece by piece: the memory it takes "
            "depends on the tile, not on the length of the song, and the joins cannot be heard.",
            search_aliases=["music", "song", "latent to audio", "decode audio", "ace step vae"],
            inputs=[
                ModelSocket.Input("model", tooltip="From Load ACE-Step."),
                io.Latent.Input("latent", tooltip="Audio latents, as the DiT Sampler gives them."),
                tile_input(),
                memory_input(),
            ],
            outputs=[
                io.Audio.Output(
                    "audio", display_name="audio", tooltip="48 kHz stereo, for any audio node."
                )
            ],
        )

    @classmethod
    @bordered
    def execute(
        cls, model: ModelHandle, latent: Mapping[str, Any], tile: float, max_memory: int = 0
    ) -> io.NodeOutput:
        limits = round(tile * FRAME_RATE), max_memory * MIB
        audio = engine().decode(model.spec, latents_from(latent), *limits)
        return io.NodeOutput(audio_of(audio))


class VAEEncodeTiled(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepVAEEncodeTiled",
            display_name="ACE-Step VAE Encode (Tiled)",
            category="ACE-Step/vae",
            description="Sound to latents, piece by piece. Any sample rate, mono or stereo.",
            search_aliases=["music", "audio to latent", "encode audio", "timbre", "ace step vae"],
            inputs=[
                ModelSocket.Input("model", tooltip="From Load ACE-Step."),
                io.Audio.Input("audio", tooltip="Any sound; it is brought to 48 kHz stereo."),
                tile_input(),
                memory_input(),
            ],
            outputs=[
                io.Latent.Output(
                    "latent",
                    display_name="latent",
                    tooltip="Audio latents at 25 frames a second, for example as a timbre.",
                )
            ],
        )

    @classmethod
    @bordered
    def execute(
        cls, model: ModelHandle, audio: Mapping[str, Any], tile: float, max_memory: int = 0
    ) -> io.NodeOutput:
        limits = round(tile * FRAME_RATE), max_memory * MIB
        latents = engine().encode(model.spec, audio_from(audio), *limits)
        return io.NodeOutput(latent_of(latents))


def tile_input() -> Any:
    return io.Float.Input(
        "tile",
        default=0.0,
        min=0.0,
        max=120.0,
        step=0.1,
        advanced=True,
        tooltip="Seconds of sound worked on at once. Smaller needs less memory. 0: chosen from the "
        "free memory.",
    )


def memory_input() -> Any:
    return io.Int.Input(
        "max_memory",
        default=0,
        min=0,
        max=1_000_000,
        optional=True,
        advanced=True,
        tooltip="MiB that the work may take beside the model; the tile is chosen to keep it, by "
        "an estimate. 0: what is free.",
    )
