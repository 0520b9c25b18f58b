"""Shared fixtures: tiny real models on disk, one per layout, written once per test run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from acestep_engine.engine import Engine
from acestep_engine.host import LocalHost
from acestep_engine.lm import grammar
from acestep_engine.types import ModelSpec
from acestep_engine.weights.tiny import write_tiny

torch.set_num_threads(1)

LAYOUTS = ("official", "comfy_split", "comfy_aio", "diffusers")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    """The same tiny model in each of the four layouts."""
    root = tmp_path_factory.mktemp("tiny")
    return {layout: write_tiny(Path(root / layout), layout) for layout in LAYOUTS}


@pytest.fixture(scope="session")
def tiny_model(tiny_models: dict[str, ModelSpec]) -> ModelSpec:
    return tiny_models["official"]


@pytest.fixture(scope="module")
def short_captions() -> Iterator[None]:
    """Random weights never end a caption, so its limit is what it costs: 60 tokens, not 512."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "CAPTION_TOKENS", 60)
        yield


@pytest.fixture
def engine() -> Engine:
    return Engine(LocalHost(show=False))
