"""Every prompt of the language model, as token ids: both directions, both layouts.

The chat frame is Qwen3's, written by hand. Text is encoded between the control tokens, which stand
only here, so what a user writes is never more than text. Knows no model and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidRequest
from ..types import Metadata, PromptLayout
from .metadata import INSTRUMENTAL, dump
from .tokenizer import QWEN3, Tokenizer, Vocabulary

GENERATE = "Generate audio semantic tokens based on the given conditions:"
UNDERSTAND = "Understand the given musical conditions and describe the audio semantics accordingly:"
INSPIRE = "Expand the user's input into a more detailed and specific musical description:"
FORMAT = "Format the user's input into a more detailed and specific musical description:"
NO_INPUT = "NO USER INPUT"


@dataclass(frozen=True)
class Prompts:
    """Prompt builders over one tokenizer and its control tokens."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary = QWEN3

    def plan(self, caption: str, lyrics: str) -> list[int]:
        """Asks for a `<think>` block."""
        return self._chat(GENERATE, _song(caption, lyrics))

    def codes(
        self, caption: str, lyrics: str, metadata: Metadata, layout: PromptLayout = "aligned"
    ) -> list[int]:
        """Asks for audio codes under `metadata`. `caption` is the user's, not the rewritten one."""
        return self.plan(caption, lyrics) + self._think(dump(metadata), layout)

    def unconditional(
        self, caption: str, lyrics: str, negative: str, layout: PromptLayout = "aligned"
    ) -> list[int]:
        """The other branch of CFG in the codes phase: an empty thought, and in the aligned layout
        neither caption nor lyrics but the negative prompt."""
        meant = negative.strip() not in ("", NO_INPUT)
        if layout == "legacy":
            user = _song(negative if meant else caption, lyrics)
        else:
            user = negative if meant else NO_INPUT
        return self._chat(GENERATE, user) + self._think("", layout)

    def understand(self, codes: Sequence[int]) -> list[int]:
        """Asks what song the codes are; without codes, to invent one."""
        top = self.vocabulary.codes
        wrong = next((code for code in codes if not 0 <= code < top), None)
        if wrong is not None:
            raise InvalidRequest(
                f"Audio code {wrong} does not exist: codes are 0 to {top - 1}. "
                "Use codes made by the same family of models."
            )
        heard = [self.vocabulary.first_code + code for code in codes]
        return self._chat(UNDERSTAND, "" if heard else NO_INPUT, heard)

    def inspire(self, query: str, instrumental: bool) -> list[int]:
        """Asks for a whole song from a few words."""
        line = f"instrumental: {'true' if instrumental else 'false'}"
        return self._chat(INSPIRE, f"{query or NO_INPUT}\n\n{line}")

    def format(self, caption: str, lyrics: str) -> list[int]:
        """Asks to rewrite caption and lyrics."""
        user = _song(caption or NO_INPUT, lyrics or INSTRUMENTAL).removesuffix("\n")
        return self._chat(FORMAT, user)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def _chat(self, instruction: str, user: str, heard: Sequence[int] = ()) -> list[int]:
        start, end = self.vocabulary.start, self.vocabulary.end
        newline = self._encode("\n")
        system = self._encode(f"system\n# Instruction\n{instruction}\n\n")
        return [
            *(start, *system, end, *newline),
            *(start, *self._encode(f"user\n{user}"), *heard, end, *newline),
            *(start, *self._encode("assistant\n")),
        ]

    def _think(self, yaml: str, layout: PromptLayout) -> list[int]:
        opened, closed = self.vocabulary.think_open, self.vocabulary.think_close
        inside = self._encode(f"\n{yaml}\n")
        ids = [opened, *inside, closed, *self._encode("\n\n")]
        if layout == "legacy":
            ids += [self.vocabulary.end, *self._encode("\n")]
        return ids


def _song(caption: str, lyrics: str) -> str:
    return f"# Caption\n{caption}\n\n# Lyric\n{lyrics}\n"
