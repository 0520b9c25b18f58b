"""The noise of a render: what it starts from, and a stream for solvers that add more.

A song's noise depends on its own seeds alone, so it is the same on every device, alone or in a
batch, and a longer song begins with the noise of a shorter one. It is drawn on the CPU in float32.
No global generator is touched. Dimension key: B songs, T latent frames, C latent channels.
"""

from __future__ import annotations

import math

import torch
from numpy.random import SeedSequence
from torch import Tensor

from ..types import LATENT_CHANNELS, MAX_SEED, DiTSampling


def seed_of(seed: int, item: int) -> int:
    """The seed of song `item` of a batch, counting from 0."""
    return (seed + item) % (MAX_SEED + 1)


def draw(seed: int, frames: int) -> Tensor:
    """Standard normal noise (1, frames, 64) on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(1, frames, LATENT_CHANNELS, generator=generator)


def draw_for(sampling: DiTSampling, item: int, frames: int) -> Tensor:
    """What song `item` of a render starts from, a retake mixed in; (1, frames, 64)."""
    own = draw(seed_of(sampling.seed, item), frames)
    if not sampling.retake:
        return own
    return mix(own, draw(seed_of(sampling.retake_seed, item), frames), sampling.retake)


def mix(noise_BTC: Tensor, other_BTC: Tensor, amount: float) -> Tensor:
    """On the arc from `noise_BTC` (0) to `other_BTC` (1), both exact; the variance stays 1."""
    quarter = math.pi / 2
    return math.sin(quarter * (1.0 - amount)) * noise_BTC + math.sin(quarter * amount) * other_BTC


def stream(seed: int) -> torch.Generator:
    """A CPU generator that repeats no number of `draw(seed, ...)`.

    torch's CPU generator reads the low 32 bits of a seed only, so the new one is hashed into them.
    """
    hashed = SeedSequence(seed, spawn_key=(1,)).generate_state(1)
    return torch.Generator("cpu").manual_seed(int(hashed[0]))
