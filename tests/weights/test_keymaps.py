"""Names of real-size models in every style become the official ones: none lost, none invented."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from diffusers import AceStepTransformer1DModel, AutoencoderOobleck
from diffusers.pipelines.ace_step.modeling_ace_step import (
    AceStepAudioTokenDetokenizer,
    AceStepAudioTokenizer,
    AceStepConditionEncoder,
)
from transformers import Qwen3Config, Qwen3Model

from acestep_engine.weights.keymaps import official_names

NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
ATTENTION = tuple(
    f"{part}.weight" for part in ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
)
MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


def both(*names: str) -> list[str]:
    return [f"{name}.{leaf}" for name in names for leaf in ("weight", "bias")]


def tower(prefix: str, layers: int) -> list[str]:
    leaves = (*NORMS, *(f"self_attn.{name}" for name in ATTENTION), *MLP)
    return [f"{prefix}layers.{i}.{leaf}" for i in range(layers) for leaf in leaves] + [
        f"{prefix}norm.weight"
    ]


def dit(layers: int = 24) -> list[str]:
    leaves = [f"{name}.weight" for name in ("self_attn_norm", "cross_attn_norm", "mlp_norm")]
    leaves += [f"{side}.{name}" for side in ("self_attn", "cross_attn") for name in ATTENTION]
    leaves += [*MLP, "scale_shift_table"]
    times = [
        f"{embed}.{part}"
        for embed in ("time_embed", "time_embed_r")
        for part in ("linear_1", "linear_2", "time_proj")
    ]
    return [
        *both("proj_in.1", "proj_out.1", "condition_embedder", *times),
        "norm_out.weight",
        "scale_shift_table",
        *(f"layers.{i}.{leaf}" for i in range(layers) for leaf in leaves),
    ]


CONDITION = [
    "text_projector.weight",
    *both("lyric_encoder.embed_tokens", "timbre_encoder.embed_tokens"),
    *tower("lyric_encoder.", 8),
    *tower("timbre_encoder.", 4),
    "timbre_encoder.special_token",
    "null_condition_emb",
]
TOKENIZER = [
    *both("audio_acoustic_proj", "attention_pooler.embed_tokens"),
    *both("quantizer.project_in", "quantizer.project_out"),
    "attention_pooler.special_token",
    *tower("attention_pooler.", 2),
]
WAY_OUT = both("quantizer.project_out")
DETOKENIZER = [*both("embed_tokens", "proj_out"), "special_tokens", *tower("", 2)]


def keys(model_class: type, *args: object, **sizes: object) -> list[str]:
    with torch.device("meta"):
        return list(model_class(*args, **sizes).state_dict())


def official_file() -> list[str]:
    """Names in an official 2B file."""
    return [
        *(f"decoder.{name}" for name in dit()),
        *("null_condition_emb" if "null" in name else f"encoder.{name}" for name in CONDITION),
        *(f"tokenizer.{name}" for name in TOKENIZER),
        *(f"detokenizer.{name}" for name in DETOKENIZER),
    ]


def test_counts_are_those_of_the_published_files() -> None:
    assert [len(names) for names in (dit(), CONDITION, TOKENIZER, DETOKENIZER)] == [
        476,
        140 + 1,
        32,
        28,
    ]
    assert len(set(official_file())) == len(official_file())


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("dit", dit()),
        ("condition_encoder", CONDITION),
        ("audio_tokenizer", TOKENIZER),
        ("audio_detokenizer", DETOKENIZER + WAY_OUT),
    ],
)
def test_each_role_takes_its_own_of_an_official_file(role: str, expected: Iterable[str]) -> None:
    found = official_names(role, "official", official_file())
    assert sorted(found) == sorted(expected)
    assert all(source.endswith(name) for name, source in found.items())


@pytest.mark.parametrize("layers", [24, 32])
def test_diffusers_transformer_becomes_the_official_decoder(layers: int) -> None:
    names = keys(AceStepTransformer1DModel, num_hidden_layers=layers)
    assert sorted(official_names("dit", "diffusers", names)) == sorted(dit(layers))


def test_diffusers_encoders_become_the_official_ones() -> None:
    condition, tokenizer = keys(AceStepConditionEncoder), keys(AceStepAudioTokenizer)
    detokenizer = keys(AceStepAudioTokenDetokenizer)
    assert "silence_latent" in condition
    assert sorted(official_names("condition_encoder", "diffusers", condition)) == sorted(CONDITION)
    assert sorted(official_names("audio_tokenizer", "diffusers", tokenizer)) == sorted(TOKENIZER)
    both_folders = [*detokenizer, *tokenizer]
    assert sorted(official_names("audio_detokenizer", "diffusers", both_folders)) == sorted(
        DETOKENIZER + WAY_OUT
    )


def test_qwen3_names_are_already_official() -> None:
    names = keys(Qwen3Model, Qwen3Config(num_hidden_layers=28))
    assert len(names) == 310
    expected = ["embed_tokens.weight", *tower("", 28)]
    assert sorted(official_names("lm", "official", names)) == sorted(expected)


def test_vae_has_365_tensors_under_either_weight_norm_naming() -> None:
    names = keys(AutoencoderOobleck, downsampling_ratios=[2, 4, 4, 6, 10])
    assert len(names) == 365
    modern = [
        name.replace("weight_g", "parametrizations.weight.original0").replace(
            "weight_v", "parametrizations.weight.original1"
        )
        for name in names
    ]
    assert sorted(official_names("vae", "diffusers", names)) == sorted(names)
    assert official_names("vae", "diffusers", modern) == dict(zip(names, modern, strict=True))


@pytest.mark.parametrize(
    ("comfy", "diffusers"),
    [
        ("encoder.layers.0.bias", "encoder.conv1.bias"),
        ("encoder.layers.7.weight_g", "encoder.conv2.weight_g"),
        ("encoder.layers.6.alpha", "encoder.snake1.alpha"),
        ("encoder.layers.1.layers.0.layers.0.beta", "encoder.block.0.res_unit1.snake1.beta"),
        ("encoder.layers.5.layers.2.layers.3.bias", "encoder.block.4.res_unit3.conv2.bias"),
        ("encoder.layers.3.layers.3.alpha", "encoder.block.2.snake1.alpha"),
        ("encoder.layers.3.layers.4.weight_v", "encoder.block.2.conv1.weight_v"),
        ("decoder.layers.1.layers.0.alpha", "decoder.block.0.snake1.alpha"),
        ("decoder.layers.2.layers.1.bias", "decoder.block.1.conv_t1.bias"),
        ("decoder.layers.5.layers.2.layers.1.bias", "decoder.block.4.res_unit1.conv1.bias"),
        ("decoder.layers.5.layers.4.layers.2.alpha", "decoder.block.4.res_unit3.snake2.alpha"),
        (
            "decoder.layers.7.parametrizations.weight.original1",
            "decoder.conv2.weight_v",
        ),
    ],
)
def test_comfyui_vae_names_become_those_of_diffusers(comfy: str, diffusers: str) -> None:
    assert official_names("vae", "comfy", [comfy]) == {diffusers: comfy}


def test_what_the_models_do_not_need_is_left_out() -> None:
    extras = [
        "decoder.rotary_emb.inv_freq",
        "encoder.lyric_encoder.rotary_emb.inv_freq",
        "tokenizer.quantizer.layers.0.implicit_codebook",
        "tokenizer.quantizer.scales",
    ]
    for role in ("dit", "condition_encoder", "audio_tokenizer", "audio_detokenizer"):
        assert official_names(role, "official", extras) == {}
    assert official_names("lm", "official", ["lm_head.weight", "rotary_emb.inv_freq"]) == {}


def test_a_name_of_no_known_role_is_reported_once_with_the_dit() -> None:
    assert official_names("dit", "official", ["surprise.weight"]) == {
        "surprise.weight": "surprise.weight"
    }
    for role in ("condition_encoder", "audio_tokenizer", "audio_detokenizer"):
        assert official_names(role, "official", ["surprise.weight"]) == {}
