"""Names of tensors in each kind of file, as tables onto the official names; and one function.

A style is a way of naming: "official" (also ComfyUI's, except for the VAE), "bare" (a DiT alone,
without its `decoder.`), "comfy" (that VAE) and "diffusers". Knows no files and no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .parts import Role

Style = Literal["official", "bare", "comfy", "diffusers"]
Rule = tuple[str, str]
"""A regular expression and its replacement."""

BASES = (
    "",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "model.",
    "vae.",
    "first_stage_model.",
)
"""What may stand before the names of a diffusion model or VAE, by who wrote the file."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Names of which any one says that a file holds `role` in `style`."""

    role: Role
    style: Style
    names: tuple[str, ...]


MARKS = (
    Mark("dit", "official", ("decoder.proj_in.1.weight", "decoder.condition_embedder.weight")),
    Mark(
        "condition_encoder",
        "official",
        (
            "encoder.lyric_encoder.embed_tokens.weight",
            "encoder.lyric_encoder.layers.0.input_layernorm.weight",
        ),
    ),
    Mark(
        "audio_tokenizer",
        "official",
        ("tokenizer.audio_acoustic_proj.weight", "tokenizer.attention_pooler.special_token"),
    ),
    Mark(
        "audio_detokenizer",
        "official",
        ("detokenizer.special_tokens", "detokenizer.proj_out.weight"),
    ),
    Mark("dit", "bare", ("proj_in.1.weight", "proj_out.1.weight")),
    Mark("dit", "diffusers", ("proj_in_conv.weight", "proj_out_conv.weight")),
    Mark(
        "condition_encoder",
        "diffusers",
        ("lyric_encoder.embed_tokens.weight", "lyric_encoder.layers.0.input_layernorm.weight"),
    ),
    Mark(
        "audio_tokenizer",
        "diffusers",
        ("audio_acoustic_proj.weight", "attention_pooler.special_token"),
    ),
    Mark("audio_detokenizer", "diffusers", ("special_tokens",)),
    Mark("vae", "diffusers", ("encoder.conv1.bias", "decoder.block.0.snake1.alpha")),
    Mark("vae", "comfy", ("encoder.layers.0.bias", "decoder.layers.1.layers.0.alpha")),
)

QWEN3_MARK = ("embed_tokens.weight", "norm.weight", "layers.0.self_attn.q_norm.weight")
QWEN3_NOT = "embed_tokens.bias"  # the lyric encoder has one, a language model has none


@dataclass(frozen=True, slots=True)
class Keymap:
    """How names become official: `select` picks those of the role, `renames` run on them in order.

    A name that no rule of `select` matches belongs to another role. `ignore` lists selected names
    that carry nothing the models need: rotary tables, implicit codebooks, the tied output head.
    """

    select: tuple[Rule, ...]
    renames: tuple[Rule, ...] = ()
    ignore: tuple[str, ...] = ()


_ALL: Rule = (r"^(.+)$", r"\1")
_ROTARY = r"(^|\.)rotary_emb\."
_WAY_OUT = r"quantizer\.project_out\."  # of the tokenizer, but the detokenizer begins with it
_TOKENIZER = r"(?:quantizer|attention_pooler|audio_acoustic_proj)\."
_CODEBOOK = r"^quantizer\.(?!project_(in|out)\.)"

_ATTENTION: tuple[Rule, ...] = (
    (r"\.to_q\.", ".q_proj."),
    (r"\.to_k\.", ".k_proj."),
    (r"\.to_v\.", ".v_proj."),
    (r"\.to_out\.0\.", ".o_proj."),
    (r"\.norm_q\.", ".q_norm."),
    (r"\.norm_k\.", ".k_norm."),
)

_WEIGHT_NORM: tuple[Rule, ...] = (
    (r"\.parametrizations\.weight\.original0$", ".weight_g"),
    (r"\.parametrizations\.weight\.original1$", ".weight_v"),
)

