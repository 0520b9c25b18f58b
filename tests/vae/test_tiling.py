"""Tiling: every frame once, and the result of one pass, as exactly as arithmetic allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from acestep_engine.config import VAEConfig
from acestep_engine.errors import Cancelled, InvalidRequest, NonFinite, OutOfMemory
from acestep_engine.models_torch.oobleck import Oobleck, Snake
from acestep_engine.types import HOP
from acestep_engine.vae import tiling
from acestep_engine.vae.tiling import DECODE_OVERLAP, ENCODE_OVERLAP, decode, encode, plan_tiles

LENGTHS = (1, 2, 18, 63, 64, 65, 127, 157, 257, 300)
TILES = (32, 64, 128)
LOW = 2.0**-24  # what float32 cannot hold of a float64 travels in channels of its own


def ignore(done: int, total: int) -> None:
    """Progress nobody looks at."""


@cache
def autoencoder(audio_channels: int, dtype: torch.dtype, width: int = 2) -> Oobleck:
    """Random weights, the real strides and reach, few channels."""
    multiples = (1, 2, 4, 8, 16) if width > 1 else (1,) * 5
    with torch.random.fork_rng():
        torch.random.manual_seed(11)
        vae = Oobleck(VAEConfig(2 * width, width, 64, audio_channels, multiples))
    for part in vae.modules():
        if isinstance(part, Snake):
            nn.init.zeros_(part.alpha)
            nn.init.zeros_(part.beta)
    return vae.to(dtype).eval()


def split(values: Tensor) -> Tensor:
    """float64 channels as twice as many that survive a float32 buffer."""
    high = values.float().double()
    return torch.cat((high, (values - high) / LOW), dim=1)


def join(values: Tensor) -> Tensor:
    high, low = values.double().chunk(2, dim=1)
    return high + low * LOW


@torch.inference_mode()
def exact_decode(latents_BCT: Tensor) -> Tensor:
    """Mono float64 decode as two channels."""
    return split(autoencoder(1, torch.float64).decode(latents_BCT))


@torch.inference_mode()
def exact_encode(audio_BXS: Tensor) -> Tensor:
    """Mean of the first audio channel, 32 float64 channels as 64."""
    return split(autoencoder(1, torch.float64).encode(audio_BXS[:, :1])[:, :32])


@torch.inference_mode()
def plain_decode(latents_BCT: Tensor) -> Tensor:
    return autoencoder(2, torch.float32).decode(latents_BCT)


def repeat_frames(latents_BCT: Tensor) -> Tensor:
    """A decoder without reach: each frame's first two channels, held for its duration."""
    return latents_BCT[:, :2].repeat_interleave(HOP, dim=2)


def gaussian(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=dtype)


@cache
def whole_decode(frames: int) -> tuple[Tensor, Tensor]:
    latents = gaussian(1, 64, frames)
    return latents, join(exact_decode(latents))


@cache
def whole_encode(samples: int) -> tuple[Tensor, Tensor]:
    audio = gaussian(1, 2, samples)
    return audio, join(exact_encode(audio))


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("overlap", [DECODE_OVERLAP, ENCODE_OVERLAP])
def test_every_plan_covers_each_frame_once_with_full_context(overlap: int) -> None:
    for length in range(1, 301):
        for tile in range(max(16, 2 * overlap + 1), 129):
            tiles = plan_tiles(length, tile, overlap)
            assert tiles[0].start == 0
            assert tiles[-1].stop == length
            assert all(a.stop == b.start for a, b in pairwise(tiles))
            for t in tiles:
                assert t.start < t.stop
                assert 0 <= t.window_start <= max(0, t.start - overlap)
                assert length >= t.window_stop >= min(length, t.stop + overlap)


