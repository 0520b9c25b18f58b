"""What the engine keeps between its calls, and when it is made anew: weights, conditions."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from acestep_engine.backends.torch_eager import BUILDERS, TorchVelocity
from acestep_engine.engine import Engine
from acestep_engine.models_torch.dit import Prepared
from acestep_engine.types import Codes, DiTSampling, Latents, ModelSpec, Request

SHORT = Request(
    caption="calm piano", duration=2, bpm=90, keyscale="C major", timesignature="4", language="en"
)


def test_another_dit_seed_encodes_nothing_again(engine: Engine, tiny_model: ModelSpec) -> None:
    plan = engine.plan(tiny_model, SHORT)
    first = engine.render(tiny_model, plan, None, DiTSampling(seed=1))
    remembered = engine._renderer._remembered
    second = engine.render(tiny_model, plan, None, DiTSampling(seed=2))
    assert engine._renderer._remembered is remembered
    assert not torch.equal(first.values, second.values)


def test_a_file_that_changed_on_the_disk_is_read_again(
    engine: Engine, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    folder = tmp_path / "acestep-v15-turbo"
    shutil.copytree(tiny_model.dit, folder)
    model = replace(tiny_model, dit=str(folder))
    plan = engine.plan(model, SHORT)
    before = engine.render(model, plan).values
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.text_projector.weight"] *= 2
    save_file(tensors, folder / "model.safetensors")
    assert not torch.equal(engine.render(model, plan).values, before)


def test_released_weights_load_again(engine: Engine, tiny_model: ModelSpec) -> None:
    plan = engine.plan(tiny_model, SHORT)
    before = engine.render(tiny_model, plan)
    engine.release(tiny_model)
    assert engine.store.loaded() == []
    assert torch.equal(engine.render(tiny_model, plan).values, before.values)


def test_release_keeps_what_another_model_shares(
    engine: Engine, tiny_models: dict[str, ModelSpec]
) -> None:
    official, split = tiny_models["official"], tiny_models["comfy_split"]
    mixed = replace(split, vae=official.vae)
    engine.decode(official, Latents(torch.ones(1, 20, 64)))
    engine.release(official, keep=(mixed,))
    assert [part.name for part in engine.store.loaded()] == ["vae"]


@pytest.mark.parametrize("before", ["absent", "stored"])
def test_silence_that_changed_on_the_disk_is_read_again(
    engine: Engine, tiny_model: ModelSpec, tmp_path: Path, before: str
) -> None:
    folder = shutil.copytree(tiny_model.dit, tmp_path / "acestep-v15-turbo")
    model = replace(tiny_model, dit=str(folder))
    if before == "stored":
        torch.save(torch.zeros(1, 64, 20), folder / "silence_latent.pt")
    plan = engine.plan(model, SHORT)
    first = engine.render(model, plan).values
    torch.save(torch.ones(1, 64, 200), folder / "silence_latent.pt")
    assert not torch.equal(engine.render(model, plan).values, first)


def test_silence_follows_a_vae_that_changed_on_the_disk(
    engine: Engine, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model.vae, tmp_path / "vae")
    model = replace(tiny_model, vae=str(folder))
    plan = engine.plan(model, SHORT)
    first = engine.render(model, plan).values
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["encoder.conv2.bias"] += 1
    save_file(tensors, file)
    assert not torch.equal(engine.render(model, plan).values, first)


@pytest.mark.parametrize(("codes", "times"), [(None, 1), (Codes(((1,) * 10, (2,) * 10)), 2)])
def test_a_condition_is_prepared_once_for_all_its_seeds(
    engine: Engine,
    tiny_model: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
    codes: Codes | None,
    times: int,
) -> None:
    prepared = []

    class Counting(TorchVelocity):
        def prepare(self, encoder_BLD: torch.Tensor) -> Prepared:
            prepared.append(encoder_BLD)
            return super().prepare(encoder_BLD)

    monkeypatch.setitem(BUILDERS, "dit", (BUILDERS["dit"][0], Counting))
    plan = engine.plan(tiny_model, SHORT)
    songs = engine.render(tiny_model, plan, codes, DiTSampling(batch=2, seed=3)).values
    assert len(prepared) == times
    last = None if codes is None else Codes(codes.items[1:])
    assert torch.equal(
        engine.render(tiny_model, plan, last, DiTSampling(seed=4)).values[0], songs[1]
    )
