"""The decode loop: counts, guidance over the allowed rows, stops, and parity with a plain loop."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config as OracleConfig
from transformers import Qwen3ForCausalLM

from acestep_engine.backends.torch_eager import TorchLanguageModel
from acestep_engine.config import Qwen3Config
from acestep_engine.errors import InvalidRequest, NonFinite, OutOfMemory
from acestep_engine.lm.decode import CodesCourse, Task, decode
from acestep_engine.lm.room import MAX_POSITIONS
from acestep_engine.lm.tokenizer import Vocabulary
from acestep_engine.models_torch.qwen3 import Qwen3Model
from acestep_engine.types import LMSampling

SMALL = Vocabulary(
    size=100, text=80, start=5, end=9, think_open=6, think_close=7, first_code=80, codes=20
)
CPU = torch.device("cpu")
CONDITIONAL, UNCONDITIONAL = [1, 2, 3], [4]
ONE, PAIR = (CONDITIONAL,), (CONDITIONAL, UNCONDITIONAL)


def flat(row: list[int]) -> Tensor:
    return torch.zeros(SMALL.size)


def loud(row: list[int]) -> Tensor:
    """Different scores for the two branches, and a text token that shouts in both."""
    angle = torch.arange(SMALL.size) * (0.7 if row[0] == CONDITIONAL[0] else 0.3)
    scores = angle.sin()
    scores[3] = 1e4
    return scores


def run(lm: Any, host: Any, bounds: tuple[int, int], prompts=ONE, **sampling: Any) -> list[int]:
    course = CodesCourse(SMALL, *bounds, CPU)
    decode(lm, Task("codes", prompts, LMSampling(**sampling)), course, host)
    return list(course.songs[0])


@pytest.mark.parametrize(("low", "high"), [(50, 50), (10, 40), (0, 5), (1, 1)])
def test_the_number_of_codes_stays_within_its_bounds(scripted, host, low: int, high: int) -> None:
    counts = {len(run(scripted(flat), host, (low, high), seed=seed)) for seed in range(40)}
    assert low <= min(counts)
    assert max(counts) <= high
    assert len(counts) > 1 or low == high


def test_the_end_is_not_even_scored_where_the_length_is_known(scripted, host) -> None:
    lm = scripted(flat)
    run(lm, host, (30, 30))
    assert lm.asked == [SMALL.code_ids] * 30
    assert lm.forwards == 30


def test_codes_after_the_end_do_not_count(scripted, host) -> None:
    def ends_after_seven(row: list[int]) -> Tensor:
        scores = torch.zeros(SMALL.size)
        scores[SMALL.end if len(row) == len(CONDITIONAL) + 7 else 85] = 100.0
        return scores

    assert run(scripted(ends_after_seven), host, (0, 50)) == [5] * 7


@pytest.mark.parametrize("scale", [1.0, 2.0, 7.0])
def test_guidance_and_draws_see_the_codes_only(scripted, host_of, scale: float) -> None:
    """A score of 1e4 on a text token changes nothing, and draws follow the guided softmax."""
    lm = scripted(loud)
    prompts = ONE if scale == 1 else PAIR
    count = 4000
    course = CodesCourse(SMALL, count, count, CPU)
    sampling = LMSampling(temperature=1.0, top_p=1.0, cfg_scale=scale)
    decode(lm, Task("codes", prompts, sampling), course, host_of())
    c, u = (loud(prompt)[SMALL.code_ids] for prompt in PAIR)
    expected = (u + scale * (c - u)).softmax(-1) * count
    found = Counter(course.songs[0])
    assert found.keys() <= set(range(20))
    counts = torch.tensor([found[code] for code in range(20)])
    live = expected > 5
    chi_square = ((counts - expected)[live] ** 2 / expected[live]).sum()
    assert chi_square < live.sum() + 5 * (2 * live.sum()) ** 0.5
    assert lm.forwards == count
    assert len(lm.sessions) == 1
    assert len(lm.sessions[0].rows) == len(prompts)


def test_both_branches_are_fed_the_same_codes(scripted, host) -> None:
    lm = scripted(loud)
    codes = run(lm, host, (6, 6), PAIR, seed=3)
    fed = [SMALL.first_code + code for code in codes[:-1]]
    assert lm.sessions[0].rows == [CONDITIONAL + fed, UNCONDITIONAL + fed]


def test_a_seed_is_a_song(scripted, host) -> None:
    first = run(scripted(loud), host, (40, 40), seed=5)
    torch.rand(1000)
    assert run(scripted(loud), host, (40, 40), seed=5) == first
    assert run(scripted(loud), host, (40, 40), seed=6) != first


def test_the_penalty_counts_what_was_drawn(scripted, host) -> None:
    def descending(row: list[int]) -> Tensor:
        return -torch.arange(SMALL.size).float() / 100 + 2

    greedy = {"temperature": 0.0}
    assert run(scripted(descending), host, (4, 4), **greedy) == [0, 0, 0, 0]
    assert run(scripted(descending), host, (4, 4), repetition_penalty=2.0, **greedy) == [0, 1, 2, 3]


def test_not_a_number_is_an_error_with_its_stage(scripted, host) -> None:
    def breaks(row: list[int]) -> Tensor:
        return torch.full((SMALL.size,), float("nan") if len(row) > 6 else 0.0)

    with pytest.raises(NonFinite, match=r"^codes: .*fp32"):
        run(scripted(breaks), host, (20, 20))
    assert host.bars["codes"].closed


def test_a_stop_is_obeyed_at_the_next_token(scripted, host_of, stop) -> None:
    for check in (1, 2, 10):
        lm, host = scripted(flat), host_of(stop_at=check)
        with pytest.raises(stop):
            run(lm, host, (500, 500))
        assert lm.forwards == check - 1
        assert host.bars["codes"].closed


def test_progress_ends_at_the_whole(scripted, host) -> None:
    run(scripted(flat), host, (12, 12))
    seen = host.bars["codes"].seen
    assert seen == sorted(seen)
    assert seen[-1] == 12


def test_progress_is_seen_while_it_runs(scripted, host) -> None:
    def slow(row: list[int]) -> Tensor:
        time.sleep(0.05)
        return flat(row)

    run(scripted(slow), host, (20, 20))
    assert len(host.bars["codes"].seen) >= 4


def test_too_little_memory_is_known_before_the_first_token(scripted, host_of) -> None:
    lm = scripted(flat)
    with pytest.raises(OutOfMemory, match=r"2 x 11003 tokens need 21 MiB .* 19 MiB are free"):
        run(lm, host_of(free=20_000_000), (11_000, 11_000), PAIR)
    assert lm.forwards == 0


def test_a_prompt_beyond_the_window_is_refused(scripted, host) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt has 40000 .* 1000 .* {MAX_POSITIONS}"):
        run(scripted(flat), host, (1000, 1000), ([1] * 40_000,))


@pytest.fixture(scope="module")
def tiny() -> tuple[TorchLanguageModel, Qwen3ForCausalLM]:
    sizes = {
        "vocab_size": SMALL.size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    oracle = Qwen3ForCausalLM(OracleConfig(**sizes, tie_word_embeddings=True, rope_theta=1e6))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    module = Qwen3Model(Qwen3Config(**sizes))
    module.load_state_dict(oracle.model.state_dict())
    return TorchLanguageModel(module, "cpu", torch.float32), oracle.eval()


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_the_loop_writes_what_a_plain_loop_writes(tiny, host, scale: float) -> None:
    """Oracle: full forward passes without a cache, guidance over the whole vocabulary."""
    lm, oracle = tiny
    rows = [[1, 2, 3, 50, 6], [1, 2, 4]]
    prompts = (rows[0],) if scale == 1 else tuple(map(list, rows))
    found = run(lm, host, (300, 300), prompts, temperature=0.0, cfg_scale=scale)
    expected = []
    with torch.no_grad():
        for _ in range(60):
            c, u = (oracle(torch.tensor([row])).logits[0, -1] for row in rows)
            mixed = (u + scale * (c - u))[SMALL.code_ids]
            expected.append(int(mixed.argmax()))
            for row in rows:
                row.append(SMALL.first_code + expected[-1])
    assert found[:60] == expected
    assert len(set(expected)) > 5


@pytest.mark.parametrize("length", [254, 255, 256, 257, 511])
def test_no_length_of_a_prompt_or_a_song_is_special(tiny, host, length: int) -> None:
    """Oracle: one forward pass over prompt and song expects each code where it stands."""
    lm, oracle = tiny
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(10, 80, (length,), generator=generator).tolist()
    other = prompt[: length // 2]
    found = run(lm, host, (310, 310), (prompt, other), temperature=0.0, cfg_scale=1.5)
    fed = [SMALL.first_code + code for code in found[:-1]]
    with torch.no_grad():
        c, u = (
            oracle(torch.tensor([row + fed])).logits[0, len(row) - 1 :, SMALL.code_ids]
            for row in (prompt, other)
        )
    mixed = u + 1.5 * (c - u)
    best = mixed.max(-1).values
    chosen = mixed.gather(-1, torch.tensor(found)[:, None]).squeeze(-1)
    assert (best - chosen).max() < 1e-4  # a tie within rounding may fall either way
    assert len(set(found)) > 2
