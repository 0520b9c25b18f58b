"""Brakes on a velocity: how long it may be, and how fast it may turn.

Knows no model, no guidance and no solver. Dimension key: B songs, T latent frames, C channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def clamp(v_BTC: Tensor, x_BTC: Tensor, limit: float) -> Tensor:
    """`v_BTC` no longer than `limit` times `x_BTC`, song by song; 0 is no limit."""
    if not limit:
        return v_BTC
    longest, length = (part.norm(dim=(1, 2), keepdim=True) for part in (limit * x_BTC, v_BTC))
    return torch.where(length > longest, v_BTC * (longest / length), v_BTC)


def averaging(share: float) -> Callable[[Tensor, bool], Tensor]:
    """Exponential average over one render: `share` of the result before, the rest of the velocity.

    The function takes a velocity, and whether it is a look ahead, which moves no average on.
    """
    before_BTC: Tensor | None = None

    def average(v_BTC: Tensor, ahead: bool) -> Tensor:
        nonlocal before_BTC
        if not share:
            return v_BTC
        if before_BTC is not None:
            v_BTC = (1.0 - share) * v_BTC + share * before_BTC
        before_BTC = before_BTC if ahead else v_BTC
        return v_BTC

    return average
