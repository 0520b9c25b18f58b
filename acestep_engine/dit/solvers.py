"""Solvers: one step along dx/dt from noise level t down to t_next.

`solver(name, seed)` makes the step of one render, with its history. A step may ask for the velocity
as often as it needs; it knows nothing of guidance or models.
Dimension key: B songs, T latent frames, C latent channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..types import SolverName
from .noise import stream


class VelocityAt(Protocol):
    def __call__(self, x_BTC: Tensor, t: float, ahead: bool = False) -> Tensor:
        """dx/dt. ahead: a look at where the step may end, which counts in no running average."""
        ...


SolverStep = Callable[[Tensor, VelocityAt, float, float], Tensor]
"""(x_BTC, velocity, t, t_next) to x_BTC at t_next. The first x_BTC may lie on the CPU, where noise
is drawn; the result lies where velocities do."""


def solver(name: SolverName, seed: int = 0) -> SolverStep:
    """The step of a fresh render; `seed` is the song's, for the solver that adds noise."""
    made: dict[str, Callable[[], SolverStep]] = {
        "euler": lambda: euler,
        "heun": lambda: heun,
        "dpmpp_2m": dpmpp_2m,
        "sde": lambda: sde(seed),
    }
    return made[name]()


def euler(x_BTC: Tensor, velocity: VelocityAt, t: float, t_next: float) -> Tensor:
    """One straight step; at t_next = 0 it is the model's estimate of the clean latents."""
    v_BTC = velocity(x_BTC, t)
    return x_BTC.to(v_BTC.device) - (t - t_next) * v_BTC


def heun(x_BTC: Tensor, velocity: VelocityAt, t: float, t_next: float) -> Tensor:
    """Euler, then again with the mean of the velocities at both ends; second order.

    The last step stays Euler: at t = 0 models are not trained and a velocity says nothing.
    """
    v_BTC = velocity(x_BTC, t)
    x_BTC = x_BTC.to(v_BTC.device)
    there_BTC = x_BTC - (t - t_next) * v_BTC
    if t_next == 0.0:
        return there_BTC
    return x_BTC - (t - t_next) * 0.5 * (v_BTC + velocity(there_BTC, t_next, ahead=True))


def sde(seed: int) -> SolverStep:
    """To the estimate of the clean latents, and back up to t_next with noise never used before.

    Right for distilled models, whose estimate is a song. That of others is the mean of all songs
    possible, and what is lost of their variety with it does not come back.
    """
    generator = stream(seed)

    def step(x_BTC: Tensor, velocity: VelocityAt, t: float, t_next: float) -> Tensor:
        clean_BTC = _clean(x_BTC, velocity(x_BTC, t), t)
        if t_next == 0.0:
            return clean_BTC
        fresh_BTC = torch.randn(x_BTC.shape, generator=generator).to(clean_BTC.device)
        return t_next * fresh_BTC + (1.0 - t_next) * clean_BTC

    return step


def dpmpp_2m() -> SolverStep:
    """DPM-Solver++(2M) (Lu et al., arXiv 2211.01095): second order for one velocity a step.

    The clean latents are foreseen in the middle of the step, from the estimates of this step and
    the one before, on the axis log((1 - t) / t). The first step has one estimate only, and the
    last, whose end lies infinitely far on that axis, keeps to the newest.
    """
    level, before_BTC = 0.0, None

    def step(x_BTC: Tensor, velocity: VelocityAt, t: float, t_next: float) -> Tensor:
        nonlocal level, before_BTC
        clean_BTC = _clean(x_BTC, velocity(x_BTC, t), t)
        level_before, level = level, _level(t)
        last_BTC, before_BTC = before_BTC, clean_BTC
        if t_next == 0.0:
            return clean_BTC
        if last_BTC is not None:
            ratio = (_level(t_next) - level) / (level - level_before)
            clean_BTC = clean_BTC + 0.5 * ratio * (clean_BTC - last_BTC)
        decay = t_next / t
        return decay * x_BTC.to(clean_BTC.device) + (1.0 - decay) * clean_BTC

    return step


def _level(t: float) -> float:
    return -math.inf if t == 1.0 else math.log((1.0 - t) / t)


def _clean(x_BTC: Tensor, v_BTC: Tensor, t: float) -> Tensor:
    """The clean latents, if the velocity stayed what it is at noise level t."""
    return x_BTC.to(v_BTC.device) - t * v_BTC
