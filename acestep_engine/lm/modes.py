"""Songs in words: written from an idea, rewritten from a draft, or described from audio codes.

Each mode is a `Question`: a prompt, and what is known of the answer beforehand. `answer` lets the
language model write metadata, then lyrics, and keeps what was known. Knows no backend, no files and
no device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..backends.base import LanguageModel
from ..errors import InvalidRequest
from ..host import Host
from ..types import (
    CODE_RATE,
    MAX_DURATION,
    MIN_DURATION,
    AnswerOptions,
    Codes,
    LMSampling,
    Request,
)
from .courses import SongCourse
from .decode import Task, TextCourse, decode
from .grammar import State, load_grammar
from .metadata import merge, normalise, parse, stated
from .prompts import Prompts
from .tokenizer import QWEN3, load_tokenizer

HEARING = AnswerOptions(sampling=LMSampling(temperature=0.3))  # a description wants no daring
BORDER_CODES = 2  # at either end a code of silence may differ: the VAE looks 9 frames around itself

# What may stand above lyrics: "# Lyric", "# Lyrics:" and, before it, a section of languages.
_HEADER = re.compile(
    r"\A(?:#+[ \t]*Languages?\b.*?\n(?=#))?#+[ \t]*Lyrics?[ \t]*:?[ \t]*(?:\n|\Z)",
    re.IGNORECASE | re.DOTALL,
)
_LATE_HEADER = re.compile(r"^#+[ \t]*Lyrics?[ \t]*:?[ \t]*$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Question:
    """What the language model is asked, and what its answer will say in any case.

    `known` is normalised. Where it is instrumental, no lyrics are written.
    """

    stage: str
    prompt: list[int]
    known: Request


def write(query: str, instrumental: bool, language: str | None) -> Question:
    """A whole song from a few words; without any, the model invents one."""
    known = normalise(Request(instrumental=instrumental, language=language))
    return Question("Write", Prompts(load_tokenizer()).inspire(query.strip(), instrumental), known)


def rewrite(request: Request) -> Question:
    """Caption and lyrics of `request` in the form the models know best; its values stand."""
    known = normalise(request)
    prompt = Prompts(load_tokenizer()).format(known.caption, known.lyrics)
    return Question("Rewrite", prompt, known)


def understand(codes: Codes) -> tuple[Question, ...]:
    """The song behind audio codes, one question each. How long it is, the codes say themselves."""
    if not codes.items:
        raise InvalidRequest("There are no audio codes to describe. Connect those of a song.")
    for song in codes.items:
        _check_audible(song)
    single, prompts = len(codes.items) == 1, Prompts(load_tokenizer())
    return tuple(
        Question(
            "Understand" if single else f"Understand {item}/{len(codes.items)}",
            prompts.understand(song),
            normalise(Request(duration=len(song) / CODE_RATE)),
        )
        for item, song in enumerate(codes.items, 1)
    )


def answer(lm: LanguageModel, question: Question, options: AnswerOptions, host: Host) -> Request:
    """What the language model answers, as a valid request; what was known stands."""
    prompt, state, course = _begin(lm, question, options)
    decode(lm, Task(question.stage, (prompt,), options.sampling), course, host)
    known, text = question.known, load_tokenizer().decode
    found = merge(known, parse(text(state.written)))
    lyrics = lyrics_of(text(course.lyrics)) if isinstance(course, SongCourse) else ""
    answered = replace(
        known,
        caption=found.caption or known.caption,
        lyrics=lyrics or known.lyrics,
        duration=known.duration or found.duration,
        bpm=found.bpm,
        keyscale=found.keyscale,
        timesignature=found.timesignature,
        language=found.language,
    )
    return normalise(answered)


def answer_memory(lm: LanguageModel, question: Question, options: AnswerOptions) -> int:
    """Bytes that `answer` takes beside the weights."""
    prompt, _, course = _begin(lm, question, options)
    return lm.cache_bytes(1, len(prompt) + course.limit)


def lyrics_of(text: str) -> str:
    """The lyrics of an answer, or of what follows its `<think>` block; empty where it has none.

    A block that was never closed ends at a header of lyrics.
    """
    thought, closed, rest = text.partition("</think>")
    if not closed:
        header = _LATE_HEADER.search(thought)
        unclosed = thought.lstrip().startswith("<think>")
        rest = thought[header.start() if header else len(thought) :] if unclosed else thought
    written = rest.partition("<|im_end|>")[0].strip()
    return _HEADER.sub("", written).strip()


def _check_audible(song: Sequence[int]) -> None:
    seconds = len(song) / CODE_RATE
    if not MIN_DURATION <= seconds <= MAX_DURATION:
        raise InvalidRequest(
            f"There are {len(song)} audio codes, which is {seconds:g} seconds of sound; a song "
            f"lasts {MIN_DURATION:g} to {MAX_DURATION:g}. Connect codes or sound of such a length."
        )
    inner = song[BORDER_CODES:-BORDER_CODES]
    if len(inner) > 1 and len(set(inner)) == 1:
        raise InvalidRequest(
            f"All audio codes are the same ({inner[0]}): this is silence or a steady hum, and "
            "there is nothing to describe. Check that the sound that was encoded can be heard."
        )


def _begin(
    lm: LanguageModel, question: Question, options: AnswerOptions
) -> tuple[list[int], State, TextCourse | SongCourse]:
    grammar, device = load_grammar(), torch.device(lm.device)
    state = grammar.start(stated(question.known))
    prompt = question.prompt + state.take()
    if question.known.instrumental:
        return prompt, state, TextCourse(grammar, state, QWEN3, device)
    bridge = [QWEN3.think_close, *load_tokenizer().encode("\n\n")]
    return prompt, state, SongCourse(grammar, state, QWEN3, bridge, options.max_tokens, device)
