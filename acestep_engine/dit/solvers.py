"""Solvers: one step along dx/dt from noise level t down to t_next.

A solver may ask for the velocity as often as it needs; it knows nothing of guidance or models.
Dimension key: B songs, T latent frames, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

VelocityAt = Callable[[Tensor, float], Tensor]  # (x_BTC, t) -> dx/dt


def euler(x_BTC: Tensor, velocity: VelocityAt, t: float, t_next: float) -> Tensor:
    """One straight step; at t_next = 0 it is the model's estimate of the clean latents."""
    v_BTC = velocity(x_BTC, t)
    return x_BTC.to(v_BTC.device) - (t - t_next) * v_BTC  # noise is drawn on the CPU
