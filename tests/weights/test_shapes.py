"""Sizes come from the tensors; a config adds only what they cannot tell."""

from __future__ import annotations

import pytest
import torch
from diffusers import AceStepTransformer1DModel, AutoencoderOobleck
from diffusers.pipelines.ace_step.modeling_ace_step import (
    AceStepAudioTokenDetokenizer,
    AceStepAudioTokenizer,
    AceStepConditionEncoder,
)
from torch import nn
from transformers import Qwen3Config as HFQwen3Config
from transformers import Qwen3Model

from acestep_engine.config import (
    ConditionConfig,
    DiTConfig,
    EncoderConfig,
    FSQConfig,
    Qwen3Config,
    VAEConfig,
)
from acestep_engine.errors import BadCheckpoint
from acestep_engine.weights.keymaps import official_names
from acestep_engine.weights.shapes import config_of, lm_size

Shapes = dict[str, tuple[int, ...]]


def shapes_of(role: str, model_class: type, *args: object, **sizes: object) -> Shapes:
    """Official names and shapes of a real-size model of another library."""
    with torch.device("meta"):
        module: nn.Module = model_class(*args, **sizes)
    found = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    return {new: found[old] for new, old in official_names(role, "diffusers", found).items()}


def vae_shapes(**sizes: object) -> Shapes:
    stored = shapes_of("vae", AutoencoderOobleck, **sizes)
    folded = {n.replace("weight_v", "weight"): s for n, s in stored.items() if "weight_g" not in n}
    return folded


def qwen_shapes(rows: int, hidden: int, inner: int, layers: int, heads: int) -> Shapes:
    config = HFQwen3Config(
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
    )
    with torch.device("meta"):
        module = Qwen3Model(config)
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def test_2b_transformer_without_a_config_has_the_published_sizes() -> None:
    assert config_of("dit", shapes_of("dit", AceStepTransformer1DModel), {}) == DiTConfig()


def test_xl_transformer_is_wider_than_its_condition() -> None:
    sizes = {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    shapes = shapes_of("dit", AceStepTransformer1DModel, **sizes, encoder_hidden_size=2048)
    assert config_of("dit", shapes, {}) == DiTConfig(**sizes, encoder_hidden_size=2048)


def test_a_config_that_contradicts_the_tensors_is_outvoted() -> None:
    shapes = shapes_of("dit", AceStepTransformer1DModel, num_hidden_layers=3)
    found = config_of("dit", shapes, {"num_hidden_layers": 24, "hidden_size": 999})
    assert found == DiTConfig(num_hidden_layers=3)


def test_a_config_supplies_what_no_shape_tells() -> None:
    told = {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "sliding_window": 64}
    shapes = shapes_of("dit", AceStepTransformer1DModel, num_hidden_layers=1)
    assert config_of("dit", shapes, told) == DiTConfig(num_hidden_layers=1, **told)


def test_condition_encoder_has_the_published_sizes_and_xl_begins_with_a_token() -> None:
    shapes = shapes_of("condition_encoder", AceStepConditionEncoder)
    assert config_of("condition_encoder", shapes, {}) == ConditionConfig()
    xl = config_of("condition_encoder", shapes, {"encoder_hidden_size": 2048})
    assert isinstance(xl, ConditionConfig)
    assert xl.timbre_cls


def test_tokenizer_and_detokenizer_have_the_published_sizes() -> None:
    tokenizer = shapes_of("audio_tokenizer", AceStepAudioTokenizer)
    detokenizer = shapes_of("audio_detokenizer", AceStepAudioTokenDetokenizer)
    assert config_of("audio_tokenizer", tokenizer, {}) == FSQConfig()
    assert config_of("audio_detokenizer", detokenizer, {}) == FSQConfig()


def test_code_levels_that_do_not_fit_the_tensors_are_refused() -> None:
    shapes = shapes_of("audio_tokenizer", AceStepAudioTokenizer)
    with pytest.raises(BadCheckpoint, match="6 code dimensions"):
        config_of("audio_tokenizer", shapes, {"fsq_input_levels": [8, 5, 5]})


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        ("0.6B", (1024, 3072, 28, 16)),
        ("1.7B", (2048, 6144, 28, 16)),
        ("4B", (2560, 9728, 36, 32)),
    ],
)
def test_language_models_of_every_size(size: str, sizes: tuple[int, int, int, int]) -> None:
    shapes = qwen_shapes(217_204, *sizes)
    assert lm_size(shapes) == size
    assert config_of("lm", shapes, {}) == Qwen3Config(217_204, *sizes, 8, 128)


def test_rope_theta_is_read_from_either_form_of_config() -> None:
    shapes = qwen_shapes(100, 32, 48, 1, 8)
    for config in ({"rope_theta": 7.0}, {"rope_parameters": {"rope_theta": 7.0}}):
        found = config_of("lm", shapes, config)
        assert isinstance(found, Qwen3Config)
        assert found.rope_theta == 7.0


def test_vae_strides_are_half_its_kernels() -> None:
    shapes = vae_shapes(downsampling_ratios=[2, 4, 4, 6, 10])
    assert config_of("vae", shapes, {}) == VAEConfig()


def test_the_vae_of_another_model_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="2048 samples a frame"):
        config_of("vae", vae_shapes(downsampling_ratios=[2, 4, 4, 8, 8]), {})


def test_a_missing_tensor_that_tells_a_size_is_named() -> None:
    shapes = shapes_of("dit", AceStepTransformer1DModel, num_hidden_layers=1)
    del shapes["condition_embedder.weight"]
    with pytest.raises(BadCheckpoint, match=r"condition_embedder\.weight"):
        config_of("dit", shapes, {})


def test_widths_that_are_no_whole_heads_are_refused() -> None:
    shapes = qwen_shapes(100, 32, 48, 1, 8)
    shapes["layers.0.self_attn.q_norm.weight"] = (96,)
    with pytest.raises(BadCheckpoint, match="no multiples of head_dim 96"):
        config_of("lm", shapes, {})


def test_a_small_tower_is_read_as_it_is() -> None:
    small = EncoderConfig(64, 96, 2, 8, 2, 8)
    shapes = shapes_of(
        "condition_encoder",
        AceStepConditionEncoder,
        hidden_size=64,
        intermediate_size=96,
        num_lyric_encoder_hidden_layers=2,
        num_timbre_encoder_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        text_hidden_dim=16,
    )
    found = config_of("condition_encoder", shapes, {})
    assert found == ConditionConfig(lyric=small, timbre=small, text_hidden_dim=16)
