"""Guidance, filters and the draw against hand-computed numbers and exact distributions."""

from __future__ import annotations

import math

import pytest
import torch

from acestep_engine.lm.sampling import distribution, draw, guide, penalise, uniforms
from acestep_engine.types import LMSampling

P = (0.40, 0.25, 0.15, 0.10, 0.06, 0.04)
CPU = torch.device("cpu")
PLAIN = LMSampling(temperature=1.0, top_p=1.0)


def scores(p=P) -> torch.Tensor:
    return torch.tensor([p]).log()


def filtered(logits: torch.Tensor, sampling: LMSampling) -> torch.Tensor:
    """Probabilities of the candidates."""
    weights = distribution(logits, sampling)
    return (weights / weights.sum(-1, keepdim=True))[0]


def test_guidance_on_finite_scores() -> None:
    c, u = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 2.5, 1.0]])
    assert guide(c, u, 2.0).tolist() == [[1.5, 1.5, 5.0]]
    assert guide(c, u, 1.0).tolist() == c.tolist()
    assert torch.equal(guide(c, c, 7.3), c)
    shifted = guide(c + 3, u - 5, 2.0).softmax(-1)
    torch.testing.assert_close(shifted, guide(c, u, 2.0).softmax(-1))


def test_the_penalty_weakens_only_what_was_drawn() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.0, 2.0]])
    seen = torch.tensor([True, True, True, False])
    expected = torch.tensor([[2 / 1.2, -1.2, 0.0, 2.0]])
    torch.testing.assert_close(penalise(logits, seen, 1.2), expected)


def test_temperature() -> None:
    expected = [0.44241, 0.25450, 0.13954, 0.08660, 0.04748, 0.02947]
    found = filtered(scores(), LMSampling(temperature=0.85, top_p=1.0))
    assert found.tolist() == pytest.approx(expected, abs=6e-6)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.1, 1), (0.39, 1), (0.5, 2), (0.66, 3), (0.81, 4), (0.91, 5), (0.97, 6)]
)
def test_top_p_drops_what_comes_after_more_than_p(top_p: float, kept: int) -> None:
    shuffled = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    found = filtered(scores()[:, shuffled], LMSampling(temperature=1.0, top_p=top_p))
    original = torch.empty_like(found).scatter(0, shuffled, found)
    expected = torch.tensor([*P[:kept], *[0.0] * (6 - kept)], dtype=found.dtype)
    torch.testing.assert_close(original, expected / expected.sum(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spread", [0.01, 0.6, 3.0, 12.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_over_many_candidates_keeps_what_a_full_sort_keeps(
    spread: float, top_p: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 64_000, generator=generator) * spread
    ordered = logits.softmax(-1).sort(-1, descending=True).values
    exact = ordered.double()
    kept = exact.cumsum(-1) - exact <= top_p * exact.sum(-1, keepdim=True)
    least = ordered.gather(-1, kept.sum(-1, keepdim=True) - 1)
    found = distribution(logits, LMSampling(temperature=1.0, top_p=top_p))
    assert torch.equal(found > 0, logits.softmax(-1) >= least)
    assert (found > 0).any(-1).all()


def test_candidates_of_equal_weight_stay_or_go_together() -> None:
    found = filtered(scores((0.25, 0.25, 0.25, 0.25)), LMSampling(temperature=1.0, top_p=0.3))
    assert found.tolist() == [0.25] * 4


@pytest.mark.parametrize(("min_p", "kept"), [(0.09, 6), (0.2, 4), (0.6, 2), (1.0, 1)])
def test_min_p_is_relative_to_the_best(min_p: float, kept: int) -> None:
    found = filtered(scores(), LMSampling(temperature=1.0, top_p=1.0, min_p=min_p))
    assert (found > 0).tolist() == [True] * kept + [False] * (6 - kept)


def test_filters_act_one_after_the_other() -> None:
    """top-k 4 leaves .9 in all; of that .40 and .25 weigh 0.72, so the third still fits in 0.8."""
    sampling = LMSampling(temperature=1.0, top_k=4, top_p=0.8, min_p=0.2)
    expected = [0.40 / 0.80, 0.25 / 0.80, 0.15 / 0.80, 0, 0, 0]
    assert filtered(scores(), sampling).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("temperature", "kept"), [(0.5, 4), (1.0, 4), (3.0, 4)])
