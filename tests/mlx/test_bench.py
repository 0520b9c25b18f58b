"""Memory of the decode by tiles, at the real strides of the VAE but a single channel at its end."""

from __future__ import annotations

import json

import pytest
import torch

from acestep_engine.bench import mlx as bench
from acestep_engine.vae.tiling import DECODE_OVERLAP, plan_tiles


@pytest.fixture(scope="module")
def codec():
    return bench.codec_of(1, torch.float32)


def test_the_last_line_has_the_promised_keys() -> None:
    result = json.loads(bench.run(300, 1, "fp32").splitlines()[-1])
    assert list(result)[:3] == ["frames", "tiles", "drop_512_vs_2048"]
    assert result["frames"] == 300
    assert list(result["tiles"]) == ["2048", "1024", "512", "256"]
    assert result["tiles"]["256"] < result["tiles"]["2048"]


@pytest.mark.slow
def test_tiles_of_512_frames_take_less_than_half_and_give_the_same_sound(codec) -> None:
    latents, sounds, peaks = bench.latents_of(2048), {}, {}
    for tile in (2048, 512):

        def call(tile=tile) -> None:
            sounds[tile] = bench.tiled(codec, latents, tile)

        peaks[tile] = bench.peak_of(call)
    assert len(plan_tiles(2048, 512, DECODE_OVERLAP)) == 5
    assert 1 - peaks[512] / peaks[2048] >= 0.56
    assert sounds[2048].std() > 1e-3
    assert torch.equal(sounds[512], sounds[2048])


def test_the_peak_is_proportional_to_the_width(codec) -> None:
    latents = bench.latents_of(200)
    one, four = (
        min(bench.peak_of(lambda codec=codec: bench.tiled(codec, latents, 200)) for _ in range(3))
        for codec in (codec, bench.codec_of(4, torch.float32))
    )
    assert four / one == pytest.approx(4, rel=0.1)
