"""Output level: the decoder is unbounded, audio files are not.

Plain arithmetic per song; knows neither models nor files.
Dimension key: B songs, X audio channels, S samples.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import InvalidRequest
from ..types import Audio, Latents

SILENCE = 1e-6  # peaks below are silence, which no gain can make louder


def limit_peak(audio_BXS: Tensor) -> Audio:
    """48 kHz sound with every song that exceeds ±1 scaled down to it; others are untouched.

    The gains are kept, so that `splice` can undo them.
    """
    peak_B11 = _peak(audio_BXS).clamp(min=1.0)
    return Audio(audio_BXS / peak_B11, gain=tuple((1.0 / peak_B11.double()).flatten().tolist()))


def normalise_peak(audio_BXS: Tensor, db: float = -1.0) -> Tensor:
    """`audio_BXS` with the peak of every song at `db` dBFS (at most 0); silence is untouched."""
    if db > 0.0:
        raise InvalidRequest(
            f"A peak of {db} dBFS would clip: 0 is the loudest a file can hold. Use 0 or less."
        )
    peak = _peak(audio_BXS)
    gain = 10.0 ** (db / 20.0) / peak.clamp(min=SILENCE)
    return audio_BXS * gain.where(peak >= SILENCE, 1.0)


def audible(latents: Latents) -> Latents:
    """`latents` as something to take after, unless a song of them was encoded from silence."""
    for song, peak in enumerate(latents.record.get("peaks", ()), 1):
        if peak < SILENCE:
            raise InvalidRequest(
                f"Song {song} of the encoded sound is silent (its peak is {peak:g}): there is "
                "nothing to take from it. Connect a sound that can be heard."
            )
    return latents


def _peak(audio_BXS: Tensor) -> Tensor:
    return audio_BXS.abs().amax(dim=(1, 2), keepdim=True)