_COMFY_VAE: tuple[Rule, ...] = (
    (r"^(encoder|decoder)\.layers\.0\.", r"\1.conv1."),
    *((rf"^(encoder|decoder)\.layers\.{b + 1}\.", rf"\1.block.{b}.") for b in range(5)),
    (r"^(encoder|decoder)\.layers\.6\.", r"\1.snake1."),
    (r"^(encoder|decoder)\.layers\.7\.", r"\1.conv2."),
    *((rf"^(encoder\.block\.\d)\.layers\.{i}\.", rf"\1.res_unit{i + 1}.") for i in range(3)),
    (r"^(encoder\.block\.\d)\.layers\.3\.", r"\1.snake1."),
    (r"^(encoder\.block\.\d)\.layers\.4\.", r"\1.conv1."),
    (r"^(decoder\.block\.\d)\.layers\.0\.", r"\1.snake1."),
    (r"^(decoder\.block\.\d)\.layers\.1\.", r"\1.conv_t1."),
    *((rf"^(decoder\.block\.\d)\.layers\.{i + 2}\.", rf"\1.res_unit{i + 1}.") for i in range(3)),
    *(
        (rf"(res_unit\d)\.layers\.{i}\.", rf"\1.{name}.")
        for i, name in enumerate(("snake1", "conv1", "snake2", "conv2"))
    ),
)

_PATCH: tuple[Rule, ...] = (
    (r"^proj_in_conv\.", "proj_in.1."),
    (r"^proj_out_conv\.", "proj_out.1."),
)
_OTHERS = r"(?:encoder|tokenizer|detokenizer)\.|null_condition_emb$"  # what is not the DiT's

_QWEN3 = Keymap((_ALL,), ignore=(_ROTARY, r"^lm_head\."))

KEYMAPS: dict[tuple[Role, Style], Keymap] = {
    ("lm", "official"): _QWEN3,
    ("text_encoder", "official"): _QWEN3,
    ("dit", "official"): Keymap(
        # a name of no known role counts as the DiT's, so that it is reported once
        ((r"^decoder\.(.+)$", r"\1"), (rf"^((?!{_OTHERS}).+)$", r"\1")),
        ignore=(_ROTARY,),
    ),
    ("dit", "bare"): Keymap((_ALL,), ignore=(_ROTARY,)),
    ("condition_encoder", "official"): Keymap(
        ((r"^encoder\.(.+)$", r"\1"), (r"^(null_condition_emb)$", r"\1")), ignore=(_ROTARY,)
    ),
    ("audio_tokenizer", "official"): Keymap(
        ((r"^tokenizer\.(.+)$", r"\1"),), ignore=(_ROTARY, _CODEBOOK)
    ),
    ("audio_detokenizer", "official"): Keymap(
        ((r"^detokenizer\.(.+)$", r"\1"), (rf"^tokenizer\.({_WAY_OUT}.+)$", r"\1")),
        ignore=(_ROTARY,),
    ),
    ("dit", "diffusers"): Keymap((_ALL,), (*_PATCH, *_ATTENTION), (_ROTARY,)),
    ("condition_encoder", "diffusers"): Keymap((_ALL,), _ATTENTION, (_ROTARY, r"^silence_latent$")),
    ("audio_tokenizer", "diffusers"): Keymap((_ALL,), _ATTENTION, (_ROTARY, _CODEBOOK)),
    ("audio_detokenizer", "diffusers"): Keymap(
        ((rf"^({_WAY_OUT}.+)$", r"\1"), (rf"^((?!{_TOKENIZER}).+)$", r"\1")),
        _ATTENTION,
        (_ROTARY,),
    ),
    ("vae", "diffusers"): Keymap((_ALL,), _WEIGHT_NORM),
    ("vae", "comfy"): Keymap((_ALL,), (*_COMFY_VAE, *_WEIGHT_NORM)),
}


def official_names(role: Role, style: Style, names: Iterable[str]) -> dict[str, str]:
    """Official name -> name in the file, for those of `names` that belong to `role`.

    `names` come without their base. Names that no table knows keep their own and are reported when
    the model is filled.
    """
    keymap = KEYMAPS[role, style]
    selects = [(re.compile(pattern), new) for pattern, new in keymap.select]
    renames = [(re.compile(pattern), new) for pattern, new in keymap.renames]
    ignores = [re.compile(pattern) for pattern in keymap.ignore]
    found: dict[str, str] = {}
    for name in names:
        match = next(((p, new) for p, new in selects if p.search(name)), None)
        if match is None:
            continue
        official = match[0].sub(match[1], name)
        for pattern, new in renames:
            official = pattern.sub(new, official)
        if not any(pattern.search(official) for pattern in ignores):
            found[official] = name
    return found
