"""Which copies of the weights stay in memory, and which go."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from acestep_engine.host import LocalHost
from acestep_engine.runtime import PrecisionWish, Wish
from acestep_engine.store import Store
from acestep_engine.types import ModelSpec


@pytest.fixture
def store() -> Store:
    return Store(LocalHost(show=False))


@pytest.fixture
def model(tiny_model: ModelSpec, tmp_path: Path) -> ModelSpec:
    """A model whose text encoder may be changed on the disk."""
    folder = shutil.copytree(tiny_model.text_encoder, tmp_path / "Qwen3-Embedding-0.6B")
    return replace(tiny_model, text_encoder=str(folder))


def at(model: ModelSpec, precision: PrecisionWish) -> ModelSpec:
    return replace(model, wish=Wish(device="cpu", precision=precision))


def precisions(store: Store) -> list[str]:
    return [component.key[-1] for component in store.loaded()]


def test_another_precision_takes_the_place_of_the_first(
    store: Store, tiny_model: ModelSpec
) -> None:
    for precision in ("fp32", "bf16", "fp32"):
        store.backend(at(tiny_model, precision), "vae")
        assert len(store.loaded()) == 1
    assert precisions(store) == ["torch.float32"]


def test_a_precision_that_another_model_uses_stays(store: Store, tiny_model: ModelSpec) -> None:
    other = replace(at(tiny_model, "fp32"), lm="")
    store.backend(other, "vae")
    store.backend(at(tiny_model, "bf16"), "vae")
    assert precisions(store) == ["torch.float32", "torch.bfloat16"]
    store.release(other, keep=(at(tiny_model, "bf16"),))
    assert precisions(store) == ["torch.bfloat16"]


def test_release_drops_the_precision_that_no_kept_model_uses(
    store: Store, tiny_model: ModelSpec
) -> None:
    before, now = at(tiny_model, "fp32"), at(tiny_model, "bf16")
    store.backend(before, "vae")
    store.release(before, keep=(now,))
    assert store.loaded() == []


def test_a_changed_file_leaves_no_old_copy(store: Store, model: ModelSpec) -> None:
    store.backend(model, "text_encoder")
    (old,) = store.loaded()
    file = Path(model.text_encoder) / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.weight"] *= 2
    save_file(tensors, file)
    store.backend(replace(model, lm=""), "text_encoder")
    (new,) = store.loaded()
    assert new is not old
    assert (new.module.norm.weight == old.module.norm.weight * 2).all()  # type: ignore[union-attr]
