"""Tiny real checkpoints on the disk, in every layout: for tests, and to try things without files.

The same seed gives the same tensors bit for bit in each layout. Names of other layouts are made
here by hand and not from `keymaps`, so that one checks the other.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..config import Family, Qwen3Config
from ..types import ModelSpec
from .parts import PARTS, Role
from .silence import BUFFER, FILE
from .sources import Layout
from .tiny_tensors import CONDITION, DIT, DIT_XL, FSQ, LM, TEXT_ENCODER, VAE, Table, tables

_DIT_ROLES: dict[Role, str] = {
    "dit": "decoder.",
    "condition_encoder": "encoder.",
    "audio_tokenizer": "tokenizer.",
    "audio_detokenizer": "detokenizer.",
}
_DIFFUSERS_NAMES = (
    ("proj_in.1.", "proj_in_conv."),
    ("proj_out.1.", "proj_out_conv."),
    (".q_proj.", ".to_q."),
    (".k_proj.", ".to_k."),
    (".v_proj.", ".to_v."),
    (".o_proj.", ".to_out.0."),
    (".q_norm.", ".norm_q."),
    (".k_norm.", ".norm_k."),
)
_DIFFUSERS_CLASSES: dict[Role, str] = {
    "dit": "AceStepTransformer1DModel",
    "condition_encoder": "AceStepConditionEncoder",
    "audio_tokenizer": "AceStepAudioTokenizer",
    "audio_detokenizer": "AceStepAudioTokenDetokenizer",
    "vae": "AutoencoderOobleck",
}


@dataclass(frozen=True, slots=True)
class _Model:
    """One checkpoint in memory, about to be written."""

    tables: dict[Role, Table]
    name: str  # as "xl_turbo"
    family: Family
    xl: bool
    silence: Tensor | None


def write_tiny(
    folder: str | Path,
    layout: Layout,
    *,
    seed: int = 0,
    xl: bool = False,
    family: Family = "turbo",
    lm: bool = True,
    dtype: torch.dtype = torch.float32,
    silence: Tensor | None = None,
    shards: int = 1,
) -> ModelSpec:
    """Write a tiny model below `folder` and say where its parts are.

    `lm` off leaves the language model out. `silence`: latents (N, 64) to store where the layout has
    a place for them. `shards`: files of an official DiT folder.
    """
    made = tables(seed, xl, dtype)
    if not lm:
        del made["lm"]
    model = _Model(made, f"{'xl_' * xl}{family}", family, xl, silence)
    root = Path(folder)
    if layout == "official":
        return _write_official(root, model, shards)
    if layout == "diffusers":
        return _write_diffusers(root, model)
    return _write_comfy(root, model, layout)


def _write_official(root: Path, model: _Model, shards: int) -> ModelSpec:
    dit = root / f"acestep-v15-{model.name.replace('_', '-')}"
    table = _joined(model)
    if shards > 1:
        _save_shards(dit, table, shards)
    else:
        _save(dit / "model.safetensors", table)
    _save_json(dit / "config.json", _dit_config(model))
    if model.silence is not None:
        torch.save(model.silence.T[None].float().contiguous(), dit / FILE)
    text = root / PARTS["text_encoder"].official
    _save_qwen3(text, model.tables["text_encoder"], TEXT_ENCODER)
    return ModelSpec(str(dit), str(text), _save_lm(root, model), _save_vae(root / "vae", model))


def _write_diffusers(root: Path, model: _Model) -> ModelSpec:
    home = root / f"acestep-v15-{model.name.replace('_', '-')}-diffusers"
    for role in _DIT_ROLES:
        table = {_replaced(name, _DIFFUSERS_NAMES): t for name, t in model.tables[role].items()}
        if role == "condition_encoder" and model.silence is not None:
            table[BUFFER] = model.silence[None].float().contiguous()
        folder = home / PARTS[role].diffusers
        _save(folder / "diffusion_pytorch_model.safetensors", table)
        _save_json(folder / "config.json", _diffusers_config(role, model))
    _save_qwen3(home / "text_encoder", model.tables["text_encoder"], TEXT_ENCODER)
    _save_vae(home / "vae", model)
    return ModelSpec(str(home), str(home), _save_lm(root, model), str(home))


def _write_comfy(root: Path, model: _Model, layout: Layout) -> ModelSpec:
    vae = {_comfy_vae_name(name): _flat_snake(name, t) for name, t in model.tables["vae"].items()}
    qwens = {
        role: _prefixed("model.", model.tables.get(role, {})) for role in ("text_encoder", "lm")
    }
    if layout == "comfy_aio":
        path = root / "checkpoints" / f"ace_step_1.5_{model.name}_aio.safetensors"
        table = _prefixed("model.diffusion_model.", _joined(model)) | _prefixed("vae.", vae)
        table |= _prefixed("text_encoders.qwen3_06b.transformer.", qwens["text_encoder"])
        table |= _prefixed("text_encoders.qwen3_2b.transformer.", qwens["lm"])
        _save(path, table)
        return ModelSpec(str(path), str(path), str(path) if qwens["lm"] else "", str(path))
    dit = root / "diffusion_models" / f"acestep_v1.5_{model.name}.safetensors"
    text = root / "text_encoders" / "qwen_0.6b_ace15.safetensors"
    lm = root / "text_encoders" / "qwen_1.7b_ace15.safetensors"
    codec = root / "vae" / "ace_1.5_vae.safetensors"
    _save(dit, _joined(model))
    _save(text, qwens["text_encoder"])
    if qwens["lm"]:
        _save(lm, qwens["lm"])
    modern = (
        (".weight_g", ".parametrizations.weight.original0"),
        (".weight_v", ".parametrizations.weight.original1"),
    )
    _save(codec, {_replaced(name, modern): t for name, t in vae.items()})
    return ModelSpec(str(dit), str(text), str(lm) if qwens["lm"] else "", str(codec))


def _save_lm(root: Path, model: _Model) -> str:
    if "lm" not in model.tables:
        return ""
    folder = root / PARTS["lm"].official
    _save_qwen3(folder, model.tables["lm"], LM)
    return str(folder)


def _save_qwen3(folder: Path, table: Table, config: Qwen3Config) -> None:
    _save(folder / "model.safetensors", table)
    extra = {
        "architectures": ["Qwen3Model"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    _save_json(folder / "config.json", asdict(config) | extra)


def _save_vae(folder: Path, model: _Model) -> str:
    _save(folder / "diffusion_pytorch_model.safetensors", model.tables["vae"])
    _save_json(folder / "config.json", _diffusers_config("vae", model))
    return str(folder)


def _save(path: Path, table: Table) -> None:
    """Write and then rename, so that whoever still reads the old file keeps it whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    save_file(table, unfinished, metadata={"format": "pt"})
    unfinished.replace(path)


