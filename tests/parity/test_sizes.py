"""Tensor names and parameter totals at the real sizes, without memory for them."""

from __future__ import annotations

import pytest
import torch
from diffusers import AceStepTransformer1DModel, AutoencoderOobleck
from torch import nn

from acestep_engine.backends.torch_eager import BUILDERS
from acestep_engine.config import ConditionConfig, DiTConfig, FSQConfig, Qwen3Config, VAEConfig

XL = DiTConfig(
    hidden_size=2560, intermediate_size=9728, num_hidden_layers=32, num_attention_heads=32
)
SMALL_LM = Qwen3Config(hidden_size=1024, intermediate_size=3072)
LARGE_LM = Qwen3Config(
    hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32
)


def on_meta(role: str, config: object) -> nn.Module:
    with torch.device("meta"):
        return BUILDERS[role][0](config)


def total(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


CODEBOOK = 6 * 2048 + 2048  # `quantizer.project_out`, which the detokenizer carries along


@pytest.mark.parametrize(
    ("role", "config", "tensors", "parameters"),
    [
        ("lm", SMALL_LM, 310, 662_884_352),
        ("lm", Qwen3Config(), 310, 1_854_243_840),
        ("lm", LARGE_LM, 398, 4_189_554_176),
        ("dit", DiTConfig(), 476, 1_575_458_880),
        ("dit", XL, 628, 4_168_897_088),
        ("condition_encoder", ConditionConfig(), 140 + 1, 608_369_664),  # with null_condition_emb
        ("audio_tokenizer", FSQConfig(), 32, 105_032_198),
        ("audio_detokenizer", FSQConfig(), 28 + 2, 105_011_776 + CODEBOOK),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_counts_are_the_published_ones(role, config, tensors, parameters) -> None:
    module = on_meta(role, config)
    assert len(module.state_dict()) == tensors
    assert total(module) == parameters
    assert not list(module.buffers())
    assert all(parameter.is_meta for parameter in module.parameters())


def test_names_of_each_part_are_the_official_ones() -> None:
    expected = {
        "dit": {
            "proj_in.1.weight": (2048, 192, 2),
            "proj_out.1.weight": (2048, 64, 2),
            "scale_shift_table": (1, 2, 2048),
            "time_embed_r.time_proj.weight": (12288, 2048),
            "layers.23.scale_shift_table": (1, 6, 2048),
            "layers.0.cross_attn.k_norm.weight": (128,),
            "condition_embedder.bias": (2048,),
        },
        "condition_encoder": {
            "text_projector.weight": (2048, 1024),
            "lyric_encoder.embed_tokens.bias": (2048,),
            "lyric_encoder.layers.7.mlp.down_proj.weight": (2048, 6144),
            "timbre_encoder.special_token": (1, 1, 2048),
            "null_condition_emb": (1, 1, 2048),
        },
        "audio_tokenizer": {
            "audio_acoustic_proj.weight": (2048, 64),
            "attention_pooler.special_token": (1, 1, 2048),
            "quantizer.project_in.weight": (6, 2048),
        },
        "audio_detokenizer": {
            "special_tokens": (1, 5, 2048),
            "proj_out.weight": (64, 2048),
            "quantizer.project_out.weight": (2048, 6),
        },
    }
    configs = {"dit": DiTConfig(), "condition_encoder": ConditionConfig()}
    for role, shapes in expected.items():
        state = on_meta(role, configs.get(role, FSQConfig())).state_dict()
        for name, shape in shapes.items():
            assert tuple(state[name].shape) == shape


def test_dit_names_map_onto_those_of_diffusers(to_diffusers) -> None:
    with torch.device("meta"):
        theirs = AceStepTransformer1DModel(num_hidden_layers=2)
    ours = to_diffusers(on_meta("dit", DiTConfig(num_hidden_layers=2)))
    shapes = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert {name: tensor.shape for name, tensor in ours.items()} == shapes


def test_the_folded_vae_has_one_tensor_less_per_convolution() -> None:
    with torch.device("meta"):
        theirs = AutoencoderOobleck(downsampling_ratios=[2, 4, 4, 6, 10]).state_dict()
    gains = {name for name in theirs if name.endswith("weight_g")}
    assert len(theirs) == 365
    assert len(gains) == 74
    module = on_meta("vae", VAEConfig())
    expected = {
        name.replace("weight_v", "weight"): tensor.shape
        for name, tensor in theirs.items()
        if name not in gains
    }
    assert len(expected) == 291
    assert {name: tensor.shape for name, tensor in module.state_dict().items()} == expected
    assert total(module) == sum(t.numel() for n, t in theirs.items() if n not in gains)
