"""Sockets of the flow, and the way between ComfyUI's LATENT and AUDIO and the engine's nouns.

It runs no model and changes no value it is given.
Dimension key: B songs, T latent frames, C latent channels (64), X audio channels, S samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io

from ..acestep_engine.errors import InvalidRequest
from ..acestep_engine.types import LATENT_CHANNELS, Audio, Latents

ModelSocket = io.Custom("ACESTEP_MODEL")
PlanSocket = io.Custom("ACESTEP_PLAN")
CodesSocket = io.Custom("ACESTEP_CODES")
TaskSocket = io.Custom("ACESTEP_TASK")

RECORD = "acestep"  # key of a LATENT that holds how the engine made it; of an AUDIO, its gain


def latents_from(latent: Mapping[str, Any]) -> Latents:
    """A LATENT, (B, 64, T) at 25 Hz, as the engine takes it.

    The record is left behind where another node changed the number of frames or songs.
    """
    samples_BCT = latent["samples"]
    if samples_BCT.ndim != 3 or samples_BCT.shape[1] != LATENT_CHANNELS:
        raise InvalidRequest(
            f"This latent has the shape {tuple(samples_BCT.shape)}, but ACE-Step 1.5 music is "
            f"(songs, {LATENT_CHANNELS}, frames). Connect a latent of an ACE-Step 1.5 node, not "
            "one of an image, a video or another music model."
        )
    values_BTC = samples_BCT.detach().transpose(1, 2).float().cpu().clone()
    shape, record = latent.get(RECORD, (None, {}))
    return Latents(values_BTC, dict(record) if shape == tuple(samples_BCT.shape) else {})


def latent_of(latents: Latents) -> dict[str, Any]:
    """The native LATENT of `latents`."""
    samples_BCT = latents.values.transpose(1, 2).contiguous()
    return {
        "samples": samples_BCT,
        "type": "audio",
        RECORD: (tuple(samples_BCT.shape), dict(latents.record)),
    }


def audio_from(audio: Mapping[str, Any]) -> Audio:
    """An AUDIO, which may load lazily: of a foreign mapping only the two keys are read.

    The gain is left behind where another node put another sound in its place.
    """
    waveform_BXS = audio["waveform"]
    if waveform_BXS.ndim != 3:
        raise InvalidRequest(
            f"This audio has the shape {tuple(waveform_BXS.shape)}, but must be (songs, channels, "
            "samples). Load it with ComfyUI's own audio loader."
        )
    known, gain = audio.get(RECORD, (None, ())) if isinstance(audio, dict) else (None, ())
    own = gain if known is waveform_BXS else ()
    return Audio(waveform_BXS.detach().float().cpu(), int(audio["sample_rate"]), own)


def audio_of(audio: Audio) -> dict[str, Any]:
    """The native AUDIO of `audio`."""
    waveform_BXS = audio.waveform
    return {
        "waveform": waveform_BXS,
        "sample_rate": audio.sample_rate,
        RECORD: (waveform_BXS, audio.gain),
    }
