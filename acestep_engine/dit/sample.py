"""The denoise loop: from noise to latents, for every family, solver and schedule.

A generator, so that the caller owns progress, interrupt and previews. It knows a velocity callable
and nothing of its weights, device or precision; x itself stays float32.
Dimension key: B songs, T latent frames, C latent channels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..backends.base import Velocity
from ..config import FAMILY_DEFAULTS, Family
from ..errors import InvalidRequest
from ..types import DiTSampling, GuidanceMode, SolverName, Wavelet, require_finite
from . import damping, schedule
from .conditions import Conditions
from .course import Course
from .guidance import acts_at, guide
from .solvers import VelocityAt, solver
from .wavelet import corrected

logger = logging.getLogger(__name__)

CURE = (
    "Load the DiT in bf16 or fp32 (fp16 overflows), and check that the file is complete "
    "and of the chosen family."
)


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """How to denoise, with nothing left automatic. nodes: noise levels, the last one 0."""

    nodes: tuple[float, ...]
    guidance: float
    interval: tuple[float, float]
    solver: SolverName = "euler"
    guidance_mode: GuidanceMode = "apg"
    velocity_clamp: float = 0.0
    velocity_ema: float = 0.0
    dcw: Wavelet = Wavelet()

    def guided(self, t: float) -> bool:
        """Whether the step that starts at noise level `t` asks the null branch, too."""
        return self.guidance > 1.0 and acts_at(t, self.interval)


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """Conditions with their cross-attention keys and values; null_cross is None if never asked.

    free: what takes over where the course stops following the source.
    """

    context_BTC: Tensor
    cross: Any
    null_cross: Any
    course: Course = Course()
    free: Branches | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """After a step (counted from 0): `t` is the noise level of `x_BTC` now, 0 at the end."""

    index: int
    t: float
    x_BTC: Tensor


def resolve(sampling: DiTSampling, family: Family) -> ResolvedSampling:
    """Defaults of `family` filled in; what it cannot do is put right and logged."""
    if sampling.retake and sampling.retake_seed == sampling.seed:
        raise InvalidRequest(
            f"retake_seed and seed are both {sampling.seed}, so there is no other noise to mix in. "
            "Change retake_seed, or set retake to 0."
        )
    default = FAMILY_DEFAULTS[family]
    guidance = default.guidance if sampling.guidance is None else sampling.guidance
    if family == "turbo" and guidance > 1.0:
        logger.warning(
            "Guidance %g is ignored: turbo is distilled and has no unconditional branch. "
            "Load an sft or base checkpoint to use guidance, or set it to 1.",
            guidance,
        )
        guidance = 1.0
    return ResolvedSampling(
        _nodes(sampling, family),
        guidance,
        sampling.interval,
        sampling.solver,
        sampling.guidance_mode,
        sampling.velocity_clamp,
        sampling.velocity_ema,
        _dcw(sampling),
    )


def _dcw(sampling: DiTSampling) -> Wavelet:
    if sampling.solver == "sde" and sampling.dcw.mode != "off":
        logger.warning(
            "The wavelet correction '%s' is off: it would amplify the noise that the solver sde "
            "adds. Choose another solver to use it.",
            sampling.dcw.mode,
        )
        return Wavelet()
    return sampling.dcw


def _nodes(sampling: DiTSampling, family: Family) -> tuple[float, ...]:
    turbo = family == "turbo"
    if sampling.timesteps:
        if sampling.steps is not None or sampling.shift is not None:
            logger.warning("Own timesteps are given: steps and shift are not used.")
        own = schedule.own_nodes(sampling.timesteps)
        return schedule.snap_to_trained(own) if turbo else own
    default = FAMILY_DEFAULTS[family]
    steps = default.steps if sampling.steps is None else sampling.steps
    shift = default.shift if sampling.shift is None else sampling.shift
    if turbo and (steps != schedule.TURBO_STEPS or shift not in schedule.TURBO_SHIFTS):
        logger.warning(
            "Turbo was trained for 8 steps at shift 1, 2 or 3; %d steps at shift %g are off that "
            "track and may sound worse.",
            steps,
            shift,
        )
    return schedule.nodes(steps, shift)


def prepare(velocity: Velocity, conditions: Conditions, settings: ResolvedSampling) -> Branches:
    """What stays the same for all steps, and for all seeds of a song."""
    guided = any(settings.guided(t) for t in settings.nodes[:-1])
    return Branches(
        conditions.context_BTC,
        velocity.prepare(conditions.encoder_BLD),
        velocity.prepare(conditions.null_BLD) if guided else None,
        conditions.course,
        prepare(velocity, conditions.free, settings) if conditions.free else None,
    )


def denoise(
    velocity: Velocity,
    branches: Branches,
    noise_BTC: Tensor,
    settings: ResolvedSampling,
    seed: int = 0,
) -> Iterator[Step]:
    """Denoise `noise_BTC` along the nodes, yielding after every step.

    seed: of the song, for noise that a solver adds.
    """
    course, steps = branches.course, len(settings.nodes) - 1
    given = branches
    velocity_at = _guided(velocity, lambda: given, settings)
    step = corrected(solver(settings.solver, seed), settings.dcw)
    noise_BTC = noise_BTC.float()
    x_BTC = course.begin(noise_BTC, settings.nodes[0])
    for i, (t, t_next) in enumerate(zip(settings.nodes[:-1], settings.nodes[1:], strict=True)):
        given = branches if course.follows(i, steps) else branches.free or branches
        x_BTC = step(x_BTC, velocity_at, t, t_next)
        x_BTC = course.settle(x_BTC, noise_BTC, t_next, i, steps)
        require_finite(x_BTC, f"DiT sampling, step {i + 1} of {steps}", CURE)
        yield Step(i, t_next, x_BTC)


def _guided(
    velocity: Velocity, given: Callable[[], Branches], settings: ResolvedSampling
) -> VelocityAt:
    """The velocity under what is `given` now: guided, then limited, then averaged.

    What guidance and average remember lives as long as one render.
    """
    guidance = guide(settings.guidance_mode, settings.guidance)
    average = damping.averaging(settings.velocity_ema)

    def velocity_at(x_BTC: Tensor, t: float, ahead: bool = False) -> Tensor:
        branches = given()
        v_BTC = velocity(x_BTC, t, branches.context_BTC, branches.cross)
        x_BTC = x_BTC.to(v_BTC.device)
        if settings.guided(t):
            null_BTC = velocity(x_BTC, t, branches.context_BTC, branches.null_cross)
            v_BTC = guidance(v_BTC, null_BTC, x_BTC, t, ahead)
        return average(damping.clamp(v_BTC, x_BTC, settings.velocity_clamp), ahead)

    return velocity_at
