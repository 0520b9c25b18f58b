"""Songs in words: what the model is asked, what it may write, and whose values stand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from acestep_engine.engine import Engine
from acestep_engine.errors import InvalidRequest, ModelNotFound
from acestep_engine.lm import modes
from acestep_engine.lm.tokenizer import QWEN3, Tokenizer
from acestep_engine.types import AnswerOptions, Codes, LMSampling, ModelSpec, Request

SHORT = AnswerOptions(max_tokens=160)
THOUGHT = (
    "bpm: 120\ncaption: A calm piano piece.\n  It flows.\nduration: 30\nkeyscale: F♯ minor\n"
    "language: hi\ntimesignature: 4\n"
)


class Author:
    """Scores that favour `thought`, then `lyrics`, then the end; all else is equal."""

    def __init__(self, tokenizer: Tokenizer, lyrics: str, thought: str = THOUGHT) -> None:
        opened = [QWEN3.think_open, *tokenizer.encode("\n" + thought)]
        closed = [QWEN3.think_close, *tokenizer.encode("\n\n")]
        self.wanted = [*opened, *closed, *tokenizer.encode(lyrics), QWEN3.end]

    def __call__(self, row: list[int]) -> Tensor:
        scores = torch.zeros(QWEN3.size)
        written = row[row.index(QWEN3.think_open) :]
        if written == self.wanted[: len(written)] and len(written) < len(self.wanted):
            scores[self.wanted[len(written)]] = 60.0
        return scores


def ask(lm, host, question: modes.Question, options: AnswerOptions = SHORT) -> Request:
    return modes.answer(lm, question, options, host)


def codes_of(*lengths: int) -> Codes:
    return Codes(tuple(tuple(7 * n % 64_000 for n in range(count)) for count in lengths))


@pytest.mark.parametrize("header", ["# Lyric\n", "# Lyrics\n", "# Lyrics:\n", ""])
def test_an_idea_becomes_a_song(scripted, host, tokenizer: Tokenizer, header: str) -> None:
    lm = scripted(Author(tokenizer, header + "[Verse]\nla la\n\n[Chorus]\nlo"))
    found = ask(lm, host, modes.write("calm piano", False, None))
    assert found == Request(
        caption="A calm piano piece. It flows.",
        lyrics="[Verse]\nla la\n\n[Chorus]\nlo",
        duration=30.0,
        bpm=120,
        keyscale="F# minor",
        timesignature="4",
        language="hi",
    )
    asked = tokenizer.decode(lm.sessions[0].rows[0])
    assert "user\ncalm piano\n\ninstrumental: false\nassistant" in asked


def test_no_query_asks_for_a_surprise(tokenizer: Tokenizer) -> None:
    assert "user\nNO USER INPUT\n\ninst" in tokenizer.decode(modes.write(" ", True, None).prompt)


def test_an_instrumental_has_its_marker_and_no_words(scripted, host, tokenizer: Tokenizer) -> None:
    lm = scripted(Author(tokenizer, "# Lyric\nwords"))
    found = ask(lm, host, modes.write("calm piano", True, None))
    assert (found.lyrics, found.instrumental) == ("[Instrumental]", True)
    assert QWEN3.think_close not in lm.sessions[0].rows[0]


def test_a_wanted_language_is_written_into_the_thought(
    scripted, host, tokenizer: Tokenizer
) -> None:
    lm = scripted(Author(tokenizer, "la"))
    found = ask(lm, host, modes.write("calm piano", False, "yue"))
    assert found.language == "yue"
    assert "language: yue\n" in tokenizer.decode(lm.sessions[0].rows[0])


def test_rewriting_keeps_every_value_of_the_user(scripted, host, tokenizer: Tokenizer) -> None:
    thought = THOUGHT.replace("120", "91").replace("30", "8").replace("F♯ minor", "A minor")
    thought = thought.replace("hi", "pa").replace(": 4", ": 3")
    lm = scripted(Author(tokenizer, "# Lyric\nnew words", thought))
    draft = Request("calm", "old words", 7.2, 91, "am", "3", "pa")
    found = ask(lm, host, modes.rewrite(draft))
    assert found == Request(
        "A calm piano piece. It flows.", "new words", 7.2, 91, "A minor", "3", "pa"
    )
    asked = tokenizer.decode(lm.sessions[0].rows[0])
    assert "# Caption\ncalm\n\n# Lyric\nold words\nassistant" in asked
    assert "language: pa\n" in asked


def test_words_that_are_not_rewritten_stay(scripted, host, tokenizer: Tokenizer) -> None:
    lm = scripted(Author(tokenizer, "# Lyric\n"))
    assert ask(lm, host, modes.rewrite(Request("calm", "old words"))).lyrics == "old words"


def test_codes_say_how_long_they_are(scripted, host, tokenizer: Tokenizer) -> None:
    (question,) = modes.understand(codes_of(61))
    assert question.prompt.count(QWEN3.first_code) == 1
    assert sum(id >= QWEN3.first_code for id in question.prompt) == 61
    lm = scripted(Author(tokenizer, "# Lyric\nla", THOUGHT.replace("30", "13")))
    found = ask(lm, host, question)
    assert (found.duration, found.lyrics) == (12.2, "la")
    assert "duration: 13\n" in tokenizer.decode(lm.sessions[0].rows[0])


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        (Codes(()), "no audio codes"),
        (Codes(((),)), "0 audio codes"),
        (codes_of(4), "0.8 seconds"),
        (codes_of(3001), "600.2 seconds"),
        (Codes(((5, 6, *[9] * 40, 7, 8),)), r"same \(9\).*silence"),
        (Codes(((70_000, *range(30)),)), "70000"),
        (Codes((tuple(range(30)), (3,) * 30)), "silence"),
    ],
)
def test_codes_without_a_song_are_refused(codes: Codes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        modes.understand(codes)


@pytest.mark.parametrize(
    ("text", "lyrics"),
    [
        ("</think>\n\n# Lyric\n[Verse]\nla\n<|im_end|>", "[Verse]\nla"),
        ("<think>\nbpm: 9\n</think>\n\n# Lyrics\nla", "la"),
        ("</think>\n\n# Lyrics:\nla\n", "la"),
        ("</think>\n\n# Lyric", ""),
        ("</think>\n\n# Languages\nen\n\n# Lyric\nla", "la"),
        ("</think>\nla\n# Lyric\nlo", "la\n# Lyric\nlo"),
        ("</think>\n\nLyrical words\nla", "Lyrical words\nla"),
        ("<think>\nbpm: 9\ntimesignature: 4\n<|im_end|>", ""),
        ("<think>\nbpm: 9\n# Lyric\nla\n<|im_end|>", "la"),
        ("# Lyric\nla", "la"),
        ("la", "la"),
        ("", ""),
    ],
)
def test_lyrics_are_found_in_an_answer(text: str, lyrics: str) -> None:
    assert modes.lyrics_of(text) == lyrics


def test_lyrics_are_text_whatever_the_scores(scripted, host) -> None:
    """Control tokens and audio codes, valid or not, shout in every run."""
    text = QWEN3.text
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        base = torch.randn(QWEN3.size, generator=generator)
        base[text:] += 1e4
        base[QWEN3.end] = base[:text].logsumexp(0) - 5 if seed % 2 else -1e4
        base[198] += 10  # line breaks, so that captions end early

        def loud(row: list[int], base: Tensor = base) -> Tensor:
            return base

        lm = scripted(loud)
        options = AnswerOptions(400, LMSampling(temperature=1.5, top_p=1.0, seed=seed))
        ask(lm, host, modes.write("x", False, "en"), options)
        row = lm.sessions[0].rows[0]
        start = row.index(QWEN3.think_open)
        answer = [id for id in row[start:] if id >= text]
        assert answer[:2] == [QWEN3.think_open, QWEN3.think_close]
        assert set(answer[2:]) <= {QWEN3.end}
        assert len(row) - start <= 400


def test_lyrics_stop_at_the_budget_and_the_metadata_is_complete(
    scripted, host, tokenizer: Tokenizer
) -> None:
    lm = scripted(Author(tokenizer, "la " * 300))
    question = modes.write("x", False, None)
    found = ask(lm, host, question, AnswerOptions(100))
    assert found.timesignature == "4"
    written = lm.sessions[0].rows[0][len(question.prompt) :]
    assert len(written) == 99  # the last one drawn is not fed
    assert 40 < len(tokenizer.encode(found.lyrics)) < 60
    tight = ask(lm, host, question, AnswerOptions(1))
    assert (tight.timesignature, tight.lyrics) == ("4", "")


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (LMSampling(temperature=0.0), " la la la la la la"),
        (LMSampling(temperature=0.0, repetition_penalty=1.5), " la li lo"),
        (LMSampling(temperature=5.0, top_p=1.0, min_p=1.0), " la la la la la la"),
        (LMSampling(temperature=5.0, top_k=1), " la la la la la la"),
        (LMSampling(temperature=5.0, top_p=0.5, temperature_last=True), " la la la la la la"),
    ],
)
def test_the_limits_on_tokens_hold_in_lyrics(
    scripted, host, tokenizer: Tokenizer, sampling: LMSampling, words: str
) -> None:
    """Of three words each is a little less likely than the one before, and all others are far."""
    line = Author(tokenizer, "")
    (la,), (li,), (lo,) = map(tokenizer.encode, (" la", " li", " lo"))

    def score(row: list[int]) -> Tensor:
        if len(line.wanted) - 1 > len(row) - row.index(QWEN3.think_open):
            return line(row)
        scores = torch.full((QWEN3.size,), -90.0)
        scores[[la, li, lo]] = torch.tensor([20.0, 17.0, 15.0])
        return scores

    question = modes.write("x", False, None)
    found = ask(scripted(score), host, question, AnswerOptions(60, sampling))
    assert found.lyrics.startswith(words.strip())


def test_the_memory_need_covers_what_is_opened(scripted, host, tokenizer: Tokenizer) -> None:
    lm, opened = scripted(Author(tokenizer, "la")), []
    question = modes.write("x", False, None)
    need = modes.answer_memory(lm, question, SHORT)
    lm.cache_bytes = lambda rows, capacity: opened.append(rows * capacity * 1000) or 0
    ask(lm, host, question)
    assert opened == [need]


def test_a_stop_is_obeyed_at_the_next_token(scripted, host_of, stop, tokenizer: Tokenizer) -> None:
    for check in (1, 10, 60):
        lm, host = scripted(Author(tokenizer, "la " * 99)), host_of(stop_at=check)
        with pytest.raises(stop):
            ask(lm, host, modes.write("x", False, None))
        assert lm.forwards == check - 1
        assert host.bars["Write"].closed


@pytest.mark.usefixtures("short_captions")
def test_a_seed_is_an_answer_with_a_real_model(engine: Engine, tiny_model: ModelSpec) -> None:
    first = engine.write(tiny_model, "calm piano", language="de", options=SHORT)
    torch.rand(1000)
    assert engine.write(tiny_model, "calm piano", language="de", options=SHORT) == first
    assert first.language == "de"
    assert first.caption
    assert first.lyrics
    other = replace(SHORT, sampling=LMSampling(seed=6))
    assert engine.write(tiny_model, "calm piano", language="de", options=other) != first


@pytest.mark.usefixtures("short_captions")
def test_a_song_is_described_the_same_alone_and_in_a_batch(
    engine: Engine, tiny_model: ModelSpec
) -> None:
    codes = codes_of(30, 52)
    options = replace(SHORT, sampling=LMSampling(temperature=0.3, seed=5))
    together = engine.understand(tiny_model, codes, options)
    assert [song.duration for song in together] == [6.0, 10.4]
    alone = replace(options, sampling=LMSampling(temperature=0.3, seed=6))
    assert engine.understand(tiny_model, Codes(codes.items[1:]), alone) == together[1:]


def test_without_a_language_model_the_cure_is_told(engine: Engine, tiny_model: ModelSpec) -> None:
    with pytest.raises(ModelNotFound, match="language model"):
        engine.write(replace(tiny_model, lm=""), "calm piano", options=SHORT)
