"""Solvers on velocities whose paths are known in closed form, with diffusers as oracle of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from acestep_engine.dit.noise import draw
from acestep_engine.dit.schedule import nodes
from acestep_engine.dit.solvers import VelocityAt, solver
from acestep_engine.types import SolverName

NAMES: tuple[SolverName, ...] = get_args(SolverName)
FOLLOWS_THE_PATH: tuple[SolverName, ...] = ("euler", "heun", "dpmpp_2m")
MEAN, SPREAD = 0.7, 0.4  # of the clean latents of the Gaussian


def walk(
    name: SolverName, velocity: VelocityAt, x: Tensor, levels: Sequence[float], seed: int = 0
) -> Tensor:
    step = solver(name, seed)
    for t, t_next in pairwise(levels):
        x = step(x, velocity, t, t_next)
    return x


class Counted:
    """The velocity of a model that always answers `clean`; it counts how it was asked."""

    def __init__(self, clean: Tensor) -> None:
        self.clean = clean
        self.asked: list[tuple[float, bool]] = []

    def __call__(self, x_BTC: Tensor, t: float, ahead: bool = False) -> Tensor:
        self.asked.append((t, ahead))
        return (x_BTC - self.clean) / t


def variance_at(t: float) -> float:
    return ((1 - t) * SPREAD) ** 2 + t * t


def gaussian(x: Tensor, t: float, ahead: bool = False) -> Tensor:
    """The exact velocity where clean latents are normal with MEAN and SPREAD."""
    expected = MEAN + (1 - t) * SPREAD**2 / variance_at(t) * (x - (1 - t) * MEAN)
    return (x - expected) / t


def distilled(x: Tensor, t: float, ahead: bool = False) -> Tensor:
    """The same as a distilled model sees it: it leads to the end of the path through x."""
    end = MEAN + SPREAD / math.sqrt(variance_at(t)) * (x - (1 - t) * MEAN)
    return (x - end) / t


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "levels",
    [nodes(1, 1.0), nodes(8, 3.0), nodes(50, 0.5), (0.9, 0.899, 0.2, 0.19, 0.0)],
    ids=["one", "turbo", "fifty", "uneven"],
)
def test_a_perfect_model_is_recovered_on_any_schedule(
    name: SolverName, levels: tuple[float, ...]
) -> None:
    clean = draw(99, 20)
    found = walk(name, Counted(clean), draw(0, 20), levels)
    assert (found - clean).abs().max() <= 5e-7


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("heun", 2), ("dpmpp_2m", 2)])
def test_the_error_falls_with_the_order_of_the_solver(name: SolverName, order: int) -> None:
    high, low, start = 0.9, 0.1, draw(1, 20).double()
    stretch = math.sqrt(variance_at(low) / variance_at(high))
    exact = (1 - low) * MEAN + stretch * (start - (1 - high) * MEAN)
    errors = []
    for steps in (64, 128, 256):
        levels = [high + (low - high) * i / steps for i in range(steps + 1)]
        errors.append((walk(name, gaussian, start, levels) - exact).norm().item())
    slopes = [math.log2(coarse / fine) for coarse, fine in pairwise(errors)]
    assert slopes == pytest.approx([order, order], abs=0.15)


def test_the_second_order_pays_at_the_steps_in_use() -> None:
    noise = draw(1, 20).double()
    error = {
        name: (walk(name, gaussian, noise, nodes(16, 1.0)) - MEAN - SPREAD * noise).norm().item()
        for name in FOLLOWS_THE_PATH
    }
    assert error["dpmpp_2m"] < error["euler"] / 3
    assert error["heun"] < error["euler"] / 3


@pytest.mark.parametrize("levels", [nodes(8, 3.0), nodes(20, 1.0), (0.9, 0.5, 0.45, 0.1, 0.0)])
def test_the_multistep_solver_equals_that_of_diffusers(levels: tuple[float, ...]) -> None:
    noise = draw(3, 20)

    def bent(x: Tensor, t: float, ahead: bool = False) -> Tensor:
        return torch.sin(2 * x + t)

    oracle = DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", final_sigmas_type="zero"
    )
    oracle.set_timesteps(len(levels) - 1)
    oracle.sigmas = torch.tensor(levels)
    oracle.set_begin_index(0)
    x = noise
    for index, t in enumerate(levels[:-1]):
        x = oracle.step(bent(x, t), oracle.timesteps[index], x).prev_sample
    found = walk("dpmpp_2m", bent, noise, levels)
    torch.testing.assert_close(found, x, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("euler", [(1.0, False), (0.5, False)]),
        ("heun", [(1.0, False), (0.5, True), (0.5, False)]),
        ("dpmpp_2m", [(1.0, False), (0.5, False)]),
        ("sde", [(1.0, False), (0.5, False)]),
    ],
)
def test_a_velocity_is_asked_for_as_often_as_promised_and_never_at_zero(
    name: SolverName, asked: list[tuple[float, bool]]
) -> None:
    velocity = Counted(draw(5, 3))
    walk(name, velocity, draw(6, 3), (1.0, 0.5, 0.0))
    assert velocity.asked == asked


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_of_a_render_in_the_next(name: SolverName) -> None:
    first, other = draw(7, 20), draw(8, 20)
    alone = walk(name, gaussian, first, nodes(6, 1.0))
    walk(name, gaussian, other, nodes(6, 1.0))
    assert torch.equal(walk(name, gaussian, first, nodes(6, 1.0)), alone)


def test_noise_added_on_the_way_keeps_the_variance_that_a_distilled_model_gives() -> None:
    step, x = solver("sde", 4), draw(2, 5000)
    levels = nodes(8, 3.0)
    for t, t_next in pairwise(levels):
        x = step(x, distilled, t, t_next)
        assert x.mean().item() == pytest.approx((1 - t_next) * MEAN, abs=0.01)
        assert x.var().item() == pytest.approx(variance_at(t_next), rel=0.01)


def test_noise_added_on_the_way_shrinks_what_other_models_give_as_arithmetic_says() -> None:
    step, x, expected = solver("sde", 4), draw(2, 5000), 1.0
    levels = nodes(8, 1.0)
    for t, t_next in pairwise(levels):
        x = step(x, gaussian, t, t_next)
        share = (1 - t) * SPREAD**2 / variance_at(t)
        expected = t_next**2 + ((1 - t_next) * share) ** 2 * expected
        assert x.var().item() == pytest.approx(expected, rel=0.02, abs=1e-6)
    assert expected < SPREAD**2


def test_the_noise_added_belongs_to_the_seed_and_is_not_the_first_noise() -> None:
    x, clean = draw(11, 400), torch.zeros(1, 400, 64)
    added = [walk("sde", Counted(clean), x, (1.0, 0.5), seed) / 0.5 for seed in (11, 11, 12)]
    assert torch.equal(added[0], added[1])
    for other in (added[2], x, draw(12, 400)):
        correlation = (added[0] * other).mean().item()
        assert abs(correlation) < 0.03  # five deviations of 25,600 draws
    assert added[0].std().item() == pytest.approx(1.0, abs=0.02)


def test_noise_is_fresh_at_every_step() -> None:
    step, clean = solver("sde", 0), torch.zeros(1, 400, 64)
    first = step(draw(0, 400), Counted(clean), 1.0, 0.5) / 0.5
    second = step(draw(0, 400), Counted(clean), 0.5, 0.25) / 0.25
    assert abs((first * second).mean().item()) < 0.03


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    walk("sde", gaussian, draw(0, 20), nodes(4, 1.0))
    assert torch.equal(torch.get_rng_state(), before)
