"""The nouns refuse what cannot be meant, and say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from acestep_engine.errors import InvalidRequest
from acestep_engine.types import (
    Audio,
    ComposeOptions,
    DiTSampling,
    Latents,
    LMSampling,
    Metadata,
    Plan,
    Request,
    Wavelet,
    frames_of,
)


def plan(**changes: Any) -> Plan:
    return Plan(
        **{"caption": "a", "lyrics": "b", "metadata": Metadata(), "duration": 9.0, **changes}
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: plan(duration=0.0), r"duration of a plan is 0\.0.* between 1\.0 and 600\.0"),
        (lambda: plan(duration=601.0), "601"),
        (lambda: plan(duration=1e6), "1000000"),
        (lambda: plan(duration=float("nan")), "nan"),
        (lambda: plan(duration="9"), "'9', which is no number"),
        (lambda: plan(duration=None), "None, which is no number"),
        (lambda: plan(seed=-1), "seed of a plan is -1"),
        (lambda: plan(seed=1.5), r"1\.5, but only whole numbers"),
        (lambda: plan(caption=None), "caption of a plan is None, which is no text"),
        (lambda: plan(lyrics=5), "lyrics of a plan is 5"),
        (lambda: plan(metadata={"bpm": 3}), "Give a Metadata"),
        (lambda: Request(caption=None), "caption is None"),
        (lambda: Request(lyrics=["la"]), "lyrics is"),
        (lambda: Request(keyscale=4), "keyscale is 4"),
        (lambda: Request(language=b"en"), "language is b'en'"),
        (lambda: Request(duration="long"), "'long', which is no number"),
        (lambda: Request(bpm="120"), "'120', which is no number"),
        (lambda: Latents([1.0]), "latents are a list"),
        (lambda: Latents(torch.zeros(20, 64)), r"\(20, 64\), but must be \(songs, frames, 64\)"),
        (lambda: Latents(torch.zeros(1, 64, 20)), r"\(1, 64, 20\)"),
        (lambda: Latents(torch.zeros(0, 20, 64)), "one song or more"),
        (lambda: Latents(torch.zeros(1, 20, 64, dtype=torch.int64)), "floating point"),
        (lambda: Audio(torch.zeros(2, 100)), r"\(2, 100\), but must be \(songs, channels"),
        (lambda: Audio(torch.zeros(1, 2, 100, dtype=torch.int16)), "divided by their range"),
        (lambda: Audio(torch.zeros(1, 0, 100)), "no channels"),
        (lambda: Audio(torch.zeros(1, 2, 100), 0), "sample rate is 0"),
        (lambda: Audio(torch.zeros(1, 2, 100), 44_100.5), "whole numbers"),
        (lambda: Audio(torch.zeros(1, 2, 9), gain=(1.0, 0.5)), "gains for 2 songs, but 1"),
        (lambda: LMSampling(temperature="hot"), "temperature is 'hot'"),
        (lambda: LMSampling(temperature=float("nan")), "temperature is nan"),
        (lambda: LMSampling(seed=0.5), "seed is 0.5"),
        (lambda: LMSampling(top_k=1.5), "top_k is 1.5"),
        (lambda: LMSampling(negative=None), "negative is None"),
        (lambda: ComposeOptions(batch=9), "batch is 9"),
        (lambda: ComposeOptions(batch=2.0), "whole"),
        (lambda: ComposeOptions(layout="new"), "aligned, legacy"),
        (lambda: DiTSampling(steps=0), "steps is 0"),
        (lambda: DiTSampling(steps=8.5), "whole"),
        (lambda: DiTSampling(solver="rk4"), "solver is 'rk4'.* euler, heun, dpmpp_2m, sde"),
        (lambda: DiTSampling(guidance_mode="pag"), "'pag'.* apg, cfg, adg, adg_w_norm, adg_wo"),
        (lambda: DiTSampling(velocity_clamp=-1.0), "velocity_clamp is -1"),
        (lambda: DiTSampling(velocity_ema=1.0), "velocity_ema is 1.0"),
        (lambda: DiTSampling(retake=1.5), "retake is 1.5"),
        (lambda: DiTSampling(retake_seed=-1), "retake_seed is -1"),
        (lambda: Wavelet("both"), "dcw is 'both'.* off, low, high, double, pix"),
        (lambda: Wavelet("low", 2.0), "dcw_scaler is 2"),
        (lambda: Wavelet("low", 0.1, float("nan")), "dcw_high is nan"),
    ],
)
def test_odd_values_are_refused_by_name(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        make()


def test_what_can_be_meant_is_taken() -> None:
    import numpy as np

    assert plan(duration=7, seed=np.int64(3)).whole_seconds == 7
    assert Request(duration=np.float32(3), timesignature=4).bpm is None  # type: ignore[arg-type]
    assert Latents(torch.zeros(1, 0, 64)).values.numel() == 0
    assert Audio(torch.zeros(1, 6, 10, dtype=torch.float64), 8_000).seconds == 10 / 8_000


@pytest.mark.parametrize(
    ("seconds", "frames"),
    [(0.1 * 3 * 100, 750), (7.2, 180), (7.201, 181), (1.1 * 3, 83), (2.3 * 3, 173), (0.0, 0)],
)
def test_frames_hold_the_seconds_without_the_noise_of_arithmetic(
    seconds: float, frames: int
) -> None:
    """3.3 s are 82.5 frames and 6.9 s are 172.5; 30.000000000000004 s are 750 and no more."""
    assert frames_of(seconds) == frames


def test_every_whole_number_of_frames_comes_back() -> None:
    assert [frames_of(frames / 25) for frames in range(15_001)] == list(range(15_001))
