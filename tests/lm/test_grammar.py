"""The grammar over the real vocabulary: what may come, what must, and that it always ends."""

from __future__ import annotations

import re

import numpy as np
import pytest

from acestep_engine.lm.grammar import CAPTION_TOKENS, FRAME_TOKENS, Grammar, State
from acestep_engine.lm.metadata import FIELDS, KEYS, LANGUAGES, TIMESIGNATURES, parse
from acestep_engine.lm.tokenizer import QWEN3, Tokenizer
from acestep_engine.types import Metadata

NEWLINE = 198
WITHOUT_CAPTION = [name for name in FIELDS if name != "caption"]


@pytest.fixture(scope="module")
def grammar(tokenizer: Tokenizer) -> Grammar:
    return Grammar(tokenizer)


def options(grammar: Grammar, tokenizer: Tokenizer, state: State) -> set[str]:
    return {tokenizer.piece(token).decode() for token in grammar.allowed(state).tolist()}


def write(grammar: Grammar, tokenizer: Tokenizer, state: State, text: str) -> None:
    for token in tokenizer.encode(text):
        assert token in grammar.allowed(state)
        grammar.advance(state, token)


def only(grammar: Grammar, field: str) -> State:
    return grammar.start(Metadata(), [field])


DIGITS = set("0123456789")


@pytest.mark.parametrize(
    ("field", "written", "allowed"),
    [
        ("bpm", "", DIGITS - {"0"}),
        *[("bpm", value, DIGITS) for value in ("1", "2", "4", "10", "20", "29")],
        ("bpm", "3", DIGITS),
        ("bpm", "30", {"0", "\n"}),
        ("duration", "", DIGITS - {"0"}),
        *[("duration", value, DIGITS) for value in ("1", "5", "6")],
        *[("duration", value, DIGITS | {"\n"}) for value in ("10", "59")],
        ("duration", "60", {"0", "\n"}),
        ("timesignature", "", {"2", "3", "4", "6"}),
        ("keyscale", "", set(" A, Ab, B, C, D, Db, E, Eb, F, G".replace(",", "\0").split("\0"))),
        ("keyscale", " A", {" major", " minor", "#", "♯", "♭"}),
        ("keyscale", " A#", {" major", " minor"}),
    ],
)
def test_what_may_follow_in_a_value(
    grammar: Grammar, tokenizer: Tokenizer, field: str, written: str, allowed: set[str]
) -> None:
    state = only(grammar, field)
    write(grammar, tokenizer, state, written)
    assert options(grammar, tokenizer, state) == allowed


@pytest.mark.parametrize(
    ("field", "written"),
    [
        *[("bpm", value) for value in ("31", "99", "300")],
        *[("duration", value) for value in ("61", "599", "600")],
        ("timesignature", "4"),
        ("keyscale", " C major"),
        ("language", " yue"),
        ("language", " en"),
    ],
)
def test_a_finished_value_ends_its_line_by_itself(
    grammar: Grammar, tokenizer: Tokenizer, field: str, written: str
) -> None:
    state = only(grammar, field)
    tokens = tokenizer.encode(written)
    for token in tokens:
        if not state.done and not tokenizer.decode(state.written).endswith(f"{written}\n"):
            grammar.advance(state, token)
    assert state.done
    space = "" if written.startswith(" ") else " "
    assert tokenizer.decode(state.written) == f"\n{field}:{space}{written}\n"


def test_languages_start_with_their_own_tokens(grammar: Grammar, tokenizer: Tokenizer) -> None:
    state = only(grammar, "language")
    assert state.greedy
    first = {tokenizer.encode(f"language: {code}")[2] for code in LANGUAGES}
    quoted = tokenizer.encode("language: 'no'")[2]
    assert len(first) == 51
    assert set(grammar.allowed(state).tolist()) == first | {quoted}
    assert tokenizer.encode(" yue") == [379, 361]
    grammar.advance(state, quoted)
    assert parse(tokenizer.decode(state.written)).language == "no"


def test_the_longest_duration_can_be_set(tokenizer: Tokenizer) -> None:
    short = Grammar(tokenizer, max_duration=20)
    state = only(short, "duration")
    grammar_says = options(short, tokenizer, state)
    assert grammar_says == {"1", "2"}
    write(short, tokenizer, state, "2")
    assert tokenizer.decode(state.written) == "\nduration: 20\n"


def test_field_names_are_tokenised_as_in_running_text(
    grammar: Grammar, tokenizer: Tokenizer
) -> None:
    state = grammar.start(Metadata())
    assert state.take() == [QWEN3.think_open, NEWLINE, 65, 5187, 25, 220]
    assert state.take() == []


def test_a_compliant_model_writes_what_it_wants(grammar: Grammar, tokenizer: Tokenizer) -> None:
    state = grammar.start(Metadata())
    for text in ("120", " A calm piano piece.\n", "  It flows.\n", "duration", "30", "\n"):
        for token in tokenizer.encode(text):
            assert token in grammar.allowed(state)
            grammar.advance(state, token)
    for text in (" G", " major", " en", "4"):
        grammar.advance(state, tokenizer.encode(text)[0])
    assert state.done
    assert tokenizer.decode(state.written) == (
        "\nbpm: 120\ncaption: A calm piano piece.\n  It flows.\nduration: 30\nkeyscale: G major\n"
        "language: en\ntimesignature: 4\n"
    )


