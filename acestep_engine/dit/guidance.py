"""Guidance: how the velocities with and without the prompt become one.

Adaptive projected guidance (Sadat et al., arXiv 2410.02416) with a reverse momentum, as the base
and sft checkpoints were tuned with. Knows neither schedule nor solver.
Dimension key: B songs, T latent frames, C latent channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

MOMENTUM = -0.75
NORM_LIMIT = 2.5  # longest guidance direction per song and channel, over time


def acts_at(t: float, interval: tuple[float, float]) -> bool:
    """Whether guidance is on at noise level `t` (1 is pure noise)."""
    start, end = interval
    return start <= t <= end


def apg(
    cond_BTC: Tensor, null_BTC: Tensor, scale: float, momentum_BTC: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Guided velocity, and the momentum to hand to the next call (None at the first)."""
    direction = cond_BTC - null_BTC
    if momentum_BTC is not None:
        direction = direction + MOMENTUM * momentum_BTC
    length = direction.norm(dim=1, keepdim=True)
    limited = direction * (NORM_LIMIT / length).clamp(max=1.0)  # 0 / 0 cannot occur: 2.5 / 0 is inf
    return cond_BTC + (scale - 1.0) * _orthogonal(limited, cond_BTC), direction


def _orthogonal(vector_BTC: Tensor, to_BTC: Tensor) -> Tensor:
    """The part of `vector_BTC` at right angles to `to_BTC` over time, for each channel."""
    # float64 as in the reference; Metal has none and not every Intel GPU does, float32 costs 1e-6
    exact = torch.float64 if vector_BTC.device.type in ("cpu", "cuda") else torch.float32
    vector, axis = vector_BTC.to(exact), normalize(to_BTC.to(exact), dim=1)
    parallel = (vector * axis).sum(dim=1, keepdim=True) * axis
    return (vector - parallel).to(vector_BTC.dtype)
