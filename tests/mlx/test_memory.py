"""What the VAE leaves behind: nothing of a window outlives it, and MLX keeps little for later."""

from __future__ import annotations

import mlx.core as mx
import pytest
import torch

from acestep_engine.backends.mlx import CACHE_LIMIT, WINDOWS, MLXCodec
from acestep_engine.vae import tiling


@pytest.fixture
def codec(pair) -> MLXCodec:
    """As new: it has seen no window yet."""
    return MLXCodec(pair("vae")[1].module, "cpu", torch.float32)


def extra_memory(codec: MLXCodec, latents: torch.Tensor, tile: int) -> int:
    """Bytes that a decode takes at its height, beside what was there."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tiling.decode(codec.decode, latents, tile, lambda done, total: None)
    return mx.get_peak_memory() - before


def test_the_peak_follows_the_tile_and_not_the_song(codec, randn) -> None:
    tile = extra_memory(codec, randn(1, 64, 48), 48)
    assert extra_memory(codec, randn(1, 64, 200), 48) <= 1.05 * tile
    assert extra_memory(codec, randn(1, 64, 200), 200) > 3 * tile


def test_nothing_stays_in_use_after_a_window(codec, randn) -> None:
    latents = randn(1, 64, 20)
    before = mx.get_active_memory()
    audio = codec.decode(latents)
    assert mx.get_active_memory() == before
    audio += 1  # it has memory of its own
    assert not torch.equal(codec.decode(latents), audio)


def test_every_fourth_window_gives_back_what_mlx_kept(codec, randn) -> None:
    mx.clear_cache()
    kept = []
    for _ in range(2 * WINDOWS):
        codec.decode(randn(1, 64, 20))
        kept.append(mx.get_cache_memory())
    assert [memory == 0 for memory in kept] == [False, False, False, True] * 2
    assert max(kept) <= CACHE_LIMIT


def test_the_limit_holds_during_the_work_only(codec, randn, monkeypatch) -> None:
    own = mx.set_cache_limit(123 << 20)
    seen = []

    def work(latents: mx.array) -> mx.array:
        seen.append(mx.set_cache_limit(CACHE_LIMIT))
        return plain(latents)

    plain = codec.module.decode
    monkeypatch.setattr(codec.module, "decode", work)
    codec.decode(randn(1, 64, 3))
    assert seen == [CACHE_LIMIT]
    assert mx.set_cache_limit(own) == 123 << 20
