"""The command line as a user meets it: in a process of its own, by its output and its files."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from acestep_engine import audio
from acestep_engine.cli import arguments, song
from acestep_engine.cli.files import write_json
from acestep_engine.cli.main import main, parser
from acestep_engine.engine import Engine
from acestep_engine.types import LMSampling, ModelSpec, Plan

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "acestep_engine", *map(str, arguments)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=one_thread
    )


@pytest.mark.slow
def test_song_writes_a_stereo_file_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "songs" / "first.flac"
    result = run("song", "--model", "tiny", "--seconds", "3", "--caption", "calm", "--out", out)
    assert result.returncode == 0, result.stderr
    sound = audio.load(out)
    assert (sound.sample_rate, sound.waveform.shape) == (48_000, (1, 2, 144_000))
    assert "Plan (3 s, seed 0):" in result.stdout
    assert "duration: 3" in result.stdout
    report = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert report["seconds"] == 3
    assert report["plan"]["metadata"]["duration"] == 3
    assert len(report["codes"]["items"][0]) == 15
    assert report["codes"]["seeds"] == [0]
    assert report["render"]["seeds"] == [0]
    assert report["render"]["instruction"].startswith("Generate audio semantic tokens")
    assert report["model"]["device"] == "cpu"
    assert report["model"]["parts"]["dit"]["files"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["first.flac", "first.json"]


@pytest.mark.slow
def test_a_batch_writes_a_file_per_song(tmp_path: Path) -> None:
    out = tmp_path / "s.wav"
    common = ("--model", "tiny", "--seconds", "1", "--no-think", "--no-codes", "--out", out)
    assert run("song", *common, "--batch", "2").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s-2.wav", "s.json", "s.wav"]
    instruction = json.loads((tmp_path / "s.json").read_text())["render"]["instruction"]
    assert instruction.startswith("Fill the audio semantic mask")


@pytest.mark.slow
def test_encode_and_decode_keep_the_length(tmp_path: Path, tiny_model: ModelSpec) -> None:
    song = tmp_path / "a.wav"
    model = ("--model", Path(tiny_model.vae).parent)
    quick = ("--seconds", "2", "--no-think", "--no-codes")
    assert run("song", *model, *quick, "--out", song).returncode == 0
    encoded = run("encode", *model, song, tmp_path / "a.safetensors")
    assert "latents (1, 50, 64)" in encoded.stdout, encoded.stderr
    assert run("decode", *model, tmp_path / "a.safetensors", tmp_path / "b.mp3").returncode == 0
    assert abs(audio.load(tmp_path / "b.mp3").seconds - 2) < 0.06


def parsed(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(arguments)


def test_every_option_of_the_language_model_arrives() -> None:
    options = parsed(
        *("song", "--cfg", "3", "--temperature", "0.5", "--top-k", "7", "--top-p", "0.8"),
        *("--min-p", "0.1", "--repetition-penalty", "1.2", "--negative", "harsh", "--seed", "9"),
        *("--temperature-last", "--prompt-layout", "legacy", "--instrumental"),
    )
    assert song.composing_of(options) == LMSampling(0.5, 7, 0.8, 0.1, 1.2, 3.0, "harsh", 9, True)
    assert song.composing_of(parsed("song")) == LMSampling()
    assert options.prompt_layout == "legacy"
    assert arguments.request_of(options).instrumental


def test_plan_and_codes_have_a_temperature_each(engine: Engine, tiny_model: ModelSpec) -> None:
    def plans(*arguments: str) -> list[Plan]:
        common = ("plan", "--keep-caption", "--temperature", "1.5", *arguments)
        seeds = (parsed(*common, "--seed", seed) for seed in ("1", "2", "3"))
        return [song.make_plan(engine, tiny_model, options) for options in seeds]

    cold, warm = plans("--plan-temperature", "0"), plans()
    assert cold[0].metadata == cold[1].metadata == cold[2].metadata
    assert warm[0].metadata != warm[1].metadata
    assert [plan.seed for plan in warm] == [1, 2, 3]
    options = parsed("song", "--plan-temperature", "0")
    assert song.composing_of(options).temperature == LMSampling().temperature


def test_plan_and_inspect_print_what_is_used(tmp_path: Path, tiny_model: ModelSpec) -> None:
    model = ("--model", Path(tiny_model.vae).parent)
    plan = run("plan", *model, "--bpm", "100", "--key", "A minor", "--out", tmp_path / "p.json")
    assert "bpm: 100" in plan.stdout, plan.stderr
    assert json.loads((tmp_path / "p.json").read_text())["metadata"]["keyscale"] == "A minor"
    described = json.loads(run("inspect", *model, "--precision", "bf16").stdout)
    assert described["family"] == "turbo"
    assert described["precision"] == "bf16"
    assert "precision bf16: asked for" in described["reasons"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("song", "--model", "gone", "--out", "x.wav"), ("gone",)),
        (("song", "--model", "tiny", "--out", "x.xyz"), (".xyz", ".flac")),
        (("song", "--model", "tiny", "--seconds", "1e6", "--out", "x.wav"), ("600",)),
        (("plan", "--model", "tiny", "--bpm", "5"), ("30", "300")),
        (("song", "--model", "tiny", "--device", "cuda", "--out", "x.wav"), ("cuda", "cpu")),
        (("decode", "--model", "tiny", "gone.safetensors", "x.wav"), ("gone.safetensors",)),
    ],
    ids=["model", "suffix", "length", "bpm", "device", "latents"],
)
def test_mistakes_end_in_one_readable_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(list(arguments)) == 1
    told = capsys.readouterr().err
    message = told.strip().splitlines()[-1]
    assert message.startswith("Error: ")
    assert all(word in message for word in words), message
    assert "Traceback" not in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "suffix"), [("plan", ".json"), ("encode", ".safetensors"), ("song", ".wav")]
)
@pytest.mark.parametrize("fault", ["no suffix", "a folder", "below a file", "the report"])
def test_a_target_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    suffix: str,
    fault: str,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / "report.json").mkdir()
    name = {
        "no suffix": "plain",
        "a folder": f"folder{suffix}",
        "below a file": f"file/x{suffix}",
        "the report": f"report{suffix if command == 'song' else ''}",
    }[fault]
    target = str(tmp_path / name)
    out = ("in.wav", target) if command == "encode" else ("--out", target)
    assert main([command, "--model", "no such model", *out]) == 1
    assert capsys.readouterr().err.startswith("Error: Cannot write")


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match=r"x\.json"):
        write_json(tmp_path / "x.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.slow
def test_a_console_without_the_letters_of_the_plan_still_gets_its_song(tmp_path: Path) -> None:
    out = tmp_path / "s.wav"
    command = [sys.executable, "-m", "acestep_engine", "song", "--model", "tiny", "--seconds", "1"]
    command += ["--no-codes", "--out", str(out)]
    narrow = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "cp1252"}
    assert subprocess.run(command, cwd=ROOT, capture_output=True, env=narrow).returncode == 0
    assert out.exists()


def test_a_broken_part_is_named_before_any_work(tmp_path: Path, tiny_model: ModelSpec) -> None:
    shutil.copytree(Path(tiny_model.vae).parent, tmp_path / "m")
    vae = tmp_path / "m" / "vae" / "diffusion_pytorch_model.safetensors"
    vae.write_bytes(vae.read_bytes()[:1000])
    result = run("song", "--model", tmp_path / "m", "--out", tmp_path / "x.wav")
    assert result.returncode == 1
    assert vae.name in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert "Plan" not in result.stdout
