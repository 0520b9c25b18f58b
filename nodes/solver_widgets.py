"""The widgets that say how the DiT gets from noise to sound.

All are optional, because they came after workflows had been saved; each default is the plain way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from comfy_api.latest import io

from ..acestep_engine.types import (
    MAX_SEED,
    DiTSampling,
    GuidanceMode,
    SolverName,
    Wavelet,
    WaveletMode,
)

DEFAULT = DiTSampling()
RARE = {"optional": True, "advanced": True}


def solver_inputs() -> list[Any]:
    """Solver, guidance, brakes, retake and wavelet correction, in this order."""
    return [*_way_inputs(), *_retake_inputs(), *_wavelet_inputs()]


def solver_fields(widgets: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `DiTSampling` from the widgets of `solver_inputs`, where there are any."""
    names = ("solver", "guidance_mode", "velocity_clamp", "velocity_ema", "retake", "retake_seed")
    plain = {name: widgets.get(name, getattr(DEFAULT, name)) for name in names}
    dcw = Wavelet(
        widgets.get("dcw", DEFAULT.dcw.mode),
        widgets.get("dcw_scaler", DEFAULT.dcw.scaler),
        widgets.get("dcw_high", DEFAULT.dcw.high_scaler),
    )
    return {**plain, "dcw": dcw}


def _way_inputs() -> list[Any]:
    return [
        io.Combo.Input(
            "solver",
            options=list(get_args(SolverName)),
            default=DEFAULT.solver,
            tooltip="How each step is taken. euler: the plain way. heun: finer, at twice the time "
            "per step. dpmpp_2m: nearly as fine in the time of euler. sde: adds fresh noise at "
            "every step, for more variety with turbo models; others lose life with it.",
            **RARE,
        ),
        io.Combo.Input(
            "guidance_mode",
            options=list(get_args(GuidanceMode)),
            default=DEFAULT.guidance_mode,
            tooltip="How guidance leads. apg: strong without harshness, what the models were tuned "
            "with. cfg: the classic way, wants a lower guidance. adg: turns the sound towards the "
            "words by a limited angle; _w_norm allows more and keeps the level, _wo_clip has no "
            "limit.",
            **RARE,
        ),
        io.Float.Input(
            "velocity_clamp",
            default=DEFAULT.velocity_clamp,
            min=0.0,
            max=100.0,
            step=0.1,
            tooltip="Tames steps that would leap: the longest step direction, in lengths of the "
            "sound so far. Try 2 or 3 if strong guidance distorts; 1.4 is usual without. 0: off.",
            **RARE,
        ),
        io.Float.Input(
            "velocity_ema",
            default=DEFAULT.velocity_ema,
            min=0.0,
            max=0.99,
            step=0.01,
            tooltip="Smooths the path: the share of the steps before in each step. A little, such "
            "as 0.1, calms the sound; much blurs it. 0: off.",
            **RARE,
        ),
    ]


def _retake_inputs() -> list[Any]:
    return [
        io.Float.Input(
            "retake",
            default=DEFAULT.retake,
            min=0.0,
            max=1.0,
            step=0.01,
            tooltip="A variation of the performance that seed gives: 0 is that performance, 0.1 to "
            "0.3 a sibling of it, 1 the one of retake_seed.",
            **RARE,
        ),
        io.Int.Input(
            "retake_seed",
            default=DEFAULT.retake_seed,
            min=0,
            max=MAX_SEED,
            tooltip="Which variation, where retake is above 0. Keep seed, change this, and hear "
            "siblings of one take. Must differ from seed.",
            **RARE,
        ),
    ]


def _wavelet_inputs() -> list[Any]:
    return [
        io.Combo.Input(
            "dcw",
            options=list(get_args(WaveletMode)),
            default=DEFAULT.dcw.mode,
            tooltip="Wavelet correction of each step. low: slow movements, early in the render. "
            "high: quick detail, late. double: both. pix: everything alike. Not with the solver "
            "sde.",
            **RARE,
        ),
        io.Float.Input(
            "dcw_scaler",
            default=DEFAULT.dcw.scaler,
            min=0.0,
            max=1.0,
            step=0.005,
            tooltip="Strength of the wavelet correction.",
            **RARE,
        ),
        io.Float.Input(
            "dcw_high",
            default=DEFAULT.dcw.high_scaler,
            min=0.0,
            max=1.0,
            step=0.005,
            tooltip="Strength of the quick detail, where dcw is double.",
            **RARE,
        ),
    ]
