"""Batches of songs: several plans at once, each song as if it were alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from acestep_engine.backends.torch_graph import GraphLanguageModel
from acestep_engine.backends.torch_lm import TorchLanguageModel
from acestep_engine.config import Qwen3Config
from acestep_engine.errors import InvalidRequest
from acestep_engine.lm import planner
from acestep_engine.lm.tokenizer import QWEN3, Tokenizer
from acestep_engine.models_torch.qwen3 import Qwen3Model
from acestep_engine.types import Codes, ComposeOptions, LMSampling, Metadata, Plan

PLANS = (
    Plan("calm piano", "la", Metadata(bpm=90), 3.0),
    Plan("harsh noise and a long description of it", "[Verse]\n" + "la di " * 30, Metadata(), 1.4),
    Plan("", "", Metadata(language="en", keyscale="A minor"), 5.0),
)
COUNTS = [15, 10, 25]
WILD = LMSampling(seed=5, temperature=1.0, top_p=1.0)


def wavy(row: list[int]) -> Tensor:
    """Scores that depend on the whole row."""
    return torch.arange(QWEN3.size).mul(0.37 + sum(row) % 97 / 100).sin() * 3


def model(width: int, dtype: torch.dtype) -> TorchLanguageModel:
    heads = max(1, width // 64)
    config = Qwen3Config(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2 * heads,
        num_key_value_heads=heads,
        head_dim=32,
    )
    module = Qwen3Model(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 0.1 if parameter.ndim > 1 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    TorchLanguageModel.finish(module, dtype)
    return TorchLanguageModel(module.to(dtype), "cpu", dtype)


@pytest.fixture(scope="module")
def tiny() -> TorchLanguageModel:
    return model(64, torch.float32)


def alone(lm: Any, plans: Sequence[Plan], sampling: LMSampling, host: Any) -> list[tuple[int, ...]]:
    """Each plan in a call of its own, with the seed it would have in a batch."""
    options = [
        ComposeOptions(sampling=replace(sampling, seed=sampling.seed + item))
        for item in range(len(plans))
    ]
    return [
        planner.compose(lm, plan, option, host).items[0]
        for plan, option in zip(plans, options, strict=True)
    ]


@pytest.mark.parametrize("backend", [TorchLanguageModel, GraphLanguageModel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_songs_of_several_plans_are_those_of_each_plan_alone(
    host, backend: type[TorchLanguageModel], dtype: torch.dtype, scale: float
) -> None:
    lm = backend(model(64, dtype).module, "cpu", dtype)
    sampling = replace(WILD, cfg_scale=scale)
    codes = planner.compose(lm, PLANS, ComposeOptions(sampling=sampling), host)
    assert codes.seeds == (5, 6, 7)
    assert [len(song) for song in codes.items] == COUNTS
    assert list(codes.items) == alone(lm, PLANS, sampling, host)


def test_rows_that_keep_their_bits_go_in_step_and_the_short_ones_end_early(scripted, host) -> None:
    lm = scripted(wavy)
    codes = planner.compose(lm, PLANS, ComposeOptions(sampling=WILD), host)
    rows = [len(session.rows) for session in lm.sessions]
    assert rows == [6, 2, 2, 2, 6]  # together, each alone, and then the songs themselves
    rehearsed = 4 * (1 + planner.REHEARSED)
    assert lm.forwards == rehearsed + max(COUNTS)
    assert [len(song) for song in codes.items] == COUNTS
    assert list(codes.items) == alone(scripted(wavy), PLANS, WILD, host)
    assert list(host.bars) == ["Codes"]


def test_rows_that_disturb_each_other_go_one_after_the_other(scripted, host) -> None:
    """A score that knows how many rows there are stands for a kernel that does."""
    lm = scripted(lambda row: wavy(row) * (1 + len(lm.sessions[-1].rows)))
    found = planner.compose(lm, PLANS, ComposeOptions(sampling=WILD), host)
    assert [len(session.rows) for session in lm.sessions] == [6, 2, 2, 2, 2]
    assert list(found.items) == alone(lm, PLANS, WILD, host)
    assert list(host.bars)[:3] == ["Codes 1/3", "Codes 2/3", "Codes 3/3"]


def test_songs_of_one_plan_still_go_in_step_where_plans_disturb_each_other(scripted, host) -> None:
    def score(row: list[int]) -> Tensor:
        lengths = {len(other) for other in lm.sessions[-1].rows}
        return wavy(row) * len(lengths)

    lm = scripted(score)
    found = planner.compose(lm, PLANS[:2], ComposeOptions(2, sampling=WILD), host)
    assert [len(session.rows) for session in lm.sessions] == [8, 2, 4, 4]
    assert found.seeds == (5, 6, 7, 8)
    assert [len(song) for song in found.items] == [15, 15, 10, 10]
    single = [PLANS[0], PLANS[0], PLANS[1], PLANS[1]]
    assert list(found.items) == alone(lm, single, WILD, host)


@pytest.mark.parametrize("songs", range(1, 9))
def test_every_song_of_a_batch_has_exactly_its_codes(scripted, host, songs: int) -> None:
    plans = [Plan("a" * n, "b", Metadata(), 1.0 + n % 3) for n in range(songs)]
    codes = planner.compose(scripted(wavy), plans, ComposeOptions(), host)
    assert [len(song) for song in codes.items] == [5 * (1 + n % 3) for n in range(songs)]
    together = planner.compose(scripted(wavy), plans[0], ComposeOptions(songs), host)
    assert [len(song) for song in together.items] == [5] * songs


def test_seven_seconds_and_a_bit_are_forty_codes_in_every_song(scripted, host) -> None:
    plans = [replace(PLANS[0], duration=7.2), replace(PLANS[1], duration=7.2)]
    codes = planner.compose(scripted(wavy), plans, ComposeOptions(2), host)
    assert [len(song) for song in codes.items] == [40] * 4


@pytest.mark.parametrize(
    ("plans", "batch", "words"),
    [
        ((), 1, "0 plans"),
        (PLANS * 3, 1, "9 plans with 1 songs each are 9 songs"),
        (PLANS, 3, "3 plans with 3 songs each are 9 songs"),
    ],
)
def test_too_many_songs_are_refused(
    scripted, host, plans: tuple[Plan, ...], batch: int, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        planner.compose(scripted(wavy), plans, ComposeOptions(batch), host)


def test_guidance_in_a_batch_sees_the_codes_only_and_each_song_its_own(scripted, host) -> None:
    """Text shouts in all rows; the draws of each song follow its own guided softmax."""
    live, scale, count = 6, 2.0, 1200
    plans = [replace(plan, duration=240.0) for plan in PLANS[:2]]
    kinds: dict[int, int] = {}

    def score(row: list[int]) -> Tensor:
        """Six codes by the kind of the prompt, which is its length; all other codes are out."""
        length = next((n for n, id in enumerate(row) if id >= QWEN3.first_code), len(row))
        kind = kinds.setdefault(length, len(kinds))
        scores = torch.full((QWEN3.size,), -50.0)
        scores[: QWEN3.first_code] = 1e4
        first = QWEN3.first_code
        scores[first : first + live] = torch.arange(live).mul(0.4 + kind).sin()
        return scores

    def expected(conditional: int) -> Tensor:
        c, u = (torch.arange(live).mul(0.4 + kind).sin() for kind in (conditional, 2))
        return (u + scale * (c - u)).softmax(-1) * count

    lm = scripted(score)
    sampling = LMSampling(temperature=1.0, top_p=1.0, cfg_scale=scale)
    codes = planner.compose(lm, plans, ComposeOptions(sampling=sampling), host)
    assert len(kinds) == 3  # two songs, and one unconditional prompt for both
    for song, items in enumerate(codes.items):
        found = Counter(items)
        assert set(found) <= set(range(live))
        wanted = expected(song)
        chi_square = sum((found[code] - wanted[code]) ** 2 / wanted[code] for code in range(live))
        assert chi_square < live + 5 * (2 * live) ** 0.5
    assert [len(session.rows) for session in lm.sessions] == [4, 2, 2, 4]


def test_one_song_that_ends_early_does_not_change_the_others(host) -> None:
    lm = model(256, torch.bfloat16)
    long = replace(PLANS[0], duration=8.0)
    short = replace(PLANS[0], duration=1.0)
    sampling = replace(WILD, top_p=0.9)
    codes = planner.compose(lm, [long, short, long], ComposeOptions(sampling=sampling), host)
    assert list(codes.items) == alone(lm, [long, short, long], sampling, host)


def steps(lm: TorchLanguageModel, rows: int) -> Tensor:
    """States of a prompt and of 20 codes in `rows` rows, all alike in pairs."""
    session = lm.open(rows, 60)
    states = [session.feed([[1, 2, 3, 4, 5, 6], [1, 2, 9]] * (rows // 2))]
    for token in range(20):
        states.append(session.feed(torch.full((rows, 1), QWEN3.first_code + token)))
    return torch.stack(states)


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_said_to_agree_only_where_they_do(width: int, dtype: torch.dtype) -> None:
    lm = model(width, dtype)
    pair = steps(lm, 2)
    for rows in (4, 6, 8, 16):
        if lm.rows_agree(rows, 2, QWEN3.code_ids):
            assert torch.equal(steps(lm, rows), pair.repeat(1, rows // 2, 1)), rows


class Counted:
    """A real language model that remembers what was opened."""

    def __init__(self, lm: TorchLanguageModel) -> None:
        self.lm, self.opened = lm, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lm, name)

    def open(self, rows: int, capacity: int) -> Any:
        self.opened.append(rows)
        return self.lm.open(rows, capacity)


def test_where_rows_do_not_agree_songs_go_one_by_one(tiny: TorchLanguageModel, host) -> None:
    sizes = [songs for songs in (4, 2) if tiny.rows_agree(2 * songs, 2, QWEN3.code_ids)]
    if sizes:
        pytest.skip("on this machine no number of rows matters")
    lm = Counted(tiny)
    planner.compose(lm, PLANS[0], ComposeOptions(4), host)
    assert lm.opened == [2] * 4


def test_equal_prompts_are_read_once(host) -> None:
    lm = model(256, torch.bfloat16)
    assert lm.rows_agree(8, 2, QWEN3.code_ids)
    read: list[int] = []
    hook = lm.module.embed_tokens.register_forward_pre_hook(
        lambda module, ids: read.append(ids[0].numel())
    )
    planner.compose(lm, PLANS[0], ComposeOptions(), host)
    single, counts = list(read), planner.codes_for(3.0)
    read.clear()
    planner.compose(lm, PLANS[0], ComposeOptions(4), host)
    hook.remove()
    assert sum(read[: 1 - counts]) == sum(single[: 1 - counts])


def test_the_codes_prompt_states_the_whole_seconds(scripted, host, tokenizer: Tokenizer) -> None:
    """Whatever the metadata says, the model must know how long the song is that it writes."""
    lm = scripted(wavy)
    for stated in (None, 99):
        plan = Plan("x", "y", Metadata(bpm=90, duration=stated), 2.3)
        planner.compose(lm, plan, ComposeOptions(), host)
        thought = tokenizer.decode(lm.sessions[-1].rows[0])
        assert "bpm: 90\nduration: 3\n" in thought


def stopped(lm: Any, plans: Sequence[Plan], make: Any, stop: type[Exception]) -> Iterator[Any]:
    for check in (1, 2, 20, 30):
        host = make(stop_at=check)
        with pytest.raises(stop):
            planner.compose(lm, plans, ComposeOptions(), host)
        yield host


def test_a_batch_stops_at_the_next_step_and_in_the_rehearsal(scripted, host_of, stop) -> None:
    lm = scripted(wavy)
    for host in stopped(lm, PLANS, host_of, stop):
        assert all(bar.closed for bar in host.bars.values())
    assert isinstance(planner.compose(lm, PLANS, ComposeOptions(), host_of()), Codes)
