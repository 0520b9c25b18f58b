"""The CPU's norm against torch's own, and against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acestep_engine.models_torch.cpu_norm import CpuRMSNorm, arrange

EPS = 1e-6
GENERATOR = torch.Generator().manual_seed(0)


def plain(width: int, dtype: torch.dtype) -> nn.RMSNorm:
    norm = nn.RMSNorm(width, eps=EPS, dtype=dtype)
    norm.weight.data = torch.randn(width, generator=GENERATOR).to(dtype)
    return norm


@pytest.mark.parametrize("shape", [(1, 64), (2, 7, 96), (1, 5, 3, 16)])
@pytest.mark.parametrize("size", [0.0, 1e-4, 1.0, 5e5])
def test_it_is_the_norm_of_torch(shape: tuple[int, ...], size: float) -> None:
    norm = plain(shape[-1], torch.float32)
    x = size * torch.randn(shape, generator=GENERATOR)
    before = x.clone()
    torch.testing.assert_close(CpuRMSNorm(norm)(x), norm(x), rtol=2e-6, atol=1e-7)
    assert torch.equal(x, before)


def test_half_precision_is_rounded_once() -> None:
    norm = plain(128, torch.bfloat16)
    x = torch.randn(3, 50, 128, generator=GENERATOR).to(torch.bfloat16)
    out = CpuRMSNorm(norm)(x)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight.double()
    assert out.dtype is torch.bfloat16
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001).all()


def test_every_norm_below_a_module_is_replaced_and_keeps_its_name() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.RMSNorm(4), nn.RMSNorm(4)))
    names = list(module.state_dict())
    arrange(module)
    assert list(module.state_dict()) == names
    assert not any(isinstance(part, nn.RMSNorm) for part in module.modules())
