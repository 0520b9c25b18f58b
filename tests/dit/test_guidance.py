"""Adaptive projected guidance: golden numbers, its laws, and diffusers' function as oracle."""

from __future__ import annotations

import pytest
import torch
from diffusers.guiders.adaptive_projected_guidance import MomentumBuffer, normalized_guidance
from torch import Tensor

from acestep_engine.dit.guidance import MOMENTUM, NORM_LIMIT, acts_at, apg

COND = torch.tensor([[[1.0, 2.0], [0.5, -1.0], [-1.0, 0.0]]])
NULL = torch.tensor([[[0.0, 1.0], [1.0, 1.0], [2.0, -3.0]]])


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
