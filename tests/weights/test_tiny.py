"""The tiny checkpoints: repeatable, small, and fit to be read by other libraries."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from diffusers import AceStepTransformer1DModel
from diffusers.pipelines.ace_step.modeling_ace_step import (
    AceStepAudioTokenDetokenizer,
    AceStepAudioTokenizer,
    AceStepConditionEncoder,
)
from transformers import Qwen3Model

from acestep_engine.models_torch.oobleck import Oobleck
from acestep_engine.types import ModelSpec
from acestep_engine.weights.layouts import Layout, locate
from acestep_engine.weights.load import fill, read
from acestep_engine.weights.tiny import write_tiny
from acestep_engine.weights.tiny_tensors import VAE, tables

LAYOUTS: tuple[Layout, ...] = ("official", "comfy_split", "comfy_aio", "diffusers")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_seed_decides_every_tensor_and_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    first, again = tables(5, False, torch.float32), tables(5, False, torch.float32)
    other = tables(6, False, torch.float32)
    assert all(same(first[role], again[role]) for role in first)
    assert not any(same(first[role], other[role]) for role in first)
    assert torch.equal(state, torch.get_rng_state())


def test_an_xl_model_differs_in_its_transformer_alone() -> None:
    plain, xl = tables(0, False, torch.float32), tables(0, True, torch.float32)
    assert [role for role in plain if not same(plain[role], xl[role])] == ["dit"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_small_and_written_fast(tmp_path: Path, layout: Layout) -> None:
    start = time.perf_counter()
    write_tiny(tmp_path, layout, dtype=torch.bfloat16)
    assert time.perf_counter() - start < 20  # about 0.1 s; only a runaway fails
    assert sum(file.stat().st_size for file in tmp_path.rglob("*")) < 16 << 20


def test_writing_again_over_a_file_in_use_leaves_the_old_one_whole(tmp_path: Path) -> None:
    from safetensors import safe_open

    spec = write_tiny(tmp_path, "comfy_split", lm=False)
    with safe_open(spec.dit, framework="pt") as stream:
        view = stream.get_tensor("decoder.norm_out.weight")
    before = view.clone()
    write_tiny(tmp_path, "comfy_split", lm=False, seed=1)
    assert torch.equal(view, before)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("xl", [False, True])
def test_diffusers_and_transformers_load_the_diffusers_layout(tmp_path: Path, xl: bool) -> None:
    spec = write_tiny(tmp_path, "diffusers", xl=xl, silence=torch.ones(15_000, 64))
    for folder, model_class in (
        ("transformer", AceStepTransformer1DModel),
        ("condition_encoder", AceStepConditionEncoder),
        ("audio_tokenizer", AceStepAudioTokenizer),
        ("audio_token_detokenizer", AceStepAudioTokenDetokenizer),
    ):
        _, info = model_class.from_pretrained(
            Path(spec.dit) / folder, output_loading_info=True, low_cpu_mem_usage=False
        )
        assert not any(info.values()), (folder, info)


def test_the_vae_speaks_at_a_healthy_level(tiny_model: ModelSpec) -> None:
    source = locate(tiny_model, "vae")
    tensors = read(source)
    with torch.device("meta"):
        vae = Oobleck(VAE)
    fill(vae, tensors, torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        sound = vae.decode(torch.randn(1, 64, 20, generator=generator))
        latents = vae.encode(0.3 * torch.randn(1, 2, 20 * 1920, generator=generator))
    assert 0.02 < sound.std() < 0.5
    assert sound.abs().max() < 1.5
    assert 0.1 < latents.std() < 2


def test_transformers_loads_the_official_language_model(tiny_model: ModelSpec) -> None:
    for path, rows in ((tiny_model.lm, 217_204), (tiny_model.text_encoder, 151_669)):
        module, info = Qwen3Model.from_pretrained(path, output_loading_info=True)
        assert not any(info.values()), info
        assert module.embed_tokens.weight.shape == (rows, 16)