def _save_shards(folder: Path, table: Table, count: int) -> None:
    names = sorted(table)
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = {name: table[name] for name in names[number::count]}
        _save(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in table.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _save_json(folder / "model.safetensors.index.json", index)


def _save_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")


def _joined(model: _Model) -> Table:
    """The four roles of a DiT file under their official prefixes."""
    table: Table = {}
    for role, prefix in _DIT_ROLES.items():
        table |= _prefixed(prefix, model.tables[role])
    table["null_condition_emb"] = table.pop("encoder.null_condition_emb")
    return table


def _prefixed(prefix: str, table: Table) -> Table:
    return {prefix + name: tensor for name, tensor in table.items()}


def _replaced(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    for old, new in pairs:
        name = name.replace(old, new)
    return name


def _flat_snake(name: str, tensor: Tensor) -> Tensor:
    return tensor.flatten() if name.endswith((".alpha", ".beta")) else tensor


def _comfy_vae_name(name: str) -> str:
    """encoder.block.0.res_unit2.snake1.alpha -> encoder.layers.1.layers.1.layers.0.alpha"""
    side, *path, leaf = name.split(".")
    if path[0] != "block":
        return f"{side}.layers.{ {'conv1': 0, 'snake1': 6, 'conv2': 7}[path[0]] }.{leaf}"
    units = {f"res_unit{n}": n - 1 + 2 * (side == "decoder") for n in (1, 2, 3)}
    own = {"snake1": 0, "conv_t1": 1} if side == "decoder" else {"snake1": 3, "conv1": 4}
    places = [int(path[1]) + 1, (units | own)[path[2]]]
    if len(path) == 4:
        places.append(("snake1", "conv1", "snake2", "conv2").index(path[3]))
    return f"{side}.{'.'.join(f'layers.{place}' for place in places)}.{leaf}"


def _dit_config(model: _Model) -> dict[str, Any]:
    tower = CONDITION.lyric
    config = asdict(DIT_XL if model.xl else DIT)
    width = config.pop("encoder_hidden_size")
    if model.xl:
        config |= {
            "encoder_hidden_size": width,
            "encoder_intermediate_size": tower.intermediate_size,
            "encoder_num_attention_heads": tower.num_attention_heads,
            "encoder_num_key_value_heads": tower.num_key_value_heads,
        }
    return config | {
        "model_type": "acestep",
        "is_turbo": model.family == "turbo",
        "model_version": model.family,
        "num_lyric_encoder_hidden_layers": tower.num_hidden_layers,
        "num_timbre_encoder_hidden_layers": CONDITION.timbre.num_hidden_layers,
        "num_attention_pooler_hidden_layers": FSQ.tower.num_hidden_layers,
        "text_hidden_dim": CONDITION.text_hidden_dim,
        "timbre_hidden_dim": CONDITION.timbre_hidden_dim,
        "timbre_fix_frame": CONDITION.timbre_fix_frame,
        "fsq_dim": FSQ.fsq_dim,
        "fsq_input_levels": list(FSQ.fsq_input_levels),
        "fsq_input_num_quantizers": 1,
        "pool_window_size": FSQ.pool_window_size,
    }


def _diffusers_config(role: Role, model: _Model) -> dict[str, Any]:
    """config.json of one diffusers folder: the keys that its class takes."""
    values: dict[str, Any]
    if role == "vae":
        values = asdict(VAE) | {"sampling_rate": 48_000}
    elif role == "dit":
        values = asdict(DIT_XL if model.xl else DIT)
        values |= {"is_turbo": model.family == "turbo", "model_version": model.family}
    else:
        layers = re.compile(
            "num_(lyric|timbre)_" if role == "condition_encoder" else "num_att.*pool"
        )
        own = ("text_hidden_dim", "timbre_hidden_dim") if role == "condition_encoder" else ()
        if role != "condition_encoder":
            own = ("audio_acoustic_hidden_dim", "pool_window_size")
        if role == "audio_tokenizer":
            own += ("fsq_dim", "fsq_input_levels", "fsq_input_num_quantizers")
        whole = _dit_config(model)
        values = asdict(CONDITION.lyric)
        del values["num_hidden_layers"]
        values |= {key: value for key, value in whole.items() if key in own or layers.match(key)}
    return {"_class_name": _DIFFUSERS_CLASSES[role], "_diffusers_version": "0.42.1"} | values
