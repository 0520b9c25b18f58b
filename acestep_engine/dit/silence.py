"""Latents of digital silence: what stands for "no source" and "no reference".

Encoding zeros gives the same frame everywhere except near both ends, as far as the encoder reaches
(under 7 frames), so a short encode holds all there is to know. Knows no VAE, only a callable.
Dimension key: N stored frames, T latent frames (25 Hz), C latent channels (64).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..types import HOP

FRAMES = 15_000  # ten minutes, the longest song
EDGE = 8  # frames kept at either end
PROBE = 3 * EDGE  # frames encoded to learn both ends and the middle


def from_encoder(encode: Callable[[Tensor], Tensor]) -> Tensor:
    """Silence (15000, 64) as float32, from an encoder of (1, 2, S) audio to (1, 64, S // 1920)."""
    probe_TC = encode(torch.zeros(1, 2, PROBE * HOP))[0].T.to("cpu", torch.float32)
    middle = probe_TC[PROBE // 2].expand(FRAMES - 2 * EDGE, -1)
    return torch.cat((probe_TC[:EDGE], middle, probe_TC[-EDGE:]))


def take(silence_NC: Tensor, frames: int) -> Tensor:
    """The first `frames` of silence, (1, frames, 64); a store that is too short is repeated."""
    repeats = -(-frames // silence_NC.shape[0])
    return silence_NC.repeat(repeats, 1)[None, :frames]
