"""The brakes on a velocity: its limit, and its running average."""

from __future__ import annotations

import pytest
import torch

from acestep_engine.dit.damping import averaging, clamp
from acestep_engine.dit.noise import draw


def test_a_velocity_is_limited_to_its_share_of_each_song() -> None:
    x = torch.cat((draw(0, 30), draw(1, 30)))
    v = torch.cat((5 * draw(2, 30), 0.5 * draw(3, 30)))
    limited = clamp(v, x, 2.0)
    assert limited[0].norm().item() == pytest.approx(2.0 * x[0].norm().item(), rel=1e-5)
    torch.testing.assert_close(limited[0] / limited[0].norm(), v[0] / v[0].norm())
    assert torch.equal(limited[1], v[1])


def test_no_limit_and_no_velocity_leave_the_bits_alone() -> None:
    x, v = draw(0, 30), 9 * draw(1, 30)
    assert clamp(v, x, 0.0) is v
    still = torch.zeros_like(v)
    assert torch.equal(clamp(still, x, 1.0), still)
    assert torch.equal(clamp(still, still, 1.0), still)


def test_the_average_is_exponential_and_begins_with_the_first_velocity() -> None:
    average, velocities = averaging(0.25), [draw(seed, 10) for seed in range(4)]
    found = [average(v, False) for v in velocities]
    expected = velocities[0]
    assert torch.equal(found[0], expected)
    for v, result in zip(velocities[1:], found[1:], strict=True):
        expected = 0.75 * v + 0.25 * expected
        torch.testing.assert_close(result, expected)


def test_a_look_ahead_does_not_move_the_average() -> None:
    average, (a, b, c) = averaging(0.5), [draw(seed, 10) for seed in range(3)]
    average(a, False)
    torch.testing.assert_close(average(b, True), 0.5 * b + 0.5 * a)
    torch.testing.assert_close(average(c, False), 0.5 * c + 0.5 * a)


def test_a_share_of_zero_is_the_velocity_itself() -> None:
    average, v = averaging(0.0), draw(0, 10)
    average(draw(1, 10), False)
    assert average(v, False) is v
