"""What a window of the VAE takes in memory, and the largest tile that a budget allows.

Arithmetic on sizes: no tensors, no devices. Songs of a batch run one after the other, so neither
their number nor their length counts, only the window. A prediction is an estimate without margin:
on a CPU in fp32 and bf16 it is checked by measurement, elsewhere it is a guess by the same figures.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import Literal

from ..config import VAEConfig
from ..errors import InvalidRequest, OutOfMemory
from .tiling import DECODE_OVERLAP, ENCODE_OVERLAP, plan_tiles

logger = logging.getLogger(__name__)

Op = Literal["decode", "encode"]

LADDER = (512, 384, 256, 192, 128, 64)  # latent frames of a tile
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MIB = 1 << 20
UNIT_KERNEL = 7  # of the wide convolution in a residual unit

# The peak lies in a convolution of a residual unit: what is summed up, its activation and the
# result are alive then, each as wide as the stage. The decoder still holds what the stage was made
# from. Every convolution also copies its weight; where many channels meet, that is most of all.
# On a CPU under Linux with two threads, in fp32 and bf16, what `bench vae` counts for random
# weights of the real size was within 13 % of this, at 62 to 509 frames.
# Not measured, only estimates: fp16 and every device but the CPU. MLX is known to need several
# times as much where it convolves on the CPU.
# bf16 tensors are small enough for the allocator to keep some that are free: half a tensor more.
TENSORS = {"fp32": 3.0, "bf16": 3.5, "fp16": 3.5}
FIXED = 50 * MIB  # code that is loaded, or made for the sizes at hand, at the first use


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


def peak_bytes(op: Op, frames: int, config: VAEConfig, precision: str) -> int:
    """Bytes at the peak of one window of `frames`, beside the weights: an estimate."""
    base = config.decoder_channels if op == "decode" else config.encoder_hidden_size
    widths = [base * multiple for multiple in (1, *config.channel_multiples)]
    samples = frames * math.prod(config.downsampling_ratios)
    most = 0.0  # values alive at once
    for below, above, stride in zip(
        widths[:-1], widths[1:], config.downsampling_ratios, strict=True
    ):
        wide, narrow = below * samples, above * samples // stride  # tensors at the two ends
        held = narrow if op == "decode" else 0
        most = max(most, TENSORS[precision] * wide + held + UNIT_KERNEL * below * below)
        if op == "encode":
            most = max(most, wide + narrow + 2 * stride * below * above)
        samples //= stride
    return round(most * ITEM_BYTES[precision]) + FIXED


def window_frames(op: Op, tile: int, frames: int) -> int:
    """Frames of the windows that a song of `frames` is cut into: at most `tile`, often fewer."""
    overlap = DECODE_OVERLAP if op == "decode" else ENCODE_OVERLAP
    first = plan_tiles(frames, tile, overlap)[0]
    return first.window_stop - first.window_start


def choose(op: Op, frames: int, config: VAEConfig, precision: str, budget: Budget) -> Window:
    """The largest tile for a song of `frames` that `budget` allows; logged with its peak."""

    def window(tile: int) -> Window:
        return Window(tile, peak_bytes(op, window_frames(op, tile, frames), config, precision))

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
