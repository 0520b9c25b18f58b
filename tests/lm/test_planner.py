"""Plans and codes end to end: who decides on what, seeds, batches and lengths."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acestep_engine.backends.torch_eager import TorchLanguageModel
from acestep_engine.config import Qwen3Config
from acestep_engine.errors import InvalidRequest
from acestep_engine.lm import planner
from acestep_engine.lm.tokenizer import QWEN3, Tokenizer
from acestep_engine.models_torch.qwen3 import Qwen3Model
from acestep_engine.types import (
    ComposeOptions,
    LMSampling,
    Metadata,
    Plan,
    PlanOptions,
    Request,
)

GIVEN = Request("calm piano", "la", 30, 120, "C major", "4")
SPARE = PlanOptions(rewrite_caption=False)


def flat(row: list[int]) -> Tensor:
    return torch.zeros(QWEN3.size)


class Wishes:
    """Scores that favour the continuation of `text` inside the `<think>` block."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.wanted = [QWEN3.think_open, *tokenizer.encode("\n" + text)]

    def __call__(self, row: list[int]) -> Tensor:
        scores = torch.zeros(QWEN3.size)
        written = row[row.index(QWEN3.think_open) :]
        if written == self.wanted[: len(written)] and len(written) < len(self.wanted):
            scores[self.wanted[len(written)]] = 50.0
        return scores


TRACE = (
    "bpm: 120\ncaption: A calm piano piece.\n  It flows.\nduration: 30\nkeyscale: G major\n"
    "language: hi\ntimesignature: 4\n"
)


