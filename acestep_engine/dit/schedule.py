"""Noise levels that a render passes through: falling from at most 1 (noise) to 0 (clean).

Plain float64 numbers; knows no tensors and no models. Rounded to bf16, 50 nodes at shift 3 would
hold a duplicate, that is a wasted step, so nothing here is ever rounded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from ..errors import InvalidRequest

logger = logging.getLogger(__name__)

TURBO_STEPS = 8
TURBO_SHIFTS = (1, 2, 3)


def nodes(steps: int, shift: float) -> tuple[float, ...]:
    """steps + 1 noise levels from 1.0 to 0.0, evenly spaced and then warped by `shift`."""
    return tuple(warp((steps - i) / steps, shift) for i in range(steps + 1))


def warp(t: float, shift: float) -> float:
    """shift·t / (1 + (shift - 1)·t), written so that 0 and 1 stay exact."""
    return shift * t / (shift * t + (1.0 - t))


TRAINED = tuple(  # the noise levels turbo was distilled on, 20 in all
    sorted({t for shift in TURBO_SHIFTS for t in nodes(TURBO_STEPS, shift)[:-1]}, reverse=True)
)


def own_nodes(timesteps: Sequence[float]) -> tuple[float, ...]:
    """The user's noise levels as nodes: in (0, 1] and strictly falling, final zeros optional."""
    values = list(timesteps)
    while values and values[-1] == 0.0:
        values.pop()
    if not values:
        raise InvalidRequest(
            f"The timesteps {tuple(timesteps)} hold no noise level above 0. "
            "Give at least one, or leave them empty for the automatic schedule."
        )
    for i, t in enumerate(values):
        if not (math.isfinite(t) and 0.0 < t <= 1.0):
            raise InvalidRequest(
                f"Timestep {i} is {t}, but noise levels lie above 0 and at most at 1. Correct it."
            )
        if i and t >= values[i - 1]:
            raise InvalidRequest(
                f"Timestep {i} is {t} after {values[i - 1]}, but noise levels must fall from step "
                "to step. Sort them from high to low and drop duplicates."
            )
    return (*values, 0.0)


def snap_to_trained(own: Sequence[float]) -> tuple[float, ...]:
    """`own` nodes moved to the nearest levels turbo knows; levels that coincide are merged."""
    levels = (min(TRAINED, key=lambda known: abs(known - t)) for t in own[:-1])
    snapped = (*dict.fromkeys(levels), 0.0)
    if snapped != tuple(own):
        logger.warning(
            "Turbo knows %d noise levels only, so the timesteps %s become %s (%d steps).",
            len(TRAINED),
            _text(own[:-1]),
            _text(snapped[:-1]),
            len(snapped) - 1,
        )
    return snapped


def _text(levels: Sequence[float]) -> str:
    return ", ".join(f"{t:.4g}" for t in levels)
