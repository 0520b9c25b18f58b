"""The LoRA node: what it offers, what it says, and that it leaves no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from acestep_engine.types import ModelSpec

LAYER = "layers.0.self_attn.q_proj"
SECONDS = 2.0


def write(path: Path, scale: float = 4.0, prefix: str = "diffusion_model.decoder.") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(8)
    up, down = (torch.randn(shape, generator=generator) for shape in ((32, 4), (4, 32)))
    table = {f"{prefix}{LAYER}.lora_B.weight": scale * up, f"{prefix}{LAYER}.lora_A.weight": down}
    save_file(table, path)


@pytest.fixture
def loras(models: Path) -> Path:
    """A file and a PEFT folder."""
    write(models / "loras" / "style.safetensors")
    folder = models / "loras" / "trained" / "final"
    write(folder / "adapter_model.safetensors", prefix="base_model.model.")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    return models / "loras"


@pytest.fixture
def model(run: Any, models: Path, offer: Any, tiny_models: dict[str, ModelSpec]) -> Any:
    (handle,) = run("ACEStepLoad", **offer(models, "official", tiny_models["official"]))
    return handle


def song(run: Any, model: Any) -> torch.Tensor:
    words = {"caption": "calm piano", "lyrics": "la la", "duration": SECONDS, "think": False}
    plan, *_ = run("ACEStepCoTPlanner", model=model, bpm=90, **words)
    (latent,) = run("ACEStepDiTSampler", model=model, plan=plan, seed=4, steps=2)
    return latent["samples"]


def test_files_and_trained_folders_are_offered(pack: Any, loras: Path) -> None:
    options = pack("nodes.lora").choices()
    assert options[0] == "trained/final"
    assert "style.safetensors" in options


def test_the_list_is_never_empty(pack: Any, models: Path) -> None:
    node = pack("nodes.lora")
    assert node.choices() == [node.NOTHING]
    assert node.path_of(node.NOTHING) is None


def test_adapters_stack_and_say_what_matched(run: Any, loras: Path, model: Any) -> None:
    once, report = run("ACEStepLoRA", model=model, adapter="trained/final", strength=0.5)
    assert "matched 1 of 1 weights, LoRA, rank 4, alpha 8 (from adapter_config.json)" in report
    assert "strength 0.5" in report
    twice, report = run("ACEStepLoRA", model=once, adapter="style.safetensors")
    assert "no alpha anywhere" in report
    assert [lora.strength for lora in twice.spec.loras] == [0.5, 1.0]
    assert model.spec.loras == ()


def test_a_song_changes_with_the_node_and_is_the_old_one_without(
    run: Any, loras: Path, model: Any
) -> None:
    before = song(run, model)
    changed, _ = run("ACEStepLoRA", model=model, adapter="trained/final", strength=3.0)
    assert (song(run, changed) - before).abs().max() > 1e-3
    still, _ = run("ACEStepLoRA", model=model, adapter="trained/final", strength=0.0)
    assert torch.equal(song(run, still), before)
    assert torch.equal(song(run, model), before)


def test_weights_with_an_adapter_leave_with_their_handle(
    run: Any, pack: Any, loras: Path, model: Any
) -> None:
    song(run, model)
    store = pack("nodes.host").engine().store
    plain = set(map(id, store.loaded()))
    changed, _ = run("ACEStepLoRA", model=model, adapter="style.safetensors")
    song(run, changed)
    assert len(store.loaded()) == len(plain) + 1
    del changed
    assert set(map(id, store.loaded())) == plain


def test_a_missing_adapter_is_named_with_the_cure(run: Any, loras: Path, model: Any) -> None:
    with pytest.raises(Exception, match=r"'gone\.safetensors' is missing from models/loras"):
        run("ACEStepLoRA", model=model, adapter="gone.safetensors")


def test_a_foreign_adapter_is_told_by_the_node(run: Any, loras: Path, model: Any) -> None:
    write(loras / "image.safetensors", prefix="lora_unet_down_blocks_0_")
    with pytest.raises(Exception, match=r"fits nothing.*lora_unet_down_blocks_0_") as caught:
        run("ACEStepLoRA", model=model, adapter="image.safetensors")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_file_trained_anew_counts_as_another(pack: Any, loras: Path) -> None:
    node = pack("nodes.lora").ApplyLoRA
    before = node.fingerprint_inputs(adapter="trained/final", strength=1.0)
    assert node.fingerprint_inputs(adapter="trained/final", strength=1.0) == before
    (loras / "trained" / "final" / "adapter_config.json").write_text('{"lora_alpha": 16}')
    assert node.fingerprint_inputs(adapter="trained/final", strength=1.0) != before
    assert node.fingerprint_inputs(adapter="gone", strength=1.0) == "gone"
