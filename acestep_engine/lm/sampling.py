"""From scores to a token: guidance, penalty, filters and the draw, as free functions.

Works on candidates only: what is not allowed is not there, so no -inf ever enters the guidance.
Each draw takes one uniform number drawn beforehand on the CPU, so a seed gives the same tokens
whatever else runs. Knows no ids. Dimension key: B rows · V candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import LMSampling

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


def distribution(logits_BV: Tensor, sampling: LMSampling) -> tuple[Tensor, Tensor | None]:
    """What remains after temperature (GREEDY or more), top-k, min-p and top-p.

    Returns weights that need not sum to 1, and the candidate that each belongs to, None for all in
    their own order. Sorts only where top-p needs it; with top-k that is among the k best.
    """
    scaled = logits_BV / sampling.temperature
    candidates = None
    if 0 < sampling.top_k < scaled.shape[-1]:
        scaled, candidates = scaled.topk(sampling.top_k)
    elif sampling.top_p < 1:
        scaled, candidates = scaled.sort(descending=True)
    weights = scaled.softmax(-1).to(_precise(scaled.device))
    if sampling.min_p > 0:
        best = weights.amax(-1, keepdim=True)
        weights = torch.where(weights >= sampling.min_p * best, weights, 0)
    if sampling.top_p < 1:
        weights = _nucleus(weights, sampling.top_p)
    return weights, candidates


def draw(logits_BV: Tensor, uniform: Tensor, sampling: LMSampling) -> Tensor:
    """One candidate per row, (B,), by inversion of the cumulative distribution at `uniform`."""
    if sampling.temperature < GREEDY:
        return logits_BV.argmax(-1)
    weights, candidates = distribution(logits_BV, sampling)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    place = torch.searchsorted(cumulative, uniform * total, right=True)
    # Rounding may carry uniform * total up to the total; the last candidate with weight is meant.
    last = (cumulative < total).sum(-1, keepdim=True)
    place = torch.minimum(place, last)
    chosen = place if candidates is None else candidates.gather(-1, place)
    return chosen.squeeze(-1)


def _nucleus(weights_BV: Tensor, top_p: float) -> Tensor:
    """Top-p (Holtzman et al., 2020) on descending weights; the first always stays.

    A candidate goes where those before it already weigh more than `top_p` of the whole.
    """
    cumulative = weights_BV.cumsum(-1)
    before = cumulative - weights_BV
    return torch.where(before <= top_p * cumulative[:, -1:], weights_BV, 0)


def _precise(device: torch.device) -> torch.dtype:
    """The widest float: 64,000 weights summed up in float32 would lose the rare ones."""
    return torch.float32 if device.type == "mps" else torch.float64
