"""The whole path by the same loops over either backend: the same seed is the same song."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from acestep_engine.dit import conditions, sample, silence
from acestep_engine.dit.noise import draw
from acestep_engine.host import LocalHost
from acestep_engine.lm import planner
from acestep_engine.lm.metadata import stated
from acestep_engine.lm.tokenizer import load_tokenizer
from acestep_engine.types import (
    Codes,
    ComposeOptions,
    DiTSampling,
    LMSampling,
    Plan,
    PlanOptions,
    Request,
)
from acestep_engine.vae import tiling

HOST = LocalHost(show=False)
SAMPLING = LMSampling(seed=11)
REQUEST = Request(caption="calm piano and rain", lyrics="[Verse]\nwalking home", duration=6)


@pytest.fixture(scope="module")
def both(pair):
    """What a function of the backends, by role, gives in torch and in MLX."""
    return lambda work: [work(lambda role, side=side: pair(role)[side]) for side in (0, 1)]


def compose(backend: Any) -> tuple[Plan, Codes]:
    plan = planner.plan(backend("lm"), REQUEST, PlanOptions(sampling=SAMPLING), HOST)
    return plan, planner.compose(backend("lm"), plan, ComposeOptions(2, sampling=SAMPLING), HOST)


def render(backend: Any, plan: Plan, codes: Codes, family: str) -> torch.Tensor:
    quiet = silence.from_encoder(backend("vae").encode)
    canvas = conditions.paint(backend("audio_detokenizer"), codes.items[0], None, quiet)
    encode = load_tokenizer().encode
    words = conditions.read(backend("text_encoder"), encode, plan, canvas.instruction)
    condition = conditions.build(backend("condition_encoder"), words, canvas, quiet)
    settings = sample.resolve(DiTSampling(seed=3, steps=8), family)
    branches = sample.prepare(backend("dit"), condition, settings)
    noise = draw(3, condition.frames)
    *_, last = sample.denoise(backend("dit"), branches, noise, settings)
    return last.x_BTC


def test_the_same_seed_plans_and_composes_the_same(both) -> None:
    (plan, codes), (mlx_plan, mlx_codes) = both(compose)
    assert mlx_plan == plan
    assert mlx_codes == codes
    assert [len(item) for item in codes.items] == [30, 30]


@pytest.mark.parametrize("family", ["turbo", "base"])
def test_the_same_seed_renders_and_sounds_the_same(both, gap, family) -> None:
    plan = Plan("calm piano", "la la", stated(REQUEST), 6.0)
    codes = Codes((tuple(range(100, 63_000, 2_100)),))
    latents, mlx_latents = both(lambda backend: render(backend, plan, codes, family))
    assert latents.shape == (1, 150, 64)
    assert gap(mlx_latents, latents) <= 1e-4
    audio, mlx_audio = both(
        lambda backend: tiling.decode(
            backend("vae").decode, latents.transpose(1, 2), 64, lambda done, total: None
        )
    )
    assert gap(mlx_audio, audio) <= 1e-5


def test_latents_of_a_song_become_the_same_codes(both, randn) -> None:
    audio = randn(1, 2, 20 * 1920) / 4

    def listen(backend: Any) -> torch.Tensor:
        latents = tiling.encode(backend("vae").encode, audio, 20, lambda done, total: None)
        return backend("audio_tokenizer").tokenize(latents.transpose(1, 2))

    codes, mlx_codes = both(listen)
    assert torch.equal(mlx_codes, codes)
