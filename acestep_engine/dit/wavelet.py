"""Correction of a step in the halves of a Haar wavelet along time (arXiv 2604.16044).

A step leaves x off the path the model foresaw; it is pushed away from the estimate of the clean
latents a little, in the slow half early and in the fast half late. Knows no model and no schedule.
Dimension key: B songs, T latent frames, C latent channels.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from ..types import Wavelet
from .solvers import SolverStep, VelocityAt


def corrected(step: SolverStep, wavelet: Wavelet) -> SolverStep:
    """`step` followed by the correction, or `step` itself where that is off."""
    if wavelet.mode == "off":
        return step

    def corrected_step(x_BTC: Tensor, velocity: VelocityAt, t: float, t_next: float) -> Tensor:
        seen: list[Tensor] = []

        def watched(x_BTC: Tensor, t: float, ahead: bool = False) -> Tensor:
            seen.append(velocity(x_BTC, t, ahead))
            return seen[-1]

        there_BTC = step(x_BTC, watched, t, t_next)
        clean_BTC = x_BTC.to(seen[0].device) - t * seen[0]
        return correct(there_BTC, clean_BTC, t, wavelet)

    return corrected_step


def correct(x_BTC: Tensor, clean_BTC: Tensor, t: float, wavelet: Wavelet) -> Tensor:
    """`x_BTC` after a step from noise level `t`, pushed away from the estimate `clean_BTC`."""
    away_BTC = x_BTC - clean_BTC
    if wavelet.mode == "pix":
        return x_BTC + wavelet.scaler * away_BTC
    slow_BTC, fast_BTC = split(away_BTC)
    if wavelet.mode in ("low", "double"):
        x_BTC = x_BTC + t * wavelet.scaler * slow_BTC
    if wavelet.mode in ("high", "double"):
        strength = wavelet.scaler if wavelet.mode == "high" else wavelet.high_scaler
        x_BTC = x_BTC + (1.0 - t) * strength * fast_BTC
    return x_BTC


def split(x_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """What the low and the high band of a one-level Haar transform hold; their sum is `x_BTC`.

    The low band alone, transformed back, is the mean of each pair of frames. An odd last frame
    makes a pair with a frame of zeros.
    """
    frames = x_BTC.shape[1]
    pairs = pad(x_BTC, (0, 0, 0, frames % 2)).unflatten(1, (-1, 2))
    means = pairs.mean(dim=2, keepdim=True).expand_as(pairs)
    slow_BTC = means.flatten(1, 2)[:, :frames]
    return slow_BTC, x_BTC - slow_BTC
