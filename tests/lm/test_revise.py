"""Plans changed by hand: what is stated replaces, what is left empty stays."""

from __future__ import annotations

import pytest

from acestep_engine.errors import InvalidRequest
from acestep_engine.lm.revise import revise
from acestep_engine.types import Metadata, Plan, Request

PLAN = Plan(
    "calm piano",
    "la",
    Metadata(90, "A calm piano piece.", 31, "C major", "en", "4"),
    30.5,
    seed=7,
    thought=True,
)


def test_nothing_stated_changes_nothing() -> None:
    assert revise(PLAN, Request()) == PLAN


def test_values_are_replaced_in_the_models_own_words() -> None:
    changed = revise(PLAN, Request(duration=12.2, bpm=120, keyscale="am", language="DE"))
    assert changed.metadata == Metadata(120, "A calm piano piece.", 13, "A minor", "de", "4")
    assert changed.duration == 12.2
    assert (changed.caption, changed.lyrics, changed.seed) == ("calm piano", "la", 7)


def test_a_new_caption_is_the_one_that_sounds() -> None:
    changed = revise(PLAN, Request(caption="loud drums"))
    assert changed.caption == changed.dit_caption == "loud drums"


def test_words_can_be_replaced_or_taken_away() -> None:
    assert revise(PLAN, Request(lyrics="lo")).lyrics == "lo"
    assert revise(PLAN, Request(lyrics="lo", instrumental=True)).lyrics == "[Instrumental]"


def test_values_can_be_cleared() -> None:
    changed = revise(PLAN, Request(), ["keyscale", "language"])
    assert changed.metadata == Metadata(90, "A calm piano piece.", 31, None, None, "4")


def test_impossible_values_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="700"):
        revise(PLAN, Request(duration=700))