@pytest.mark.parametrize("overlap", [DECODE_OVERLAP, ENCODE_OVERLAP])
def test_all_windows_of_a_plan_have_one_size_and_there_are_no_more_than_needed(
    overlap: int,
) -> None:
    for length in range(1, 301):
        for tile in range(2 * overlap + 1, 129):
            tiles = plan_tiles(length, tile, overlap)
            (size,) = {t.window_stop - t.window_start for t in tiles}
            assert size <= tile
            least = math.ceil(max(1, length - 2 * overlap) / (tile - 2 * overlap))
            assert len(tiles) <= least


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("frames", LENGTHS)
def test_tiled_decode_equals_one_pass(frames: int, tile: int) -> None:
    latents, expected = whole_decode(frames)
    assert error(join(decode(exact_decode, latents, tile, ignore)), expected) <= 1e-12


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("frames", LENGTHS)
def test_tiled_encode_equals_one_pass(frames: int, tile: int) -> None:
    audio, expected = whole_encode(frames * HOP)
    assert error(join(encode(exact_encode, audio, tile, ignore)), expected) <= 1e-12


def test_the_smallest_tiles_are_exact_as_well() -> None:
    latents, expected = whole_decode(64)
    tile = 2 * DECODE_OVERLAP + 1
    assert error(join(decode(exact_decode, latents, tile, ignore)), expected) <= 1e-12
    audio, expected = whole_encode(64 * HOP)
    tile = 2 * ENCODE_OVERLAP + 1
    assert error(join(encode(exact_encode, audio, tile, ignore)), expected) <= 1e-12


@pytest.mark.parametrize("rest", [1, 960, 1919])
def test_samples_after_the_last_whole_frame_are_heard(rest: int) -> None:
    audio, expected = whole_encode(100 * HOP + rest)
    assert expected.shape[2] == 100
    assert error(join(encode(exact_encode, audio, 40, ignore)), expected) <= 1e-12


def test_one_frame_less_of_context_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "DECODE_OVERLAP", DECODE_OVERLAP - 1)
    monkeypatch.setattr(tiling, "ENCODE_OVERLAP", ENCODE_OVERLAP - 1)
    latents, expected = whole_decode(300)
    assert error(join(decode(exact_decode, latents, 64, ignore)), expected) > 1e-8
    audio, expected = whole_encode(300 * HOP)
    assert error(join(encode(exact_encode, audio, 64, ignore)), expected) > 1e-8


@pytest.mark.parametrize(("batch", "frames", "tile"), [(2, 127, 32), (1, 640, 64), (1, 1001, 128)])
def test_float32_stereo_songs_of_a_batch_equal_one_pass(batch: int, frames: int, tile: int) -> None:
    latents = gaussian(batch, 64, frames, dtype=torch.float32)
    audio = decode(plain_decode, latents, tile, ignore)
    assert audio.shape == (batch, 2, frames * HOP)
    assert audio.dtype == torch.float32
    assert audio.device.type == "cpu"
    for b in range(batch):
        assert error(audio[b : b + 1], plain_decode(latents[b : b + 1])) <= 1e-6


def test_every_sample_is_written() -> None:
    latents = gaussian(3, 64, 200, dtype=torch.float32)
    assert torch.equal(decode(repeat_frames, latents, 33, ignore), repeat_frames(latents))


def recording(fn: Callable[[Tensor], Tensor], sizes: list[int]) -> Callable[[Tensor], Tensor]:
    def call(values: Tensor) -> Tensor:
        sizes.append(values.shape[-1])
        return fn(values)

    return call


def test_progress_counts_the_frames_of_the_whole_batch() -> None:
    seen: list[tuple[int, int]] = []
    decode(repeat_frames, gaussian(2, 64, 100), 40, lambda done, total: seen.append((done, total)))
    stops = [t.stop for t in plan_tiles(100, 40, DECODE_OVERLAP)]
    assert seen == [(stop, 200) for stop in stops] + [(100 + stop, 200) for stop in stops]


def test_an_interrupt_stops_before_the_next_tile() -> None:
    def stop(done: int, total: int) -> None:
        raise Cancelled("stopped")

    sizes: list[int] = []
    with pytest.raises(Cancelled):
        decode(recording(repeat_frames, sizes), gaussian(2, 64, 100), 40, stop)
    assert len(sizes) == 1


