"""Presets name official repositories, and a failed download tells what to do by hand."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import huggingface_hub
import pytest

from acestep_engine.errors import ModelNotFound
from acestep_engine.weights import presets
from acestep_engine.weights.layouts import discover
from acestep_engine.weights.tiny import write_tiny

DEAD = "http://127.0.0.1:9"  # the discard port: nothing listens


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_part_of_a_preset_is_in_its_downloads(name: str) -> None:
    spec = presets.spec_of(name, "/models")
    for path in (spec.dit, spec.text_encoder, spec.lm, spec.vae):
        folder = Path(path).name
        homes = [
            item
            for item in presets.files_of(name)
            if item.folder == folder
            or (
                not item.folder
                and any(fnmatch.fnmatch(f"{folder}/a.json", p) for p in item.patterns)
            )
        ]
        assert [home.repo for home in homes] in (
            ["ACE-Step/Ace-Step1.5"],
            [f"ACE-Step/{folder}"],
        ), folder


def test_the_first_preset_needs_one_repository_and_not_all_of_it() -> None:
    (item,) = presets.files_of("turbo")
    wanted = [
        "acestep-v15-turbo/model.safetensors",
        "acestep-v15-turbo/silence_latent.pt",
        "acestep-v15-turbo/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "Qwen3-Embedding-0.6B/merges.txt",
        "acestep-5Hz-lm-1.7B/tokenizer.json",
    ]
    unwanted = ["acestep-v15-turbo/modeling_acestep_v15_turbo.py", "README.md", "other/x.json"]
    matched = [
        file for file in wanted + unwanted if any(fnmatch.fnmatch(file, p) for p in item.patterns)
    ]
    assert matched == wanted


def test_parts_of_their_own_repositories_come_from_there() -> None:
    assert [(d.repo, d.folder) for d in presets.files_of("xl-base")] == [
        ("ACE-Step/Ace-Step1.5", ""),
        ("ACE-Step/acestep-v15-xl-base", "acestep-v15-xl-base"),
    ]
    assert [(d.repo, d.folder) for d in presets.files_of("turbo-4b-lm")] == [
        ("ACE-Step/Ace-Step1.5", ""),
        ("ACE-Step/acestep-5Hz-lm-4B", "acestep-5Hz-lm-4B"),
    ]


@pytest.mark.parametrize("filled", [False, True])
def test_without_a_network_the_way_by_hand_is_told(tmp_path: Path, filled: bool) -> None:
    if filled:  # an earlier try left something behind
        (tmp_path / "vae").mkdir()
        (tmp_path / "vae" / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound) as caught:
        presets.download("turbo-0.6b-lm", tmp_path, endpoint=DEAD)
    text = str(caught.value)
    assert "'turbo-0.6b-lm' could not be downloaded" in text
    assert "run it again" in text
    assert "from ACE-Step/Ace-Step1.5 the folders vae, Qwen3-Embedding-0.6B" in text
    assert f"from ACE-Step/acestep-5Hz-lm-0.6B all files into {tmp_path}" in text
    assert "\n" not in text


def test_download_asks_the_hub_for_the_listed_files_and_checks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def arrive(repo: str, **wishes: object) -> None:
        asked.append((repo, wishes["local_dir"], wishes["allow_patterns"]))
        write_tiny(tmp_path, "official")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", arrive)
    assert presets.download("turbo", tmp_path) == tmp_path
    (item,) = presets.files_of("turbo")
    assert asked == [(item.repo, tmp_path, list(item.patterns))]
    assert discover(tmp_path) == presets.locate("turbo", tmp_path)


def test_an_incomplete_preset_says_how_to_complete_it(tmp_path: Path) -> None:
    write_tiny(tmp_path, "official", lm=False)
    with pytest.raises(ModelNotFound, match=r"'turbo' is not complete.*language model.*download"):
        presets.locate("turbo", tmp_path)
