"""Numbers that every backend needs, in numpy float64: rotary and timestep frequencies, FSQ tables.

Both torch and MLX models take their constants from here, so that they cannot drift apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def rope_frequencies(head_dim: int, theta: float) -> FloatArray:
    """Inverse frequencies theta^(-2i/d), shape (head_dim / 2,)."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def timestep_frequencies(half: int = 128, max_period: float = 10_000.0) -> FloatArray:
    """Frequencies exp(-ln(max_period) i / half) of the timestep sinusoid, shape (half,)."""
    return np.exp(-np.log(max_period) * np.arange(half, dtype=np.float64) / half)


TIMESTEP_SCALE = 1_000.0  # the embedder sees t * 1000


def is_sliding(layer: int) -> bool:
    """Even layers attend inside the window |i - j| <= sliding_window, odd layers everywhere."""
    return layer % 2 == 0


def fsq_basis(levels: tuple[int, ...]) -> NDArray[np.int64]:
    """Place values of the mixed-radix code index: [1, 8, 64, 512, 2560, 12800]."""
    return np.cumprod(np.array((1, *levels[:-1]), dtype=np.int64))


def codebook_size(levels: tuple[int, ...]) -> int:
    return int(np.prod(np.array(levels, dtype=np.int64)))


def fsq_levels_of(index: NDArray[np.int64], levels: tuple[int, ...]) -> NDArray[np.int64]:
    """Integer level per dimension of each code index, shape index.shape + (dims,)."""
    return (index[..., None] // fsq_basis(levels)) % np.array(levels, dtype=np.int64)
