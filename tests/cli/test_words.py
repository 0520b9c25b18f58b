"""Songs in words on the command line: written, heard, scored, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acestep_engine.cli.files import read_plan
from acestep_engine.engine import Engine
from acestep_engine.lm.notation import read_codes, write_codes
from acestep_engine.types import AnswerOptions, Codes, LMSampling, ModelSpec, PlanOptions, Request
from acestep_engine.weights.tiny import write_tiny

Run = Callable[..., None]
Captured = pytest.CaptureFixture[str]

SHORT = AnswerOptions(12, LMSampling(temperature=0.5, seed=4))
AS_SHORT = ("--temperature", "0.5", "--seed", "4", "--max-tokens", "12")
SONGS = Codes(((1, 20, 300, 4_000, 50_000, 6) * 2, (9, 8, 7, 6, 5)))


@pytest.fixture
def codes_file(tmp_path: Path) -> Path:
    path = tmp_path / "codes.txt"
    path.write_text(write_codes(SONGS))
    return path


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def as_plan(engine: Engine, model: ModelSpec, request: Request) -> Any:
    sampling = PlanOptions(think=False, sampling=SHORT.sampling)
    return engine.plan(model, request, sampling)


@pytest.mark.slow
def test_write_prints_a_song_and_keeps_it_as_a_plan(
    run: Run, engine: Engine, tiny_model: ModelSpec, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "new" / "song.json"
    run("write", "a slow waltz", "--language", "de", *AS_SHORT, "--json", file)
    expected = engine.write(tiny_model, "a slow waltz", False, "de", SHORT)
    assert read_plan(str(file)) == as_plan(engine, tiny_model, expected)
    told = capsys.readouterr().out
    assert "language: de" in told
    assert f"bpm: {expected.bpm}" in told
    assert expected.lyrics in told
    assert str(file) in told


@pytest.mark.slow
def test_write_needs_no_idea_and_no_words_to_sing(run: Run, capsys: Captured) -> None:
    run("write", "--instrumental", *AS_SHORT)
    assert "[Instrumental]" in capsys.readouterr().out


@pytest.mark.slow
def test_rewrite_keeps_what_it_is_given(
    run: Run, engine: Engine, tiny_model: ModelSpec, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "draft.json"
    words = ("--caption", "rock", "--lyrics", "la la", "--bpm", "120", "--seconds", "30")
    run("rewrite", *words, "--key", "Am", "--meter", "3", *AS_SHORT, "--json", file)
    draft = Request("rock", "la la", 30, 120, "Am", "3")
    expected = engine.rewrite(tiny_model, draft, SHORT)
    assert read_plan(str(file)) == as_plan(engine, tiny_model, expected)
    assert "keyscale: A minor" in capsys.readouterr().out


def test_a_sound_becomes_codes_as_text(
    run: Run, recording: Path, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "codes.json"
    run("codes", recording, "--json", file)
    tokens = read_codes(capsys.readouterr().out)
    assert [len(song) for song in tokens.items] == [10]
    assert read(file) == {"items": [list(tokens.items[0])], "seeds": []}
    run("codes", recording, "--notation", "numbers", "--tile", "32", "--max-memory", "1GiB")
    assert capsys.readouterr().out == ",".join(map(str, tokens.items[0])) + "\n"


@pytest.mark.slow
def test_a_sound_is_understood_as_its_codes_are(
    run: Run, recording: Path, tmp_path: Path, capsys: Captured
) -> None:
    run("codes", recording, "--json", tmp_path / "codes.json")
    by_codes, by_sound = tmp_path / "a.json", tmp_path / "b.json"
    run("understand", "--codes", tmp_path / "codes.json", *AS_SHORT, "--json", by_codes)
    run("understand", recording, *AS_SHORT, "--json", by_sound)
    assert read(by_codes) == read(by_sound)
    assert read(by_codes)["duration"] == 2.0
    assert "duration: 2" in capsys.readouterr().out


@pytest.mark.slow
def test_every_song_of_a_batch_is_understood(
    run: Run, codes_file: Path, tmp_path: Path, capsys: Captured
) -> None:
    run("understand", "--codes", codes_file, *AS_SHORT, "--json", tmp_path / "heard.json")
    assert read(tmp_path / "heard.json")["duration"] == 2.4
    assert read(tmp_path / "heard-2.json")["duration"] == 1.0
    told = capsys.readouterr().out
    assert "# Song 1" in told
    assert "# Song 2" in told


def test_codes_are_scored_against_a_plan(
    run: Run,
    engine: Engine,
    tiny_model: ModelSpec,
    codes_file: Path,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    plan, file = tmp_path / "plan.json", tmp_path / "scores.json"
    words = ("--caption", "calm", "--bpm", "90", "--seconds", "2", "--no-think")
    run("plan", *words, "--json", plan)
    run("score", codes_file, plan, "--json", file)
    expected = engine.score(tiny_model, SONGS, read_plan(str(plan)))
    assert [score["reward"] for score in read(file)["scores"]] == [s.reward for s in expected]
    rewards = [score.reward for score in expected]
    assert read(file)["best"] == rewards.index(max(rewards)) + 1
    told = capsys.readouterr().out
    assert f"song 1: {rewards[0]:.3f} (caption " in told
    assert "metadata" not in told
    assert f"best: song {read(file)['best']}" in told


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", ("no audio codes",)),
        ('{"codes": null}', ("no audio codes", "'items'")),
        ('{"items": [["a"]], "seeds": []}', ("a",)),
        ('{"items": [[-1]], "seeds": []}', ("-1",)),
        ('{"items": [], "seeds": []}', ("no audio codes",)),
    ],
    ids=["list", "song without codes", "words", "negative", "none"],
)
def test_what_holds_no_codes_is_refused(
    refused: Callable[..., str], tmp_path: Path, content: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "c.json").write_text(content)
    line = refused("understand", "--codes", tmp_path / "c.json")
    assert all(word in line for word in words), line


def test_understand_takes_either_a_sound_or_codes(
    refused: Callable[..., str], recording: Path, codes_file: Path
) -> None:
    assert "either" in refused("understand")
    assert "either" in refused("understand", recording, "--codes", codes_file)


@pytest.mark.parametrize(
    "command", [("write", "x"), ("rewrite",), ("understand", "x.wav"), ("codes", "x.wav")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    refused: Callable[..., str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    assert "Cannot write" in refused(*command, "--json", tmp_path / "x.txt")


def test_without_a_language_model_the_cure_is_named(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    model = write_tiny(tmp_path, "official", lm=False)
    line = refused("write", "x", "--model", Path(model.vae).parent)
    assert "language model" in line
