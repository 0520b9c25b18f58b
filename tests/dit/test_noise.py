"""Noise: golden values, and independence of batch, length and global state."""

from __future__ import annotations

import torch

from acestep_engine.dit.noise import draw


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
