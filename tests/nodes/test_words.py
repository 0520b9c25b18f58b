"""Songs in words through the nodes: written, formatted, described, scored, changed, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from acestep_engine.types import ModelSpec

SHORT = {"max_tokens": 160}  # a random model never finds the end


@pytest.fixture(autouse=True)
def short_captions(pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside ComfyUI, in the copy of the engine that the nodes use."""
    monkeypatch.setattr(pack("acestep_engine.lm.grammar"), "CAPTION_TOKENS", 60)


@pytest.fixture
def model(run: Any, models: Path, offer: Any, tiny_models: dict[str, ModelSpec]) -> Any:
    (handle,) = run("ACEStepLoad", **offer(models, "official", tiny_models["official"]))
    return handle


def plan_of(run: Any, model: Any, **values: Any) -> Any:
    words = {"caption": "calm piano", "lyrics": "la la", "think": False, **values}
    return run("ACEStepCoTPlanner", model=model, **words)[0]


def codes_of(pack: Any, *lengths: int) -> Any:
    songs = tuple(tuple(7 * n + length for n in range(length)) for length in lengths)
    return pack("acestep_engine.types").Codes(songs, tuple(range(len(songs))))


def test_an_idea_becomes_a_plan_that_other_nodes_take(run: Any, model: Any) -> None:
    written = run("ACEStepSongWriter", model=model, query="calm piano", language="de", **SHORT)
    plan, caption, lyrics, bpm, key, duration, language, meter = written
    assert (plan.caption, plan.lyrics, plan.duration) == (caption, lyrics, duration)
    assert caption
    assert 30 <= bpm <= 300
    assert 10 <= duration <= 600
    assert (language, plan.metadata.keyscale) == ("de", key)
    assert meter in "2346"
    (short, *_) = run("ACEStepPlanEdit", plan=plan, duration=1.0)
    (codes,) = run("ACEStepAudioCodeSampler", model=model, plan=short)
    assert [len(song) for song in codes.items] == [5]
    again, *_ = run(
        "ACEStepCoTPlanner",
        model=model,
        caption=caption,
        lyrics=lyrics,
        duration=duration,
        bpm=bpm,
        keyscale=key,
        timesignature=meter,
        language=language,
    )
    assert again.metadata == plan.metadata


def test_an_instrumental_has_no_words(run: Any, model: Any) -> None:
    _, _, lyrics, *_ = run("ACEStepSongWriter", model=model, query="x", instrumental=True)
    assert lyrics == "[Instrumental]"


def test_the_formatter_keeps_what_is_set(run: Any, model: Any) -> None:
    given = {"bpm": 91, "keyscale": "F# minor", "timesignature": "3", "language": "yue"}
    words = {"caption": "calm", "lyrics": "la", "duration": 7.2}
    plan, caption, _, *values = run("ACEStepLyricFormatter", model=model, **words, **given, **SHORT)
    assert values == [91, "F# minor", 7.2, "yue", "3"]
    assert caption != "calm"
    assert plan.metadata.duration == 8


def test_sound_is_understood(run: Any, model: Any) -> None:
    waveform = torch.rand(1, 2, 3 * 48_000, generator=torch.Generator().manual_seed(1)) - 0.5
    audio = {"waveform": waveform, "sample_rate": 48_000}
    (latent,) = run("ACEStepVAEEncodeTiled", model=model, audio=audio)
    heard = run("ACEStepUnderstand", model=model, latent=latent, **SHORT)
    assert heard[5] == 3.0
    assert heard[1]
    assert run("ACEStepUnderstand", model=model, latent=latent, **SHORT) == heard


def test_silence_is_refused(run: Any, model: Any) -> None:
    audio = {"waveform": torch.zeros(1, 1, 4 * 44_100), "sample_rate": 44_100}
    (latent,) = run("ACEStepVAEEncodeTiled", model=model, audio=audio)
    with pytest.raises(Exception, match="silence"):
        run("ACEStepUnderstand", model=model, latent=latent, **SHORT)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "nothing to listen to"),
        ({"song": 3, "codes": True}, "only 2"),
        ({"codes": "x"}, "same"),
    ],
)
def test_what_cannot_be_understood_is_told(
    run: Any, pack: Any, model: Any, given: dict[str, Any], words: str
) -> None:
    if given.get("codes") == "x":
        given = {"codes": pack("acestep_engine.types").Codes(((4,) * 30,))}
    elif "codes" in given:
        given = {**given, "codes": codes_of(pack, 10, 12)}
    with pytest.raises(Exception, match=words):
        run("ACEStepUnderstand", model=model, **given, **SHORT)


def test_the_best_of_a_batch_goes_on(run: Any, pack: Any, model: Any) -> None:
    plan, codes = plan_of(run, model, duration=2.0, bpm=90), codes_of(pack, 10, 11, 12)
    best, reward, report = run("ACEStepScore", model=model, plan=plan, codes=codes)
    number = int(report.rsplit(" ", 1)[1])
    assert best.items == codes.items[number - 1 : number]
    assert best.seeds == codes.seeds[number - 1 : number]
    lines = report.splitlines()
    rewards = [float(line.split()[2]) for line in lines[:-1]]
    assert max(rewards) == pytest.approx(reward, abs=6e-4)
    assert len(rewards) == 3
    assert "caption" in lines[0]
    assert "bpm" in lines[0]


def test_a_plan_is_taken_apart_and_changed(run: Any, model: Any) -> None:
    plan = plan_of(run, model, duration=12.5, bpm=90, keyscale="C major", language="en")
    same, *values = run("ACEStepPlanEdit", plan=plan)
    assert same == plan
    assert values == ["calm piano", "la la", 90, "C major", 12.5, "en", ""]
    edits = {"caption": "loud", "instrumental": True, "bpm": 120, "keyscale": "clear"}
    _, *values = run("ACEStepPlanEdit", plan=plan, timesignature="3", **edits)
    assert values == ["loud", "[Instrumental]", 120, "", 12.5, "en", "3"]


@pytest.mark.parametrize("notation", ["tokens", "numbers"])
def test_codes_become_text_and_codes_again(run: Any, pack: Any, notation: str) -> None:
    codes = codes_of(pack, 10, 7)
    same, text, duration = run("ACEStepCodesText", codes=codes, notation=notation)
    assert same is codes
    assert duration == 2.0
    back, again, _ = run("ACEStepCodesText", text=text, notation=notation)
    assert back.items == codes.items
    assert again == text
    edited, _, duration = run("ACEStepCodesText", text="1, 2, 3", codes=codes)
    assert (edited.items, duration) == (((1, 2, 3),), 0.6)


def test_codes_text_without_codes_says_so(run: Any) -> None:
    with pytest.raises(Exception, match="no codes"):
        run("ACEStepCodesText")
