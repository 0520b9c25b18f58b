"""The lists of the loader: never empty, never failing, likely files first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PARTS = ("dit", "text_encoder", "lm", "vae")
TURBO = "acestep_v1.5_turbo.safetensors"


@pytest.fixture
def choices(pack: Any) -> Any:
    return pack("nodes.choices")


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.mark.parametrize("state", ["missing", "empty"])
def test_lists_hold_an_entry_where_there_are_no_models(
    choices: Any, models: Path, state: str
) -> None:
    if state == "empty":
        for name in ("diffusion_models", "checkpoints", "text_encoders", "vae", "acestep"):
            (models / name).mkdir()
    assert choices.options("dit") == [choices.NOTHING]
    assert choices.options("lm") == [choices.NONE, choices.FROM_DIT]
    assert all(choices.options(part) for part in PARTS)


def test_files_and_folders_both_show_up(choices: Any, models: Path) -> None:
    touch(models / "diffusion_models" / "sub" / "acestep_v1.5_xl.safetensors")
    touch(models / "checkpoints" / "ace_step_1.5_turbo_aio.safetensors")
    touch(models / "acestep" / "acestep-v15-base" / "model.safetensors")
    touch(models / "acestep" / "repo" / "acestep-5Hz-lm-4B" / "model.safetensors")
    touch(models / "acestep" / "repo" / "vae" / "diffusion_pytorch_model.safetensors")
    dits = choices.options("dit")
    assert str(Path("sub") / "acestep_v1.5_xl.safetensors") in dits
    assert "ace_step_1.5_turbo_aio.safetensors" in dits
    assert "acestep-v15-base" in dits
    assert "repo" in dits
    assert choices.options("lm")[0] == "repo/acestep-5Hz-lm-4B"
    assert choices.options("vae")[0] == "repo/vae"


def test_a_diffusers_folder_is_one_entry(choices: Any, models: Path) -> None:
    folder = models / "acestep" / "song-diffusers"
    touch(folder / "model_index.json")
    touch(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert choices.options("dit") == ["song-diffusers"]


def test_the_usual_file_comes_first_and_foreign_ones_last(choices: Any, models: Path) -> None:
    for name in ("a_flux.safetensors", "acestep_v1.5_sft.safetensors", TURBO):
        touch(models / "diffusion_models" / name)
    names = ("clip_l.safetensors", "qwen_0.6b_ace15.safetensors", "qwen_4b_ace15.safetensors")
    for name in names:
        touch(models / "text_encoders" / name)
    assert choices.options("dit") == [TURBO, "acestep_v1.5_sft.safetensors", "a_flux.safetensors"]
    assert choices.options("text_encoder")[0] == "qwen_0.6b_ace15.safetensors"
    assert choices.options("lm")[0] == "qwen_4b_ace15.safetensors"


def test_foreign_files_alone_are_never_the_default(choices: Any, models: Path) -> None:
    touch(models / "diffusion_models" / "a_flux.safetensors")
    assert choices.options("dit") == [choices.NOTHING, "a_flux.safetensors"]


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_named_with_its_cure(
    choices: Any, pack: Any, models: Path, part: str
) -> None:
    touch(models / "diffusion_models" / TURBO)
    chosen = {"dit": TURBO, "text_encoder": "none", "lm": "none", "vae": "none"}
    chosen[part] = "gone.safetensors"
    label = pack("acestep_engine.weights.parts").PARTS[part].label
    with pytest.raises(pack("acestep_engine.errors").ModelNotFound) as caught:
        choices.model_of(chosen, "auto", pack("acestep_engine.runtime").Wish())
    text = str(caught.value)
    for words in (label, "gone.safetensors", "Hugging Face", "models/"):
        assert words in text


def test_no_choice_at_all_says_what_to_get(choices: Any, pack: Any, models: Path) -> None:
    chosen = dict.fromkeys(PARTS, choices.FROM_DIT) | {"dit": choices.NOTHING}
    with pytest.raises(pack("acestep_engine.errors").ModelNotFound, match=TURBO):
        choices.model_of(chosen, "auto", pack("acestep_engine.runtime").Wish())
