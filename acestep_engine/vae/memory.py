"""What a window of the VAE takes in memory, and the largest tile that a budget allows.

Arithmetic on sizes: no tensors, no devices. Songs of a batch run one after the other, so neither
their number nor their length counts, only the window. A prediction is an estimate without margin:
on a CPU in fp32 and bf16 it is fitted, elsewhere it is a guess by the same figures.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import Literal

from ..config import VAEConfig
from ..errors import InvalidRequest, OutOfMemory

logger = logging.getLogger(__name__)

Op = Literal["decode", "encode"]

LADDER = (512, 384, 256, 192, 128, 64)  # latent frames of a tile
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MIB = 1 << 20

# How many tensors of the widest stage are alive at once (the code needs three: what is summed up,
# its activation, a convolution's result), and bytes that kernels keep, whatever the window, for
# each value of the largest weight. Both are fitted by hand to the peak of resident memory that
# `bench vae` counts: the VAE at its real size with random weights, on a CPU under Linux,
#   decode: fp32 at 64, 128, 256 and 512 frames, bf16 at 64, 256 and 512;
#   encode: fp32 and bf16 at 64 and 256.
# What comes out is between 10 % too low and 14 % too high there (encode in bf16 is the worst at
# both ends; decode in fp32 stays within 6 %), on one thread. On two, whose scratch memory is used
# again sooner, a decode was seen to take up to a quarter less than predicted.
# Not measured, only estimates: fp16, which takes the figures of bf16, and every device but the CPU.
# MLX is known to need several times as much where it convolves on the CPU.
COSTS: dict[tuple[Op, str], tuple[int, float]] = {
    ("decode", "fp32"): (3, 5.8),
    ("decode", "bf16"): (4, 3.0),
    ("decode", "fp16"): (4, 3.0),
    ("encode", "fp32"): (3, 1.6),
    ("encode", "bf16"): (3, 1.9),
    ("encode", "fp16"): (3, 1.9),
}


@dataclass(frozen=True, slots=True)
class Window:
    """A tile in latent frames, and the bytes it is expected to take beside the weights."""

    tile: int
    peak: int


@dataclass(frozen=True, slots=True)
class Budget:
    """tile: asked for, 0 leaves it to the budget, which then gives `most` frames at most.

    limit: bytes, 0: unknown. strict: the user named the limit, so even a wished tile must keep it.
    guess: the estimate was not measured on such a device, so what seems too large is tried anyway.
    """

    tile: int
    most: int
    limit: int
    strict: bool = False
    guess: bool = False


def peak_bytes(op: Op, tile: int, config: VAEConfig, precision: str) -> int:
    """Bytes at the peak of one window of `tile` frames, beside the weights: an estimate."""
    base = config.decoder_channels if op == "decode" else config.encoder_hidden_size
    widths = [base * multiple for multiple in (1, *config.channel_multiples)]
    samples = math.prod(config.downsampling_ratios)
    widest = largest = 0
    for below, above, stride in zip(
        widths[:-1], widths[1:], config.downsampling_ratios, strict=True
    ):
        widest = max(widest, below * samples)  # residual units run on the side with more samples
        largest = max(largest, below * above * 2 * stride)
        samples //= stride
    live, scratch = COSTS[op, precision]
    return round(live * widest * tile * ITEM_BYTES[precision] + scratch * largest)


def choose(op: Op, frames: int, config: VAEConfig, precision: str, budget: Budget) -> Window:
    """The largest tile for a song of `frames` that `budget` allows; logged with its peak."""

    def window(tile: int) -> Window:
        return Window(tile, peak_bytes(op, min(tile, frames), config, precision))

    if budget.tile:
        tiles = [budget.tile]
    else:
        tiles = [budget.most, *(tile for tile in LADDER if tile < budget.most)]
    free = math.inf if budget.limit == 0 or (budget.tile and not budget.strict) else budget.limit
    fitting = [found for found in map(window, tiles) if found.peak <= free]
    if not fitting and budget.guess and not budget.strict:
        fitting = [window(tiles[-1])]
    if not fitting:
        raise OutOfMemory(_complaint(op, window(tiles[-1]), budget))
    best = fitting[0]
    logger.info(
        "ACE-Step: VAE %s in tiles of %d frames, %d MiB at the peak%s",
        *(op, best.tile, best.peak // MIB),
        f" of {budget.limit // MIB} MiB" if budget.limit else "",
    )
    return best


def _complaint(op: Op, least: Window, budget: Budget) -> str:
    named, size = budget.strict, "A" if budget.tile else "Even the smallest"
    return (
        f"VAE {op}: {size} tile of {least.tile} frames needs {least.peak // MIB + 1} MiB, but "
        f"{'the limit' if named else 'the free memory'} is {budget.limit // MIB} MiB. "
        f"{'Raise the limit' if named else 'Close other programs'}"
        f"{', choose a smaller tile' if budget.tile else ''}, or choose bf16."
    )


def read_size(text: str) -> int:
    """Bytes of "900 MiB", "1.5 GiB" (also M, MB, G, GB; a bare number is MiB); 0 is automatic."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([mg])(?:i?b)?)?", text.strip(), re.IGNORECASE)
    if not found:
        raise InvalidRequest(f"'{text}' is no amount of memory. Write it as 900MiB or 1.5GiB.")
    unit = (found[2] or "m").lower()
    return round(float(found[1]) * (MIB if unit == "m" else 1024 * MIB))
