"""Long audio through a VAE in tiles: the result equals one pass, the memory is that of one tile.

Integer arithmetic over a callable, for torch and MLX alike: no model is known here, only how far
it sees. Each tile keeps its core and drops the rim that lacks context; nothing is blended.
Dimension key: B songs, C latent channels (64), T latent frames, X audio channels, S samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidRequest, OutOfMemory
from ..types import HOP, LATENT_CHANNELS, SAMPLE_RATE, require_finite

logger = logging.getLogger(__name__)

# How far a frame's result depends on its neighbours, from the kernels, strides and dilations:
# a decoded sample on 9 frames to either side, an encoded frame on 12,165 samples (6.3 frames).
DECODE_OVERLAP = 9
ENCODE_OVERLAP = 7

AUDIO_CHANNELS = 2
CURE = "Load the VAE in bf16 or fp32 and check its file; if the input is at fault, render it again."

Fn = Callable[[Tensor], Tensor]
OnTile = Callable[[int, int], None]  # (frames done, frames in all); may raise to stop


class Tile(NamedTuple):
    """Frames [start, stop) to keep, out of the frames [window_start, window_stop) computed."""

    start: int
    stop: int
    window_start: int
    window_stop: int

    @property
    def trim(self) -> int:
        """Frames to drop at the left of the window's result."""
        return self.start - self.window_start


class Cut(NamedTuple):
    """How a song is cut: its length, and the frames of a tile and of the context at its sides."""

    length: int
    tile: int
    overlap: int


Work = Callable[[int, Tile], None]  # (song, tile)


def plan_tiles(length: int, tile: int, overlap: int) -> list[Tile]:
    """Cut `length` frames into the fewest windows of one size, at most `tile` frames each.

    The cores cover every frame once; each has `overlap` frames of context or the song's end on
    either side. The last window is moved left rather than made smaller. A window below
    2 * overlap + 1 frames would keep nothing, so that is the least, whatever `tile` says.
    """
    tile = max(tile, 2 * overlap + 1)
    if length <= tile:
        return [Tile(0, length, 0, length)]
    inner = length - 2 * overlap  # the outermost windows keep one rim each
    count = -(-inner // (tile - 2 * overlap))
    window = -(-inner // count) + 2 * overlap
    tiles: list[Tile] = []
    start = 0
    while start < length:
        left = min(max(start - overlap, 0), length - window)
        stop = length if left + window == length else left + window - overlap
        tiles.append(Tile(start, stop, left, left + window))
        start = stop
    return tiles


def decode(fn: Fn, latents_BCT: Tensor, tile: int, on_tile: OnTile) -> Tensor:
    """Waveform (B, 2, 1920 T), float32 on the CPU, by `fn`: (1, 64, t) -> (1, 2, 1920 t)."""
    batch, _, frames = latents_BCT.shape
    _check_latents(latents_BCT)
    audio = torch.empty(batch, AUDIO_CHANNELS, frames * HOP, dtype=torch.float32)

    def one(b: int, t: Tile) -> None:  # a function, so that its tensors are gone before the next
        result = fn(latents_BCT[b : b + 1, :, t.window_start : t.window_stop])
        core = result[0, :, t.trim * HOP : (t.trim + t.stop - t.start) * HOP]
        audio[b, :, t.start * HOP : t.stop * HOP] = require_finite(core, "VAE decode", CURE)

    _for_each(one, batch, Cut(frames, tile, DECODE_OVERLAP), on_tile)
    return audio


def encode(fn: Fn, audio_BXS: Tensor, tile: int, on_tile: OnTile) -> Tensor:
    """Latents (B, 64, S // 1920), float32 on the CPU, by `fn`: (1, 2, s) -> (1, 64, s // 1920)."""
    batch, _, samples = audio_BXS.shape
    frames = samples // HOP
    if frames == 0:
        raise InvalidRequest(
            f"The audio has {samples} samples, but one latent frame takes {HOP} (0.04 s). "
            "Use longer audio."
        )
    require_finite(audio_BXS, "VAE encode, input audio", "Use audio whose samples are numbers.")
    latents = torch.empty(batch, LATENT_CHANNELS, frames, dtype=torch.float32)

    def one(b: int, t: Tile) -> None:
        # samples past the last whole frame are heard by the frames before them
        end = samples if t.window_stop == frames else t.window_stop * HOP
        result = fn(audio_BXS[b : b + 1, :, t.window_start * HOP : end])
        core = result[0, :, t.trim : t.trim + t.stop - t.start]
        latents[b, :, t.start : t.stop] = require_finite(core, "VAE encode", CURE)

    _for_each(one, batch, Cut(frames, tile, ENCODE_OVERLAP), on_tile)
    return latents


def _for_each(one: Work, batch: int, cut: Cut, on_tile: OnTile) -> None:
    """Work through every song, tile by tile; where memory runs out, go on with half the tile."""
    for b in range(batch):
        done = 0
        while done < cut.length:
            rest = [t for t in plan_tiles(cut.length, cut.tile, cut.overlap) if t.stop > done]
            try:
                for t in rest:
                    one(b, t._replace(start=max(t.start, done)))
                    done = t.stop
                    on_tile(b * cut.length + done, batch * cut.length)
            except OutOfMemory as error:
                cut = _halve(cut, error)


def _halve(cut: Cut, error: OutOfMemory) -> Cut:
    least = 2 * cut.overlap + 1
    if cut.tile <= least:
        raise OutOfMemory(
            f"VAE: not even a tile of {cut.tile} frames ({cut.tile * HOP / SAMPLE_RATE:.2f} s) "
            f"fits into the memory. Close other programs, or choose bf16. ({error})"
        ) from error
    smaller = max(min(cut.tile, cut.length) // 2, least)
    logger.warning("VAE: a tile of %d frames does not fit; going on with %d.", cut.tile, smaller)
    return cut._replace(tile=smaller)


def _check_latents(latents_BCT: Tensor) -> None:
    """Refuse what can only decode to noise or silence that nobody asked for."""
    require_finite(latents_BCT, "VAE decode, input latents", CURE)
    for b, latents_CT in enumerate(latents_BCT):
        if not latents_CT.any():
            raise InvalidRequest(
                f"VAE decode, input latents: song {b + 1} of {len(latents_BCT)} is all zeros: "
                "an empty latent that no sampler has filled, or a failed render. Connect those "
                "of a sampler; if they are, load the DiT in bf16 or fp32 and check its file."
            )
