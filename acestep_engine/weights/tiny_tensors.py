"""The tensors of tiny random checkpoints, under official names; `tiny` writes them to files.

Vocabularies, code levels and strides are the real ones, all else is as small as it gets. Scales are
chosen so that activations stay of size one and the VAE speaks within about -1..1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import (
    ConditionConfig,
    DiTConfig,
    EncoderConfig,
    FSQConfig,
    Qwen3Config,
    VAEConfig,
)
from ..types import LATENT_CHANNELS
from .parts import Role
from .sources import TEXT_ROWS

Table = dict[str, Tensor]

_WIDE = {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
_SMALL = {"head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
_TOWER = EncoderConfig(32, 48, 2, **_WIDE)

LM = Qwen3Config(217_204, 16, 24, 2, **_SMALL)
TEXT_ENCODER = Qwen3Config(TEXT_ROWS, 16, 24, 2, **_SMALL)
CONDITION = ConditionConfig(lyric=_TOWER, timbre=_TOWER, text_hidden_dim=16)
FSQ = FSQConfig(tower=_TOWER, fsq_dim=32)
DIT = DiTConfig(32, 48, 2, **_WIDE, encoder_hidden_size=32)
DIT_XL = DiTConfig(40, 56, 3, 6, 2, 8, encoder_hidden_size=32)
VAE = VAEConfig(encoder_hidden_size=8, decoder_channels=4, channel_multiples=(1, 1, 2, 2, 2))


@dataclass(frozen=True, slots=True)
class _Draw:
    """Random tensors of one checkpoint, added to `table` under official names."""

    table: Table
    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        values = torch.randn(shape, generator=self.generator) * std + mean
        self.table[name] = values.to(self.dtype)

    def norm(self, name: str, width: int) -> None:
        self.normal(f"{name}.weight", (width,), 0.05, 1.0)

    def linear(self, name: str, out: int, width: int, *, bias: bool = False) -> None:
        """Weights that keep the size of what they act on."""
        self.normal(f"{name}.weight", (out, width), width**-0.5)
        if bias:
            self.normal(f"{name}.bias", (out,), 0.02)

    def attention(self, name: str, config: Any) -> None:
        width, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.linear(f"{name}.q_proj", heads * dim, width)
        self.linear(f"{name}.k_proj", kv_heads * dim, width)
        self.linear(f"{name}.v_proj", kv_heads * dim, width)
        self.linear(f"{name}.o_proj", width, heads * dim)
        self.norm(f"{name}.q_norm", dim)
        self.norm(f"{name}.k_norm", dim)

    def mlp(self, name: str, config: Any) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        self.linear(f"{name}.gate_proj", inner, width)
        self.linear(f"{name}.up_proj", inner, width)
        self.linear(f"{name}.down_proj", width, inner)

    def tower(self, prefix: str, config: Any) -> None:
        """Layers and final norm of an encoder or a language model."""
        for layer in (f"{prefix}layers.{i}" for i in range(config.num_hidden_layers)):
            self.norm(f"{layer}.input_layernorm", config.hidden_size)
            self.attention(f"{layer}.self_attn", config)
            self.norm(f"{layer}.post_attention_layernorm", config.hidden_size)
            self.mlp(f"{layer}.mlp", config)
        self.norm(f"{prefix}norm", config.hidden_size)

    def conv(
        self, name: str, shape: tuple[int, int, int], gain: float, *, bias: bool = True
    ) -> None:
        """A weight-normed convolution: `gain` is the length of each slice along dimension 0."""
        self.normal(f"{name}.weight_g", (shape[0], 1, 1), 0.02 * gain, gain)
        self.normal(f"{name}.weight_v", shape, 1.0)
        if bias:
            self.normal(f"{name}.bias", (shape[1 if name.endswith("conv_t1") else 0],), 0.01)

    def snake(self, name: str, channels: int) -> None:
        self.normal(f"{name}.alpha", (1, channels, 1), 0.1)
        self.normal(f"{name}.beta", (1, channels, 1), 0.1, 1.0)

    def res_unit(self, name: str, channels: int) -> None:
        self.snake(f"{name}.snake1", channels)
        self.conv(f"{name}.conv1", (channels, channels, 7), 0.5)
        self.snake(f"{name}.snake2", channels)
        self.conv(f"{name}.conv2", (channels, channels, 1), 0.5)


def tables(seed: int, xl: bool, dtype: torch.dtype) -> dict[Role, Table]:
    """The tensors of every role under official names; the VAE with its weight norm, in float32."""
    found: dict[Role, Table] = {}
    writers: tuple[tuple[Role, Callable[[_Draw], None], torch.dtype], ...] = (
        ("dit", partial(_dit, config=DIT_XL if xl else DIT), dtype),
        ("condition_encoder", _condition, dtype),
        ("audio_tokenizer", _tokenizer, dtype),
        ("audio_detokenizer", _detokenizer, dtype),
        ("vae", _vae, torch.float32),
        ("text_encoder", _text_encoder, dtype),
        ("lm", _lm, dtype),
    )
    for number, (role, write, kind) in enumerate(writers):
        generator = torch.Generator().manual_seed(seed * len(writers) + number)
        found[role] = {}
        write(_Draw(found[role], generator, kind))
    return found


def _dit(draw: _Draw, config: DiTConfig) -> None:
    width, channels, patch = config.hidden_size, LATENT_CHANNELS, config.patch_size
    fan_in = config.in_channels * patch
    draw.normal("proj_in.1.weight", (width, config.in_channels, patch), fan_in**-0.5)
    draw.normal("proj_in.1.bias", (width,), 0.02)
    for name in ("time_embed", "time_embed_r"):
        draw.linear(f"{name}.linear_1", width, 256, bias=True)
        draw.linear(f"{name}.linear_2", width, width, bias=True)
        draw.linear(f"{name}.time_proj", 6 * width, width, bias=True)
    draw.linear("condition_embedder", width, config.encoder_hidden_size, bias=True)
    for layer in (f"layers.{i}" for i in range(config.num_hidden_layers)):
        for norm in ("self_attn_norm", "cross_attn_norm", "mlp_norm"):
            draw.norm(f"{layer}.{norm}", width)
        draw.attention(f"{layer}.self_attn", config)
        draw.attention(f"{layer}.cross_attn", config)
        draw.mlp(f"{layer}.mlp", config)
        draw.normal(f"{layer}.scale_shift_table", (1, 6, width), 0.3)
    draw.norm("norm_out", width)
    draw.normal("scale_shift_table", (1, 2, width), 0.3)
    draw.normal("proj_out.1.weight", (width, channels, patch), width**-0.5)
    draw.normal("proj_out.1.bias", (channels,), 0.02)


def _condition(draw: _Draw) -> None:
    width = CONDITION.lyric.hidden_size
    draw.linear("text_projector", width, CONDITION.text_hidden_dim)
    draw.linear("lyric_encoder.embed_tokens", width, CONDITION.text_hidden_dim, bias=True)
    draw.tower("lyric_encoder.", CONDITION.lyric)
    draw.linear("timbre_encoder.embed_tokens", width, LATENT_CHANNELS, bias=True)
    draw.normal("timbre_encoder.special_token", (1, 1, width), 1.0)
    draw.tower("timbre_encoder.", CONDITION.timbre)
    draw.normal("null_condition_emb", (1, 1, width), 1.0)


def _tokenizer(draw: _Draw) -> None:
    width, dims = FSQ.tower.hidden_size, len(FSQ.fsq_input_levels)
    draw.linear("audio_acoustic_proj", width, LATENT_CHANNELS, bias=True)
    draw.linear("attention_pooler.embed_tokens", width, width, bias=True)
    draw.normal("attention_pooler.special_token", (1, 1, width), 1.0)
    draw.tower("attention_pooler.", FSQ.tower)
    draw.linear("quantizer.project_in", dims, width, bias=True)
    draw.linear("quantizer.project_out", FSQ.fsq_dim, dims, bias=True)


def _detokenizer(draw: _Draw) -> None:
    width = FSQ.tower.hidden_size
    draw.linear("embed_tokens", width, width, bias=True)
    draw.normal("special_tokens", (1, FSQ.pool_window_size, width), 1.0)
    draw.tower("", FSQ.tower)
    draw.linear("proj_out", LATENT_CHANNELS, width, bias=True)


def _text_encoder(draw: _Draw) -> None:
    draw.normal("embed_tokens.weight", (TEXT_ENCODER.vocab_size, TEXT_ENCODER.hidden_size), 0.5)
    draw.tower("", TEXT_ENCODER)


def _lm(draw: _Draw) -> None:
    draw.normal("embed_tokens.weight", (LM.vocab_size, LM.hidden_size), 0.5)
    draw.tower("", LM)


def _vae(draw: _Draw) -> None:
    strides = VAE.downsampling_ratios
    wide = [VAE.encoder_hidden_size * m for m in (1, *VAE.channel_multiples)]
    draw.conv("encoder.conv1", (wide[0], VAE.audio_channels, 7), 1.0)
    for b, (width, out, stride) in enumerate(zip(wide, wide[1:], strides, strict=False)):
        for unit in (1, 2, 3):
            draw.res_unit(f"encoder.block.{b}.res_unit{unit}", width)
        draw.snake(f"encoder.block.{b}.snake1", width)
        draw.conv(f"encoder.block.{b}.conv1", (out, width, 2 * stride), 1.0)
    draw.snake("encoder.snake1", wide[-1])
    draw.conv("encoder.conv2", (2 * LATENT_CHANNELS, wide[-1], 3), 1.0)

    wide = [VAE.decoder_channels * m for m in (1, *VAE.channel_multiples)][::-1]
    draw.conv("decoder.conv1", (wide[0], LATENT_CHANNELS, 7), 1.0)
    for b, (width, out, stride) in enumerate(zip(wide, wide[1:], strides[::-1], strict=False)):
        block = f"decoder.block.{b}"
        draw.snake(f"{block}.snake1", width)
        gain = math.sqrt(out * stride / width)  # two taps of every channel meet in an output
        draw.conv(f"{block}.conv_t1", (width, out, 2 * stride), gain)
        for unit in (1, 2, 3):
            draw.res_unit(f"{block}.res_unit{unit}", out)
    draw.snake("decoder.snake1", wide[-1])
    draw.conv("decoder.conv2", (VAE.audio_channels, wide[-1], 7), 0.06, bias=False)
