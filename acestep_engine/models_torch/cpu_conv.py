"""Convolutions for the CPU: the same sums as torch's layers, with channels last in memory.

There oneDNN is several times faster, and nothing is copied from one layout to another between the
layers. Shapes stay those of torch, only strides differ, so a tensor made here goes anywhere. It
knows single layers, no model. Dimension key: B items · C channels · S samples · K kernel.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONV, TRANSPOSED = (0, 2, 1), (2, 1, 0)  # dimensions of a weight, outermost in memory first


def arrange(module: nn.Module) -> None:
    """Lay out the weights of `module` as the functions below read them fastest.

    Only strides change: the functions take weights that were not laid out as well, and copy them.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv1d | nn.ConvTranspose1d):
            order = TRANSPOSED if isinstance(layer, nn.ConvTranspose1d) else CONV
            weight = layer.weight.detach()
            if not weight.permute(order).is_contiguous():
                back = sorted(range(3), key=order.__getitem__)
                layer.weight.data = weight.permute(order).contiguous().permute(back)
    give_back()


def give_back() -> None:
    """Let the system have the memory of freed tensors: called where their width changes.

    glibc keeps the places of tensors below 32 MiB, and seldom uses them again for wider ones.
    """
    if trim := _trim():
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def convolve(conv: nn.Conv1d, x_BCS: Tensor) -> Tensor:
    (stride,), (padding,), (dilation,) = conv.stride, conv.padding, conv.dilation
    if stride > 1:
        give_back()
    weight = conv.weight.unsqueeze(2)  # conv1d itself would go through the other layout
    place = (1, stride), (0, int(padding)), (1, dilation)
    return F.conv2d(x_BCS.unsqueeze(2), weight, conv.bias, *place).squeeze(2)


def add_pointwise(conv: nn.Conv1d, x_BCS: Tensor, sum_BCS: Tensor) -> Tensor:
    """`sum_BCS`, to which `conv` (kernel 1) of `x_BCS` has been added."""
    weight_CC, bias = conv.weight[:, :, 0].T, conv.bias
    assert bias is not None
    for x_SC, sum_SC in zip(x_BCS.transpose(1, 2), sum_BCS.transpose(1, 2), strict=True):
        sum_SC.addmm_(x_SC, weight_CC).add_(bias)
    return sum_BCS


def spread(conv: nn.ConvTranspose1d, x_BCS: Tensor) -> Tensor:
    """A transposed convolution whose kernel is two strides long, as two products.

    A sample becomes two strides of samples, the second of which is the next one's first.
    """
    give_back()
    batch, _, samples = x_BCS.shape
    stride, padding = conv.stride[0], int(conv.padding[0])
    inner, outer, _ = conv.weight.shape
    halves = conv.weight.permute(TRANSPOSED).reshape(2, stride * outer, inner)
    assert conv.bias is not None
    bias = conv.bias.repeat(stride)
    out_BSC = x_BCS.new_empty(batch, samples + 1, stride * outer)
    for x_SC, out_SC in zip(x_BCS.transpose(1, 2), out_BSC, strict=True):
        torch.addmm(bias, x_SC, halves[0].T, out=out_SC[:-1])
        out_SC[-1] = bias
        out_SC[1:].addmm_(x_SC, halves[1].T)
    out_BSC = out_BSC.view(batch, -1, outer)
    return out_BSC[:, padding : out_BSC.shape[1] - padding].transpose(1, 2)