def test_encode_windows_are_whole_frames() -> None:
    sizes: list[int] = []
    encode(recording(exact_encode, sizes), gaussian(1, 2, 100 * HOP), 40, ignore)
    assert len(sizes) > 1
    assert all(size % HOP == 0 for size in sizes)


@pytest.mark.parametrize("tile", [1, 16, 18])
def test_a_tile_without_room_for_a_core_gets_the_least_room(tile: int) -> None:
    assert plan_tiles(100, tile, 9) == plan_tiles(100, 19, 9)


def short_of_memory(fn: Callable[[Tensor], Tensor], limit: int) -> Callable[[Tensor], Tensor]:
    """A device on which a window of more than `limit` frames or samples does not fit."""

    def call(values: Tensor) -> Tensor:
        if values.shape[-1] > limit:
            raise OutOfMemory(f"{values.shape[-1]} do not fit into {limit}")
        return fn(values)

    return call


def test_where_memory_runs_out_the_song_goes_on_in_smaller_tiles(
    caplog: pytest.LogCaptureFixture,
) -> None:
    latents, expected = whole_decode(300)
    found = decode(short_of_memory(exact_decode, 70), latents, 256, ignore)
    assert error(join(found), expected) <= 1e-12
    audio, expected = whole_encode(300 * HOP)
    found = encode(short_of_memory(exact_encode, 70 * HOP), audio, 128, ignore)
    assert error(join(found), expected) <= 1e-12
    assert [record.message for record in caplog.records] == [
        "VAE: a tile of 256 frames does not fit; going on with 128.",
        "VAE: a tile of 128 frames does not fit; going on with 64.",
        "VAE: a tile of 128 frames does not fit; going on with 64.",
    ]


def test_memory_that_runs_out_in_the_middle_keeps_what_is_done() -> None:
    left = [3]

    def flaky(latents_BCT: Tensor) -> Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise OutOfMemory("another program took it")
        return exact_decode(latents_BCT)

    latents, expected = whole_decode(300)
    assert error(join(decode(flaky, latents, 64, ignore)), expected) <= 1e-12


def test_memory_for_not_even_the_least_tile_is_an_error_with_numbers() -> None:
    with pytest.raises(OutOfMemory, match=r"19 frames \(0.76 s\)"):
        decode(short_of_memory(exact_decode, 18), gaussian(1, 64, 300), 64, ignore)


def test_audio_below_one_frame_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="1919 samples"):
        encode(exact_encode, gaussian(1, 2, HOP - 1), 64, ignore)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_latents_are_refused_before_any_work(bad: float) -> None:
    latents = gaussian(2, 64, 50)
    latents[1, 3, 20] = bad
    sizes: list[int] = []
    with pytest.raises(NonFinite, match=r"VAE decode, input latents: 1 of 6400.*bf16 or fp32"):
        decode(recording(repeat_frames, sizes), latents, 32, ignore)
    assert not sizes


def test_an_empty_latent_is_refused_and_the_song_is_named() -> None:
    latents = gaussian(2, 64, 50)
    latents[1] = 0
    with pytest.raises(InvalidRequest, match=r"VAE decode.*song 2 of 2 is all zeros"):
        decode(repeat_frames, latents, 32, ignore)


def test_a_decoder_or_encoder_that_breaks_is_named() -> None:
    def broken_decode(latents_BCT: Tensor) -> Tensor:
        return torch.full((1, 2, latents_BCT.shape[2] * HOP), math.nan)

    def broken_encode(audio_BXS: Tensor) -> Tensor:
        return torch.full((1, 64, audio_BXS.shape[2] // HOP), math.nan)

    with pytest.raises(NonFinite, match="VAE decode:"):
        decode(broken_decode, gaussian(1, 64, 50), 32, ignore)
    with pytest.raises(NonFinite, match="VAE encode:"):
        encode(broken_encode, gaussian(1, 2, HOP * 2), 32, ignore)


def test_non_finite_audio_is_refused() -> None:
    audio = gaussian(1, 2, 4 * HOP)
    audio[0, 0, 5] = math.nan
    with pytest.raises(NonFinite, match="VAE encode, input audio"):
        encode(exact_encode, audio, 32, ignore)
