"""Attention by the kernels of flash-attn, on devices and in precisions that it takes.

It knows the package and its call conventions, but neither models nor how a cache is kept.
Dimension key: B rows · L tokens · H query heads · G key and value heads · K head dim · T positions.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)
AMPERE = (8, 0)  # compute capability from which version 2 of the package has kernels

SPLITS = 8
"""Chunks of the positions that are worked on side by side for one row.

The package would choose by the number of rows, so a song in a batch would be summed up in another
order than alone.
"""


@cache
def package() -> Any:
    """The package, imported once; None where it is missing or does not fit this machine."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < AMPERE:
        return None
    try:
        import flash_attn  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return None
    except ImportError as error:  # built for another torch
        logger.warning(
            "ACE-Step: flash-attn is installed, but cannot be imported (%s). Attention runs in "
            "torch; install a build for torch %s.",
            error,
            torch.__version__,
        )
        return None
    return flash_attn


def usable(x: Tensor) -> bool:
    """Whether tensors like `x` can go through the kernels."""
    return x.device.type in DEVICES and x.dtype in DTYPES and package() is not None


def causal(q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor) -> Tensor:
    """Each token sees itself and those before it, (B, L, H, K)."""
    return package().flash_attn_func(q_BLHK, k_BLGK, v_BLGK, causal=True)


def one_token(q_B1HK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, seen_B: Tensor) -> Tensor:
    """One query a row over the first `seen_B` (int32) positions of its cache, (B, 1, H, K)."""
    return package().flash_attn_with_kvcache(
        q_B1HK,
        k_BGTK.transpose(1, 2),
        v_BGTK.transpose(1, 2),
        cache_seqlens=seen_B,
        causal=True,
        num_splits=SPLITS,
    )
