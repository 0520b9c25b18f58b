"""Sizes of a model from the shapes of its tensors, so that a file without a config loads as well.

A config supplies only what no shape can tell. Knows no files; names are the official ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..config import (
    ConditionConfig,
    DiTConfig,
    EncoderConfig,
    FSQConfig,
    Qwen3Config,
    VAEConfig,
)
from ..errors import BadCheckpoint
from ..types import HOP, LATENT_CHANNELS
from .parts import PARTS, Role, cure

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Config = Mapping[str, Any]
AnyConfig = Qwen3Config | ConditionConfig | FSQConfig | DiTConfig | VAEConfig

LM_SIZES = {1024: "0.6B", 2048: "1.7B", 2560: "4B"}  # by hidden size
HIGHEST = 1e12  # of any number in a config
CODES = 64_000


def config_of(role: Role, shapes: Shapes, config: Config) -> AnyConfig:
    """The sizes of `role`; BadCheckpoint where a tensor that tells one is missing or odd.

    `encoder_hidden_size` in `config` marks an XL model: its timbre encoder begins with a token of
    its own.
    """
    try:
        return _READERS[role](shapes, config)
    except KeyError as error:
        raise BadCheckpoint(
            f"The {PARTS[role].label} lacks the tensor {error}, which tells its size. {cure(role)}"
        ) from error
    except (IndexError, ValueError, ZeroDivisionError) as error:
        raise BadCheckpoint(
            f"The tensors of the {PARTS[role].label} do not fit together: {error}. {cure(role)}"
        ) from error


def check_config(config: Config, file: object) -> None:
    """BadCheckpoint where a value of `file` that no shape can tell is not of its kind."""
    for name, value in _untold(config, *_KINDS).items():
        kind, fits = _KINDS[name]
        if not fits(value):
            raise BadCheckpoint(
                f"{file}: '{name}' is {value!r}, but must be {kind}. Correct it, or download the "
                "file again."
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= HIGHEST


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_levels(value: Any) -> bool:
    counts = isinstance(value, list) and all(map(_is_count, value))
    return counts and math.prod(value) == CODES


_NUMBER = f"a number above 0, at most {HIGHEST:g}", _is_number
_COUNT = f"a whole number from 1 to {HIGHEST:g}", _is_count
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "rms_norm_eps": _NUMBER,
    "rope_theta": _NUMBER,
    "sliding_window": _COUNT,
    "max_position_embeddings": _COUNT,
    "timbre_fix_frame": _COUNT,
    "pool_window_size": _COUNT,
    "fsq_input_levels": (f"a list of whole numbers whose product is {CODES}", _is_levels),
}
"""The fields that are read from a config, and what each must be."""


def lm_size(shapes: Shapes) -> str:
    """ "0.6B", "1.7B" or "4B", or the width of a model of no known size."""
    width = shapes["norm.weight"][0]
    return LM_SIZES.get(width, f"width {width}")


def _layers(shapes: Shapes, prefix: str) -> int:
    numbers = (re.match(rf"{re.escape(prefix)}layers\.(\d+)\.", name) for name in shapes)
    return 1 + max((int(match[1]) for match in numbers if match), default=-1)


def _attention(shapes: Shapes, prefix: str) -> dict[str, int]:
    """Sizes of the layers below `prefix`, read from the first one."""
    layer = f"{prefix}layers.0."
    head_dim = shapes[f"{layer}self_attn.q_norm.weight"][0]
    q_width, hidden = shapes[f"{layer}self_attn.q_proj.weight"]
    kv_width = shapes[f"{layer}self_attn.k_proj.weight"][0]
    if q_width % head_dim or kv_width % head_dim:
        raise ValueError(f"widths {q_width} and {kv_width} are no multiples of head_dim {head_dim}")
    return {
        "hidden_size": hidden,
        "intermediate_size": shapes[f"{layer}mlp.gate_proj.weight"][0],
        "num_hidden_layers": _layers(shapes, prefix),
        "num_attention_heads": q_width // head_dim,
        "num_key_value_heads": kv_width // head_dim,
        "head_dim": head_dim,
    }


def _untold(config: Config, *names: str) -> dict[str, Any]:
    """The values that shapes cannot tell, of `names`, as far as `config` has them."""
    rope = config.get("rope_parameters")
    nested = rope if isinstance(rope, Mapping) else {}
    values = {name: config.get(name, nested.get(name)) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _tower(shapes: Shapes, config: Config, prefix: str) -> EncoderConfig:
    told = _untold(config, "rms_norm_eps", "rope_theta", "sliding_window")
    return EncoderConfig(**_attention(shapes, prefix), **told)


def _qwen3(shapes: Shapes, config: Config) -> Qwen3Config:
    told = _untold(config, "rms_norm_eps", "rope_theta", "max_position_embeddings")
    rows = shapes["embed_tokens.weight"][0]
    return Qwen3Config(vocab_size=rows, **_attention(shapes, ""), **told)


def _condition(shapes: Shapes, config: Config) -> ConditionConfig:
    return ConditionConfig(
        lyric=_tower(shapes, config, "lyric_encoder."),
        timbre=_tower(shapes, config, "timbre_encoder."),
        text_hidden_dim=shapes["text_projector.weight"][1],
        timbre_hidden_dim=shapes["timbre_encoder.embed_tokens.weight"][1],
        timbre_cls=config.get("encoder_hidden_size") is not None,
        **_untold(config, "timbre_fix_frame"),
    )


def _levels(config: Config, dims: int | None) -> dict[str, tuple[int, ...]]:
    levels = tuple(config.get("fsq_input_levels") or FSQConfig().fsq_input_levels)
    if dims is not None and len(levels) != dims:
        raise ValueError(f"{dims} code dimensions, but fsq_input_levels is {list(levels)}")
    return {"fsq_input_levels": levels}


def _tokenizer(shapes: Shapes, config: Config) -> FSQConfig:
    return FSQConfig(
        tower=_tower(shapes, config, "attention_pooler."),
        audio_acoustic_hidden_dim=shapes["audio_acoustic_proj.weight"][1],
        fsq_dim=shapes["quantizer.project_out.weight"][0],
        **_levels(config, shapes["quantizer.project_out.weight"][1]),
        **_untold(config, "pool_window_size"),
    )


def _detokenizer(shapes: Shapes, config: Config) -> FSQConfig:
    return FSQConfig(
        tower=_tower(shapes, config, ""),
        audio_acoustic_hidden_dim=shapes["proj_out.weight"][0],
        fsq_dim=shapes["embed_tokens.weight"][1],
        pool_window_size=shapes["special_tokens"][1],
        **_levels(config, None),
    )


def _dit(shapes: Shapes, config: Config) -> DiTConfig:
    _, in_channels, patch = shapes["proj_in.1.weight"]
    return DiTConfig(
        **_attention(shapes, ""),
        encoder_hidden_size=shapes["condition_embedder.weight"][1],
        in_channels=in_channels,
        audio_acoustic_hidden_dim=shapes["proj_out.1.weight"][1],
        patch_size=patch,
        **_untold(config, "rms_norm_eps", "rope_theta", "sliding_window"),
    )


def _vae(shapes: Shapes, config: Config) -> VAEConfig:
    width, audio_channels, _ = shapes["encoder.conv1.weight"]
    blocks = [i for i in range(16) if f"encoder.block.{i}.conv1.weight" in shapes]
    strided = [shapes[f"encoder.block.{i}.conv1.weight"] for i in blocks]
    ratios = tuple(kernel // 2 for _, _, kernel in strided)  # a kernel is two strides long
    latent = shapes["decoder.conv1.weight"][1]
    hop = 1
    for ratio in ratios:
        hop *= ratio
    if hop != HOP or latent != LATENT_CHANNELS:
        raise ValueError(
            f"{hop} samples a frame and {latent} channels, where ACE-Step 1.5 has {HOP} and "
            f"{LATENT_CHANNELS}; Stable Audio has a VAE with the same names and 2048 samples"
        )
    return VAEConfig(
        encoder_hidden_size=width,
        decoder_channels=shapes["decoder.conv2.weight"][1],
        decoder_input_channels=latent,
        audio_channels=audio_channels,
        channel_multiples=tuple(out // width for out, _, _ in strided),
        downsampling_ratios=ratios,
    )


_READERS: dict[Role, Callable[[Shapes, Config], AnyConfig]] = {
    "lm": _qwen3,
    "text_encoder": _qwen3,
    "condition_encoder": _condition,
    "audio_tokenizer": _tokenizer,
    "audio_detokenizer": _detokenizer,
    "dit": _dit,
    "vae": _vae,
}
