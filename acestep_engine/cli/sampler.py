"""The options of `song` that say how the DiT gets from noise to sound. It knows no schedule."""

from __future__ import annotations

import argparse
from typing import get_args

from ..types import DiTSampling, GuidanceMode, SolverName, Wavelet, WaveletMode

DEFAULT = DiTSampling()


def add_to(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("render").add_argument
    add("--batch", type=int, default=DEFAULT.batch, help="songs with the seeds after --seed")
    add("--steps", type=int, help="default: of the family")
    add("--shift", type=float, help="above 1: more steps for the structure; default: of the family")
    add("--guidance", type=float, help="1: off; default: of the family")
    add("--guidance-mode", default=DEFAULT.guidance_mode, choices=get_args(GuidanceMode))
    add(
        "--interval",
        type=float,
        nargs=2,
        default=DEFAULT.interval,
        metavar=("LOW", "HIGH"),
        help="noise levels, 0 to 1, between which guidance acts",
    )
    add("--timesteps", type=float, nargs="+", help="own noise levels, falling from 1")
    add("--solver", default=DEFAULT.solver, choices=get_args(SolverName))
    add(
        "--velocity-clamp",
        type=float,
        default=DEFAULT.velocity_clamp,
        help="longest step, in lengths of the latents; 0: any",
    )
    add(
        "--velocity-ema",
        type=float,
        default=DEFAULT.velocity_ema,
        help="share of the steps before in each step, 0 to 0.99",
    )
    add(
        "--retake",
        type=float,
        default=DEFAULT.retake,
        help="0: the noise of --seed, 1: that of --retake-seed, between: a variation",
    )
    add("--retake-seed", type=int, default=DEFAULT.retake_seed)
    add("--dcw", default=DEFAULT.dcw.mode, choices=get_args(WaveletMode), help="wavelet correction")
    add("--dcw-scaler", type=float, default=DEFAULT.dcw.scaler, help="strength of --dcw")
    add("--dcw-high", type=float, default=DEFAULT.dcw.high_scaler, help="upper band of double")


def sampling_of(options: argparse.Namespace) -> DiTSampling:
    """What `add_to` asks for, with the seed of the song."""
    low, high = options.interval
    return DiTSampling(
        steps=options.steps,
        shift=options.shift,
        guidance=options.guidance,
        interval=(low, high),
        timesteps=tuple(options.timesteps) if options.timesteps else None,
        seed=options.seed,
        batch=options.batch,
        solver=options.solver,
        guidance_mode=options.guidance_mode,
        velocity_clamp=options.velocity_clamp,
        velocity_ema=options.velocity_ema,
        retake=options.retake,
        retake_seed=options.retake_seed,
        dcw=Wavelet(options.dcw, options.dcw_scaler, options.dcw_high),
    )
