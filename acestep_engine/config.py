"""Sizes of the models, field names as in the official config.json.

Sizes come from the tensors themselves (`weights.shapes`), so a file without a config loads as well;
a config.json beside the weights supplies only what no shape can tell (rope_theta, is_turbo, ...).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["turbo", "sft", "base"]


def _check_heads(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )


@dataclass(frozen=True, slots=True)
class Qwen3Config:
    """Qwen3 dense decoder: the 5 Hz language model and the text encoder. Defaults: 1.7B LM."""

    vocab_size: int = 217_204
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 40_960

    def __post_init__(self) -> None:
        _check_heads(self.num_attention_heads, self.num_key_value_heads)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """A tower of bidirectional layers in the condition encoder, tokenizer or detokenizer.

    Layer i has a window of `sliding_window` where i is even, and sees everything where i is odd.
    """

    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 8
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    sliding_window: int = 128

    def __post_init__(self) -> None:
        _check_heads(self.num_attention_heads, self.num_key_value_heads)


@dataclass(frozen=True, slots=True)
class ConditionConfig:
    """Text projector, lyric encoder, timbre encoder and the learned null condition."""

    lyric: EncoderConfig = EncoderConfig(num_hidden_layers=8)
    timbre: EncoderConfig = EncoderConfig(num_hidden_layers=4)
    text_hidden_dim: int = 1024
    timbre_hidden_dim: int = 64
    timbre_fix_frame: int = 750  # latent frames of a timbre reference (30 s)
    timbre_cls: bool = (
        False  # XL files put `special_token` in front of the reference; 2B files don't
    )


@dataclass(frozen=True, slots=True)
class FSQConfig:
    """Audio tokenizer (25 Hz latents to 5 Hz codes) and detokenizer (back)."""

    tower: EncoderConfig = EncoderConfig(num_hidden_layers=2)
    audio_acoustic_hidden_dim: int = 64
    fsq_dim: int = 2048
    fsq_input_levels: tuple[int, ...] = (8, 8, 8, 5, 5, 5)
    pool_window_size: int = 5


@dataclass(frozen=True, slots=True)
class DiTConfig:
    """Diffusion transformer. Defaults: 2B; XL has hidden_size 2560, encoder_hidden_size 2048."""

    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    encoder_hidden_size: int = 2048
    in_channels: int = 192
    audio_acoustic_hidden_dim: int = 64
    patch_size: int = 2
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    sliding_window: int = 128

    def __post_init__(self) -> None:
        _check_heads(self.num_attention_heads, self.num_key_value_heads)


@dataclass(frozen=True, slots=True)
class VAEConfig:
    """Oobleck autoencoder; the product of `downsampling_ratios` is the hop in samples (1920)."""

    encoder_hidden_size: int = 128
    decoder_channels: int = 128
    decoder_input_channels: int = 64
    audio_channels: int = 2
    channel_multiples: tuple[int, ...] = (1, 2, 4, 8, 16)
    downsampling_ratios: tuple[int, ...] = (2, 4, 4, 6, 10)


@dataclass(frozen=True, slots=True)
class FamilyDefaults:
    """What the render uses where the user leaves a widget automatic."""

    steps: int
    shift: float
    guidance: float


FAMILY_DEFAULTS: dict[Family, FamilyDefaults] = {
    "turbo": FamilyDefaults(steps=8, shift=3.0, guidance=1.0),  # distilled: no CFG branch
    "sft": FamilyDefaults(steps=50, shift=3.0, guidance=7.0),
    "base": FamilyDefaults(steps=50, shift=3.0, guidance=7.0),
}
