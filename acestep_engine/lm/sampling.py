"""From scores to a token: guidance, penalty, filters and the draw, as free functions.

Works on candidates only: what is not allowed is not there, so no -inf ever enters the guidance.
Each draw takes one uniform number drawn beforehand on the CPU, so a seed gives the same tokens
whatever else runs. Knows no ids. Dimension key: B rows · V candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import LMSampling

MANY = 4_096  # candidates from which a CPU finds the nucleus faster without a full sort
GREEDY = 1e-5  # temperatures below it mean the likeliest candidate; float32 would overflow


def uniforms(seed: int, steps: int, device: torch.device) -> Tensor:
    """One number in [0, 1) per step, shape (steps,), from a generator of its own."""
    generator = torch.Generator("cpu").manual_seed(seed)
    numbers = torch.rand(steps, generator=generator, dtype=torch.float64)
    return numbers.to(device, _precise(device))


def guide(conditional_BV: Tensor, unconditional_BV: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance (Ho and Salimans, 2022) on the scores."""
    return unconditional_BV + scale * (conditional_BV - unconditional_BV)


def penalise(logits_BV: Tensor, seen_V: Tensor, penalty: float) -> Tensor:
    """Weaken candidates already drawn: scores from 0 up are divided, those below multiplied."""
    weaker = torch.where(logits_BV >= 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_V, weaker, logits_BV)


def distribution(logits_BV: Tensor, sampling: LMSampling) -> Tensor:
    """Weights that remain after temperature (GREEDY or more), top-k, min-p and top-p.

    They stand in the candidates' own order and need not sum to 1. Candidates of equal weight stay
    or go together, so that no order among them can matter.
    """
    warmed = logits_BV / sampling.temperature
    scaled = logits_BV if sampling.temperature_last else warmed
    weights = scaled.softmax(-1)
    if 0 < sampling.top_k < scaled.shape[-1]:
        floor = scaled.topk(sampling.top_k).values[:, -1:]
        weights = torch.where(scaled >= floor, weights, 0)
    if sampling.min_p > 0:
        best = weights.amax(-1, keepdim=True)
        weights = torch.where(weights >= sampling.min_p * best, weights, 0)
    if sampling.top_p < 1:
        weights = torch.where(weights >= _nucleus_floor(weights, sampling.top_p), weights, 0)
    if sampling.temperature_last:
        weights = torch.where(weights > 0, warmed.softmax(-1), 0)
    return weights.to(_precise(weights.device))


def draw(logits_BV: Tensor, uniform: Tensor, sampling: LMSampling) -> Tensor:
    """One candidate per row, (B,), by inversion of the cumulative distribution at `uniform`.

    `uniform`: a number for all rows, or one each as (B, 1).
    """
    if sampling.temperature < GREEDY:
        return logits_BV.argmax(-1)
    cumulative = distribution(logits_BV, sampling).cumsum(-1)
    total = cumulative[:, -1:]
    place = torch.searchsorted(cumulative, uniform * total, right=True)
    # Rounding may carry uniform * total up to the total; the last candidate with weight is meant.
    last = (cumulative < total).sum(-1, keepdim=True)
    return torch.minimum(place, last).squeeze(-1)


def _nucleus_floor(weights_BV: Tensor, top_p: float) -> Tensor:
    """Least weight that stays under top-p (Holtzman et al., 2020), (B, 1).

    A candidate goes where those heavier than it already hold more than `top_p` of the whole.
    """
    if weights_BV.device.type == "cpu" and weights_BV.shape[-1] > MANY:
        floors = [_floor_by_buckets(weights_V, top_p) for weights_V in weights_BV]
        return torch.stack(floors)[:, None]
    return _floor_by_sorting(weights_BV, weights_BV.new_zeros(()), weights_BV.sum(-1), top_p)[
        :, None
    ]


def _floor_by_sorting(weights_BV: Tensor, above: Tensor, total_B: Tensor, top_p: float) -> Tensor:
    """Least weight that stays, (B,), where `above` is held by heavier candidates elsewhere."""
    ordered = weights_BV.sort(-1, descending=True).values
    precise = ordered.to(_precise(ordered.device))
    before = precise.cumsum(-1) - precise + above
    kept = (before <= top_p * total_B[..., None]).sum(-1, keepdim=True)
    return ordered.gather(-1, (kept - 1).clamp(min=0)).squeeze(-1)


def _floor_by_buckets(weights_V: Tensor, top_p: float) -> Tensor:
    """The same without sorting 64,000 numbers: only the bucket of the floor is sorted.

    Buckets are the upper halves of the float32 bits, which are in the order of the numbers.
    """
    keys_V = (weights_V.contiguous().view(torch.int32) >> 16).clamp(min=0).long()
    mass = torch.bincount(keys_V, weights=weights_V.double(), minlength=1 << 15)
    upward = mass.flip(0).cumsum(0).flip(0)
    total, above = upward[0], upward - mass
    bucket = ((mass > 0) & (above <= top_p * total)).int().argmax()  # the lowest that is reached
    inside = weights_V[keys_V == bucket]
    if inside.numel() == 0:  # not a number: the loop says so
        return weights_V.new_zeros(())
    return _floor_by_sorting(inside, above[bucket], total, top_p)


def _precise(device: torch.device) -> torch.dtype:
    """The widest float: 64,000 weights summed up in float32 would lose the rare ones."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32
