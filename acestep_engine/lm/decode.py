"""The one decode loop: feed, score the candidates, draw, until the course is over.

A `Course` says what may come next and what is fed after each draw: `TextCourse` writes a `<think>`
block by the grammar, `CodesCourse` draws audio codes without waiting for the device. Knows no
prompt wording and no backend. Dimension key: B rows (conditional, unconditional) · D width ·
V candidates.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..backends.base import LanguageModel, Rows
from ..errors import InvalidRequest, NonFinite
from ..host import Host
from ..types import LMSampling
from . import sampling as draws
from .grammar import Grammar, State
from .room import MAX_POSITIONS, Room
from .tokenizer import Vocabulary

CHECK_SECONDS = 0.2  # longest time between looks at the device
GATHER = 4_096  # more candidates than this are cut from a product with the whole text vocabulary

Feed = Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """Token ids that may come next, and the head rows that score them in the same order."""

    ids_V: Tensor
    rows: tuple[Rows, ...]
    columns_V: Tensor | None = None  # which of the rows to keep; None keeps all

    def scores(self, lm: LanguageModel, hidden_BD: Tensor) -> Tensor:
        parts = [lm.logits(hidden_BD, rows) for rows in self.rows]
        logits_BV = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return logits_BV if self.columns_V is None else logits_BV[:, self.columns_V]


class Course(Protocol):
    """What may come next, step by step."""

    vocabulary: Vocabulary
    limit: int  # most tokens that will be fed or drawn

    @property
    def greedy(self) -> bool:
        """Whether this step takes the likeliest candidate."""
        ...

    def candidates(self) -> Candidates: ...

    def accept(self, id_N: Tensor, rows: int) -> Feed | None:
        """Take the drawn id of each song, (N,); what to feed the `rows` rows, None at the end."""
        ...

    def settle(self) -> tuple[int, bool]:
        """How many tokens a song has, and whether all is over; may wait for the device."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """One generation: its name for messages, a prompt for each row, and how tokens are drawn.

    `seeds`: one per song, for several songs in step; else the seed of `sampling` makes one song.
    The first rows are the conditional ones of the songs, the others their unconditional ones.
    """

    stage: str
    prompts: tuple[list[int], ...]
    sampling: LMSampling
    seeds: tuple[int, ...] = ()


class TextCourse:
    """A `<think>` block, drawn by `grammar` from where `state` is."""

    def __init__(
        self, grammar: Grammar, state: State, vocabulary: Vocabulary, device: torch.device
    ) -> None:
        self._grammar, self._state = grammar, state
        self.vocabulary = vocabulary
        self._device = device
        self._known: dict[int, Candidates] = {}
        self.limit = grammar.budget(state)

    @property
    def greedy(self) -> bool:
        return self._state.greedy

    def candidates(self) -> Candidates:
        ids = self._grammar.allowed(self._state)
        known = self._known.get(id(ids))  # the grammar keeps its arrays, so the key is stable
        if known is None:
            ids_V = torch.as_tensor(ids, device=self._device)
            wide = len(ids) > GATHER
            known = (
                Candidates(ids_V, (slice(0, self.vocabulary.text),), ids_V)
                if wide
                else Candidates(ids_V, (ids_V,))
            )
            self._known[id(ids)] = known
        return known

    def accept(self, id_N: Tensor, rows: int) -> Feed | None:
        self._grammar.advance(self._state, int(id_N))
        return None if self._state.done else [self._state.take()] * rows

    def settle(self) -> tuple[int, bool]:
        return len(self._state.written), self._state.done


class CodesCourse:
    """`minimum` to `maximum` audio codes; the end token is a candidate in between only."""

    greedy = False

    def __init__(
        self, vocabulary: Vocabulary, minimum: int, maximum: int, device: torch.device
    ) -> None:
        self.vocabulary = vocabulary
        self._minimum, self.limit = minimum, maximum
        codes = vocabulary.code_ids
        ids_V = torch.arange(codes.start, codes.stop, device=device)
        end_1 = torch.tensor([vocabulary.end], device=device)
        self._going = Candidates(ids_V, (codes,))
        self._ending = Candidates(torch.cat((ids_V, end_1)), (codes, end_1))
        self._drawn: list[Tensor] = []  # of each step, (N,)
        self._songs: list[list[int]] = []  # read back from the device so far
        self._over: list[bool] = []
        self._read = 0  # steps read back

    def candidates(self) -> Candidates:
        return self._going if len(self._drawn) < self._minimum else self._ending

    def accept(self, id_N: Tensor, rows: int) -> Feed | None:
        self._drawn.append(id_N)
        if len(self._drawn) == self.limit:
            return None
        return id_N.repeat(rows // len(id_N))[:, None]

    def settle(self) -> tuple[int, bool]:
        fresh = self._drawn[self._read :]
        if fresh:
            self._read = len(self._drawn)
            columns = torch.stack(fresh, dim=1).tolist()
            self._songs = self._songs or [[] for _ in columns]
            self._over = self._over or [False] * len(columns)
            for song, tokens in enumerate(columns):
                self._append(song, tokens)
        return max(map(len, self._songs), default=0), bool(self._over) and all(self._over)

    def _append(self, song: int, tokens: list[int]) -> None:
        for token in tokens:
            self._over[song] |= token == self.vocabulary.end
            if self._over[song]:
                return
            self._songs[song].append(token - self.vocabulary.first_code)

    @property
    def songs(self) -> tuple[tuple[int, ...], ...]:
        """The codes of each song."""
        return tuple(tuple(song) for song in self._songs)


@torch.inference_mode()
def decode(lm: LanguageModel, task: Task, course: Course, host: Host) -> None:
    """Run `course` to its end, all songs of `task` in step."""
    with _room(lm, task, course).taken(host):
        bar = host.progress(task.stage, course.limit)
        try:
            for done in _steps(lm, task, course, host):
                bar.update(done)
            bar.update(course.limit)
        finally:
            bar.close()


def _steps(lm: LanguageModel, task: Task, course: Course, host: Host) -> Iterator[int]:
    """The loop. Asks for an interrupt at each token; yields the number of tokens now and then.

    Progress and non-finite scores are looked at every CHECK_SECONDS only, because each look waits
    for the device.
    """
    device = torch.device(lm.device)
    seeds = task.seeds or (task.sampling.seed,)
    columns = [draws.uniforms(seed, course.limit, device) for seed in seeds]
    seen_NV = torch.zeros(len(seeds), course.vocabulary.size, dtype=torch.bool, device=device)
    clean = torch.ones((), dtype=torch.bool, device=device)
    looked = time.monotonic()
    host.check_interrupt()
    session = lm.open(len(task.prompts), _capacity(task, course))
    feed: Feed | None = task.prompts
    candidates, step = None, None
    for uniform_N in torch.stack(columns, dim=1):
        same = (following := course.candidates()) is candidates
        candidates = following
        sampling = replace(task.sampling, temperature=0.0) if course.greedy else task.sampling
        chooser = _Chooser(lm, candidates, sampling, seen_NV, clean)
        if same and isinstance(feed, Tensor):
            step = step or session.record(chooser)
            id_N = step(feed, uniform_N[:, None])
        else:
            step = None
            id_N = chooser(session.feed(feed), uniform_N[:, None])
        seen_NV.scatter_(1, id_N[:, None], True)
        feed = course.accept(id_N, len(task.prompts))
        host.check_interrupt()
        if feed is None or time.monotonic() - looked > CHECK_SECONDS:
            done, over = course.settle()
            if not clean:
                raise NonFinite(
                    f"{task.stage}: the language model gave NaN or infinite scores within the "
                    f"first {done} tokens. Try precision fp32 or bf16, or another file."
                )
            yield done
            if over or feed is None:
                return
            looked = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Chooser:
    """From states to the id of each song; remembers whether all scores were finite.

    A backend may record it, so it does the same with the same tensors however often it is run.
    """

    lm: LanguageModel
    candidates: Candidates
    sampling: LMSampling
    seen_NV: Tensor
    clean: Tensor

    def __call__(self, hidden_BD: Tensor, uniform_N1: Tensor) -> Tensor:
        logits_BV = self.candidates.scores(self.lm, hidden_BD)
        self.clean.logical_and_(logits_BV.isfinite().all())
        logits_NV = _guided(logits_BV, len(self.seen_NV), self.sampling)
        if (penalty := self.sampling.repetition_penalty) != 1:
            drawn_NV = self.seen_NV[:, self.candidates.ids_V]
            logits_NV = draws.penalise(logits_NV, drawn_NV, penalty)
        return self.candidates.ids_V[draws.draw(logits_NV, uniform_N1, self.sampling)]


def _guided(logits_BV: Tensor, songs: int, sampling: LMSampling) -> Tensor:
    """Scores of each song, (N, V): the conditional ones, guided where there are others."""
    if len(logits_BV) == songs:
        return logits_BV
    return draws.guide(logits_BV[:songs], logits_BV[songs:], sampling.cfg_scale)


def _capacity(task: Task, course: Course) -> int:
    return max(map(len, task.prompts)) + course.limit


def _room(lm: LanguageModel, task: Task, course: Course) -> Room:
    """The length is known before the first token, so what cannot fit is said at once."""
    capacity = _capacity(task, course)
    if capacity > MAX_POSITIONS:
        raise InvalidRequest(
            f"{task.stage}: the prompt has {capacity - course.limit} tokens and up to "
            f"{course.limit} follow, but the language model reads {MAX_POSITIONS} at most. "
            "Shorten the lyrics or the caption."
        )
    cure = "Ask for a shorter song, or set cfg_scale to 1 (halves the need)."
    return Room(task.stage, lm, len(task.prompts), capacity, cure)
