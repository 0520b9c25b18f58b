"""Constrained writing of the `<think>` block: which tokens may come next, and which must.

A `Grammar` is compiled once and never changes; each sequence has its own small `State`. Values that
the user gave, and everything else without a choice, are forced: they collect in `state.pending`, to
be fed in one go. numpy only: knows no model, no logits and no device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .metadata import (
    FIELDS,
    KEYS,
    LANGUAGES,
    MAX_BPM,
    MIN_BPM,
    MIN_WRITTEN_DURATION,
    TIMESIGNATURES,
    dump,
)
from .tokenizer import QWEN3, Tokenizer, Vocabulary, load_tokenizer

if TYPE_CHECKING:
    from ..types import Metadata

CAPTION_TOKENS = 512
FRAME_TOKENS = 64  # more than all names, tags and generated values take together

Ids = NDArray[np.int64]


@dataclass(slots=True)
class Node:
    """A place in a tree of lines; `ids` are the tokens that go on from here, none at its end."""

    branches: dict[int, Node] = field(default_factory=dict)
    ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(slots=True)
class State:
    """One sequence: where it is, and what has yet to be fed to the model."""

    fields: list[str]  # still to come
    lines: dict[str, list[int]]  # forced lines of the values that the user gave
    node: Node | None = None  # inside a value; None inside a caption
    greedy: bool = False  # whether the next token is the likeliest one, not a drawn one
    caption: int = 0  # caption tokens so far
    fresh: bool = False  # whether the caption's current line has no token yet
    written: list[int] = field(default_factory=list)  # everything after the prompt
    pending: list[int] = field(default_factory=list)  # the end of `written`, not fed yet
    done: bool = False

    def take(self) -> list[int]:
        """The tokens to feed now; they count as fed."""
        ids, self.pending = self.pending, []
        return ids


class Grammar:
    """The `<think>` block of a song of at most `max_duration` seconds."""

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: Vocabulary = QWEN3, max_duration: int = 600
    ) -> None:
        self._encode = tokenizer.encode
        self._head = [vocabulary.think_open, *self._encode("\n")]
        self._newline = self._encode("\n")
        self._names = {name: self._encode(f"{name}:") for name in FIELDS}
        self._trees = {
            "bpm": self._tree("bpm", map(str, range(MIN_BPM, MAX_BPM + 1))),
            "duration": self._tree(
                "duration", map(str, range(MIN_WRITTEN_DURATION, max_duration + 1))
            ),
            "keyscale": self._tree("keyscale", KEYS),
            # YAML quotes Norwegian ('no'), and so did the training data; the bare word is read too.
            "language": self._tree("language", (*LANGUAGES, "'no'")),
            "timesignature": self._tree("timesignature", TIMESIGNATURES),
        }
        self._compile_caption(tokenizer)

    def start(self, fixed: Metadata, fields: Collection[str] = FIELDS) -> State:
        """A new sequence that writes `fields` and the fields of `fixed`, those word for word."""
        lines = {}
        for name in FIELDS:
            text = dump(replace(fixed, **{other: None for other in FIELDS if other != name}))
            if text:
                lines[name] = self._encode(text + "\n")
        state = State([name for name in FIELDS if name in fields or name in lines], lines)
        self._force(state, self._head)
        self._next_field(state)
        return state

    def budget(self, state: State) -> int:
        """The most tokens that a sequence just started can have in all."""
        return CAPTION_TOKENS + FRAME_TOKENS + sum(map(len, state.lines.values()))

    def allowed(self, state: State) -> Ids:
        """The ids that may come next, in ascending order; the same array for the same place."""
        if state.node is not None:
            return state.node.ids
        return self.opening_ids if state.caption == 0 else self.caption_ids

    def advance(self, state: State, token: int) -> None:
        """Take a token drawn from the allowed ones, and force what follows from it.

        A caption ends where a new line is not indented: that token is dropped for the next field.
        """
        if state.node is not None:
            self._force(state, [token])
            self._follow(state, state.node.branches[token])
            return
        if state.fresh and not self._indented[token]:
            self._next_field(state)
            return
        self._force(state, [token])
        state.caption += 1
        state.fresh = bool(self._breaks[token])
        if state.caption == CAPTION_TOKENS:
            if not state.fresh:
                self._force(state, self._newline)
            self._next_field(state)

    def _next_field(self, state: State) -> None:
        """Force everything up to the next choice."""
        state.node, state.greedy = None, False
        while state.fields:
            name = state.fields.pop(0)
            if name in state.lines:
                self._force(state, state.lines[name])
                continue
            self._force(state, self._names[name])
            if name == "caption":
                state.caption, state.fresh = 0, False
            else:
                self._follow(state, self._trees[name])
            return
        state.done = True

    def _follow(self, state: State, node: Node) -> None:
        """Go down from `node` as long as there is one way only; at the line's end, go on."""
        while len(node.ids) == 1:
            self._force(state, node.ids.tolist())
            node = node.branches[int(node.ids[0])]
        if len(node.ids) == 0:
            self._next_field(state)
            return
        state.greedy = node is self._trees["language"]
        state.node = node

    def _force(self, state: State, tokens: list[int]) -> None:
        state.written += tokens
        state.pending += tokens

    def _tree(self, name: str, values: Iterable[str]) -> Node:
        """The lines `name: value` as they are tokenised, from the value to the line break."""
        root = Node()
        skip = len(self._names[name])
        for value in values:
            node = root
            for token in self._encode(f"{name}: {value}\n")[skip:]:
                node = node.branches.setdefault(token, Node())
        _number(root)
        return root

    def _compile_caption(self, tokenizer: Tokenizer) -> None:
        """Sort all text tokens by what they may do in a caption.

        Banned are backticks, control characters, and more than one line break: all would break the
        block. A caption opens with a space and a word, for it follows the colon.
        """
        pieces = [tokenizer.piece(token) for token in range(len(tokenizer))]
        lines = [piece.count(b"\n") for piece in pieces]
        usable = np.array(
            [
                count < 2 and b"`" not in piece and piece.translate(None, _CONTROLS) == piece
                for piece, count in zip(pieces, lines, strict=True)
            ]
        )
        opening = np.array(
            [
                count == 0 and piece[:1] == b" " and piece.strip() != b""
                for piece, count in zip(pieces, lines, strict=True)
            ]
        )
        self._breaks = np.array(lines) > 0
        self._indented = np.array([piece[:1] == b" " for piece in pieces]) & ~self._breaks
        self.caption_ids: Ids = np.flatnonzero(usable)
        self.opening_ids: Ids = np.flatnonzero(usable & opening)


@cache
def load_grammar() -> Grammar:
    """The grammar of the real vocabulary and the longest song, compiled once per process."""
    return Grammar(load_tokenizer())


_CONTROLS = bytes(byte for byte in (*range(32), 127) if byte != 10)


def _number(node: Node) -> None:
    node.ids = np.array(sorted(node.branches), np.int64)
    for branch in node.branches.values():
        _number(branch)
