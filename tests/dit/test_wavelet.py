"""Wavelet correction: the transform, a golden number, and what leaves a step alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from acestep_engine.dit.noise import draw
from acestep_engine.dit.solvers import euler, solver
from acestep_engine.dit.wavelet import correct, corrected, split
from acestep_engine.types import Wavelet

CLEAN = torch.tensor([0.5, 1.0, 0.0, 0.25, 1.0]).view(1, 5, 1)
X = torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0]).view(1, 5, 1)


def haar(x_BTC: Tensor) -> Tensor:
    """The bands of `x_BTC` with an even number of frames, through the matrix of the transform."""
    frames = x_BTC.shape[1]
    matrix = torch.zeros(frames, frames)
    for pair in range(frames // 2):
        for band, sign in ((0, 1.0), (frames // 2, -1.0)):
            matrix[band + pair, 2 * pair] = 1 / math.sqrt(2)
            matrix[band + pair, 2 * pair + 1] = sign / math.sqrt(2)
    assert torch.allclose(matrix @ matrix.T, torch.eye(frames), atol=1e-6)
    kept = torch.cat((torch.ones(frames // 2), torch.zeros(frames // 2)))
    return torch.einsum("ji,j,jk,bkc->bic", matrix, kept, matrix, x_BTC)


def test_the_double_mode_matches_golden_numbers() -> None:
    found = correct(X, CLEAN, 0.8, Wavelet("double"))
    golden = torch.tensor([1.0290, 2.0310, -1.0175, 0.4875, 3.0440])
    torch.testing.assert_close(found.flatten(), golden, atol=1e-6, rtol=0)


@pytest.mark.parametrize("frames", [1, 2, 5, 130, 131])
def test_the_bands_add_up_and_the_low_one_is_that_of_the_orthonormal_transform(
    frames: int,
) -> None:
    x = draw(0, frames)
    slow, fast = split(x)
    torch.testing.assert_close(slow + fast, x, atol=1e-6, rtol=0)
    even = torch.nn.functional.pad(x, (0, 0, 0, frames % 2))
    torch.testing.assert_close(slow, haar(even)[:, :frames], atol=1e-6, rtol=0)
    if frames % 2 == 0:
        energy = slow.square().sum() + fast.square().sum()
        torch.testing.assert_close(energy, x.square().sum())


def test_each_mode_acts_on_its_band_at_its_time() -> None:
    slow, fast = split(X - CLEAN)
    low = correct(X, CLEAN, 0.8, Wavelet("low", 0.1))
    high = correct(X, CLEAN, 0.8, Wavelet("high", 0.1))
    pix = correct(X, CLEAN, 0.8, Wavelet("pix", 0.1))
    torch.testing.assert_close(low, X + 0.8 * 0.1 * slow)
    torch.testing.assert_close(high, X + 0.2 * 0.1 * fast)
    torch.testing.assert_close(pix, X + 0.1 * (X - CLEAN))


@pytest.mark.parametrize("mode", ["low", "high", "double", "pix"])
def test_a_strength_of_zero_changes_nothing(mode: str) -> None:
    assert torch.equal(correct(X, CLEAN, 0.8, Wavelet(mode, 0.0, 0.0)), X)  # type: ignore[arg-type]


def test_off_is_the_step_itself() -> None:
    assert corrected(euler, Wavelet()) is euler


@pytest.mark.parametrize("name", ["euler", "heun", "dpmpp_2m"])
def test_a_step_is_corrected_with_the_estimate_at_its_start(name: str) -> None:
    def velocity(x: Tensor, t: float, ahead: bool = False) -> Tensor:
        return torch.sin(x + t)

    x, wavelet = draw(1, 31), Wavelet("double", 0.2, 0.1)
    plain = solver(name)(x, velocity, 0.8, 0.5)  # type: ignore[arg-type]
    found = corrected(solver(name), wavelet)(x, velocity, 0.8, 0.5)  # type: ignore[arg-type]
    assert torch.equal(found, correct(plain, x - 0.8 * velocity(x, 0.8), 0.8, wavelet))


def test_the_last_step_is_the_clean_estimate_and_stays_so() -> None:
    x, clean = draw(2, 30), draw(3, 30)
    step = corrected(euler, Wavelet("double", 1.0, 1.0))
    found = step(x, lambda x, t, ahead=False: (x - clean) / t, 0.3, 0.0)
    torch.testing.assert_close(found, clean, atol=2e-6, rtol=0)
