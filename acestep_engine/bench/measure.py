"""What every benchmark needs: interleaved timing, bandwidth, and random weights made in memory.

Machines are shared and noisy, so a figure is the median of turns that alternate with the peer's.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import UnsupportedRuntime

Model = TypeVar("Model", bound=nn.Module)


def interleave(turns: int, calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each call in `turns` rounds of A B A B; one round before is not counted.

    A call is over when the device has done what it was given.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median(values: list[float]) -> float:
    return statistics.median(values)


def bandwidth(size: int = 1 << 28, turns: int = 5, device: torch.device | str = "cpu") -> float:
    """Bytes a second that `device` reads, by summing a large array; on a GPU also by copying it,
    where what is written counts as well, and the better of both is taken."""
    data = torch.ones(size // 8, dtype=torch.int64, device=device)
    calls: dict[str, Callable[[], object]] = {"read": lambda: data.sum()}
    if data.is_cuda:
        other = torch.empty_like(data)
        calls["copy"] = lambda: other.copy_(data)
    seconds = interleave(turns, calls)
    return max(size * (2 if name == "copy" else 1) / min(seconds[name]) for name in calls)


def random_model(
    build: Callable[[], Model],
    dtype: torch.dtype,
    seed: int = 0,
    scale: float = 0.02,
    device: torch.device | str = "cpu",
) -> Model:
    """A model of real size with random weights in `dtype`; norms are one, biases zero."""
    with torch.device("meta"):
        model = build()
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        value = torch.empty(parameter.shape, dtype=dtype, device=device)
        if parameter.ndim == 1:
            value.fill_(1.0 if leaf == "weight" else 0.0)
        else:
            value.normal_(0.0, scale, generator=generator)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    return model.eval()


def no_peer(package: str) -> UnsupportedRuntime:
    """What to raise where the package to measure against is missing."""
    return UnsupportedRuntime(
        f"The peer of this benchmark is {package}, which is not installed. "
        "Install the extra 'test', or run with --no-peer."
    )


def report(rows: list[dict[str, Any]], result: Mapping[str, Any]) -> str:
    """A table of `rows`, then `result` as the one last line of JSON."""
    lines = []
    if rows:
        names = list(rows[0])
        cells = [[_cell(row[name]) for name in names] for row in rows]
        widths = [max(len(n), *(len(c[i]) for c in cells)) for i, n in enumerate(names)]
        for line in [names, *cells]:
            lines.append("  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)))
    return "\n".join([*lines, json.dumps(result)])


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