@pytest.fixture(scope="module")
def tiny() -> TorchLanguageModel:
    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    module = Qwen3Model(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return TorchLanguageModel(module, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("seconds", "count"),
    [(30, 150), (30.3, 151), (30.9, 154), (29.999, 149), (122, 610), (5, 25), (0.4, 2)],
)
def test_codes_for_seconds(seconds: float, count: int) -> None:
    assert planner.codes_for(seconds) == count


def test_a_language_model_fills_the_gaps(scripted, host, tokenizer: Tokenizer) -> None:
    lm = scripted(Wishes(tokenizer, TRACE))
    made = planner.plan(lm, Request("calm piano", "la"), PlanOptions(), host)
    caption = "A calm piano piece. It flows."
    assert made.metadata == Metadata(120, caption, 30, "G major", "hi", "4")
    assert (made.caption, made.lyrics, made.duration) == ("calm piano", "la", 30.0)
    assert made.dit_caption == caption
    assert made.thought
    written = lm.sessions[0].rows[0]
    start = written.index(QWEN3.think_open)
    assert tokenizer.decode(written[start:]) == "\n" + TRACE.removesuffix(" 4\n") + " "
    assert len(tokenizer.encode(TRACE)) == 42
    assert lm.forwards == 20  # one for each token with a choice


@pytest.mark.parametrize("unset", ["", "auto", "unknown", None])
def test_an_open_language_is_the_models(
    scripted, host, tokenizer: Tokenizer, unset: str | None
) -> None:
    lm = scripted(
        Wishes(tokenizer, TRACE.replace("caption: A calm piano piece.\n  It flows.\n", ""))
    )
    made = planner.plan(lm, Request("x", language=unset), SPARE, host)
    assert made.metadata.language == "hi"


def test_a_given_language_is_written_into_the_thought(scripted, host, tokenizer: Tokenizer) -> None:
    lm = scripted(Wishes(tokenizer, TRACE))
    for options in (SPARE, replace(SPARE, detect_language=False)):
        made = planner.plan(lm, Request("x", language="pa"), options, host)
        assert made.metadata.language == "pa"
        assert "language: pa\n" in tokenizer.decode(lm.sessions[-1].rows[0])


def test_given_values_stand_and_condition_the_rest(scripted, host, tokenizer: Tokenizer) -> None:
    lm = scripted(flat)
    request = Request("x", "y", duration=7.2, bpm=90, keyscale="am")
    made = planner.plan(
        lm, request, PlanOptions(rewrite_caption=False, detect_language=False), host
    )
    assert made.metadata.bpm == 90
    assert made.metadata.duration == 8
    assert made.metadata.keyscale == "A minor"
    assert made.metadata.caption is None
    assert made.metadata.language is None
    assert made.metadata.timesignature in ("2", "3", "4", "6")
    assert made.duration == 7.2
    assert lm.forwards == 1


@pytest.mark.parametrize(
    ("has_lm", "request_", "options"),
    [
        (True, GIVEN, PlanOptions()),
        (True, Request("x"), PlanOptions(think=False)),
        (False, Request("x"), PlanOptions()),
    ],
)
def test_without_a_thought_the_plan_is_the_users_own(
    scripted, host, has_lm: bool, request_: Request, options: PlanOptions
) -> None:
    lm = scripted(flat) if has_lm else None
    made = planner.plan(lm, request_, options, host)
    seconds = 30 if request_ is GIVEN else 120
    expected = Metadata(
        request_.bpm, None, seconds, request_.keyscale, None, request_.timesignature
    )
    assert made.metadata == expected
    assert not made.thought
    assert lm is None or lm.forwards == 0


def test_the_thought_has_one_row_whatever_the_guidance(scripted, host) -> None:
    lm = scripted(flat)
    options = replace(SPARE, sampling=LMSampling(cfg_scale=7.0))
    planner.plan(lm, Request("x"), options, host)
    assert [len(session.rows) for session in lm.sessions] == [1]


def test_wrong_values_are_refused_before_the_model_is_asked(scripted, host) -> None:
    lm = scripted(flat)
    with pytest.raises(InvalidRequest, match="700"):
        planner.plan(lm, Request("x", duration=700), PlanOptions(), host)
    assert lm.forwards == 0


def test_fractions_of_seconds_round_up_to_whole_codes(scripted, host) -> None:
    made = planner.plan(None, Request("x", duration=7.2), PlanOptions(), host)
    codes = planner.compose(scripted(flat), made, ComposeOptions(), host)
    assert [len(song) for song in codes.items] == [40]
    assert all(0 <= code < 64_000 for code in codes.items[0])


def test_the_codes_are_asked_for_with_the_users_caption(
    scripted, host, tokenizer: Tokenizer
) -> None:
    lm = scripted(flat)
    facts = Metadata(bpm=90, caption="rewritten", duration=1)
    made = Plan("my words", "la", facts, 1.0)
    sampling = LMSampling(negative="harsh")
    planner.compose(lm, made, ComposeOptions(sampling=sampling), host)
    conditional, unconditional = map(tokenizer.decode, lm.sessions[0].rows)
    assert "# Caption\nmy words\n\n# Lyric\nla\n" in conditional
    assert "\nbpm: 90\ncaption: rewritten\nduration: 1\n" in conditional
    assert "user\nharsh\n" in unconditional
    assert "my words" not in unconditional
    planner.compose(lm, made, ComposeOptions(layout="legacy"), host)
    assert "my words" in tokenizer.decode(lm.sessions[1].rows[1])


def test_without_guidance_there_is_one_branch(scripted, host) -> None:
    lm = scripted(flat)
    made = Plan("x", "y", Metadata(), 1.0)
    planner.compose(lm, made, ComposeOptions(sampling=LMSampling(cfg_scale=1.0)), host)
    assert len(lm.sessions[0].rows) == 1


def test_a_song_is_the_same_alone_and_in_a_batch(tiny: TorchLanguageModel, host) -> None:
    made = Plan("calm piano", "la", Metadata(bpm=90), 4.0)

    def codes(seed: int, batch: int) -> Any:
        options = ComposeOptions(batch, sampling=LMSampling(seed=seed, top_k=50))
        return planner.compose(tiny, made, options, host)

    together = codes(5, 3)
    assert together.seeds == (5, 6, 7)
    assert [len(song) for song in together.items] == [20] * 3
    assert [codes(seed, 1).items[0] for seed in together.seeds] == list(together.items)
    assert len(set(together.items)) == 3


def test_a_seed_decides_and_the_global_generators_stay_untouched(
    tiny: TorchLanguageModel, host
) -> None:
    def song(seed: int) -> Any:
        sampling = LMSampling(seed=seed, top_k=100)
        options = replace(SPARE, sampling=sampling)
        made = planner.plan(tiny, Request("calm piano", "la"), options, host)
        short = replace(made, duration=3.0)
        return made, planner.compose(tiny, short, ComposeOptions(sampling=sampling), host)

    first = song(5)
    torch.rand(1000), np.random.rand(1000), [random.random() for _ in range(1000)]
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert song(5) == first
    other = song(6)
    assert other[0].metadata != first[0].metadata
    assert other[1] != first[1]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(np.random.get_state()) == states[2]


def test_long_lyrics_are_fine_until_the_window_is_full(scripted, host) -> None:
    lm = scripted(flat)
    lyrics = "la di da " * 1111
    assert len(lyrics) > 9_990
    made = planner.plan(lm, Request("x", lyrics), SPARE, host)
    planner.compose(lm, replace(made, duration=1.0), ComposeOptions(), host)
    with pytest.raises(InvalidRequest, match="Shorten the lyrics"):
        planner.compose(
            lm, replace(made, lyrics=lyrics * 15, duration=600.0), ComposeOptions(), host
        )


def test_the_memory_need_covers_what_is_opened(scripted, host) -> None:
    lm = scripted(flat)
    request = Request("x", "y")
    assert planner.plan_memory(lm, request, SPARE) > 600_000
    made = Plan("x", "y", Metadata(), 2.0)
    one = planner.compose_memory(lm, made, ComposeOptions(sampling=LMSampling(cfg_scale=1.0)))
    two = planner.compose_memory(lm, made, ComposeOptions())
    assert two == 2 * one
    rows = []

    def record(count: int, capacity: int) -> int:
        rows.append(count * capacity * 1000)
        return 0

    lm.cache_bytes = record
    planner.compose(lm, made, ComposeOptions(), host)
    planner.plan(lm, request, SPARE, host)
    assert rows[0] == two
    lm.cache_bytes = lambda count, capacity: count * capacity * 1000
    assert rows[1] == planner.plan_memory(lm, request, SPARE)


@pytest.mark.parametrize(
    ("batch", "agreeing", "free", "forwards"),
    [
        (4, 16, 1 << 40, 15),  # all in step: as many forwards as for one song
        (8, 8, 1 << 40, 2 * 15),  # only up to eight rows agree: two groups of four
        (3, 0, 1 << 40, 3 * 15),
        (4, 16, 200 * 1000, 4 * 15),  # no memory for more than one song
    ],
)
def test_songs_go_in_step_where_rows_agree_and_fit(
    scripted, host_of, batch: int, agreeing: int, free: int, forwards: int
) -> None:
    lm = scripted(lambda row: torch.arange(QWEN3.size).mul(0.37).sin())
    lm.rows_agree = lambda rows, unit, head: rows <= agreeing
    plan = Plan("a", "b", Metadata(duration=3), 3.0)
    options = ComposeOptions(batch, sampling=LMSampling(seed=5))
    codes = planner.compose(lm, plan, options, host_of(free))
    assert lm.forwards == forwards
    for item, seed in enumerate(range(5, 5 + batch)):
        single = ComposeOptions(sampling=LMSampling(seed=seed))
        assert codes.items[item] == planner.compose(lm, plan, single, host_of()).items[0]
