"""From a request to a plan, and from a plan to audio codes: the language model's two tasks.

Knows the order of things and who decides on what; knows no backend, no files and no device.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch

from ..backends.base import LanguageModel
from ..errors import InvalidRequest
from ..host import Host
from ..types import (
    CODE_RATE,
    DEFAULT_DURATION,
    MAX_DURATION,
    MAX_SEED,
    MIN_DURATION,
    Codes,
    ComposeOptions,
    Metadata,
    Plan,
    PlanOptions,
    Request,
)
from .decode import CodesCourse, Task, TextCourse, decode
from .grammar import State, load_grammar
from .metadata import FIELDS, merge, normalise, parse, stated
from .prompts import Prompts
from .tokenizer import QWEN3, load_tokenizer


def codes_for(seconds: float) -> int:
    """How many codes make up `seconds` of audio, rounding down."""
    return int(seconds * CODE_RATE)


def needs_lm(request: Request, options: PlanOptions) -> bool:
    """Whether a plan for a normalised request has gaps that a language model is to fill."""
    given = (request.bpm, request.duration, request.keyscale, request.timesignature)
    return options.think and None in given


def plan(lm: LanguageModel | None, request: Request, options: PlanOptions, host: Host) -> Plan:
    """Fill what `request` leaves open: by the language model if there is one and it may think.

    It is not asked where the user gave bpm, keyscale, timesignature and duration; such a plan keeps
    the user's caption. What the user gave stands in every case.
    """
    request = normalise(request)
    metadata = stated(request)
    thought = False
    if lm is not None and needs_lm(request, options):
        metadata = merge(request, _think(lm, request, options, host))
        thought = True
    duration = request.duration or float(metadata.duration or DEFAULT_DURATION)
    return Plan(
        caption=request.caption,
        lyrics=request.lyrics,
        metadata=replace(metadata, duration=math.ceil(duration)),
        duration=duration,
        seed=options.sampling.seed,
        thought=thought,
    )


def compose(lm: LanguageModel, plan: Plan, options: ComposeOptions, host: Host) -> Codes:
    """Audio codes for `plan`: `options.batch` songs, each from its own seed.

    Each has exactly the codes of the plan's whole seconds. They are decoded in step where the
    device gives a row the same numbers whatever its company, and there is memory for all of them;
    else one after the other. A song is the same either way.
    """
    if not MIN_DURATION <= plan.duration <= MAX_DURATION:
        raise InvalidRequest(
            f"The plan lasts {plan.duration} seconds, but a song lasts {MIN_DURATION:g} to "
            f"{MAX_DURATION:g} seconds. Change the duration of the plan."
        )
    count = codes_for(plan.whole_seconds)
    prompts = _code_prompts(plan, options)
    seeds = [(options.sampling.seed + item) % (MAX_SEED + 1) for item in range(options.batch)]
    at_once = _songs_at_once(lm, plan, options, host)
    songs: list[tuple[int, ...]] = []
    for first in range(0, len(seeds), at_once):
        group = tuple(seeds[first : first + at_once])
        stage = "Codes" if at_once == len(seeds) else f"Codes {first + 1}/{len(seeds)}"
        rows = tuple(prompt for prompt in prompts for _ in group)
        course = CodesCourse(QWEN3, count, count, torch.device(lm.device))
        decode(lm, Task(stage, rows, options.sampling, group), course, host)
        songs += course.songs
    return Codes(tuple(songs), tuple(seeds))


def plan_memory(lm: LanguageModel, request: Request, options: PlanOptions) -> int:
    """Bytes that `plan` takes beside the weights, for a normalised request."""
    state = _begin(request, options)
    prompt = _prompts().plan(request.caption, request.lyrics) + state.take()
    return lm.cache_bytes(1, len(prompt) + load_grammar().budget(state))


def compose_memory(lm: LanguageModel, plan: Plan, options: ComposeOptions) -> int:
    """Bytes that `compose` takes beside the weights with all songs in step."""
    prompts = _code_prompts(plan, options)
    capacity = max(map(len, prompts)) + codes_for(plan.whole_seconds)
    return lm.cache_bytes(options.batch * len(prompts), capacity)


def _songs_at_once(lm: LanguageModel, plan: Plan, options: ComposeOptions, host: Host) -> int:
    """The largest equal share of the batch that fits and leaves every song its own bits."""
    free = host.free_memory(torch.device(lm.device))
    unit = len(_code_prompts(plan, options))  # rows of one song
    for songs in (options.batch, 4, 2):
        if songs == 1 or options.batch % songs:
            continue
        need = compose_memory(lm, plan, replace(options, batch=songs))
        if (free == 0 or need <= free) and lm.rows_agree(
            unit * songs, unit
        ):  # 0: the system does not say
            return songs
    return 1


def _think(lm: LanguageModel, request: Request, options: PlanOptions, host: Host) -> Metadata:
    """What the language model writes, the user's own values forced into its text."""
    state = _begin(request, options)
    course = TextCourse(load_grammar(), state, QWEN3, torch.device(lm.device))
    prompt = _prompts().plan(request.caption, request.lyrics) + state.take()
    decode(lm, Task("Plan", (prompt,), options.sampling), course, host)
    return parse(load_tokenizer().decode(state.written))


def _begin(request: Request, options: PlanOptions) -> State:
    left_out = {"caption": not options.rewrite_caption, "language": not options.detect_language}
    return load_grammar().start(
        stated(request), [name for name in FIELDS if not left_out.get(name)]
    )


def _code_prompts(plan: Plan, options: ComposeOptions) -> tuple[list[int], ...]:
    """The conditional prompt, and the unconditional one where guidance is on."""
    prompts, sampling = _prompts(), options.sampling
    metadata = replace(plan.metadata, duration=plan.whole_seconds)
    conditional = prompts.codes(plan.caption, plan.lyrics, metadata, options.layout)
    if sampling.cfg_scale <= 1:
        return (conditional,)
    unconditional = prompts.unconditional(
        plan.caption, plan.lyrics, sampling.negative, options.layout
    )
    return conditional, unconditional


@cache
def _prompts() -> Prompts:
    return Prompts(load_tokenizer(), QWEN3)
