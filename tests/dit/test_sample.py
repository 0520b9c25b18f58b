"""The denoise loop over analytic velocities, and how settings are resolved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from acestep_engine.config import Family
from acestep_engine.dit.conditions import Conditions
from acestep_engine.dit.course import Course, Keep
from acestep_engine.dit.guidance import apg
from acestep_engine.dit.noise import draw
from acestep_engine.dit.sample import ResolvedSampling, Step, denoise, prepare, resolve
from acestep_engine.dit.schedule import nodes
from acestep_engine.errors import InvalidRequest, NonFinite
from acestep_engine.types import DiTSampling, SolverName, Wavelet

FRAMES = 130
CONDITIONS = Conditions(
    encoder_BLD=torch.randn(1, 9, 8, generator=torch.Generator().manual_seed(1)),
    null_BLD=torch.full((1, 1, 8), -0.5),
    context_BTC=torch.randn(1, FRAMES, 128, generator=torch.Generator().manual_seed(2)),
)


class Bend:
    """A smooth velocity that depends on all its inputs; it remembers which branch was asked."""

    def __init__(self) -> None:
        self.prepared: list[int] = []
        self.asked: list[tuple[float, int]] = []

    def prepare(self, encoder_BLD: Tensor) -> tuple[int, Tensor]:
        self.prepared.append(encoder_BLD.shape[1])
        return encoder_BLD.shape[1], encoder_BLD.mean()

    def __call__(
        self, x_BTC: Tensor, t: float, context_BTC: Tensor, cross: tuple[int, Tensor]
    ) -> Tensor:
        length, mean = cross
        self.asked.append((t, length))
        return torch.sin(x_BTC + t) + mean * context_BTC[..., :64] - 0.3 * context_BTC[..., 64:]


class Straight:
    """The velocity of a perfect model whose answer is `clean`."""

    def __init__(self, noise: Tensor, clean: Tensor) -> None:
        self.velocity = noise - clean

    def prepare(self, encoder_BLD: Tensor) -> None:
        return None

    def __call__(self, x_BTC: Tensor, t: float, context_BTC: Tensor, cross: None) -> Tensor:
        return self.velocity


def run(velocity: Bend | Straight, settings: ResolvedSampling, seed: int = 0) -> Tensor:
    return last(
        denoise(velocity, prepare(velocity, CONDITIONS, settings), draw(seed, FRAMES), settings)
    )


def last(steps: Iterator[Step]) -> Tensor:
    return list(steps)[-1].x_BTC


@pytest.mark.parametrize(
    "levels",
    [nodes(1, 1.0), nodes(8, 3.0), nodes(50, 0.5), (1.0, 0.999, 0.2, 0.19, 0.0)],
    ids=["one", "turbo", "fifty", "uneven"],
)
def test_a_perfect_model_is_recovered_on_any_schedule(levels: tuple[float, ...]) -> None:
    noise, clean = draw(0, FRAMES), draw(99, FRAMES)
    settings = ResolvedSampling(levels, 7.0, (0.0, 1.0))
    found = run(Straight(noise, clean), settings)
    torch.testing.assert_close(found, clean, atol=2e-6, rtol=0)


def test_every_step_is_reported_with_the_level_it_reached() -> None:
    velocity, settings = Bend(), ResolvedSampling(nodes(4, 3.0), 1.0, (0.0, 1.0))
    branches = prepare(velocity, CONDITIONS, settings)
    steps = list(denoise(velocity, branches, draw(0, FRAMES), settings))
    assert [(step.index, step.t) for step in steps] == list(enumerate(settings.nodes[1:]))
    assert all(step.x_BTC.dtype == torch.float32 for step in steps)


def test_turbo_equals_base_with_its_eight_nodes_and_no_guidance() -> None:
    turbo = resolve(DiTSampling(), "turbo")
    base = resolve(DiTSampling(steps=8, shift=3.0, guidance=1.0), "base")
    assert turbo == base
    assert torch.equal(run(Bend(), turbo), run(Bend(), base))


def test_an_empty_interval_equals_no_guidance_and_never_asks_the_null_branch() -> None:
    plain, empty = Bend(), Bend()
    expected = run(plain, ResolvedSampling(nodes(8, 3.0), 1.0, (0.0, 1.0)))
    found = run(empty, ResolvedSampling(nodes(8, 3.0), 7.0, (0.97, 0.96)))
    assert torch.equal(found, expected)
    assert empty.prepared == [9]
    assert empty.asked == plain.asked


def test_the_null_branch_is_asked_inside_the_interval_only_with_one_token() -> None:
    velocity = Bend()
    run(velocity, ResolvedSampling(nodes(4, 3.0), 7.0, (0.6, 0.9)))
    assert velocity.prepared == [9, 1]
    assert velocity.asked == [(1.0, 9), (0.9, 9), (0.9, 1), (0.75, 9), (0.75, 1), (0.5, 9)]


def test_guidance_changes_the_result() -> None:
    plain = run(Bend(), ResolvedSampling(nodes(8, 3.0), 1.0, (0.0, 1.0)))
    guided = run(Bend(), ResolvedSampling(nodes(8, 3.0), 7.0, (0.0, 1.0)))
    assert (plain - guided).abs().max() > 0.1


def test_one_preparation_serves_many_seeds_and_no_momentum_leaks_between_them() -> None:
    velocity, settings = Bend(), ResolvedSampling(nodes(6, 3.0), 7.0, (0.0, 1.0))
    branches = prepare(velocity, CONDITIONS, settings)
    songs = [last(denoise(velocity, branches, draw(s, FRAMES), settings)) for s in (5, 6, 5)]
    assert torch.equal(songs[0], songs[2])
    assert not torch.equal(songs[0], songs[1])
    assert velocity.prepared == [9, 1]


def test_low_precision_noise_is_integrated_in_float32() -> None:
    velocity, settings = Bend(), ResolvedSampling(nodes(2, 1.0), 1.0, (0.0, 1.0))
    branches = prepare(velocity, CONDITIONS, settings)
    x = last(denoise(velocity, branches, draw(0, FRAMES).bfloat16(), settings))
    assert x.dtype == torch.float32


def test_defaults_are_euler_steps_guided_by_apg_bit_for_bit() -> None:
    velocity, momentum, x = Bend(), None, draw(4, FRAMES)
    settings = resolve(DiTSampling(steps=7), "base")
    branches = prepare(velocity, CONDITIONS, settings)
    for t, t_next in zip(settings.nodes[:-1], settings.nodes[1:], strict=True):
        cond = velocity(x, t, CONDITIONS.context_BTC, branches.cross)
        null = velocity(x, t, CONDITIONS.context_BTC, branches.null_cross)
        guided, momentum = apg(cond, null, 7.0, momentum)
        x = x - (t - t_next) * guided
    assert torch.equal(run(Bend(), settings, seed=4), x)


def test_a_second_look_counts_for_guidance_as_the_first_of_the_next_step() -> None:
    """Heun asks at the end of a step with the same momentum as the next step at its start."""
    velocity, asked = Bend(), Bend()
    settings = resolve(DiTSampling(steps=2, shift=1.0, solver="heun"), "base")
    branches = prepare(velocity, CONDITIONS, settings)

    def both(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        crosses = (branches.cross, branches.null_cross)
        cond, null = (velocity(x, t, CONDITIONS.context_BTC, cross) for cross in crosses)
        return cond, null

    x = draw(4, FRAMES)
    first, momentum = apg(*both(x, 1.0), 7.0, None)
    second, _ = apg(*both(x - 0.5 * first, 0.5), 7.0, momentum)
    x = x - 0.25 * (first + second)
    last_one, _ = apg(*both(x, 0.5), 7.0, momentum)
    torch.testing.assert_close(run(asked, settings, seed=4), x - 0.5 * last_one)
    assert [t for t, _ in asked.asked] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]


def test_an_interval_holds_for_the_second_look_as_well() -> None:
    velocity = Bend()
    run(velocity, resolve(DiTSampling(steps=2, shift=1, solver="heun", interval=(0.6, 1)), "base"))
    assert velocity.asked == [(1.0, 9), (1.0, 1), (0.5, 9), (0.5, 9)]


@pytest.mark.parametrize(
    "change",
    [
        {"solver": "heun"},
        {"solver": "dpmpp_2m"},
        {"solver": "sde"},
        {"guidance_mode": "cfg"},
        {"guidance_mode": "adg"},
        {"guidance_mode": "adg_w_norm"},
        {"guidance_mode": "adg_wo_clip"},
        {"velocity_clamp": 0.5},
        {"velocity_ema": 0.3},
        {"dcw": Wavelet("double")},
    ],
    ids=str,
)
def test_each_setting_reaches_the_loop(change: dict[str, Any]) -> None:
    plain = run(Bend(), resolve(DiTSampling(steps=5), "base"))
    changed = run(Bend(), resolve(DiTSampling(steps=5, **change), "base"))
    assert changed.isfinite().all()
    assert not torch.equal(changed, plain)


@pytest.mark.parametrize("solver", get_args(SolverName))
def test_what_a_task_keeps_stays_with_every_solver(solver: SolverName) -> None:
    clean, region = draw(9, FRAMES), torch.zeros(1, FRAMES, 1)
    region[:, 40:90] = 1.0
    settings = resolve(DiTSampling(steps=4, solver=solver, dcw=Wavelet("pix")), "base")
    branches = prepare(Bend(), CONDITIONS, settings)
    kept = replace(branches, course=Course(keep=Keep(clean, region, share=1.0, fade=0)))
    x = last(denoise(Bend(), kept, draw(0, FRAMES), settings))
    outside = (region == 0).flatten()
    assert torch.equal(x[:, outside], clean[:, outside])
    assert not torch.isclose(x[:, ~outside], clean[:, ~outside]).any(dim=-1).all()


def test_noise_that_a_solver_adds_follows_the_seed_of_the_song() -> None:
    settings = resolve(DiTSampling(steps=4, solver="sde"), "base")
    branches = prepare(Bend(), CONDITIONS, settings)
    songs = [last(denoise(Bend(), branches, draw(0, FRAMES), settings, seed)) for seed in (1, 1, 2)]
    assert torch.equal(songs[0], songs[1])
    assert not torch.equal(songs[0], songs[2])


@pytest.mark.parametrize(("solver", "mode"), [("sde", "off"), ("heun", "low")])
def test_the_wavelet_correction_is_off_where_noise_is_added_and_says_so(
    solver: SolverName, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        settings = resolve(DiTSampling(solver=solver, dcw=Wavelet("low", 0.1)), "base")
    assert settings.dcw.mode == mode
    assert ("correction 'low' is off" in caplog.text) == (solver == "sde")


def test_a_retake_of_a_seed_with_itself_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="retake_seed and seed are both 3"):
        resolve(DiTSampling(seed=3, retake=0.2, retake_seed=3), "turbo")
    resolve(DiTSampling(seed=3, retake_seed=3), "turbo")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_step_is_named(bad: float) -> None:
    class Breaks(Bend):
        def __call__(
            self, x_BTC: Tensor, t: float, context_BTC: Tensor, cross: tuple[int, Tensor]
        ) -> Tensor:
            velocity = super().__call__(x_BTC, t, context_BTC, cross)
            return (
                torch.where(torch.arange(FRAMES)[:, None] == 3, bad, velocity)
                if t < 0.8
                else velocity
            )

    with pytest.raises(NonFinite, match=r"DiT sampling, step 3 of 4.*fp32"):
        run(Breaks(), ResolvedSampling(nodes(4, 3.0), 1.0, (0.0, 1.0)))


@pytest.mark.parametrize(
    ("family", "steps", "guidance"), [("turbo", 8, 1.0), ("sft", 50, 7.0), ("base", 50, 7.0)]
)
def test_automatic_settings_are_those_of_the_family(
    family: Family, steps: int, guidance: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        settings = resolve(DiTSampling(), family)
    assert settings == ResolvedSampling(nodes(steps, 3.0), guidance, (0.0, 1.0))
    assert not caplog.records


def test_turbo_refuses_guidance_with_the_cure(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        settings = resolve(DiTSampling(guidance=7.0), "turbo")
    assert settings.guidance == 1.0
    assert "Guidance 7 is ignored" in caplog.text
    assert "sft or base" in caplog.text


def test_turbo_honours_another_number_of_steps_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING"):
        settings = resolve(DiTSampling(steps=12), "turbo")
    assert settings.nodes == nodes(12, 3.0)
    assert "12 steps" in caplog.text


def test_own_timesteps_are_taken_as_they_are_by_sft_and_snapped_by_turbo() -> None:
    own = DiTSampling(timesteps=(0.97, 0.51))
    assert resolve(own, "sft").nodes == (0.97, 0.51, 0.0)
    assert resolve(own, "turbo").nodes == (21 / 22, 0.5, 0.0)


def test_own_timesteps_beside_steps_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        resolve(DiTSampling(steps=20, timesteps=(0.9, 0.5)), "base")
    assert "steps and shift are not used" in caplog.text


def test_bad_own_timesteps_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        resolve(DiTSampling(timesteps=(0.5, 0.9)), "base")
