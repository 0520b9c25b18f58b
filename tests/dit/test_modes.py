"""Every solver with every guidance through the engine: a song alone is the song in a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from acestep_engine.engine import Engine
from acestep_engine.host import LocalHost
from acestep_engine.types import (
    Codes,
    DiTSampling,
    GuidanceMode,
    Metadata,
    ModelSpec,
    Plan,
    SolverName,
    Wavelet,
)

PLAN = Plan("calm piano", "la", Metadata(90, None, 3, "C major", "en", "4"), 3.0)
LONG = replace(PLAN, lyrics="la di da " * 20)
CODES = Codes((tuple(range(0, 60_000, 4_000)), tuple(range(1, 60_000, 4_000))))


@pytest.fixture(scope="module")
def shared() -> Engine:
    return Engine(LocalHost(show=False))


@pytest.fixture(scope="module")
def base(tiny_model: ModelSpec) -> ModelSpec:
    return replace(tiny_model, family="base")


@pytest.mark.parametrize("mode", get_args(GuidanceMode))
@pytest.mark.parametrize("solver", get_args(SolverName))
def test_a_song_of_a_batch_is_the_song_alone(
    shared: Engine, base: ModelSpec, solver: SolverName, mode: GuidanceMode
) -> None:
    sampling = DiTSampling(steps=3, seed=8, solver=solver, guidance_mode=mode, batch=2)
    state = torch.get_rng_state()
    batch = shared.render(base, PLAN, CODES, sampling).values
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(100)
    alone = replace(sampling, seed=9, batch=1)
    assert torch.equal(shared.render(base, PLAN, Codes(CODES.items[1:]), alone).values, batch[1:])
    assert batch.isfinite().all()


def test_a_batch_without_codes_differs_song_by_song_and_holds_each_alone(
    shared: Engine, base: ModelSpec
) -> None:
    sampling = DiTSampling(
        steps=3,
        seed=8,
        solver="sde",
        guidance_mode="adg",
        velocity_clamp=2.0,
        velocity_ema=0.1,
        retake=0.3,
        retake_seed=50,
        batch=3,
    )
    batch = shared.render(base, PLAN, None, sampling).values
    assert not torch.equal(batch[0], batch[1])
    shared.render(base, LONG, None, sampling)  # another length of text in between
    alone = replace(sampling, seed=10, retake_seed=52, batch=1)
    assert torch.equal(shared.render(base, PLAN, None, alone).values, batch[2:])


def test_a_full_retake_is_the_song_of_its_seed(shared: Engine, tiny_model: ModelSpec) -> None:
    taken = DiTSampling(steps=2, seed=8, retake=1.0, retake_seed=77, dcw=Wavelet("double"))
    other = DiTSampling(steps=2, seed=77, dcw=Wavelet("double"))
    values = [shared.render(tiny_model, PLAN, None, s).values for s in (taken, other)]
    assert torch.equal(*values)
