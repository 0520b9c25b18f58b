"""From a request to a plan, and from a plan to audio codes: the language model's two tasks.

Knows the order of things and who decides on what; knows no backend, no files and no device.
Dimension key: B rows · L tokens · D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

import torch
from torch import Tensor

from ..backends.base import LanguageModel
from ..errors import InvalidRequest
from ..host import Host
from ..types import (
    CODE_RATE,
    DEFAULT_DURATION,
    MAX_SEED,
    MAX_SONGS,
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
from .room import MAX_POSITIONS, Room
from .tokenizer import QWEN3, load_tokenizer

REHEARSED = 8  # codes that a rehearsal feeds: enough to meet every kernel of a step


@dataclass(frozen=True, slots=True)
class Song:
    """What to compose: the conditional prompt, the unconditional one where guidance is on, how
    many codes, from which seed."""

    prompts: tuple[list[int], ...]
    count: int
    seed: int


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


def compose(
    lm: LanguageModel, plans: Plan | Sequence[Plan], options: ComposeOptions, host: Host
) -> Codes:
    """Audio codes: `options.batch` songs of each plan in turn, each song from its own seed.

    Each has exactly the codes of its plan's whole seconds. Songs are decoded in step where the
    device gives a row the same numbers whatever its company, and there is memory for all of them;
    else one after the other. A song is the same either way.
    """
    songs = _songs(plans, options)
    composed: list[tuple[int, ...]] = []
    for group in _groups(lm, songs, host):
        stage = "Codes" if len(group) == len(songs) else f"Codes {len(composed) + 1}/{len(songs)}"
        longest = max(song.count for song in group)
        course = CodesCourse(QWEN3, longest, longest, torch.device(lm.device))
        seeds = tuple(song.seed for song in group)
        decode(lm, Task(stage, _rows(group), options.sampling, seeds), course, host)
        # A song that is over goes on unheard until the longest is.
        composed += [codes[: song.count] for codes, song in zip(course.songs, group, strict=True)]
    return Codes(tuple(composed), tuple(song.seed for song in songs))


def plan_memory(lm: LanguageModel, request: Request, options: PlanOptions) -> int:
    """Bytes that `plan` takes beside the weights, for a normalised request."""
    state = _begin(request, options)
    prompt = _prompts().plan(request.caption, request.lyrics) + state.take()
    return lm.cache_bytes(1, len(prompt) + load_grammar().budget(state))


def compose_memory(lm: LanguageModel, plans: Plan | Sequence[Plan], options: ComposeOptions) -> int:
    """Bytes that `compose` takes beside the weights with all songs in step."""
    return lm.cache_bytes(*_size(_songs(plans, options)))


def _songs(plans: Plan | Sequence[Plan], options: ComposeOptions) -> list[Song]:
    plans = [plans] if isinstance(plans, Plan) else list(plans)
    total = len(plans) * options.batch
    if not 1 <= total <= MAX_SONGS:
        raise InvalidRequest(
            f"{len(plans)} plans with {options.batch} songs each are {total} songs, but one call "
            f"composes 1 to {MAX_SONGS}. Compose them in several calls."
        )
    prompts = [_code_prompts(plan, options) for plan in plans for _ in range(options.batch)]
    counts = [codes_for(plan.whole_seconds) for plan in plans for _ in range(options.batch)]
    seeds = [(options.sampling.seed + item) % (MAX_SEED + 1) for item in range(total)]
    return list(map(Song, prompts, counts, seeds))


def _groups(lm: LanguageModel, songs: list[Song], host: Host) -> list[list[Song]]:
    """The songs in the largest equal shares that fit and leave every song its own bits."""
    groups = _shares(lm, songs, host)
    if all(_keeps_its_bits(lm, group, host) for group in groups):
        return groups
    alike = [list(group) for _, group in groupby(songs, key=lambda song: song.prompts)]
    return [share for group in alike for share in _shares(lm, group, host)]


def _shares(lm: LanguageModel, songs: list[Song], host: Host) -> list[list[Song]]:
    free = host.free_memory(torch.device(lm.device))
    unit = len(songs[0].prompts)  # rows of one song
    for size in (len(songs), 4, 2):
        if size == 1 or len(songs) % size:
            continue
        rows, capacity = unit * size, _size(songs)[1]
        fits = free == 0 or lm.cache_bytes(rows, capacity) <= free  # 0: the system does not say
        if fits and capacity <= MAX_POSITIONS and lm.rows_agree(rows, unit, QWEN3.code_ids):
            return [songs[first : first + size] for first in range(0, len(songs), size)]
    return [[song] for song in songs]


def _keeps_its_bits(lm: LanguageModel, group: list[Song], host: Host) -> bool:
    """Whether songs of different prompts leave each other's numbers alone: tried out.

    Prompts of unequal length are read side by side with padding, and attention may sum up the
    positions of a short row in another order next to a long one.
    """
    if all(song.prompts == group[0].prompts for song in group):
        return True
    steps = min(REHEARSED, *(song.count for song in group))
    together_BLD = _rehearsal(lm, group, steps, host)
    return all(
        torch.equal(together_BLD[item :: len(group)], _rehearsal(lm, [song], steps, host))
        for item, song in enumerate(group)
    )


@torch.inference_mode()
def _rehearsal(lm: LanguageModel, group: list[Song], steps: int, host: Host) -> Tensor:
    """States (B, L, D) of every row behind its prompt and behind each of `steps` codes."""
    rows, size, device = _rows(group), _size(group), torch.device(lm.device)
    with Room("Codes", lm, *size, "Compose fewer songs at once.").taken(host):
        host.check_interrupt()
        session = lm.open(*size)
        states = [session.feed(rows)]
        kept_BD = torch.empty_like(states[0])

        def keep(hidden_BD: Tensor, uniform_N1: Tensor) -> Tensor:
            kept_BD.copy_(hidden_BD)
            return uniform_N1[:, 0].long()

        step = session.record(keep)
        zero_N1 = torch.zeros(len(group), 1, device=device)
        ids_L = torch.arange(steps, device=device) * 7_919 + QWEN3.first_code
        for id_1 in ids_L.split(1):
            step(id_1.expand(len(rows), 1), zero_N1)
            states.append(kept_BD.clone())
        return torch.stack(states, dim=1)


def _rows(group: Sequence[Song]) -> tuple[list[int], ...]:
    """The conditional prompts of all songs, then their unconditional ones."""
    return tuple(
        prompt for branch in zip(*(s.prompts for s in group), strict=True) for prompt in branch
    )


def _size(songs: Sequence[Song]) -> tuple[int, int]:
    """Rows and tokens a row of all songs in step."""
    rows = _rows(songs)
    return len(rows), max(map(len, rows)) + max(song.count for song in songs)


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
