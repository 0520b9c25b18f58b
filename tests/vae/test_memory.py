"""Memory: the prediction grows with the tile, and the tile is the largest that a budget allows."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from acestep_engine.audio import resample
from acestep_engine.config import VAEConfig
from acestep_engine.engine import Engine
from acestep_engine.errors import Cancelled, InvalidRequest, OutOfMemory
from acestep_engine.host import LocalHost
from acestep_engine.types import Audio, Latents, ModelSpec
from acestep_engine.vae.memory import (
    LADDER,
    MIB,
    Budget,
    choose,
    peak_bytes,
    read_size,
    window_frames,
)

ROOT = Path(__file__).resolve().parents[2]
REAL = VAEConfig()


@pytest.mark.parametrize("op", ["decode", "encode"])
def test_the_prediction_grows_with_the_tile_and_shrinks_with_the_precision(op) -> None:
    for precision in ("fp32", "bf16", "fp16"):
        peaks = [peak_bytes(op, tile, REAL, precision) for tile in sorted(LADDER)]
        assert peaks == sorted(set(peaks))
    assert peak_bytes(op, 256, REAL, "bf16") < peak_bytes(op, 256, REAL, "fp32")


@pytest.mark.parametrize(
    ("op", "precision", "measured"),
    [  # MiB by frames of the window, as `bench vae` counts them on two threads
        ("decode", "fp32", {62: 229, 122: 433, 234: 806, 484: 1645}),
        ("decode", "bf16", {96: 228, 179: 396, 509: 1045}),
        ("encode", "fp32", {62: 206, 176: 539}),
        ("encode", "bf16", {62: 136, 176: 309}),
    ],
)
def test_the_prediction_is_near_what_was_measured_at_the_real_size(op, precision, measured) -> None:
    predicted = {frames: peak_bytes(op, frames, REAL, precision) / MIB for frames in measured}
    assert predicted == pytest.approx(measured, rel=0.13)


def test_the_prediction_is_that_of_the_windows_a_song_is_cut_into() -> None:
    assert window_frames("decode", 256, 5000) in range(240, 257)
    assert window_frames("decode", 512, 750) == 384  # two of one size
    assert window_frames("encode", 512, 100) == 100
    found = choose("decode", 750, REAL, "fp32", Budget(512, 256, 0))
    assert found.peak == peak_bytes("decode", 384, REAL, "fp32")


def test_a_budget_gets_the_largest_tile_that_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tiles = []
    for mib in (270, 400, 600, 800, 1500, 9000):
        found = choose("decode", 9999, REAL, "fp32", Budget(0, 512, mib * MIB))
        window = window_frames("decode", found.tile, 9999)
        assert found.peak == peak_bytes("decode", window, REAL, "fp32") <= mib * MIB
        tiles.append(found.tile)
    assert tiles == sorted(tiles)
    assert tiles[0] == 64
    assert tiles[-1] == 512
    assert f"tiles of 512 frames, {found.peak // MIB} MiB" in caplog.messages[-1]


def test_the_preferred_tile_is_the_most_and_an_unknown_budget_gets_it() -> None:
    for limit in (0, 1 << 50):
        assert choose("encode", 9999, REAL, "fp32", Budget(0, 256, limit)).tile == 256


def test_a_short_song_needs_no_more_than_its_length() -> None:
    limit = peak_bytes("decode", 20, REAL, "fp32")
    assert choose("decode", 20, REAL, "fp32", Budget(0, 256, limit)).tile == 256


def test_a_wished_tile_is_kept_unless_a_named_limit_forbids_it() -> None:
    assert choose("decode", 9999, REAL, "fp32", Budget(300, 256, MIB)).tile == 300
    with pytest.raises(OutOfMemory, match=r"300 frames needs \d+ MiB, but the limit is 1 MiB"):
        choose("decode", 9999, REAL, "fp32", Budget(300, 256, MIB, strict=True))


@pytest.mark.parametrize("op", ["decode", "encode"])
def test_a_budget_below_the_smallest_tile_is_an_error_with_numbers_and_a_cure(op) -> None:
    with pytest.raises(OutOfMemory, match=r"64 frames needs \d+ MiB.*is 100 MiB.*bf16"):
        choose(op, 9999, REAL, "fp32", Budget(0, 256, 100 * MIB))


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("900", 900 * MIB), ("900MiB", 900 * MIB), ("1.5 GiB", 1536 * MIB), ("2G", 2 << 30)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1 TiB", "much"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="900MiB"):
        read_size(text)


def test_the_engine_keeps_the_limit(engine: Engine, tiny_model: ModelSpec) -> None:
    latents = Latents(torch.randn(1, 700, 64, generator=torch.Generator().manual_seed(0)))
    whole = engine.decode(tiny_model, latents)
    assert engine.windows["decode"].tile == 256
    config = engine.store.backend(tiny_model, "vae").module.config
    precision = engine.store.runtime(tiny_model).precision
    limit = peak_bytes("decode", 128, config, precision)
    small = engine.decode(tiny_model, latents, max_memory=limit)
    assert engine.windows["decode"].tile == 128
    assert engine.windows["decode"].peak <= limit
    torch.testing.assert_close(small.waveform, whole.waveform, atol=0.02, rtol=0)
    with pytest.raises(OutOfMemory, match="Raise the limit"):
        engine.decode(tiny_model, latents, max_memory=1)
    with pytest.raises(OutOfMemory, match="Raise the limit"):
        engine.encode(tiny_model, whole, max_memory=1)


@pytest.mark.parametrize("rate", [44_100, 48_000, 96_000])
@pytest.mark.parametrize(("songs", "channels"), [(1, 1), (2, 2)])
def test_any_rate_and_channels_come_back_with_the_same_length(
    rate: int, songs: int, channels: int, engine: Engine, tiny_model: ModelSpec
) -> None:
    sound = torch.rand(songs, channels, rate, generator=torch.Generator().manual_seed(0)) - 0.5
    before = sound.clone()
    latents = engine.encode(tiny_model, Audio(sound, rate))
    assert torch.equal(sound, before)
    assert latents.values.shape == (songs, 25, 64)
    kept = latents.values.clone()
    audio = engine.decode(tiny_model, latents)
    assert torch.equal(latents.values, kept)
    assert audio.waveform.shape == (songs, 2, 48_000)


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000, 96_000])
def test_one_sample_is_a_frame(rate: int, engine: Engine, tiny_model: ModelSpec) -> None:
    one = Audio(torch.full((1, 1, 1), 0.5), rate)
    assert engine.encode(tiny_model, one).values.shape == (1, 1, 64)


def test_what_the_vae_hears_is_the_sound_at_48_khz_in_stereo_with_silence_behind(
    engine: Engine, tiny_model: ModelSpec
) -> None:
    """Mono, another rate, two songs, not in one piece: as if the caller had prepared it."""
    sound = torch.rand(30_000, 2, generator=torch.Generator().manual_seed(0)).T[:, None] - 0.5
    assert not sound.is_contiguous()
    ready = resample(Audio(sound.contiguous(), 44_100)).waveform
    assert ready.shape[-1] == round(30_000 * 48_000 / 44_100) == 32_653
    padded = torch.nn.functional.pad(ready, (0, 18 * 1920 - 32_653)).expand(-1, 2, -1)
    found = engine.encode(tiny_model, Audio(sound, 44_100)).values
    assert torch.equal(found, engine.encode(tiny_model, Audio(padded)).values)


@pytest.mark.slow
def test_more_than_a_minute_of_sound_keeps_its_length(
    engine: Engine, tiny_model: ModelSpec
) -> None:
    sound = torch.rand(1, 2, 62 * 48_000, generator=torch.Generator().manual_seed(0)) - 0.5
    latents = engine.encode(tiny_model, Audio(sound))
    assert latents.values.shape == (1, 1550, 64)
    assert engine.decode(tiny_model, latents).waveform.shape == sound.shape


class Watching(LocalHost):
    """Notes the bars and stops after some updates."""

    def __init__(self, stop_after: int) -> None:
        super().__init__(show=False)
        self.notes: list[object] = []
        self.stop_after = stop_after

    def progress(self, stage: str, total: int):
        self.notes.append((stage, total))
        return super().progress(stage, total)

    def check_interrupt(self) -> None:
        self.notes.append("asked")
        if self.notes.count("asked") > self.stop_after:
            raise Cancelled("stopped")


@pytest.mark.parametrize("tiles", [0, 1, 2])
def test_the_bar_stands_before_the_first_tile_and_a_stop_comes_within_one(
    tiles: int, tiny_model: ModelSpec
) -> None:
    host = Watching(stop_after=9999)
    engine = Engine(host)
    module = engine.store.backend(tiny_model, "vae").module
    module.decoder.register_forward_pre_hook(lambda *_: host.notes.append("tile"))
    host.notes.clear()  # loading looks for the stop request as well
    host.stop_after = tiles
    with pytest.raises(Cancelled):
        engine.decode(tiny_model, Latents(torch.ones(2, 300, 64)), 64)
    assert host.notes == [("Decode", 600), "asked", *["tile", "asked"] * tiles]


SCRIPT = """
import json, sys, torch
from acestep_engine.backends.torch_eager import TorchCodec
from acestep_engine.bench.measure import random_model
from acestep_engine.bench.vae import peak_of
from acestep_engine.config import VAEConfig
from acestep_engine.models_torch.oobleck import Oobleck
from acestep_engine.vae.memory import FIXED, MIB, peak_bytes, window_frames
from acestep_engine.vae.tiling import decode
torch.set_num_threads(1)
config = VAEConfig(32, 32, 64, 2, (1, 1, 1, 1, 1))
codec = TorchCodec(random_model(lambda: Oobleck(config), torch.float32), "cpu", torch.float32)
work = lambda frames: decode(codec.decode, torch.ones(1, 64, frames), 160, lambda done, total: None)
work(160)  # makes the code for a window, which is the same for all of these songs
peaks = []
for frames in (160, 586, 1580):
    assert window_frames("decode", 160, frames) == 160
    peaks.append(peak_of(lambda: work(frames)) - frames * 1920 * 2 * 4 / MIB)
print(json.dumps([(peak_bytes("decode", 160, config, "fp32") - FIXED) / MIB, *peaks]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_is_as_predicted_and_does_not_grow_with_the_song_beyond_its_output() -> None:
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    predicted, *measured = json.loads(run.stdout)
    assert measured == pytest.approx([predicted] * 3, rel=0.15)


def test_where_the_estimate_is_a_guess_the_smallest_tile_is_tried() -> None:
    budget = Budget(0, 512, 1, guess=True)
    assert choose("decode", 900, REAL, "bf16", budget).tile == 64
    with pytest.raises(OutOfMemory, match="limit"):
        choose("decode", 900, REAL, "bf16", replace(budget, strict=True))