def test_filters_before_temperature_do_not_depend_on_it(temperature: float, kept: int) -> None:
    """top-p 0.85 of P keeps four; what they weigh is then P to the power 1 / temperature."""
    sampling = LMSampling(temperature=temperature, top_p=0.85, temperature_last=True)
    warmed = [p ** (1 / temperature) for p in P[:kept]]
    expected = [weight / sum(warmed) for weight in warmed] + [0] * (6 - kept)
    assert filtered(scores(), sampling).tolist() == pytest.approx(expected)


def test_filters_after_temperature_do() -> None:
    def kept(temperature: float) -> int:
        found = filtered(scores(), LMSampling(temperature=temperature, top_p=0.85))
        return int((found > 0).sum())

    assert (kept(0.5), kept(1.0), kept(3.0)) == (2, 4, 5)


@pytest.mark.parametrize("top_k", [0, 3])
def test_without_top_p_and_min_p_the_order_does_not_matter(top_k: int) -> None:
    after = LMSampling(temperature=0.7, top_p=1.0, top_k=top_k)
    before = LMSampling(temperature=0.7, top_p=1.0, top_k=top_k, temperature_last=True)
    torch.testing.assert_close(filtered(scores(), before), filtered(scores(), after))


def test_min_p_before_temperature_compares_the_scores_as_they_are() -> None:
    sampling = LMSampling(temperature=4.0, top_p=1.0, min_p=0.2, temperature_last=True)
    assert (filtered(scores(), sampling) > 0).tolist() == [True] * 4 + [False] * 2


def test_a_wide_top_k_is_off() -> None:
    wide = LMSampling(temperature=1.0, top_k=100, top_p=0.5)
    assert torch.equal(filtered(scores(), wide), filtered(scores(), LMSampling(1.0, top_p=0.5)))


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        LMSampling(temperature=0.85, top_p=0.9),
        LMSampling(temperature=1.3, top_k=3, top_p=1.0),
        LMSampling(temperature=1.0, top_k=5, top_p=0.8, min_p=0.2),
        LMSampling(temperature=1.0, top_p=1.0, min_p=0.2),
    ],
)
def test_draws_follow_the_filtered_distribution(sampling: LMSampling) -> None:
    count = 100_000
    logits = scores()[:, [3, 0, 5, 1, 4, 2]]
    expected = filtered(logits, sampling) * count
    numbers = uniforms(11, count, CPU)
    found = draw(logits.expand(count, -1), numbers[:, None], sampling)
    counts = torch.bincount(found, minlength=6).double()
    assert counts[expected == 0].sum() == 0
    live = expected > 0
    chi_square = ((counts - expected)[live] ** 2 / expected[live]).sum()
    freedom = int(live.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_rows_are_drawn_each_by_its_own_scores() -> None:
    logits = torch.cat((scores(), scores().flip(-1)))
    assert draw(logits, torch.tensor(0.1, dtype=torch.float64), PLAIN).tolist() == [0, 2]


@pytest.mark.parametrize("sampling", [PLAIN, LMSampling(1.0, top_p=0.7), LMSampling(1.0, top_k=3)])
def test_the_ends_of_the_unit_interval_hit_kept_candidates(sampling: LMSampling) -> None:
    for number in (0.0, 1 - 2**-53, 1.0):
        chosen = int(draw(scores(), torch.tensor(number, dtype=torch.float64), sampling))
        assert filtered(scores(), sampling)[chosen] > 0


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_no_temperature_takes_the_best(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert draw(logits, torch.tensor(0.99), LMSampling(temperature)).item() == 1


def test_uniforms_depend_on_the_seed_alone() -> None:
    torch.rand(10)
    first = uniforms(5, 100, CPU)
    torch.rand(10)
    assert torch.equal(first, uniforms(5, 100, CPU))
    assert torch.equal(first[:7], uniforms(5, 7, CPU))
    assert not torch.equal(first, uniforms(6, 100, CPU))
