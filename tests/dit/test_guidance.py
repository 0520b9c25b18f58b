"""Guidance: golden numbers, the laws of each mode, and diffusers' function as oracle of APG."""

from __future__ import annotations

import pytest
import torch
from diffusers.guiders.adaptive_projected_guidance import MomentumBuffer, normalized_guidance
from torch import Tensor

from acestep_engine.dit.guidance import MOMENTUM, NORM_LIMIT, acts_at, adg, apg, cfg, guide
from acestep_engine.types import GuidanceMode

COND = torch.tensor([[[1.0, 2.0], [0.5, -1.0], [-1.0, 0.0]]])
NULL = torch.tensor([[[0.0, 1.0], [1.0, 1.0], [2.0, -3.0]]])
X = torch.tensor([[[0.2, -0.3], [1.0, 0.4], [-0.6, 0.9]]])
ANGLE_MODES: tuple[GuidanceMode, ...] = ("adg", "adg_w_norm", "adg_wo_clip")


def random_pairs(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(count, 2, 2, 40, 64, generator=generator)
    return [(pair[0], pair[1]) for pair in draws]


def test_first_and_second_call_match_golden_numbers() -> None:
    first, momentum = apg(COND, NULL, 7.0, None)
    second, _ = apg(COND, NULL, 7.0, momentum)
    golden_first = torch.tensor(
        [[-2.1234753, -0.4053512], [-5.7469506, -5.8107023], [-7.2469506, 12.0267563]]
    )
    golden_second = torch.tensor([[0.0, 1.1], [-1.5, -2.8], [-3.0, 4.5]])
    torch.testing.assert_close(first[0], golden_first, atol=2e-6, rtol=0)
    torch.testing.assert_close(second[0], golden_second, atol=2e-6, rtol=0)


def test_equals_the_function_of_diffusers_over_several_steps() -> None:
    buffer, momentum = MomentumBuffer(momentum=MOMENTUM), None
    for cond, null in random_pairs(5):
        guided, momentum = apg(cond, null, 7.0, momentum)
        oracle = normalized_guidance(
            cond,
            null,
            guidance_scale=6.0,  # its scale counts from 0
            momentum_buffer=buffer,
            eta=0.0,
            norm_threshold=NORM_LIMIT,
            use_original_formulation=True,
            norm_dim=(1,),
        )
        torch.testing.assert_close(guided, oracle, atol=1e-6, rtol=0)


def test_scale_one_returns_the_conditional_velocity_exactly() -> None:
    cond, null = random_pairs(1)[0]
    guided, _ = apg(cond, null, 1.0, None)
    assert torch.equal(guided, cond)


def test_equal_branches_leave_the_velocity_alone() -> None:
    guided, _ = apg(COND, COND.clone(), 7.0, None)
    assert torch.equal(guided, COND)


def test_the_change_is_orthogonal_over_time_and_bounded_per_channel() -> None:
    for cond, null in random_pairs(3):
        guided, _ = apg(cond, 5 * null, 7.0, None)
        change = (guided - cond).double()
        cosine = torch.cosine_similarity(change, cond.double(), dim=1)
        assert cosine.abs().max() <= 1e-6
        assert change.norm(dim=1).max() <= NORM_LIMIT * 6.0 * (1 + 1e-6)


def test_momentum_is_the_alternating_sum_of_all_directions() -> None:
    pairs, momentum = random_pairs(4), None
    for cond, null in pairs:
        _, momentum = apg(cond, null, 7.0, momentum)
    assert momentum is not None
    expected = sum(MOMENTUM ** (3 - k) * (cond - null) for k, (cond, null) in enumerate(pairs))
    torch.testing.assert_close(momentum, expected, atol=1e-5, rtol=0)


def test_songs_of_a_batch_do_not_influence_each_other() -> None:
    cond, null = random_pairs(1)[0]
    together, _ = apg(cond, null, 7.0, None)
    alone, _ = apg(cond[1:], null[1:], 7.0, None)
    torch.testing.assert_close(together[1:], alone, atol=1e-6, rtol=0)


def test_the_made_guide_is_apg_with_its_momentum() -> None:
    guided, momentum = guide("apg", 7.0), None
    for cond, null in random_pairs(4):
        expected, momentum = apg(cond, null, 7.0, momentum)
        assert torch.equal(guided(cond, null, cond, 0.5), expected)


def test_a_look_ahead_uses_the_momentum_and_does_not_move_it() -> None:
    (first, second, third), guided = random_pairs(3), guide("apg", 7.0)
    _, momentum = apg(*first, 7.0, None)
    guided(*first, first[0], 1.0)
    expected, _ = apg(*second, 7.0, momentum)
    assert torch.equal(guided(*second, first[0], 0.5, ahead=True), expected)
    expected, _ = apg(*third, 7.0, momentum)
    assert torch.equal(guided(*third, first[0], 0.5), expected)


def test_plain_guidance_is_linear_and_exact_at_its_ends() -> None:
    assert torch.equal(cfg(COND, NULL, 0.0), NULL)
    assert torch.equal(cfg(COND, NULL, 1.0), COND)
    assert torch.equal(guide("cfg", 7.0)(COND, NULL, X, 0.5), NULL + 7.0 * (COND - NULL))


@pytest.mark.parametrize(
    ("mode", "golden"),
    [
        (
            "adg",
            [[2.2134311, 1.9754450], [0.4711111, -1.9073434], [-1.7798756, -0.2611559]],
        ),
        (
            "adg_w_norm",
            [[1.7618449, 1.1516759], [1.3845588, -1.9194945], [-1.8454541, 0.1338728]],
        ),
        (
            "adg_wo_clip",
            [[0.6195006, -2.8780012], [0.4462500, -1.3402975], [-1.8045323, 3.2565906]],
        ),
    ],
)
def test_guidance_by_angle_matches_golden_numbers(
    mode: GuidanceMode, golden: list[list[float]]
) -> None:
    found = guide(mode, 7.0)(COND, NULL, X, 0.5)
    torch.testing.assert_close(found[0], torch.tensor(golden), atol=2e-6, rtol=0)


@pytest.mark.parametrize("mode", ANGLE_MODES)
def test_by_angle_scale_one_and_equal_branches_leave_the_velocity_nearly_alone(
    mode: GuidanceMode,
) -> None:
    cond, null = random_pairs(1)[0]
    x = random_pairs(2)[1][0]
    assert (adg(cond, null, x, 0.5, 1.0, mode) - cond).abs().max() < 0.03
    assert (adg(cond, cond.clone(), x, 0.5, 7.0, mode) - cond).abs().max() < 1e-3


@pytest.mark.parametrize(("mode", "limit"), [("adg", 3.14 / 6), ("adg_w_norm", 3.14 / 3)])
def test_no_frame_turns_further_than_the_limit(mode: GuidanceMode, limit: float) -> None:
    x = random_pairs(2)[1][0].double()
    for cond, null in random_pairs(3):
        cond, null = cond.double(), null.double()
        guided = guide(mode, 7.0)(cond, 5 * null, x, 0.8)
        clean, turned = x - 0.8 * cond, x - 0.8 * guided
        if mode == "adg":  # the other then scales channels, which turns frames
            angles = torch.cosine_similarity(clean, turned, dim=-1).acos()
            assert angles.max() <= limit + 1e-3
        else:
            torch.testing.assert_close(turned.norm(dim=1), clean.norm(dim=1))


@pytest.mark.parametrize("mode", ANGLE_MODES)
@pytest.mark.parametrize("t", [1.0, 0.3, 1e-3, 1e-6])
def test_guidance_by_angle_is_finite_at_every_level(mode: GuidanceMode, t: float) -> None:
    cond, null = random_pairs(1)[0]
    assert guide(mode, 7.0)(cond, null, cond + null, t).isfinite().all()


@pytest.mark.parametrize("mode", ANGLE_MODES)
def test_at_the_end_where_no_angle_exists_guidance_is_plain(mode: GuidanceMode) -> None:
    assert torch.equal(guide(mode, 7.0)(COND, NULL, X, 0.0), cfg(COND, NULL, 7.0))


@pytest.mark.parametrize("mode", ["apg", "cfg", *ANGLE_MODES])
def test_modes_treat_each_song_by_itself(mode: GuidanceMode) -> None:
    cond, null = random_pairs(1)[0]
    x = random_pairs(2)[1][0]
    together = guide(mode, 7.0)(cond, null, x, 0.5)
    for i in range(2):
        alone = guide(mode, 7.0)(cond[i : i + 1], null[i : i + 1], x[i : i + 1], 0.5)
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("t", "interval", "on"),
    [
        (1.0, (0.0, 1.0), True),
        (0.9, (0.0, 0.8), False),  # an upper end below 1 skips the noisiest steps
        (0.8, (0.0, 0.8), True),
        (0.2, (0.3, 1.0), False),
        (0.5, (0.6, 0.4), False),
    ],
)
def test_the_interval_is_read_as_noise_levels(
    t: float, interval: tuple[float, float], on: bool
) -> None:
    assert acts_at(t, interval) is on
