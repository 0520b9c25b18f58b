"""Scores: the formulas, and the same numbers as plain forward passes of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config as OracleConfig
from transformers import Qwen3ForCausalLM

from acestep_engine.backends.torch_eager import TorchLanguageModel
from acestep_engine.config import Qwen3Config
from acestep_engine.engine import Engine
from acestep_engine.errors import InvalidRequest, NonFinite, OutOfMemory
from acestep_engine.lm import scoring
from acestep_engine.lm.tokenizer import QWEN3, Tokenizer
from acestep_engine.models_torch.qwen3 import Qwen3Model
from acestep_engine.types import Codes, Metadata, ModelSpec, Plan

PLAN = Plan(
    "calm piano", "[Verse]\n" + "la di da " * 12, Metadata(120, None, 10, "C major", "en", "4"), 9.8
)
CODES = Codes(((5, 63_999, 17, 4, 5, 900), (1, 2, 3)))


@pytest.mark.parametrize(
    ("gain", "value"),
    [
        (-0.2, 0.119203),
        (-0.05, 0.377541),
        (0.0, 0.5),
        (0.05, 0.622459),
        (0.1, 0.731059),
        (0.3, 0.952574),
        (-1e9, 0.0),
        (1e9, 1.0),
    ],
)
def test_gains_become_scores(gain: float, value: float) -> None:
    assert scoring.sigmoid(gain) == pytest.approx(value, abs=1e-6)


def test_the_reward_weighs_what_is_there() -> None:
    facts = {"bpm": 1.0, "keyscale": 0.5}
    assert scoring.reward(0.8, 0.6, facts) == pytest.approx(0.73)
    assert scoring.reward(0.8, None, facts) == pytest.approx(0.785714, abs=1e-6)
    assert scoring.reward(None, 0.6, {}) == pytest.approx(0.6)


def test_ranks_become_a_recall() -> None:
    assert scoring.recall([1, 2, 11]) == pytest.approx((1 + 0.9) / 3)
    assert scoring.recall([10, 500]) == pytest.approx(0.05)


@pytest.fixture(scope="module")
def tiny() -> tuple[TorchLanguageModel, Qwen3ForCausalLM]:
    sizes = {
        "vocab_size": QWEN3.size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    oracle = Qwen3ForCausalLM(OracleConfig(**sizes, tie_word_embeddings=True, rope_theta=1e6))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        # What a song's texts need most is made likely, so that ranks spread over the whole range.
        for token in (198, 220, 16, 17, 15, QWEN3.think_open, QWEN3.think_close):
            oracle.model.embed_tokens.weight[token] *= 3
    module = Qwen3Model(Qwen3Config(**sizes))
    module.load_state_dict(oracle.model.state_dict())
    return TorchLanguageModel(module, "cpu", torch.float32), oracle.eval()


class Oracle:
    """The official way: one forward pass for each prompt and text, all scores at once."""

    def __init__(self, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
        self.model, self.encode = model, tokenizer.encode

    def prompt(self, song: tuple[int, ...]) -> list[int]:
        system = (
            "system\n# Instruction\nUnderstand the given musical conditions and describe the audio "
            "semantics accordingly:\n\n"
        )
        heard = [151_669 + code for code in song]
        user = self.encode("user\n") + heard if song else self.encode("user\nNO USER INPUT")
        turns = [151_644, *self.encode(system), 151_645, 198, 151_644, *user, 151_645, 198]
        return [*turns, 151_644, *self.encode("assistant\n")]

    def thought(self, yaml: str, after: str = "\n") -> list[int]:
        inside = f"\n{yaml}\n" if yaml else "\n"
        return [151_667, *self.encode(inside), 151_668, *self.encode(after)]

    @torch.no_grad()
    def scores(self, song: tuple[int, ...], text: list[int]) -> Tensor:
        prompt = self.prompt(song)
        logits = self.model(torch.tensor([prompt + text])).logits[0]
        return logits[len(prompt) - 1 : -1].double().log_softmax(-1)

    def pmi(self, song: tuple[int, ...], text: list[int]) -> float:
        ids = torch.tensor(text)[:, None]
        heard, unheard = (self.scores(given, text).gather(-1, ids).mean() for given in (song, ()))
        return 1 / (1 + math.exp(-float(heard - unheard) / 0.1))

    def recall(self, song: tuple[int, ...], text: list[int]) -> float:
        top = self.scores(song, text).topk(10).indices.tolist()
        ranks = [row.index(id) if id in row else 10 for row, id in zip(top, text, strict=True)]
        return sum(1 - rank / 10 for rank in ranks) / len(ranks)


def test_scores_are_those_of_plain_forward_passes(tiny, host, tokenizer: Tokenizer) -> None:
    lm, model = tiny
    oracle = Oracle(model, tokenizer)
    facts = {
        "bpm": "bpm: 120",
        "duration": "duration: 10",
        "keyscale": "keyscale: C major",
        "language": "language: en",
        "timesignature": "timesignature: 4",
    }
    found = scoring.score(lm, CODES, PLAN, host)
    for song, score in zip(CODES.items, found, strict=True):
        caption = oracle.thought("caption: calm piano")
        assert score.caption == pytest.approx(oracle.pmi(song, caption), abs=1e-4)
        lyrics = oracle.thought("", f"\n# Lyric\n{PLAN.lyrics}\n")
        assert len(lyrics) > scoring.HEAD_POSITIONS
        assert score.lyrics == pytest.approx(oracle.pmi(song, lyrics), abs=1e-4)
        expected = {n: oracle.recall(song, oracle.thought(yaml)) for n, yaml in facts.items()}
        assert score.metadata == pytest.approx(expected)
        assert 0 < sum(expected.values()) < 5
        reward = scoring.reward(score.caption, score.lyrics, score.metadata)
        assert score.reward == reward
    assert found[0] != found[1]


def test_what_the_plan_does_not_say_is_not_scored(tiny, host) -> None:
    lm, _ = tiny
    (score,) = scoring.score(lm, Codes(CODES.items[1:]), Plan("x", "", Metadata(), 9.0), host)
    assert (score.lyrics, score.metadata) == (None, {})
    assert score.reward == score.caption
    rewritten = Plan("x", "", Metadata(caption="y"), 9.0)
    assert scoring.score(lm, Codes(CODES.items[1:]), rewritten, host) != (score,)


@pytest.mark.parametrize("codes", [Codes(()), Codes(((1, 2), ()))])
def test_no_codes_are_refused(tiny, host, codes: Codes) -> None:
    with pytest.raises(InvalidRequest, match="no audio codes"):
        scoring.score(tiny[0], codes, PLAN, host)


def test_an_empty_plan_is_refused(tiny, host) -> None:
    with pytest.raises(InvalidRequest, match="says nothing"):
        scoring.score(tiny[0], CODES, Plan("", "", Metadata(), 9.0), host)


def test_lyrics_beyond_the_window_are_refused(tiny, host) -> None:
    with pytest.raises(InvalidRequest, match="Shorten the lyrics"):
        scoring.score(tiny[0], CODES, Plan("", "la " * 45_000, Metadata(), 9.0), host)


def test_not_a_number_is_an_error(scripted, host) -> None:
    lm = scripted(lambda row: torch.full((QWEN3.size,), float("nan")))
    with pytest.raises(NonFinite, match="fp32"):
        scoring.score(lm, CODES, PLAN, host)


def test_a_stop_is_obeyed_before_the_next_chunk(scripted, host_of, stop) -> None:
    for check, read in ((1, 0), (2, 1), (3, 1 + scoring.CHUNK)):
        lm, host = scripted(lambda row: torch.zeros(QWEN3.size)), host_of(stop_at=check)
        with pytest.raises(stop):
            scoring.score(lm, CODES, PLAN, host)
        assert lm.forwards <= read
        assert host.bars["Score 1/2"].closed


def test_progress_ends_at_the_whole(tiny, host) -> None:
    scoring.score(tiny[0], CODES, PLAN, host)
    for stage in ("Score 1/2", "Score 2/2"):
        seen = host.bars[stage].seen
        assert seen == sorted(seen)
        assert seen[-1] > 60


def test_the_memory_need_covers_what_is_opened(tiny, host) -> None:
    lm: Any = tiny[0]
    opened = []

    class Watched:
        device, logits, cache_bytes = lm.device, lm.logits, lm.cache_bytes

        def open(self, rows: int, capacity: int) -> Any:
            opened.append(lm.cache_bytes(rows, capacity))
            return lm.open(rows, capacity)

    watched: Any = Watched()
    scoring.score(watched, CODES, PLAN, host)
    assert len(opened) == 6
    assert scoring.score_memory(lm, CODES, PLAN) >= max(opened)


def test_too_little_memory_is_known_before_the_first_token(scripted, host_of) -> None:
    lm = scripted(lambda row: torch.zeros(QWEN3.size))
    with pytest.raises(OutOfMemory, match=r"Score 1/2: 5 x 47 tokens need 27 MiB .* 19 MiB are"):
        scoring.score(lm, CODES, PLAN, host_of(free=20_000_000))
    assert lm.forwards == 0


def test_a_song_scores_the_same_alone_and_in_a_batch(engine: Engine, tiny_model: ModelSpec) -> None:
    both = engine.score(tiny_model, CODES, PLAN)
    assert engine.score(tiny_model, Codes(CODES.items[1:]), PLAN) == both[1:]
    assert all(0 < score.reward < 1 for score in both)
