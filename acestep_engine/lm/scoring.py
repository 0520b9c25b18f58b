"""How well audio codes carry a plan, by the language model's own ear.

The model that can describe codes is made to read a given description: what it expected scores high.
Nothing is drawn. Metadata is scored by rank; caption and lyrics by how much likelier they become
when the codes are heard (pointwise mutual information). Knows no backend, no files and no device.
Dimension key: B rows · L tokens · D width · P positions · V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from ..backends.base import LanguageModel
from ..errors import InvalidRequest, NonFinite
from ..host import Host
from ..types import Codes, Metadata, Plan, Score
from .metadata import FIELDS, dump
from .prompts import Prompts
from .room import MAX_POSITIONS, Room
from .tokenizer import QWEN3, load_tokenizer

TOP = 10  # ranks that count in a recall
SHARPNESS = 0.1  # nats a token that lift a score from 0.5 to 0.73
CAPTION_WEIGHT, LYRICS_WEIGHT, METADATA_WEIGHT = 0.5, 0.3, 0.2
HEAD_POSITIONS = 32  # positions held against the whole vocabulary at once: 28 MB in float32
CHUNK = 32  # tokens read at once, between two looks at the stop request


@dataclass(frozen=True, slots=True)
class Reading:
    """Texts read side by side, each behind its prompt."""

    prompts: tuple[list[int], ...]
    texts: tuple[list[int], ...]

    @property
    def length(self) -> int:
        return max(map(len, self.texts))

    @property
    def capacity(self) -> int:
        return max(map(len, self.prompts)) + self.length


@dataclass(frozen=True, slots=True)
class Judgement:
    """How the tokens of one text were expected: mean log-probability, and the rank of each."""

    likelihood: float
    ranks: list[int]


@torch.inference_mode()
def score(lm: LanguageModel, codes: Codes, plan: Plan, host: Host) -> tuple[Score, ...]:
    """One score for each song of `codes`, against the metadata, caption and lyrics of `plan`."""
    scores = []
    for item, readings in enumerate(_readings(codes, plan), 1):
        stage = "Score" if len(codes.items) == 1 else f"Score {item}/{len(codes.items)}"
        with _room(lm, readings.values(), stage).taken(host):
            judged = _judge_all(lm, readings, host, stage)
        gains = {
            name: sigmoid(heard.likelihood - unheard.likelihood)
            for name in ("caption", "lyrics")
            if name in judged
            for heard, unheard in [judged[name]]
        }
        facts = [name for name in FIELDS if _fact(plan.metadata, name)]
        recalls = [recall(judgement.ranks) for judgement in judged.get("metadata", ())]
        metadata = dict(zip(facts, recalls, strict=True))
        caption, lyrics = gains.get("caption"), gains.get("lyrics")
        scores.append(Score(reward(caption, lyrics, metadata), caption, lyrics, metadata))
    return tuple(scores)


def score_memory(lm: LanguageModel, codes: Codes, plan: Plan) -> int:
    """Bytes that `score` takes beside the weights; its readings come one after the other."""
    every = [reading for readings in _readings(codes, plan) for reading in readings.values()]
    return _room(lm, every, "Score").nbytes


def recall(ranks: Sequence[int]) -> float:
    """0..1: rank 1 counts in full, each rank behind it a TOPth less."""
    return fmean(max(0.0, 1 - (rank - 1) / TOP) for rank in ranks)


def sigmoid(gain: float) -> float:
    """A gain in nats a token as a score: 0.5 where hearing the codes makes no difference."""
    return 0.5 * (1 + math.tanh(gain / SHARPNESS / 2))


def reward(caption: float | None, lyrics: float | None, metadata: Mapping[str, float]) -> float:
    """All parts as one number, 0..1; the weights of absent parts go to the others."""
    facts = fmean(metadata.values()) if metadata else None
    parts = [(caption, CAPTION_WEIGHT), (lyrics, LYRICS_WEIGHT), (facts, METADATA_WEIGHT)]
    present = [(value, weight) for value, weight in parts if value is not None]
    return sum(value * weight for value, weight in present) / sum(weight for _, weight in present)


def _room(lm: LanguageModel, readings: Iterable[Reading], stage: str) -> Room:
    """What the largest of `readings` takes; they come one after the other."""
    sizes = [(len(each.texts), each.capacity) for each in readings]
    longest = max(capacity for _, capacity in sizes)
    if longest > MAX_POSITIONS:
        raise InvalidRequest(
            f"{stage}: codes and words take {longest} tokens, but the language model reads "
            f"{MAX_POSITIONS} at most. Shorten the lyrics."
        )
    rows, capacity = max(sizes, key=lambda size: lm.cache_bytes(*size))
    head = 4 * HEAD_POSITIONS * QWEN3.size
    return Room(stage, lm, rows, capacity, "Score a shorter song, or fewer words.", head)


def _readings(codes: Codes, plan: Plan) -> list[dict[str, Reading]]:
    """What is to be read of each song: "metadata" without, the others with and without codes."""
    if not codes.items or not all(codes.items):
        raise InvalidRequest("There are no audio codes to score. Connect those of a song.")
    prompts, encode = Prompts(load_tokenizer()), load_tokenizer().encode
    facts = [text for name in FIELDS if (text := _fact(plan.metadata, name))]
    words = {}
    if plan.dit_caption.strip():
        words["caption"] = _thought(dump(Metadata(caption=plan.dit_caption)))
    if plan.lyrics.strip():
        lyrics = encode(f"\n# Lyric\n{plan.lyrics}\n")
        words["lyrics"] = [QWEN3.think_open, *encode("\n"), QWEN3.think_close, *lyrics]
    if not facts and not words:
        raise InvalidRequest("The plan says nothing that codes could be scored against.")
    unheard = prompts.understand(())
    songs = []
    for song in codes.items:
        heard = prompts.understand(song)
        texts = tuple(map(_thought, facts))
        readings = {"metadata": Reading((heard,) * len(texts), texts)} if texts else {}
        for name, text in words.items():
            readings[name] = Reading((heard, unheard), (text, text))
        songs.append(readings)
    return songs


def _fact(metadata: Metadata, name: str) -> str:
    """One field as the `<think>` block states it; empty where it is not stated, or the caption."""
    value = getattr(metadata, name)
    return "" if name == "caption" or value is None else dump(Metadata(**{name: value}))


def _thought(yaml: str) -> list[int]:
    encode = load_tokenizer().encode
    return [QWEN3.think_open, *encode(f"\n{yaml}\n"), QWEN3.think_close, *encode("\n")]


def _judge_all(
    lm: LanguageModel, readings: Mapping[str, Reading], host: Host, stage: str
) -> dict[str, list[Judgement]]:
    """The judgements of each reading, row by row; stops where the user asks."""
    done = 0
    bar = host.progress(stage, sum(reading.length for reading in readings.values()))

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        bar.update(done)
        host.check_interrupt()

    try:
        return {name: _read(lm, reading, advance) for name, reading in readings.items()}
    finally:
        bar.close()


def _read(lm: LanguageModel, reading: Reading, advance: Callable[[int], None]) -> list[Judgement]:
    """Feed all texts in step, then hold what was expected at each place against what stands there.

    A text that is over repeats its last token until the longest is through.
    """
    width = reading.length
    rows = [text + text[-1:] * (width - len(text)) for text in reading.texts]
    ids_BL = torch.tensor(rows, device=torch.device(lm.device))
    session = lm.open(len(rows), reading.capacity)
    advance(0)
    states = [session.feed(reading.prompts)[:, None]]
    advance(1)
    for chunk_BL in ids_BL[:, :-1].split(CHUNK, dim=1):
        states.append(session.read(chunk_BL))
        advance(chunk_BL.shape[1])
    states_BLD = torch.cat(states, dim=1)
    return [
        _judge(lm, states_BLD[row, : len(text)], ids_BL[row, : len(text)])
        for row, text in enumerate(reading.texts)
    ]


def _judge(lm: LanguageModel, states_PD: Tensor, ids_P: Tensor) -> Judgement:
    """What the states expected, held against the tokens that followed them."""
    likelihoods, ranks = [], []
    for states, ids in zip(
        states_PD.split(HEAD_POSITIONS), ids_P.split(HEAD_POSITIONS), strict=True
    ):
        logits_PV = lm.logits(states, slice(0, QWEN3.size))
        right_P1 = logits_PV.gather(-1, ids[:, None])
        likelihoods.append((right_P1 - logits_PV.logsumexp(-1, keepdim=True)).squeeze(-1))
        ranks.append((logits_PV > right_P1).sum(-1) + 1)
    likelihood = torch.cat(likelihoods).double().mean().item()
    if not math.isfinite(likelihood):
        raise NonFinite(
            "Score: the language model gave NaN or infinite scores. Try precision fp32 or bf16, or "
            "another file."
        )
    return Judgement(likelihood, torch.cat(ranks).tolist())
