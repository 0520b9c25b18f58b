"""Tasks on the command line: files in, files out, and what is refused."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from acestep_engine import audio
from acestep_engine.cli.arguments import rejoined
from acestep_engine.cli.tasks import Job, finished
from acestep_engine.errors import InvalidRequest
from acestep_engine.remix import Region, Repaint, read_region
from acestep_engine.types import Audio

RATE = 44_100
QUICK = ("--steps", "2", "--caption", "calm")

Run = Callable[..., None]


def report_of(out: Path) -> Any:
    return json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))


def samples(path: Path) -> Tensor:
    return audio.load(path).waveform[0]


def test_a_cover_is_as_long_as_its_source(run: Run, recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "cover.wav"
    knobs = ("--strength", "0.5", "--cover-noise", "0.25", "--exact")
    run("song", *QUICK, "--task", "cover", "--source", recording, *knobs, "--out", out)
    made = audio.load(out)
    assert (made.sample_rate, made.seconds) == (48_000, 2.0)
    report = report_of(out)
    assert report["task"] == {
        "name": "cover",
        "source": str(recording),
        "strength": 0.5,
        "noise_strength": 0.25,
        "exact": True,
    }
    assert report["render"]["task"] == "cover"
    assert report["plan"]["duration"] == 2.0
    assert not report["plan"]["thought"]
    assert report["codes"] is None


def test_a_repaint_leaves_the_rest_of_its_source_as_it_was(
    run: Run, recording: Path, tmp_path: Path
) -> None:
    out = tmp_path / "repaint.wav"
    places = ("--region", "0.5-0.75", "--region", "1.5-")
    knobs = ("--repaint-mode", "conservative", "--strength", "0.3", "--crossfade", "0.1")
    run(
        *("song", *QUICK, "--task", "repaint", "--source", recording, *places, *knobs),
        *("--out", out),
    )
    assert audio.load(out).sample_rate == RATE
    there, here = samples(recording), samples(out)
    assert here.shape == there.shape
    for start, end in ((0.0, 0.4), (0.85, 1.4)):
        kept = slice(round(start * RATE), round(end * RATE))
        assert torch.equal(here[:, kept], there[:, kept])
    for start, end in ((0.45, 0.5), (0.5, 0.75), (0.75, 0.8), (1.5, 2.0)):
        new = slice(round(start * RATE), round(end * RATE))
        assert not torch.equal(here[:, new], there[:, new])
    task = report_of(out)["task"]
    assert task["regions"] == [[0.5, 0.75], [1.5, None]]
    assert (task["mode"], task["strength"]) == ("conservative", 0.3)


@pytest.mark.parametrize("spelled", [("--region", "-1-0"), ("--region=-1-0",)], ids=len)
def test_a_region_before_the_beginning_makes_the_song_longer(
    run: Run, recording: Path, tmp_path: Path, spelled: tuple[str, ...]
) -> None:
    out = tmp_path / "longer.flac"
    task = ("--task", "repaint", "--source", recording, *spelled, "--crossfade", "0")
    run("song", *QUICK, *task, "--out", out)
    made = samples(out)
    assert made.shape[-1] == 3 * RATE
    assert torch.equal(made[:, RATE:], samples(recording))
    assert report_of(out)["plan"]["duration"] == 3.0


def test_a_repaint_that_would_clip_is_made_quieter() -> None:
    source = Audio(torch.full((1, 2, 2 * RATE), 0.9), RATE)
    loud = Audio(torch.full((1, 2, 2 * 48_000), 1.0), gain=(0.5,))
    job = Job(Path("x.wav"), Repaint(source, (Region(1.0),)), source)
    made = finished(job, loud, argparse.Namespace(crossfade=0.0, keep_level=False))
    assert made.waveform.abs().max() == 1.0
    assert torch.allclose(made.waveform[0, 0, :RATE], torch.tensor(0.45))


def test_each_track_is_a_file_of_its_own(run: Run, recording: Path, tmp_path: Path) -> None:
    tracks = ("--track", "vocals", "--track", "drums", "--track", "vocals")
    base = ("--family", "base", "--guidance", "1")
    task = ("--task", "extract", "--source", recording, *tracks)
    run("song", *QUICK, *base, *task, "--out", tmp_path / "stem.wav")
    names = ("stem-drums.json", "stem-drums.wav", "stem-vocals.json", "stem-vocals.wav")
    assert tuple(sorted(path.name for path in tmp_path.iterdir())) == names
    told = report_of(tmp_path / "stem-drums.wav")
    assert told["render"]["instruction"] == "Extract the DRUMS track from the audio:"
    assert told["files"] == [str(tmp_path / "stem-drums.wav")]


@pytest.mark.parametrize(
    ("task", "instruction"),
    [
        (("extract",), "Extract the track from the audio:"),
        (
            ("lego", "--track", "bass", "--region", "1-2"),
            "Generate the BASS track based on the audio context:",
        ),
        (
            ("complete", "--track", "strings", "--track", "fx"),
            "Complete the input track with STRINGS | FX:",
        ),
    ],
    ids=["extract", "lego", "complete"],
)
def test_the_tasks_of_base_models_reach_the_model(
    run: Run, recording: Path, tmp_path: Path, task: tuple[str, ...], instruction: str
) -> None:
    out = tmp_path / "x.wav"
    base = ("--family", "base", "--guidance", "1", "--source", recording, "--out", out)
    run("song", *QUICK, "--task", *task, *base)
    assert report_of(out)["render"]["instruction"] == instruction
    assert audio.load(out).seconds == 2.0


def test_a_timbre_changes_the_sound(run: Run, recording: Path, tmp_path: Path) -> None:
    plain, like = tmp_path / "plain.wav", tmp_path / "like.wav"
    common = ("song", *QUICK, "--seconds", "1", "--no-think", "--no-codes")
    run(*common, "--out", plain)
    run(*common, "--timbre", recording, "--out", like)
    assert not torch.equal(samples(plain), samples(like))
    assert report_of(like)["timbre"] == str(recording)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--task", "cover"), ("cover", "--source")),
        (("--source", "SOURCE"), ("--source", "--task")),
        (("--task", "cover", "--source", "SOURCE", "--region", "1-2"), ("--region", "repaint")),
        (("--task", "repaint", "--source", "SOURCE", "--track", "bass"), ("--track", "lego")),
        (("--task", "lego", "--source", "SOURCE", "--exact"), ("--exact", "cover")),
        (("--crossfade", "1"), ("--crossfade", "repaint")),
        (("--task", "repaint", "--source", "SOURCE", "--region", "later"), ("later", "12-20")),
        (("--task", "repaint", "--source", "SOURCE", "--region", "2-1"), ("2 to 1",)),
        (("--task", "repaint", "--source", "SOURCE", "--region", "9-"), ("9", "2 s")),
        (("--task", "repaint", "--source", "SOURCE", "--codes", "CODES"), ("codes",)),
        (("--task", "cover", "--source", "SOURCE", "--strength", "2"), ("strength", "2")),
        (("--task", "cover", "--source", "gone.wav"), ("gone.wav",)),
        (("--timbre", "gone.wav"), ("gone.wav",)),
        (("--task", "extract", "--source", "SOURCE"), ("extract", "base")),
        (
            ("--family", "base", "--task", "extract", "--source", "SOURCE", "--track", "gong"),
            ("gong", "drums"),
        ),
    ],
    ids=lambda case: " ".join(case).replace("--", ""),
)
def test_what_makes_no_sense_is_refused_in_words(
    refused: Callable[..., str],
    recording: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    codes = tmp_path / "codes.txt"
    codes.write_text("1,2,3,4,5,6")
    places = {"SOURCE": recording, "CODES": codes}
    given = [places.get(argument, argument) for argument in arguments]
    line = refused("song", *QUICK, *given, "--out", tmp_path / "x.wav")
    assert all(word in line for word in words), line
    assert [path.name for path in tmp_path.iterdir()] == ["codes.txt"]


@pytest.mark.parametrize(("read", "out"), [("--source", "in.wav"), ("--plan", "in.flac")])
def test_nothing_that_is_read_is_written_over(
    refused: Callable[..., str], recording: Path, tmp_path: Path, read: str, out: str
) -> None:
    source, plan = tmp_path / "in.wav", tmp_path / "in.json"
    source.write_bytes(recording.read_bytes())
    plan.write_text("{}")
    given = ("--task", "cover", "--source", source) if read == "--source" else ("--plan", plan)
    assert "--out" in refused("song", *given, "--out", tmp_path / out)
    assert source.read_bytes() == recording.read_bytes()
    assert plan.read_text() == "{}"


@pytest.mark.parametrize(
    ("text", "region"),
    [
        ("12-20.5", Region(12.0, 20.5)),
        ("12-", Region(12.0)),
        ("-3-0", Region(-3.0, 0.0)),
        (" .5 - 1. ", Region(0.5, 1.0)),
        ("-3-", Region(-3.0)),
        ("-20", Region(0.0, 20.0)),
        ("-5--2", Region(-5.0, -2.0)),
    ],
)
def test_regions_are_read(text: str, region: Region) -> None:
    assert read_region(text) == region


@pytest.mark.parametrize("text", ["", "-", "12", "a-b", "1-2-3", "1:30-2:00", "--1-2", "nan-1"])
def test_what_is_no_region_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="START-END"):
        read_region(text)


def test_only_a_region_is_joined_to_its_option() -> None:
    assert rejoined(["--region", "-3-0", "-x"]) == ["--region=-3-0", "-x"]
    assert rejoined(["--region", "--out", "-3-0"]) == ["--region", "--out", "-3-0"]
