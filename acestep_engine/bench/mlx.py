"""`bench mlx-memory`: what a decode takes at its peak in MLX, by the size of its tiles.

Random weights at the real strides. MLX convolves slowly on a CPU, so the default is a narrow VAE:
weights aside, every array but latents and sound has a number of channels proportional to the width
(the real one is 128), and so has its memory. Peaks are MLX's own count of arrays in use above the
loaded weights; the whole song lies outside of it. When MLX's threads let go of an array differs a
little from run to run, so the largest of some turns counts.
Dimension key: B songs, C latent channels (64), T latent frames, S samples, X audio channels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_map_with_path
from torch import Tensor

from ..backends.mlx import DTYPES, MLXCodec
from ..config import VAEConfig
from ..models_mlx.oobleck import Oobleck
from ..runtime import Wish, choose, probe
from ..store import DTYPES as TORCH_DTYPES
from ..types import HOP, LATENT_CHANNELS
from ..vae.tiling import DECODE_OVERLAP, decode, plan_tiles
from .measure import report

MIB = 1 << 20
TILES = (2048, 1024, 512, 256)
TURNS = 2
SCALE = 0.1  # of the random weights


def run(frames: int, width: int, precision: str) -> str:
    """The table and the JSON line for latents of `frames`, decoded by a VAE of `width` channels."""
    runtime = choose(probe(), Wish("mlx", precision))  # pyright: ignore[reportArgumentType]
    codec = codec_of(width, TORCH_DTYPES[runtime.precision])
    latents = latents_of(frames)
    rows: list[dict[str, Any]] = []
    for tile in TILES:
        tiles = plan_tiles(frames, tile, DECODE_OVERLAP)
        start = time.perf_counter()
        peaks = [peak_of(lambda tile=tile: tiled(codec, latents, tile)) for _ in range(TURNS)]
        row = {"tile": tile, "windows": len(tiles), "s": (time.perf_counter() - start) / TURNS}
        row |= {"peak_mb": max(peaks), "least_mb": min(peaks)}
        rows.append(row | {"at_once_mb": peak_of(lambda tile=tile: at_once(codec, latents, tile))})
    largest = {str(row["tile"]): row["peak_mb"] for row in rows}
    result = {
        "frames": frames,
        "tiles": largest,
        "drop_512_vs_2048": 1 - largest["512"] / largest["2048"],
        "at_once": {str(row["tile"]): row["at_once_mb"] for row in rows},
        "width": width,
        "precision": runtime.precision,
        "device": str(mx.default_device()),
    }
    return report(rows, result)


def codec_of(width: int, dtype: torch.dtype) -> MLXCodec:
    """A decoder with the real strides, `width` channels at its last stage, and random weights."""
    module = Oobleck(replace(VAEConfig(), decoder_channels=width, encoder_hidden_size=1))
    generator = np.random.default_rng(0)

    def fresh(name: str, value: mx.array) -> mx.array:
        values = generator.standard_normal(value.shape, dtype=np.float32) * SCALE
        return mx.array(values).astype(DTYPES[dtype])

    module.update(tree_map_with_path(fresh, module.parameters()))
    mx.eval(module.state)
    return MLXCodec(module, "cpu", dtype)


def latents_of(frames: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, LATENT_CHANNELS, frames, generator=generator)


def tiled(codec: MLXCodec, latents_BCT: Tensor, tile: int) -> Tensor:
    """As a song is decoded: each tile is evaluated and leaves MLX before the next."""
    return decode(codec.decode, latents_BCT, tile, lambda done, total: None)


def at_once(codec: MLXCodec, latents_BCT: Tensor, tile: int) -> mx.array:
    """The same tiles as one lazy graph, evaluated at the end: (B, S, X)."""
    x_BTC = mx.array(latents_BCT).astype(codec.dtype).swapaxes(1, 2)
    cores = []
    for t in plan_tiles(x_BTC.shape[1], tile, DECODE_OVERLAP):
        window_BSX = codec.module.decode(x_BTC[:, t.window_start : t.window_stop])
        cores.append(window_BSX[:, t.trim * HOP : (t.trim + t.stop - t.start) * HOP])
    audio_BSX = mx.concatenate(cores, axis=1)
    mx.eval(audio_BSX)
    return audio_BSX


def peak_of(call: Callable[[], object]) -> float:
    """MiB of arrays that `call` has in use at its peak, beside those of before."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    call()
    return (mx.get_peak_memory() - before) / MIB
