"""Tiny models with random weights, and how to hand the same weights to another implementation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
Tensors = dict[str, Tensor]

torch.set_num_threads(1)

RENAMES = (
    (r"^proj_in\.1\.", "proj_in_conv."),
    (r"^proj_out\.1\.", "proj_out_conv."),
    (r"\.([qkv])_proj\.", r".to_\1."),
    (r"\.o_proj\.", ".to_out.0."),
    (r"\.([qk])_norm\.", r".norm_\1."),
)


def random_tensor(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Values of the size that keeps activations near 1, so that no term of a sum hides another."""
    values = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * values
    if name.endswith(("bias", "alpha", "beta", "table", "token", "tokens", "emb")):
        return 0.3 * values
    return values / shape[1:].numel() ** 0.5


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    def build(model_class: type[Model], config: Any, seed: int = 0, **options: Any) -> Model:
        with torch.device("meta"):
            module = model_class(config, **options)
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: random_tensor(name, tensor.shape, generator)
            for name, tensor in module.state_dict().items()
        }
        module.load_state_dict(tensors, assign=True)
        return module.eval().requires_grad_(False)

    return build


@pytest.fixture(scope="session")
def randn() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(1234)
    return lambda *shape: torch.randn(shape, generator=generator)


@pytest.fixture(scope="session")
def gap() -> Callable[[Tensor, Tensor], float]:
    """Largest difference, relative to the largest value of the oracle."""
    return lambda ours, oracle: float((ours - oracle).abs().max() / oracle.abs().max())


@pytest.fixture(scope="session")
def to_diffusers() -> Callable[[nn.Module], Tensors]:
    def convert(module: nn.Module) -> Tensors:
        renamed = {}
        for name, tensor in module.state_dict().items():
            for pattern, new in RENAMES:
                name = re.sub(pattern, new, name)
            renamed[name] = tensor
        return renamed

    return convert
