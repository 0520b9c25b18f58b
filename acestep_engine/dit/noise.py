"""The noise a render starts from: one draw per song, on the CPU, in float32.

A song's noise depends on its own seed alone, so it is the same on every device, alone or in a
batch, and a longer song begins with the noise of a shorter one. No global generator is touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import LATENT_CHANNELS


def draw(seed: int, frames: int) -> Tensor:
    """Standard normal noise (1, frames, 64) on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(1, frames, LATENT_CHANNELS, generator=generator)
