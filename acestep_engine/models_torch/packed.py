"""Linear layers for the few rows of a decode step on a CPU, over weights that oneDNN has packed.

A step reads every weight once, so its time is that of the bytes, if the product keeps up with the
memory: plain thin products do not. The layers live on the CPU, work alone (no bias) and know no
model. Dimension key: M rows · I inputs · O outputs.
"""

from __future__ import annotations

import functools
import logging
from typing import cast

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

ROWS = 2  # a song with CFG; oneDNN arranges the weights for about so many
REACH = 32_639.0  # 127 * 257: the largest value in two balanced digits of base 256
CENTRE = 32_896.5  # 128 * 257 makes both digits unsigned; the half rounds to the nearest
LEAST = 1e-30  # added to the step of a row, which may be all zeros
SLICE = 8_192  # outputs quantised at once, to bound the copy in between


class NarrowLinear(nn.Module):
    """bf16 products as bf16, from weights in the order that the processor wants."""

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__()
        self.weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), ROWS)
        self.nbytes = weight_OI.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight_OI, None, "none", [], "")


class Int8Linear(nn.Module):
    """Weights in 8 bits with a scale for each output; inputs in 16, as two digits of 8.

    The digits are two rows of one integer product, which is exact, so a row's result does not
    depend on the other rows. Only the weights lose: inputs keep 15 bits below the largest of a row.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__()
        codes_OI, self.scale_O = quantise(weight_OI)
        self.packed = torch.ops.onednn.qlinear_prepack(codes_OI, None)
        self.zero_O = torch.zeros(len(codes_OI), dtype=torch.int64)
        # Digits are stored with 128 added; what that adds to each product is known beforehand.
        self.bias_O = -128 * codes_OI.sum(1, dtype=torch.int32) * self.scale_O
        self.nbytes = codes_OI.nbytes + self.scale_O.nbytes

    def forward(self, x: Tensor) -> Tensor:
        x_MI = x.reshape(-1, x.shape[-1]).float()
        rows, inputs = x_MI.shape
        centre, least = _constants()
        step_M1 = torch.add(least, x_MI.abs().amax(-1, keepdim=True), alpha=1 / REACH)
        octets = torch.addcdiv(centre, x_MI, step_M1).to(torch.int32).view(torch.uint8)
        digits = octets.as_strided((2, rows, inputs), (1, 4 * inputs, 4))  # low, then high
        product = torch.ops.onednn.qlinear_pointwise(
            digits.reshape(2 * rows, inputs), 1.0, 0, self.packed, self.scale_O, self.zero_O,
            self.bias_O, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        low_MO, high_MO = product.view(2, rows, -1).unbind()
        out_MO = torch.add(low_MO, high_MO, alpha=256).mul_(step_M1)
        return out_MO.to(x.dtype).view(*x.shape[:-1], -1)


@functools.cache
def _constants() -> tuple[Tensor, Tensor]:
    return torch.tensor(CENTRE), torch.tensor(LEAST)


def quantise(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(codes -127 .. 127 as int8, float32 scale of each output): weight = codes * scale."""
    scale_O = weight_OI.abs().amax(1).float().clamp(min=LEAST) / 127
    parts = zip(weight_OI.split(SLICE), scale_O.split(SLICE), strict=True)
    codes = [(part.float() / scale[:, None]).round_().to(torch.int8) for part, scale in parts]
    return torch.cat(codes), scale_O


def pack(weight_OI: Tensor, bits: int) -> nn.Module | None:
    """The layer that is fast for this weight, or None where a plain one is.

    `bits`: 8 for integers, 0 to keep the values as they are.
    """
    if bits == 8:
        return Int8Linear(weight_OI)
    if weight_OI.dtype is torch.bfloat16 and narrow_works():
        return NarrowLinear(weight_OI)
    return None


def nbytes(module: nn.Module) -> int:
    """Memory of all weights below `module`, packed ones too."""
    plain = sum(p.numel() * p.element_size() for p in module.parameters())
    packed = (m.nbytes for m in module.modules() if isinstance(m, NarrowLinear | Int8Linear))
    return plain + sum(packed)


@functools.cache
def int8_works() -> bool:
    """Whether this build and processor multiply 8-bit integers without overflow, tried out."""
    weight_OI = torch.tensor([[1.0, -1.0], [1.0, 1.0]]).repeat(32, 512)
    x_MI = torch.ones(2, weight_OI.shape[1])
    return _gives(Int8Linear, weight_OI, x_MI, tolerance=1e-3)


@functools.cache
def narrow_works() -> bool:
    """Whether this build packs bf16 weights, tried out."""
    weight_OI = torch.ones(64, 64, dtype=torch.bfloat16)
    return _gives(NarrowLinear, weight_OI, torch.ones(2, 64, dtype=torch.bfloat16), tolerance=0.0)


def _gives(
    kind: type[NarrowLinear] | type[Int8Linear], weight: Tensor, x: Tensor, tolerance: float
) -> bool:
    try:
        out = cast(Tensor, kind(weight)(x))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.info("ACE-Step: %s does not work in this build of torch: %s", kind.__name__, error)
        return False
    return bool(((out - x @ weight.T).abs() <= tolerance * weight.shape[1]).all())
