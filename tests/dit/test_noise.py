"""Noise: golden values, and independence of batch, length and global state."""

from __future__ import annotations

import pytest
import torch

from acestep_engine.dit.noise import draw, draw_for, mix, seed_of, stream
from acestep_engine.types import MAX_SEED, DiTSampling


def test_seed_42_gives_the_golden_values_of_the_cpu_generator() -> None:
    noise = draw(42, 30)
    assert noise.shape == (1, 30, 64)
    assert noise.dtype == torch.float32
    head = torch.tensor([1.9269153, 1.4872841, 0.9007172, -2.1055210])
    torch.testing.assert_close(noise[0, 0, :4], head, atol=1e-6, rtol=0)
    second = torch.tensor([1.4451338, 0.8564125])
    torch.testing.assert_close(noise[0, 1, :2], second, atol=1e-6, rtol=0)


def test_the_same_seed_draws_the_same_and_another_seed_does_not() -> None:
    assert torch.equal(draw(5, 128), draw(5, 128))
    assert not torch.equal(draw(5, 128), draw(6, 128))


def test_a_longer_song_begins_with_the_noise_of_a_shorter_one() -> None:
    assert torch.equal(draw(7, 1000)[:, :129], draw(7, 129))


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    draw(1, 200)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_largest_seed_is_accepted() -> None:
    assert draw(2**63 - 1 + 7, 1).isfinite().all()


def test_without_a_retake_a_song_starts_from_its_own_noise() -> None:
    sampling = DiTSampling(seed=MAX_SEED, batch=2)
    assert torch.equal(draw_for(sampling, 0, 30), draw(MAX_SEED, 30))
    assert torch.equal(draw_for(sampling, 1, 30), draw(0, 30))
    assert seed_of(5, 3) == 8


def test_a_retake_lies_between_both_seeds_and_song_by_song() -> None:
    sampling = DiTSampling(seed=5, retake=0.25, retake_seed=70, batch=2)
    weights = 0.9238795, 0.3826834
    for item in (0, 1):
        expected = weights[0] * draw(5 + item, 30) + weights[1] * draw(70 + item, 30)
        torch.testing.assert_close(draw_for(sampling, item, 30), expected, atol=1e-6, rtol=0)
    alone = DiTSampling(seed=6, retake=0.25, retake_seed=71)
    assert torch.equal(draw_for(sampling, 1, 30), draw_for(alone, 0, 30))


def test_the_ends_of_the_arc_are_exact() -> None:
    own, other = draw(1, 500), draw(2, 500)
    assert torch.equal(mix(own, other, 0.0), own)
    assert torch.equal(mix(own, other, 1.0), other)


@pytest.mark.parametrize("amount", [0.1, 0.5, 0.9])
def test_a_retake_keeps_the_variance(amount: float) -> None:
    mixed = mix(draw(1, 5000), draw(2, 5000), amount)
    assert mixed.var().item() == pytest.approx(1.0, abs=0.01)
    assert mixed.mean().item() == pytest.approx(0.0, abs=0.01)


def test_the_stream_of_a_seed_is_its_own() -> None:
    first = torch.randn(400, 64, generator=stream(3))
    assert torch.equal(first, torch.randn(400, 64, generator=stream(3)))
    for other in (draw(3, 400)[0], draw(4, 400)[0], torch.randn(400, 64, generator=stream(4))):
        assert abs((first * other).mean().item()) < 0.03
