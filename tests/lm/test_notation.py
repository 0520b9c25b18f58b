"""Audio codes as text: both notations and back, foreign text, codes that mean nothing."""

from __future__ import annotations

import logging
import random

import pytest

from acestep_engine.errors import InvalidRequest
from acestep_engine.lm.notation import NOTATIONS, read_codes, write_codes
from acestep_engine.types import Codes


@pytest.mark.parametrize("notation", NOTATIONS)
def test_what_is_written_can_be_read(notation) -> None:
    draw = random.Random(1)
    songs = tuple(
        tuple(draw.randrange(64_000) for _ in range(draw.randrange(1, 40))) for _ in range(8)
    )
    assert read_codes(write_codes(Codes(songs), notation)) == Codes(songs)


def test_the_two_notations() -> None:
    codes = Codes(((5, 63_999), (0,)))
    assert write_codes(codes) == "<|audio_code_5|><|audio_code_63999|>\n\n<|audio_code_0|>"
    assert write_codes(codes, "numbers") == "5,63999\n\n0"


@pytest.mark.parametrize(
    "text",
    ["1,2,3", " 1, 2\n3 ", "[1, 2, 3]", "1;2;3;", "1 2 3\n\n", "\n \n1,2,3", "1,2,\r\n3\r\n\r\n"],
)
def test_numbers_may_be_separated_as_people_do(text: str) -> None:
    assert read_codes(text).items == ((1, 2, 3),)


def test_tokens_are_found_in_a_whole_answer() -> None:
    text = "<think>\nbpm: 120\n</think>\n\n<|audio_code_7|> <|audio_code_8|><|im_end|>"
    assert read_codes(text).items == ((7, 8),)


def test_codes_without_a_meaning_become_the_largest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        codes = read_codes("<|audio_code_5|><|audio_code_70000|>")
    assert codes.items == ((5, 63_999),)
    assert "1 of 2" in caplog.text


@pytest.mark.parametrize(
    ("text", "part"), [("1, 2, three", "three"), ("-4", "-4"), ("0.5", "'.5'"), ("", "no audio")]
)
def test_what_is_no_code_is_named(text: str, part: str) -> None:
    with pytest.raises(InvalidRequest, match=part):
        read_codes(text)
