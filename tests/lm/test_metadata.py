"""What users write, what the models write, and that neither is lost between."""

from __future__ import annotations

import logging
import math
import random
from dataclasses import replace

import pytest
import yaml

from acestep_engine.errors import InvalidRequest
from acestep_engine.lm import metadata as m
from acestep_engine.types import Metadata, Request

FULL = Metadata(120, "calm piano", 30, "F# minor", "en", "4")


def test_there_are_51_languages_and_70_keys() -> None:
    assert len(set(m.LANGUAGES)) == len(m.LANGUAGES) == 51
    assert len(set(m.KEYS)) == len(m.KEYS) == 70
    assert {"F# minor", "B♭ major", "C major"} < set(m.KEYS)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Am", "A minor"),
        ("f# Minor", "F# minor"),
        ("C Major", "C major"),
        ("C", "C major"),
        ("CM", "C major"),
        ("Cm", "C minor"),
        ("Bb", "Bb major"),
        ("bb minor", "Bb minor"),
        ("b minor", "B minor"),
        ("B♭ major", "Bb major"),
        ("c♯min", "C# minor"),
        ("G sharp maj", "G# major"),
        ("E flat", "Eb major"),
        ("", None),
        ("auto", None),
        ("N/A", None),
        (None, None),
    ],
)
def test_common_spellings_of_keys(written: str | None, meant: str | None) -> None:
    assert m.normalise(Request(keyscale=written)).keyscale == meant
    assert meant is None or meant in m.KEYS


def test_every_key_is_understood() -> None:
    for key in m.KEYS:
        plain = key.replace("♯", "#").replace("♭", "b")
        assert m.normalise(Request(keyscale=key)).keyscale == plain


@pytest.mark.parametrize(
    ("written", "meant"),
    [("4/4", "4"), (4, "4"), ("4", "4"), ("6/8", "6"), ("3/4", "3"), ("", None), (None, None)],
)
def test_spellings_of_time_signatures(written, meant: str | None) -> None:
    assert m.normalise(Request(timesignature=written)).timesignature == meant


@pytest.mark.parametrize("unset", ["", "auto", "Unknown", None, " "])
def test_an_open_language_is_none(unset: str | None) -> None:
    assert m.normalise(Request(language=unset)).language is None


def test_languages_are_read_in_either_case() -> None:
    assert m.normalise(Request(language="YUE")).language == "yue"


@pytest.mark.parametrize("open_", [None, 0, -1, -0.5])
def test_an_open_duration_is_none(open_: float | None) -> None:
    assert m.normalise(Request(duration=open_)).duration is None


@pytest.mark.parametrize("open_", [None, 0, -1])
def test_an_open_tempo_is_none(open_: int | None) -> None:
    assert m.normalise(Request(bpm=open_)).bpm is None


@pytest.mark.parametrize(
    ("wrong", "value"),
    [
        ({"duration": 0.5}, "0.5"),
        ({"duration": 1e6}, "1000000.0"),
        ({"duration": math.nan}, "nan"),
        ({"duration": math.inf}, "inf"),
        ({"bpm": 29}, "29"),
        ({"bpm": 301}, "301"),
        ({"bpm": math.nan}, "nan"),
        ({"keyscale": "H major"}, "H major"),
        ({"timesignature": "5/4"}, "5/4"),
        ({"timesignature": "6/4"}, "6/4"),
        ({"language": "klingon"}, "klingon"),
    ],
)
def test_values_the_models_do_not_know_are_named(wrong: dict, value: str) -> None:
    with pytest.raises(InvalidRequest, match=value.replace("/", ".")):
        m.normalise(Request(**wrong))


def test_instrumental_replaces_the_lyrics() -> None:
    assert m.normalise(Request(lyrics="la", instrumental=True)).lyrics == "[Instrumental]"
    assert m.normalise(Request()).lyrics == ""


def test_normalising_twice_changes_nothing() -> None:
    once = m.normalise(Request("c", "l\r\nm", 7.2, 90, "Am", "6/8", "EN", True))
    assert m.normalise(once) == once


