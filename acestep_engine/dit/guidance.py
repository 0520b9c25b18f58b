"""Guidance: how the velocities with and without the prompt become one.

Adaptive projected guidance (Sadat et al., arXiv 2410.02416) with a reverse momentum, as the base
and sft checkpoints were tuned with; plain guidance (Ho & Salimans, arXiv 2207.12598); and three
variants of guidance by angle between the estimates of the clean latents.
Knows neither schedule nor solver. Dimension key: B songs, T latent frames, C latent channels.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from ..types import GuidanceMode

MOMENTUM = -0.75
NORM_LIMIT = 2.5  # longest guidance direction per song and channel, over time
ANGLE_LIMITS = {"adg": 3.14 / 6, "adg_w_norm": 3.14 / 3, "adg_wo_clip": None}  # in rad
SAME_ANGLE = 1e-3  # below this sine, sines are taken for their angles


class Guide(Protocol):
    def __call__(
        self, cond_BTC: Tensor, null_BTC: Tensor, x_BTC: Tensor, t: float, ahead: bool = False
    ) -> Tensor:
        """Guided velocity at `x_BTC`. ahead: the momentum is used, but does not move on."""
        ...


def acts_at(t: float, interval: tuple[float, float]) -> bool:
    """Whether guidance is on at noise level `t` (1 is pure noise)."""
    start, end = interval
    return start <= t <= end


def guide(mode: GuidanceMode, scale: float) -> Guide:
    """The guidance of one render, with the momentum of `apg` inside."""
    momentum_BTC: Tensor | None = None

    def by_apg(
        cond_BTC: Tensor, null_BTC: Tensor, x_BTC: Tensor, t: float, ahead: bool = False
    ) -> Tensor:
        nonlocal momentum_BTC
        guided_BTC, moved_BTC = apg(cond_BTC, null_BTC, scale, momentum_BTC)
        momentum_BTC = momentum_BTC if ahead else moved_BTC
        return guided_BTC

    def by_angle(
        cond_BTC: Tensor, null_BTC: Tensor, x_BTC: Tensor, t: float, ahead: bool = False
    ) -> Tensor:
        # At t = 0 both estimates of the clean latents are x itself: there is no angle to turn.
        if mode == "cfg" or t == 0.0:
            return cfg(cond_BTC, null_BTC, scale)
        return adg(cond_BTC, null_BTC, x_BTC, t, scale, mode)

    return by_apg if mode == "apg" else by_angle


def apg(
    cond_BTC: Tensor, null_BTC: Tensor, scale: float, momentum_BTC: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Guided velocity, and the momentum to hand to the next call (None at the first)."""
    direction = cond_BTC - null_BTC
    if momentum_BTC is not None:
        direction = direction + MOMENTUM * momentum_BTC
    length = direction.norm(dim=1, keepdim=True)
    limited = direction * (NORM_LIMIT / length).clamp(max=1.0)  # 0 / 0 cannot occur: 2.5 / 0 is inf
    return cond_BTC + (scale - 1.0) * _orthogonal(limited, cond_BTC), direction


def cfg(cond_BTC: Tensor, null_BTC: Tensor, scale: float) -> Tensor:
    """Away from the velocity without the prompt, straight on through the one with it."""
    return null_BTC + scale * (cond_BTC - null_BTC)


def adg(
    cond_BTC: Tensor,
    null_BTC: Tensor,
    x_BTC: Tensor,
    t: float,
    scale: float,
    mode: GuidanceMode = "adg",
) -> Tensor:
    """Turns each frame of the clean latents further by the angle between both branches, t > 0."""
    weight = max(scale - 1.0, 0.0) + 1e-3
    clean_BTC, null_clean_BTC = x_BTC - t * cond_BTC, x_BTC - t * null_BTC
    exact = _exact(x_BTC)
    cosine = cosine_similarity(clean_BTC.to(exact), null_clean_BTC.to(exact), dim=-1)
    angle_BT1 = cosine.clamp(-1.0 + 1e-6, 1.0 - 1e-6).acos().unsqueeze(-1)
    turned_BT1 = weight * angle_BT1
    limit = ANGLE_LIMITS[mode]
    if limit is not None:
        turned_BT1 = turned_BT1.clamp(-limit, limit)
    sine = angle_BT1.sin()
    ratio_BT1 = torch.where(sine > SAME_ANGLE, turned_BT1.sin() / sine, weight)

    apart_BTC = clean_BTC - null_clean_BTC
    squared = (null_clean_BTC**2).sum(dim=-1, keepdim=True) + 1e-8
    along = (apart_BTC * null_clean_BTC).sum(dim=-1, keepdim=True) / squared
    across_BTC = apart_BTC - along * null_clean_BTC
    dtype = x_BTC.dtype
    guided_BTC = turned_BT1.cos().to(dtype) * clean_BTC + ratio_BT1.to(dtype) * across_BTC
    if mode == "adg_w_norm":
        longer = guided_BTC.norm(dim=1, keepdim=True) / clean_BTC.norm(dim=1, keepdim=True)
        guided_BTC = guided_BTC / longer
    return (x_BTC - guided_BTC) / t


def _orthogonal(vector_BTC: Tensor, to_BTC: Tensor) -> Tensor:
    """The part of `vector_BTC` at right angles to `to_BTC` over time, for each channel."""
    exact = _exact(vector_BTC)
    vector, axis = vector_BTC.to(exact), normalize(to_BTC.to(exact), dim=1)
    parallel = (vector * axis).sum(dim=1, keepdim=True) * axis
    return (vector - parallel).to(vector_BTC.dtype)


def _exact(tensor: Tensor) -> torch.dtype:
    """float64 as in the reference. Metal and some Intel GPUs have none; float32 costs 1e-6."""
    return torch.float64 if tensor.device.type in ("cpu", "cuda") else torch.float32
