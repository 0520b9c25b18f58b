"""The course of a song in words: a `<think>` block by the grammar, then lyrics as free text.

It knows which tokens are text and which one ends the answer; it knows no prompt, no wording of the
lyrics and no backend. Dimension key: N songs (one here) · V candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .decode import Candidates, Feed, TextCourse
from .grammar import Grammar, State
from .tokenizer import Vocabulary


class SongCourse:
    """Metadata from where `state` is, then `bridge`, then any text up to the end token.

    The metadata is always completed; the lyrics stop where the answer has `max_tokens` tokens. No
    control token and no audio code, valid or not, is ever a candidate.
    """

    def __init__(
        self,
        grammar: Grammar,
        state: State,
        vocabulary: Vocabulary,
        bridge: list[int],
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self.vocabulary = vocabulary
        self._thought, self._state = TextCourse(grammar, state, vocabulary, device), state
        self._bridge, self._max_tokens = bridge, max_tokens
        self.limit = max(max_tokens, self._thought.limit + len(bridge))
        text, end_1 = slice(0, vocabulary.text), torch.tensor([vocabulary.end], device=device)
        ids_V = torch.cat((torch.arange(vocabulary.text, device=device), end_1))
        self._words = Candidates(ids_V, (text, end_1))
        self._drawn: list[Tensor] = []
        self._lyrics: list[int] = []  # read back from the device so far
        self._over = False

    @property
    def greedy(self) -> bool:
        return not self._state.done and self._thought.greedy

    def candidates(self) -> Candidates:
        return self._words if self._state.done else self._thought.candidates()

    def accept(self, id_N: Tensor, rows: int) -> Feed | None:
        if self._state.done:
            self._drawn.append(id_N)
            return id_N.expand(rows, 1) if self._room() else None
        feed = self._thought.accept(id_N, rows)
        if feed is None and self._room():
            feed = [self._state.take() + self._bridge] * rows
        return feed

    def settle(self) -> tuple[int, bool]:
        fresh = self._drawn[len(self._lyrics) :]
        if fresh and not self._over:
            for token in torch.cat(fresh).tolist():
                if token == self.vocabulary.end:
                    self._over = True
                    break
                self._lyrics.append(token)
        return len(self._state.written) + len(self._lyrics), self._over

    @property
    def lyrics(self) -> tuple[int, ...]:
        """Text tokens after the `<think>` block, without the end token."""
        return tuple(self._lyrics)

    def _room(self) -> int:
        """How many more tokens of lyrics may come."""
        used = len(self._state.written) + len(self._bridge) + len(self._drawn)
        return max(0, self._max_tokens - used)
