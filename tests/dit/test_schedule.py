"""Noise levels: golden numbers, the shift law, own timesteps and what turbo makes of them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from acestep_engine.dit.schedule import TRAINED, nodes, own_nodes, snap_to_trained, warp
from acestep_engine.errors import InvalidRequest

TURBO_TABLES = {
    1: [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125],
    2: [
        1, 0.9333333333, 0.8571428571, 0.7692307692,
        0.6666666667, 0.5454545455, 0.4, 0.2222222222,
    ],
    3: [1, 0.9545454545, 0.9, 0.8333333333, 0.75, 0.6428571429, 0.5, 0.3],
}  # fmt: skip


@pytest.mark.parametrize("shift", TURBO_TABLES)
def test_eight_steps_give_the_published_turbo_tables(shift: int) -> None:
    assert nodes(8, shift) == pytest.approx((*TURBO_TABLES[shift], 0), abs=5e-11)


def test_longer_schedules_match_golden_numbers() -> None:
    assert nodes(4, 3) == pytest.approx((1, 0.9, 0.75, 0.5, 0))
    fifty = nodes(50, 3)
    head = (1, 0.9932432, 0.9863014, 0.9791667, 0.9718310, 0.9642857)
    assert fifty[:6] == pytest.approx(head, abs=5e-8)
    assert fifty[-4:] == pytest.approx((0.1607143, 0.1111111, 0.0576923, 0), abs=5e-8)
    thirty_two = nodes(32, 3)
    assert thirty_two[:4] == pytest.approx((1, 0.9893617, 0.9782609, 0.9666667), abs=5e-8)
    assert thirty_two[-3:] == pytest.approx((0.1666667, 0.0882353, 0), abs=5e-8)


@pytest.mark.parametrize("shift", [0.01, 0.1, 0.7, 1.0, 2.5, 3.0, 100.0])
@pytest.mark.parametrize("steps", [1, 2, 8, 50, 1000])
def test_nodes_fall_strictly_from_exactly_one_to_exactly_zero(steps: int, shift: float) -> None:
    levels = nodes(steps, shift)
    assert len(levels) == steps + 1
    assert levels[0] == 1.0
    assert levels[-1] == 0.0
    assert all(a > b for a, b in pairwise(levels))


def test_shift_one_leaves_the_grid_even() -> None:
    assert nodes(10, 1.0) == tuple((10 - i) / 10 for i in range(11))


def test_shifts_compose_by_multiplication() -> None:
    for t in (0.0, 0.1, 0.5, 0.93, 1.0):
        assert warp(warp(t, 2.0), 1.5) == pytest.approx(warp(t, 3.0), abs=1e-15)


def test_turbo_was_trained_on_the_twenty_levels_of_its_three_tables() -> None:
    assert len(TRAINED) == 20
    union = {round(t, 10) for table in TURBO_TABLES.values() for t in table}
    assert {round(t, 10) for t in TRAINED} == union


def test_own_timesteps_may_leave_out_or_repeat_the_final_zero() -> None:
    assert own_nodes([0.9, 0.5]) == (0.9, 0.5, 0.0)
    assert own_nodes([0.9, 0.5, 0.0]) == (0.9, 0.5, 0.0)
    assert own_nodes([0.9, 0.5, 0.0, 0.0]) == (0.9, 0.5, 0.0)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([], "no noise level"),
        ([0.0], "no noise level"),
        ([1.1, 0.5], "1.1"),
        ([0.9, -0.1], "-0.1"),
        ([0.9, 0.0, 0.5], "Timestep 1 is 0.0"),
        ([0.5, 0.9], "0.9 after 0.5"),
        ([0.5, 0.5], "0.5 after 0.5"),
        ([math.nan], "nan"),
        ([math.inf, 0.5], "inf"),
    ],
)
def test_bad_own_timesteps_are_refused_with_the_value(values: list[float], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        own_nodes(values)


def test_turbo_moves_own_timesteps_to_the_nearest_trained_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING"):
        assert snap_to_trained((0.98, 0.82, 0.51, 0.0)) == (1.0, 15 / 18, 0.5, 0.0)
    assert "1, 0.8333, 0.5" in caplog.text


def test_levels_that_snap_together_are_merged_so_no_step_has_zero_length() -> None:
    snapped = snap_to_trained((0.999, 0.99, 0.51, 0.5, 0.49, 0.01, 0.0))
    assert snapped == (1.0, 0.5, 0.125, 0.0)


def test_trained_levels_are_kept_exactly_and_silently(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert snap_to_trained((*TRAINED, 0.0)) == (*TRAINED, 0.0)
    assert not caplog.records
