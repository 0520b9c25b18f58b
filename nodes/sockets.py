"""Sockets of the flow, and the way between ComfyUI's own types and the engine's nouns.

It runs no model and changes no value it is given.
Dimension key: B songs, T latent frames, C latent channels (64), X audio channels, S samples,
L tokens, D width of the text encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from comfy_api.latest import io

from ..acestep_engine.dit.conditions import Words
from ..acestep_engine.errors import InvalidRequest
from ..acestep_engine.types import LATENT_CHANNELS, Audio, Codes, Latents

ModelSocket = io.Custom("ACESTEP_MODEL")
PlanSocket = io.Custom("ACESTEP_PLAN")
CodesSocket = io.Custom("ACESTEP_CODES")
TaskSocket = io.Custom("ACESTEP_TASK")

RECORD = "acestep"  # key of a LATENT that holds how the engine made it; of an AUDIO, its gain
CODES = "audio_codes"  # key of a CONDITIONING: a list of codes for each song


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


def empty_latent(songs: int, frames: int, seconds: float) -> dict[str, Any]:
    """A LATENT to be filled by a sampler; decoding it crops the sound to `seconds`."""
    return latent_of(Latents(torch.zeros(songs, frames, LATENT_CHANNELS), {"seconds": seconds}))


def masked(latent: Mapping[str, Any], mask_T: Sequence[float]) -> dict[str, Any]:
    """`latent` with a noise mask, (1, 1, T): 1 is made anew, 0 stays.

    Image masks have one axis more, with which ComfyUI's sampler fails on sound.
    """
    return {**latent, "noise_mask": torch.tensor(mask_T, dtype=torch.float32)[None, None]}


def conditioning_of(words: Words, codes: Codes | None, timbre: Latents | None) -> list[list[Any]]:
    """The native CONDITIONING of ACE-Step 1.5: text states (1, L, D), and the rest by name."""
    values: dict[str, Any] = {
        "pooled_output": None,
        "conditioning_lyrics": words.lyric_BLD.float().cpu(),
    }
    if codes is not None:
        values[CODES] = [list(item) for item in codes.items]
    if timbre is not None:
        values["reference_audio_timbre_latents"] = [timbre.values.transpose(1, 2).contiguous()]
    return [[words.text_BLD.float().cpu(), values]]


def codes_from(conditioning: Iterable[Sequence[Any]]) -> Codes:
    """The audio codes of all entries; an entry with the codes of an earlier one adds none."""
    found: dict[tuple[tuple[int, ...], ...], None] = {}
    for _, values in conditioning:
        songs = values.get(CODES)
        rows = songs.tolist() if isinstance(songs, torch.Tensor) else songs or ()
        found[tuple(tuple(map(int, row)) for row in rows)] = None
    items = tuple(song for songs in found for song in songs if song)
    if not items:
        raise InvalidRequest(
            "This conditioning holds no audio codes. Connect the one that ComfyUI's "
            "TextEncodeAceStepAudio1.5 gives, with generate_audio_codes switched on there."
        )
    return Codes(items)
