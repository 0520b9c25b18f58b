"""`song` on the command line: from files of plans and codes, with adapters, by its options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from acestep_engine.cli.files import read_plan
from acestep_engine.cli.main import parser
from acestep_engine.cli.sampler import sampling_of
from acestep_engine.types import DiTSampling, ModelSpec, Wavelet

Run = Callable[..., None]
Captured = pytest.CaptureFixture[str]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_option_of_the_render_arrives() -> None:
    options = parser().parse_args(
        [
            *("song", "--steps", "9", "--shift", "2", "--guidance", "3", "--seed", "4"),
            *("--batch", "5", "--interval", "0.1", "0.9", "--timesteps", "1", "0.5"),
            *("--solver", "heun", "--guidance-mode", "adg", "--velocity-clamp", "2"),
            *("--velocity-ema", "0.1", "--retake", "0.2", "--retake-seed", "6"),
            *("--dcw", "double", "--dcw-scaler", "0.3", "--dcw-high", "0.4"),
        ]
    )
    assert sampling_of(options) == DiTSampling(
        *(9, 2.0, 3.0, (0.1, 0.9), (1.0, 0.5), 4, 5, "heun", "adg", 2.0, 0.1, 0.2, 6),
        dcw=Wavelet("double", 0.3, 0.4),
    )
    assert sampling_of(parser().parse_args(["song"])) == DiTSampling()


@pytest.mark.slow
def test_a_song_is_made_again_from_its_report(run: Run, tmp_path: Path) -> None:
    first, again = tmp_path / "first.wav", tmp_path / "again.wav"
    run(
        "song", "--seconds", "2", "--caption", "calm", "--steps", "2", "--seed", "7", "--out", first
    )
    report = first.with_suffix(".json")
    files = ("--plan", report, "--codes", report)
    run("song", *files, "--steps", "2", "--seed", "7", "--out", again)
    assert first.read_bytes() == again.read_bytes()
    old, new = read(report), read(again.with_suffix(".json"))
    assert (old["plan"], old["codes"]) == (new["plan"], new["codes"])
    run("score", report, report)


def test_words_given_beside_a_plan_replace_its_own(run: Run, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "x.wav"
    words = ("--caption", "calm", "--lyrics", "la", "--bpm", "90", "--seconds", "30")
    run("plan", *words, "--no-think", "--out", plan)
    changes = ("--bpm", "120", "--seconds", "1", "--instrumental")
    run("song", "--plan", plan, *changes, "--no-codes", "--steps", "1", "--out", out)
    told = read(tmp_path / "x.json")["plan"]
    assert (told["caption"], told["lyrics"], told["duration"]) == ("calm", "[Instrumental]", 1.0)
    assert (told["metadata"]["bpm"], told["metadata"]["duration"]) == (120, 1)


def test_codes_of_a_file_decide_on_the_length(run: Run, tmp_path: Path) -> None:
    codes, out = tmp_path / "codes.txt", tmp_path / "x.wav"
    codes.write_text("1,2,3,4,5,6,7")
    run("song", "--codes", codes, "--no-think", "--steps", "1", "--out", out)
    told = read(tmp_path / "x.json")
    assert told["seconds"] == pytest.approx(1.4)
    assert told["codes"]["items"] == [[1, 2, 3, 4, 5, 6, 7]]


def test_a_plan_changed_by_hand_is_brought_into_the_models_words(tmp_path: Path) -> None:
    facts = {"bpm": 90, "caption": "new", "duration": 9, "keyscale": "am", "language": "EN"}
    plan = {"caption": "old", "lyrics": "la", "metadata": facts, "duration": 30.5}
    (tmp_path / "p.json").write_text(json.dumps(plan))
    read = read_plan(str(tmp_path / "p.json"))
    assert (read.metadata.keyscale, read.metadata.language) == ("A minor", "en")
    assert (read.duration, read.metadata.duration, read.dit_caption) == (30.5, 31, "new")


FACTS = {"caption": "", "lyrics": "", "metadata": {}, "duration": 10}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("p.json", "Cannot read")),
        ("no JSON", ("p.json", "JSON")),
        ("[]", ("p.json", "no plan")),
        ('{"items": [[1]], "seeds": []}', ("p.json", "no plan", "'metadata'")),
        (json.dumps({**FACTS, "tempo": 3}), ("p.json", "tempo")),
        (json.dumps({**FACTS, "duration": "long"}), ("long",)),
        (json.dumps({**FACTS, "metadata": {"bpm": 5}}), ("5", "30")),
        (json.dumps({**FACTS, "metadata": {"caption": 5}}), ("caption", "5")),
    ],
    ids=["missing", "text", "list", "codes", "field", "length", "bpm", "caption"],
)
def test_what_is_no_plan_is_refused(
    refused: Callable[..., str], tmp_path: Path, content: str | None, words: tuple[str, ...]
) -> None:
    if content is not None:
        (tmp_path / "p.json").write_text(content)
    line = refused("song", "--plan", tmp_path / "p.json", "--out", tmp_path / "x.wav")
    assert all(word in line for word in words), line


@pytest.fixture
def adapter(tmp_path: Path, tiny_model: ModelSpec) -> Path:
    """A LoRA of rank 1 on one layer of the tiny model."""
    weights = load_file(Path(tiny_model.dit) / "model.safetensors")
    name = "decoder.layers.0.self_attn.q_proj"
    rows, columns = weights[f"{name}.weight"].shape
    pieces = {
        f"base_model.model.{name.removeprefix('decoder.')}.lora_{piece}.weight": tensor
        for piece, tensor in (
            ("A", weights[f"{name}.weight"].new_ones(1, columns)),
            ("B", weights[f"{name}.weight"].new_ones(rows, 1)),
        )
    }
    save_file(pieces, tmp_path / "rock.safetensors")
    return tmp_path / "rock.safetensors"


def test_adapters_are_put_on_the_model(
    run: Run, adapter: Path, tmp_path: Path, capsys: Captured
) -> None:
    run("inspect", "--lora", f"{adapter}:0.5", "--lora", adapter)
    half, whole = json.loads(capsys.readouterr().out)["adapters"]
    assert "strength 0.5" in half
    assert "strength 1" in whole
    common = ("song", "--seconds", "1", "--no-think", "--no-codes", "--steps", "1", "--out")
    plain, rock = tmp_path / "plain.wav", tmp_path / "rock.wav"
    run(*common, plain)
    run(*common, rock, "--lora", f"{adapter}:2")
    assert plain.read_bytes() != rock.read_bytes()
    assert "rock.safetensors" in read(rock.with_suffix(".json"))["model"]["adapters"][0]


def test_an_adapter_that_cannot_be_is_refused(refused: Callable[..., str], adapter: Path) -> None:
    assert "gone.safetensors" in refused("inspect", "--lora", "gone.safetensors")
    assert "strength" in refused("inspect", "--lora", f"{adapter}:99")
