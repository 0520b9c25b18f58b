"""Every layout gives the same tensors, and a place is understood by what lies in it."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from acestep_engine.config import ConditionConfig, DiTConfig
from acestep_engine.errors import BadCheckpoint, ModelNotFound
from acestep_engine.types import ModelSpec
from acestep_engine.weights.layouts import (
    ROLES,
    Layout,
    Role,
    discover,
    entries,
    family_of,
    locate,
    size_of,
)
from acestep_engine.weights.load import read
from acestep_engine.weights.shapes import config_of
from acestep_engine.weights.tensors import fold_weight_norm
from acestep_engine.weights.tiny import write_tiny
from acestep_engine.weights.tiny_tensors import tables

LAYOUTS: tuple[Layout, ...] = ("official", "comfy_split", "comfy_aio", "diffusers")


def folded(role: Role) -> dict[str, torch.Tensor]:
    """The tensors that every layout of seed 0 must give."""
    made = tables(0, False, torch.float32)
    table = made[role]
    if role == "audio_detokenizer":  # it begins with the quantiser's way out
        table |= {n: t for n, t in made["audio_tokenizer"].items() if "project_out" in n}
    for name in [name for name in table if name.endswith("weight_g")]:
        v = name.removesuffix("g") + "v"
        table[name.removesuffix("_g")] = fold_weight_norm(table.pop(name), table.pop(v))
    return table


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_are_the_same_bit_for_bit_in_every_layout(
    tiny_models: dict[str, ModelSpec], layout: Layout, role: Role
) -> None:
    tensors, expected = read(locate(tiny_models[layout], role)), folded(role)
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert tensors.shapes[name] == tuple(tensor.shape), name
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("role", ROLES)
def test_sizes_are_the_same_in_every_layout(tiny_models: dict[str, ModelSpec], role: Role) -> None:
    found = set()
    for layout in LAYOUTS:
        source = locate(tiny_models[layout], role)
        found.add(config_of(role, read(source).shapes, source.config))
    assert len(found) == 1


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    spec = write_tiny(tmp_path, "official", shards=3)
    source = locate(spec, "dit")
    assert len(source.files) == 3
    tensors = read(source)
    assert all(torch.equal(tensors[name], value) for name, value in folded("dit").items())
    source.files[1].unlink()
    with pytest.raises(BadCheckpoint, match=r"lacks 1 of 3 shards"):
        locate(spec, "dit")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_xl_is_known_by_its_widths_in_every_layout(tmp_path: Path, layout: Layout) -> None:
    spec = write_tiny(tmp_path, layout, xl=True, lm=False)
    dit, encoder = (locate(spec, role) for role in ("dit", "condition_encoder"))
    sizes = config_of("dit", read(dit).shapes, dit.config)
    assert isinstance(sizes, DiTConfig)
    assert (sizes.hidden_size, sizes.encoder_hidden_size) == (40, 32)
    assert sizes.num_attention_heads * sizes.head_dim == 48
    condition = config_of("condition_encoder", read(encoder).shapes, encoder.config)
    assert isinstance(condition, ConditionConfig)
    assert condition.timbre_cls


@pytest.mark.parametrize("prefix", ["", "model.", "diffusion_model.", "model.diffusion_model."])
def test_a_dit_is_known_under_any_prefix(
    tmp_path: Path, tiny_model: ModelSpec, prefix: str
) -> None:
    table = load_file(Path(tiny_model.dit) / "model.safetensors")
    path = tmp_path / "mine.safetensors"
    save_file({prefix + name: tensor for name, tensor in table.items()}, path)
    spec = ModelSpec(dit=str(path))
    for role in ("dit", "condition_encoder", "audio_tokenizer", "audio_detokenizer"):
        assert set(read(locate(spec, role))) == set(folded(role))


def test_a_dit_alone_without_its_prefix_is_read_and_the_lack_of_an_encoder_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "bare.safetensors"
    save_file(folded("dit"), path)
    spec = ModelSpec(dit=str(path))
    assert set(read(locate(spec, "dit"))) == set(folded("dit"))
    with pytest.raises(BadCheckpoint, match="condition encoder: it holds diffusion transformer"):
        locate(spec, "condition_encoder")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_discover_finds_the_whole_model(tmp_path: Path, layout: Layout) -> None:
    spec = write_tiny(tmp_path, layout)
    assert discover(tmp_path) == spec


def test_discover_takes_one_folder_or_file_for_what_it_is(
    tiny_models: dict[str, ModelSpec],
) -> None:
    official, aio = tiny_models["official"], tiny_models["comfy_aio"]
    assert discover(official.lm) == ModelSpec(lm=official.lm)
    assert discover(Path(official.vae)) == ModelSpec(vae=official.vae)
    assert discover(aio.dit) == aio
    assert discover(tiny_models["comfy_split"].dit) == ModelSpec(dit=tiny_models["comfy_split"].dit)


@pytest.mark.parametrize("layout", ["official", "diffusers"])
def test_a_folder_with_a_dit_is_completed_from_the_folders_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    spec = write_tiny(tmp_path, layout)
    write_tiny(tmp_path, "official", family="base", lm=False)  # its neighbour, not its rival
    assert discover(spec.dit) == spec
    monkeypatch.chdir(spec.dit)
    assert discover(".") == replace(
        spec, **{k: "." for k in ("dit", "text_encoder", "vae") if getattr(spec, k) == spec.dit}
    )


def test_discover_passes_over_the_models_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = write_tiny(tmp_path, "comfy_split")
    table = load_file(spec.text_encoder)
    rows = table.pop("model.embed_tokens.weight")
    table["model.embed_tokens.weight"] = torch.cat((rows, rows[:267]))  # a general Qwen3
    save_file(table, tmp_path / "text_encoders" / "another_qwen.safetensors")
    kernel = "decoder.layers.2.layers.1.parametrizations.weight.original1"
    strided = "encoder.layers.4.layers.4.parametrizations.weight.original1"
    codec = load_file(spec.vae)
    codec |= {kernel: codec[kernel][..., :8].clone(), strided: codec[strided][..., :8].clone()}
    save_file(codec, tmp_path / "vae" / "a_stable_audio.safetensors")
    save_file({"lora": torch.ones(1)}, tmp_path / "diffusion_models" / "a_lora.safetensors")
    (tmp_path / "diffusion_models" / "broken.safetensors").write_bytes(b"GGUF" + bytes(90))
    (tmp_path / "loras").mkdir()
    (tmp_path / "loras" / "half.safetensors").write_bytes(b"never looked at")
    with caplog.at_level(logging.WARNING):
        assert discover(tmp_path) == spec
    assert "a_stable_audio.safetensors" in caplog.text
    assert "broken.safetensors" in caplog.text
    assert "half.safetensors" not in caplog.text


def test_of_several_models_the_usual_one_is_chosen_and_the_choice_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = write_tiny(tmp_path, "official")
    write_tiny(tmp_path, "official", family="base", lm=False)
    write_tiny(tmp_path, "official", xl=True, lm=False)
    with caplog.at_level(logging.INFO):
        assert discover(tmp_path) == spec
    assert "acestep-v15-base" in caplog.text


def test_discover_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"nothing at .*none"):
        discover(tmp_path / "none")
    with pytest.raises(ModelNotFound, match="holds no model"):
        discover(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelNotFound, match=r"ACE-Step 1.5 \(looked at other.safetensors\)"):
        discover(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(b"<html>" + bytes(90))
    with pytest.raises(ModelNotFound, match=r"No usable model.*web page"):
        discover(tmp_path)


def test_entries_of_missing_empty_and_mixed_folders(tmp_path: Path) -> None:
    assert entries(tmp_path / "none") == []
    assert entries(tmp_path) == []
    spec = write_tiny(tmp_path / "sub", "official", lm=False)
    save_file({"a": torch.ones(1)}, tmp_path / "single.safetensors")
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "empty").mkdir()
    found = entries(tmp_path)
    assert found == sorted(
        [
            Path(spec.dit),
            Path(spec.text_encoder),
            Path(spec.vae),
            tmp_path / "single.safetensors",
        ]
    )


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("vae", r"No VAE.*folder vae/ .*ace_1\.5_vae\.safetensors.*models/vae"),
        ("lm", r"No language model.*acestep-5Hz-lm-1\.7B.*qwen_1\.7b_ace15\.safetensors"),
        ("text_encoder", r"No text encoder.*Qwen3-Embedding-0\.6B"),
        ("dit", r"No diffusion transformer.*acestep-v15-turbo.*models/diffusion_models"),
        ("condition_encoder", r"No condition encoder.*acestep-v15-turbo"),
    ],
)
def test_a_part_that_is_not_chosen_is_named_with_its_file(role: Role, words: str) -> None:
    with pytest.raises(ModelNotFound, match=words):
        locate(ModelSpec(), role)


def test_a_path_with_nothing_at_it_or_in_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"VAE .* was to be at .*gone.*ace_1\.5_vae"):
        locate(ModelSpec(vae=str(tmp_path / "gone")), "vae")
    with pytest.raises(ModelNotFound, match="but nothing"):
        locate(ModelSpec(vae=str(tmp_path)), "vae")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"but only pytorch_model\.bin"):
        locate(ModelSpec(vae=str(tmp_path)), "vae")


def test_the_text_encoder_is_refused_as_a_language_model(
    tiny_models: dict[str, ModelSpec],
) -> None:
    for spec in (tiny_models["comfy_split"], tiny_models["official"]):
        with pytest.raises(BadCheckpoint, match=r"151,669 rows.*audio codes.*qwen_1\.7b_ace15"):
            locate(ModelSpec(lm=spec.text_encoder), "lm")
        with pytest.raises(BadCheckpoint, match=r"language model \(217,204 rows.*qwen_0\.6b"):
            locate(ModelSpec(text_encoder=spec.lm), "text_encoder")


def test_a_file_of_another_role_says_what_it_holds(tiny_models: dict[str, ModelSpec]) -> None:
    spec = tiny_models["comfy_split"]
    with pytest.raises(BadCheckpoint, match=r"cannot be used as VAE.*it holds condition encoder"):
        locate(ModelSpec(vae=spec.dit), "vae")
    with pytest.raises(BadCheckpoint, match="it holds VAE"):
        locate(ModelSpec(dit=spec.vae), "dit")


def test_a_foreign_file_shows_its_first_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"down_blocks.0.weight": torch.ones(1)}, path)
    with pytest.raises(BadCheckpoint, match=r"no part of ACE-Step 1\.5 \(down_blocks\.0\.weight\)"):
        locate(ModelSpec(dit=str(path)), "dit")


@pytest.mark.parametrize("family", ["turbo", "sft", "base"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_family_is_read_from_config_or_name(tmp_path: Path, layout: Layout, family: str) -> None:
    spec = write_tiny(tmp_path, layout, family=family, lm=False)  # pyright: ignore
    found, reason = family_of(spec)
    assert found == family
    assert ("config.json" in reason) == (layout in ("official", "diffusers"))


@pytest.mark.parametrize(
    ("name", "config", "family"),
    [
        ("acestep-v15-turbo-shift3", {}, "turbo"),
        ("acestep-v15-base-sft-fix-inst", {}, "sft"),
        ("acestep-v15-xl-base", {}, "base"),
        ("mine-sft", {"is_turbo": True}, "turbo"),
        ("mine", {"is_turbo": False}, "base"),
        ("mine-sft", {"is_turbo": False}, "sft"),
        ("mine-turbo", {"is_turbo": False}, "base"),
        ("mine", {"is_turbo": False, "model_version": "v15-SFT"}, "sft"),
        ("database", {}, "turbo"),
    ],
)
def test_family_by_folder(
    tmp_path: Path, name: str, config: dict[str, object], family: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert family_of(ModelSpec(dit=str(folder)))[0] == family


def test_family_of_a_hub_snapshot_is_in_the_name_of_its_repository(tmp_path: Path) -> None:
    folder = tmp_path / "models--ACE-Step--acestep-v15-base" / "snapshots" / "0f3a"
    folder.mkdir(parents=True)
    assert family_of(ModelSpec(dit=str(folder)))[0] == "base"


def test_the_users_word_on_the_family_comes_first(tiny_model: ModelSpec) -> None:
    assert family_of(replace(tiny_model, family="sft")) == ("sft", "asked for")


def test_an_unknown_family_is_taken_for_turbo_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert family_of(ModelSpec(dit=str(tmp_path / "merge_7.safetensors")))[0] == "turbo"
    assert "set the family to sft or base" in caplog.text


def test_a_config_beside_a_comfyui_file_is_not_its_own(tmp_path: Path) -> None:
    spec = write_tiny(tmp_path, "comfy_split", family="base", lm=False)
    other = Path(spec.dit).parent / "config.json"
    other.write_text('{"is_turbo": true, "rope_theta": 3.0}')
    assert locate(spec, "dit").config == {}
    assert family_of(spec)[0] == "base"


def test_size_of_the_language_model_is_its_width(tiny_model: ModelSpec) -> None:
    assert size_of(tiny_model) == "width 16"


def test_a_folder_with_a_config_but_no_weights_is_no_model(
    tmp_path: Path, tiny_model: ModelSpec
) -> None:
    shutil.copy(Path(tiny_model.dit) / "config.json", tmp_path)
    with pytest.raises(ModelNotFound, match=r"but only config\.json"):
        locate(ModelSpec(dit=str(tmp_path)), "dit")
    assert entries(tmp_path) == []
