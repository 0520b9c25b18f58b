"""The same tiny weights behind both backends. Without the extra `mlx` these tests fail.

On Linux MLX computes on the CPU; nothing here tells how fast, exact or large it is on a Mac.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")  # else every shape calls the C++ compiler
os.environ.setdefault("MLX_ENABLE_TF32", "0")
try:
    import mlx.core  # noqa: F401
except ImportError as error:
    raise ImportError("These tests need MLX: pip install -e '.[mlx,test]'") from error

from acestep_engine.backends import mlx as backends
from acestep_engine.backends import torch_eager
from acestep_engine.backends.mlx_load import Bits, build
from acestep_engine.types import ModelSpec
from acestep_engine.weights.keymaps import Style
from acestep_engine.weights.load import Tensors, fill, read
from acestep_engine.weights.parts import Role
from acestep_engine.weights.shapes import config_of
from acestep_engine.weights.sources import Source, locate
from acestep_engine.weights.tiny import write_tiny

Pair = tuple[Any, Any]
STYLES: dict[Role, Style] = {"dit": "bare", "condition_encoder": "diffusers", "vae": "diffusers"}
"""How names are read that stand without a prefix, where that is not the official way."""


def in_torch(role: Role, config: Any, tensors: Tensors, dtype: torch.dtype) -> Any:
    model_class, backend_class = torch_eager.BUILDERS[role]
    with torch.device("meta"):
        module = model_class(config)
    fill(module, tensors, dtype)
    backend_class.finish(module, dtype)
    return backend_class(module.eval().requires_grad_(False), "cpu", dtype)


def in_mlx(
    role: Role, config: Any, tensors: Tensors, dtype: torch.dtype, bits: Bits | None = None
) -> Any:
    _, backend_class = backends.BUILDERS[role]
    return backend_class(build(role, config, tensors, dtype, bits), "cpu", dtype)


@pytest.fixture(scope="session")
def stored(tiny_model: ModelSpec) -> Callable[..., tuple[Tensors, Any]]:
    """The tensors of a part of the tiny model, or of another, and its sizes."""

    def stored(role: Role, spec: ModelSpec = tiny_model) -> tuple[Tensors, Any]:
        source = locate(spec, role)
        tensors = read(source)
        return tensors, config_of(role, tensors.shapes, source.config)

    return stored


@pytest.fixture(scope="session")
def twins() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(role, sizes, tensors, precision) to a backend: torch's and MLX's."""
    return in_torch, in_mlx


@pytest.fixture(scope="session")
def pair(tiny_model: ModelSpec, stored: Callable[..., Any]) -> Callable[..., Pair]:
    """Torch and MLX backend of a part of the tiny model, or of another."""
    made: dict[Any, Pair] = {}

    def pair(role: Role, dtype: torch.dtype = torch.float32, spec: ModelSpec = tiny_model) -> Pair:
        if (key := (role, dtype, spec)) not in made:
            tensors, config = stored(role, spec)
            made[key] = (
                in_torch(role, config, tensors, dtype),
                in_mlx(role, config, tensors, dtype),
            )
        return made[key]

    return pair


@pytest.fixture(scope="session")
def xl_model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return write_tiny(tmp_path_factory.mktemp("xl"), "official", xl=True, lm=False)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Tensors]:
    """Tensors under official names, by way of a file."""

    def saved(role: Role, table: dict[str, Tensor]) -> Tensors:
        path = tmp_path / f"{role}.safetensors"
        save_file(table, path)
        return read(Source(role, (path,), "comfy_split", STYLES.get(role, "official"), ""))

    return saved


@pytest.fixture
def randn() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(1234)
    return lambda *shape: torch.randn(shape, generator=generator)


@pytest.fixture(scope="session")
def gap() -> Callable[[Tensor, Tensor], float]:
    """Largest difference, relative to the largest value of the oracle."""
    return lambda ours, oracle: float((ours - oracle).abs().max() / oracle.abs().max())