def test_user_values_are_forced_in_one_run_each(grammar: Grammar, tokenizer: Tokenizer) -> None:
    user = Metadata(bpm=120, duration=7, keyscale="A minor", language="no")
    state = grammar.start(user, ["timesignature"])
    run = state.take()
    assert tokenizer.decode(run) == (
        "\nbpm: 120\nduration: 7\nkeyscale: A minor\nlanguage: 'no'\ntimesignature: "
    )
    assert run[2:10] == tokenizer.encode("bpm: 120\n")
    grammar.advance(state, tokenizer.encode("3")[0])
    assert state.done
    assert parse(tokenizer.decode(state.written)) == Metadata(120, None, 7, "A minor", "no", "3")


def test_with_everything_given_nothing_is_left_to_draw(
    grammar: Grammar, tokenizer: Tokenizer
) -> None:
    user = Metadata(90, "It's: mine\nand more", 30, "C major", "en", "6")
    state = grammar.start(user)
    assert state.done
    assert parse(tokenizer.decode(state.written)) == user


def test_a_caption_cannot_break_the_block(grammar: Grammar, tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.piece(token) for token in grammar.caption_ids.tolist()]
    assert not [piece for piece in pieces if b"`" in piece or piece.count(b"\n") > 1]
    assert not [piece for piece in pieces if re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", piece)]
    assert grammar.caption_ids.max() < QWEN3.text
    assert len(grammar.caption_ids) > 149_000
    opening = [tokenizer.piece(token) for token in grammar.opening_ids.tolist()]
    assert all(piece.startswith(b" ") and piece.strip() for piece in opening)
    assert b" A" in opening
    assert b" '" in opening


def test_a_caption_has_a_longest_length(grammar: Grammar, tokenizer: Tokenizer) -> None:
    state = grammar.start(Metadata(), ["caption", "timesignature"])
    word = tokenizer.encode(" la")[0]
    for _ in range(CAPTION_TOKENS):
        grammar.advance(state, word)
    assert tokenizer.decode(state.written).endswith(" la la\ntimesignature: ")
    assert len(grammar.allowed(state)) == 4


def random_run(grammar: Grammar, state: State, draw: np.random.Generator, newlines: float) -> None:
    while not state.done:
        allowed = grammar.allowed(state)
        token = int(allowed[draw.integers(len(allowed))])
        if len(allowed) > 100_000 and draw.random() < newlines:
            token = NEWLINE
        grammar.advance(state, token)


def random_user(draw: np.random.Generator) -> Metadata:
    def maybe(value):
        return value if draw.random() < 0.3 else None

    return Metadata(
        bpm=maybe(int(draw.integers(30, 301))),
        duration=maybe(int(draw.integers(1, 601))),
        keyscale=maybe(str(draw.choice(KEYS))),
        language=maybe(str(draw.choice(LANGUAGES))),
        timesignature=maybe(str(draw.choice(TIMESIGNATURES))),
    )


@pytest.mark.slow
def test_random_models_always_end_with_valid_metadata(
    grammar: Grammar, tokenizer: Tokenizer
) -> None:
    draw = np.random.default_rng(3)
    for run in range(1000):
        user = random_user(draw)
        fields = FIELDS if run % 4 else WITHOUT_CAPTION
        state = grammar.start(user, fields)
        random_run(grammar, state, draw, (0, 0.01, 0.2)[run % 3])
        assert len(state.written) <= CAPTION_TOKENS + FRAME_TOKENS <= grammar.budget(state)
        assert state.written[0] == QWEN3.think_open
        assert max(state.written[1:]) < QWEN3.text
        text = tokenizer.decode(state.written)
        assert "`" not in text
        found = parse(text)
        assert found.bpm in range(30, 301)
        assert found.duration in range(1, 601)
        assert found.duration == user.duration or found.duration >= 10
        assert found.keyscale in KEYS
        assert found.language in LANGUAGES
        assert found.timesignature in TIMESIGNATURES
        for name in FIELDS:
            assert getattr(user, name) in (None, getattr(found, name))
        order = re.findall(r"^([a-z]+):", text, re.MULTILINE)
        assert order == [name for name in FIELDS if name in fields]


def test_two_sequences_do_not_touch_each_other(grammar: Grammar) -> None:
    def alone(seed: int) -> list[int]:
        state = grammar.start(Metadata())
        random_run(grammar, state, np.random.default_rng(seed), 0.05)
        return state.written

    draws = [np.random.default_rng(seed) for seed in (1, 2)]
    states = [grammar.start(Metadata()) for _ in draws]
    while not all(state.done for state in states):
        for state, draw in zip(states, draws, strict=True):
            if not state.done:
                allowed = grammar.allowed(state)
                token = int(allowed[draw.integers(len(allowed))])
                if len(allowed) > 100_000 and draw.random() < 0.05:
                    token = NEWLINE
                grammar.advance(state, token)
    assert [state.written for state in states] == [alone(1), alone(2)]