def test_a_request_states_whole_seconds() -> None:
    assert m.stated(m.normalise(Request(duration=7.2))).duration == 8


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        (
            FULL,
            "bpm: 120\ncaption: calm piano\nduration: 30\nkeyscale: F# minor\n"
            "language: en\ntimesignature: 4",
        ),
        (Metadata(language="no"), "language: 'no'"),
        (Metadata(timesignature="3/4"), "timesignature: 3"),
        (Metadata(timesignature="6/8"), "timesignature: 6/8"),
        (Metadata(caption="ends with colon:"), "caption: 'ends with colon:'"),
        (Metadata(caption="1234"), "caption: 1234"),
        (Metadata(caption="007"), "caption: '007'"),
        (Metadata(caption="²"), "caption: ²"),
        (
            Metadata(caption="""It's a "quoted" song: loud"""),
            """caption: 'It''s a "quoted" song: loud'""",
        ),
        (
            Metadata(
                caption="A long caption that certainly goes over the eighty column limit of the "
                "yaml emitter so that it must be folded, with more words to be sure."
            ),
            "caption: A long caption that certainly goes over the eighty column limit of the yaml"
            "\n  emitter so that it must be folded, with more words to be sure.",
        ),
        (Metadata(), ""),
    ],
)
def test_the_written_form(metadata: Metadata, text: str) -> None:
    assert m.dump(metadata) == text


def random_caption(draw: random.Random) -> str:
    bits = [
        *("'", '"', ": ", " #", ":", "no", "\n", "\n\n", "  ", " ", "-", "é", "中文", "😀", "\t"),
        *("\u3000", "\u2028", "\x07", "123", "0", "1.5", "`", "{", "[", "|", ">", "&", "*", "!"),
        *("%", "@", "word", "a long word", "</think>", "bpm: 4", "\nbpm: 4", "\r", "~", "null"),
        *("12:30", "2020-01-01", "duration:", "\\", " \n", "\n  x", "<", "\n<", "?", ",", "=", ")"),
    ]
    return "".join(draw.choices(bits, k=draw.choice((1, 1, 2, 3, 5, 40))))


def test_any_metadata_survive_writing_and_reading() -> None:
    draw = random.Random(1)
    for _ in range(3000):
        metadata = Metadata(
            bpm=draw.choice((None, 30, 300)),
            caption=draw.choice((None, random_caption(draw))),
            duration=draw.choice((None, 1, 600)),
            keyscale=draw.choice((None, *m.KEYS)),
            language=draw.choice((None, "no", *m.LANGUAGES)),
            timesignature=draw.choice((None, *m.TIMESIGNATURES)),
        )
        text = m.dump(metadata)
        assert m.parse(text) == metadata
        assert m.parse(f"<think>\n{text}\n</think>\n\n<|audio_code_1|>") == metadata
        assert text == "" or yaml.safe_load(text).keys() == {
            name for name in m.FIELDS if getattr(metadata, name) is not None
        }


def test_a_caption_over_several_lines_is_read_whole() -> None:
    text = (
        "<think>\nbpm: 90\ncaption: A ballad: \"soft\" and 'slow'\n  with strings # and choir\n"
        "  夜空中最亮的星\nduration: 187\nkeyscale: F# minor\nlanguage: ja\ntimesignature: 4\n"
    )
    found = m.parse(text)
    caption = "A ballad: \"soft\" and 'slow' with strings # and choir 夜空中最亮的星"
    assert found == Metadata(90, caption, 187, "F# minor", "ja", "4")
    assert m.parse(m.dump(found)) == found


def test_a_block_without_its_closing_tag_is_read() -> None:
    assert m.parse("<think>\nbpm: 120\ntimesignature: 4\n<|im_end|>") == Metadata(
        bpm=120, timesignature="4"
    )


def test_foreign_fields_and_broken_values_are_left_out() -> None:
    text = "bpm: fast\ngenres: pop\n  rock\ncaption:\nduration: 30 seconds\nLanguage: 'no'"
    assert m.parse(text) == Metadata(duration=30, language="no")
    assert m.parse("") == m.parse("nothing here") == Metadata()


@pytest.mark.parametrize("caption", ["'Tis the season", '"Hello" is a song', "|", "> loud: yes"])
def test_quotes_that_do_not_quote_the_whole_are_text(caption: str) -> None:
    found = m.parse(f"caption: {caption}\nduration: 30").caption
    assert found == (None if caption == "|" else caption)


def test_what_the_user_said_wins_and_the_difference_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = m.normalise(Request(bpm=90, language="pa", duration=7.2))
    with caplog.at_level(logging.WARNING):
        merged = m.merge(request, replace(FULL, bpm=90, language="hi"))
    assert merged == replace(FULL, bpm=90, language="pa", duration=8)
    assert "language" in caplog.text
    assert "'hi'" in caplog.text
    assert "bpm" not in caplog.text


@pytest.mark.parametrize("unset", ["", "auto", "unknown"])
def test_what_the_user_left_open_is_taken_from_the_model(unset: str) -> None:
    request = m.normalise(Request(language=unset))
    assert m.merge(request, replace(FULL, language="hi")).language == "hi"
