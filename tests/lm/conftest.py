"""A language model of chosen scores, a silent host, and the real tokenizer, for the LM tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from acestep_engine.backends.base import Choose, Rows, Step
from acestep_engine.lm.tokenizer import Tokenizer, load_tokenizer

Score = Callable[[list[int]], Tensor]  # tokens of a row so far -> scores of the whole vocabulary


class ScriptedSession:
    def __init__(self, lm: ScriptedLM, rows: int) -> None:
        self.lm, self.rows = lm, [[] for _ in range(rows)]

    def feed(self, ids: Sequence[Sequence[int]] | Tensor) -> Tensor:
        self.lm.forwards += 1
        fresh = ids.tolist() if isinstance(ids, Tensor) else ids
        for row, more in zip(self.rows, fresh, strict=True):
            row += more
        return torch.stack([self.lm.score(row) for row in self.rows])

    def read(self, ids_BL: Tensor) -> Tensor:
        return torch.stack([self.feed(column[:, None]) for column in ids_BL.unbind(1)], dim=1)

    def record(self, choose: Choose) -> Step:
        return lambda ids_B1, uniform_N1: choose(self.feed(ids_B1), uniform_N1)


class ScriptedLM:
    """Its hidden state is the whole vector of scores, so the head only selects."""

    device = torch.device("cpu")

    def __init__(self, score: Score) -> None:
        self.score = score
        self.forwards = 0
        self.sessions: list[ScriptedSession] = []
        self.asked: list[Rows] = []

    def open(self, rows: int, capacity: int) -> ScriptedSession:
        self.sessions.append(ScriptedSession(self, rows))
        return self.sessions[-1]

    def logits(self, hidden_BD: Tensor, rows: Rows) -> Tensor:
        self.asked.append(rows)
        return hidden_BD[:, rows].float()

    def cache_bytes(self, rows: int, capacity: int) -> int:
        return rows * capacity * 1000

    def rows_agree(self, rows: int, unit: int, head: slice) -> bool:
        return True


class Bar:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.closed = False

    def update(self, done: int) -> None:
        self.seen.append(done)

    def close(self) -> None:
        self.closed = True


class Stop(Exception):
    pass


class QuietHost:
    """Plenty of memory; raises Stop at interrupt check number `stop_at`."""

    def __init__(self, free: int = 1 << 40, stop_at: int = -1) -> None:
        self.free, self.stop_at, self.checks = free, stop_at, 0
        self.bars: dict[str, Bar] = {}

    def free_memory(self, device: torch.device) -> int:
        return self.free

    def progress(self, stage: str, total: int) -> Bar:
        self.bars[stage] = Bar()
        return self.bars[stage]

    def check_interrupt(self) -> None:
        self.checks += 1
        if self.checks == self.stop_at:
            raise Stop


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer()


@pytest.fixture
def scripted() -> type[ScriptedLM]:
    return ScriptedLM


@pytest.fixture
def host() -> QuietHost:
    return QuietHost()


@pytest.fixture
def host_of() -> type[QuietHost]:
    return QuietHost


@pytest.fixture
def stop() -> type[Stop]:
    return Stop
