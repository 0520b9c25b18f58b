"""Output level: the decoder is unbounded, audio files are not.

Plain arithmetic per song; knows neither models nor files.
Dimension key: B songs, X audio channels, S samples.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import InvalidRequest

SILENCE = 1e-6  # peaks below are silence, which no gain can make louder


def limit_peak(audio_BXS: Tensor) -> Tensor:
    """`audio_BXS` with every song that exceeds ±1 scaled down to it; others are untouched."""
    return audio_BXS / _peak(audio_BXS).clamp(min=1.0)


def normalise_peak(audio_BXS: Tensor, db: float = -1.0) -> Tensor:
    """`audio_BXS` with the peak of every song at `db` dBFS (at most 0); silence is untouched."""
    if db > 0.0:
        raise InvalidRequest(
            f"A peak of {db} dBFS would clip: 0 is the loudest a file can hold. Use 0 or less."
        )
    peak = _peak(audio_BXS)
    gain = 10.0 ** (db / 20.0) / peak.clamp(min=SILENCE)
    return audio_BXS * gain.where(peak >= SILENCE, 1.0)


def _peak(audio_BXS: Tensor) -> Tensor:
    return audio_BXS.abs().amax(dim=(1, 2), keepdim=True)
