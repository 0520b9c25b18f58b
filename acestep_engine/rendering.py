"""The render: words, codes, a timbre and a task become conditions, and noise becomes latents.

It knows the order of the parts and what each must have in memory, but no formulas and no files.
What it built last it remembers, so that another seed encodes nothing again.
Dimension key: B songs, T latent frames, C latent channels, N frames of silence or timbre clips.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .config import Family
from .dit import conditions, extent, sample, tasks
from .dit.noise import draw_for, seed_of
from .dit.text import INSTRUCTIONS
from .errors import InvalidRequest
from .host import Host, watched
from .lm.tokenizer import load_tokenizer
from .remix import Complete, Cover, Extract, Lego, Repaint, Task, edges, spans
from .silences import CURE, Silences
from .store import Store
from .types import (
    FRAME_RATE,
    MAX_DURATION,
    MIN_DURATION,
    Audio,
    Codes,
    DiTSampling,
    Latents,
    ModelSpec,
    Plan,
    frames_of,
    require_finite,
)
from .vae import level
from .weights.layouts import Role, family_of

logger = logging.getLogger(__name__)

MIB = 1 << 20
TOKEN_MEMORY = {"fp32": MIB, "bf16": MIB // 2, "fp16": MIB // 2}  # DiT activations per patch
BASE_ONLY = (Extract, Lego, Complete)

Encode = Callable[[ModelSpec, Audio], Latents]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A task with its source encoded, and extended where a region reaches beyond it.

    spans: the regions in seconds from the first frame. key: what tells it from others.
    """

    task: Task
    latents_BTC: Tensor
    seconds: float
    spans: tuple[tuple[float, float], ...]
    key: tuple[Any, ...]


class Renderer:
    """Latents from plans; one per engine, which calls it from one thread at a time."""

    def __init__(self, store: Store, host: Host, silences: Silences, encode: Encode) -> None:
        self._store, self._host, self._silences, self._encode = store, host, silences, encode
        self._remembered: tuple[Any, list[conditions.Conditions]] | None = None
        self._encoded: tuple[Any, Latents] | None = None

    def render(
        self,
        model: ModelSpec,
        plan: Plan,
        codes: Codes | None,
        sampling: DiTSampling,
        timbre: Latents | None,
        task: Task | None,
    ) -> Latents:
        """See `Engine.render`."""
        family, _ = family_of(model)
        settings = sample.resolve(sampling, family)
        songs = range(extent.songs_of(codes, sampling))
        seeds = [seed_of(sampling.seed, item) for item in songs]
        work = None
        if task is not None:
            check_task(task, family, codes)
            work = self._work(model, task)
            plan = fit(plan, work.seconds)
        given = self._conditions(model, plan, codes, timbre, work)
        settings = replace(settings, nodes=given[0].course.nodes(settings.nodes))
        frames = frames_of(plan.duration) if work else extent.frames_of(plan, codes)
        rendered = [
            song_BTC[:, :frames]
            for song_BTC in self._denoise(model, given, settings, sampling, seeds)
        ]
        whole = frames == frames_of(plan.duration)
        record = {
            "family": family,
            "task": type(task).__name__.lower() if task else "text2music",
            "instruction": given[0].instruction,
            **asdict(settings),
            "nodes": list(settings.nodes),
            "interval": list(settings.interval),
            "seeds": seeds,
            "retake": sampling.retake,
            "retake_seed": sampling.retake_seed,
            "codes": [len(item) for item in codes.items] if codes else [],
            "seconds": plan.duration if whole else frames / FRAME_RATE,
        }
        return Latents(torch.cat(rendered), record)

    def _denoise(
        self,
        model: ModelSpec,
        given: list[conditions.Conditions],
        settings: sample.ResolvedSampling,
        sampling: DiTSampling,
        seeds: list[int],
    ) -> list[Tensor]:
        """Latents (1, T, 64) of each seed, on the CPU."""
        frames, steps = given[0].frames, len(settings.nodes) - 1
        memory = TOKEN_MEMORY[self._store.runtime(model).precision] * frames // 2
        velocity = self._store.backend(model, "dit", memory)
        rendered = []
        with watched(self._host, "Render", steps * len(seeds)) as update:
            branches = sample.prepare(velocity, given[0], settings)
            for item, seed in enumerate(seeds):
                if 0 < item < len(given):  # else all songs share their condition
                    branches = sample.prepare(velocity, given[item], settings)
                latents_BTC = noise_BTC = draw_for(sampling, item, frames)
                for step in sample.denoise(velocity, branches, noise_BTC, settings, seed):
                    latents_BTC = step.x_BTC
                    update(item * steps + step.index + 1)
                rendered.append(latents_BTC.cpu())
        return rendered

    def words(self, model: ModelSpec, plan: Plan, instruction: str) -> conditions.Words:
        """`plan` as the text encoder reads it under `instruction`."""
        reader = self._store.backend(model, "text_encoder")
        words = conditions.read(reader, load_tokenizer().encode, plan, instruction)
        require_finite(words.text_BLD, "Text encoder", CURE)
        self._host.check_interrupt()
        return words

    def forget(self) -> None:
        """Drop what was remembered; the weights it was made with are gone."""
        self._remembered = self._encoded = None

    def _work(self, model: ModelSpec, task: Task) -> Work:
        source = task.source
        own = source.seconds if isinstance(source, Audio) else _seconds_of(source)
        if not MIN_DURATION <= own <= MAX_DURATION:
            raise InvalidRequest(
                f"The source lasts {own:g} s, but a task takes {MIN_DURATION:g} to "
                f"{MAX_DURATION:g} s. Cut or extend it first."
            )
        left, right = edges(task, own)
        if isinstance(source, Latents):  # which begin and end on whole frames
            left, right = (frames_of(edge) / FRAME_RATE for edge in (left, right))
        regions = task.regions if isinstance(task, Repaint | Lego) else ()
        found = tuple(spans(regions, left, own))
        if left + own + right > MAX_DURATION:
            raise InvalidRequest(
                f"With its extension the song lasts {left + own + right:g} s, but at most "
                f"{MAX_DURATION:g} s are possible. Move the region."
            )
        if isinstance(source, Audio):
            latents = self._encode_once(model, source, left, right)
        else:
            rims = frames_of(left), frames_of(right)
            heard_BTC = level.audible(source).values
            latents = Latents(tasks.extend(heard_BTC, self._silences.of(model), *rims))
        key = (type(task).__name__, found, _digest(latents.values), *_knobs(task))
        most = latents.values.shape[1] / FRAME_RATE  # resampling may have rounded down
        return Work(task, latents.values, min(left + own + right, most), found, key)

    def _encode_once(self, model: ModelSpec, audio: Audio, left: float, right: float) -> Latents:
        """Latents of `audio` with silence before and after; the last ones are kept."""
        key = (self._store.key(model, "vae"), _digest(audio.waveform), audio.sample_rate)
        key = (*key, left, right)
        if self._encoded is None or self._encoded[0] != key:
            if audio.waveform.abs().max() < level.SILENCE:
                raise InvalidRequest(
                    f"The source is silent: no sample reaches {level.SILENCE:g}. Connect a "
                    "recording with sound in it."
                )
            rate = audio.sample_rate
            rims = round(left * rate), round(right * rate)
            self._encoded = (key, self._encode(model, Audio(pad(audio.waveform, rims), rate)))
        return self._encoded[1]

    def _conditions(
        self,
        model: ModelSpec,
        plan: Plan,
        codes: Codes | None,
        timbre: Latents | None,
        work: Work | None,
    ) -> list[conditions.Conditions]:
        """One entry per song with its own codes, or one for all."""
        reference = None if timbre is None else conditions.reference(level.audible(timbre).values)
        heard = None if reference is None else _digest(reference)
        parts: tuple[Role, ...] = (
            "text_encoder", "condition_encoder", "audio_tokenizer", "audio_detokenizer",
        )  # fmt: skip
        files = [self._store.key(model, role) for role in parts]  # a file may change on the disk
        key = (files, self._silences.key(model), plan, codes, heard, work and work.key)
        if self._remembered is None or self._remembered[0] != key:
            self._remembered = None  # before the new ones take memory
            canvases = self._canvases(model, plan, codes, work)
            self._remembered = (key, self._build(model, plan, canvases, reference))
        return self._remembered[1]

    def _canvases(
        self, model: ModelSpec, plan: Plan, codes: Codes | None, work: Work | None
    ) -> list[tasks.Canvas]:
        quiet_NC = self._silences.of(model)
        detokenizer = self._store.backend(model, "audio_detokenizer") if codes else None
        items = codes.items if codes else (None,)
        if work is None:
            seconds = None if codes else plan.whole_seconds
            return [conditions.paint(detokenizer, item, seconds, quiet_NC) for item in items]
        clean_BTC = tasks.fill(work.latents_BTC, quiet_NC)
        hints: list[Tensor | None] = [None]
        if codes:
            hints = [conditions.hints(detokenizer, item) for item in codes.items]
        elif isinstance(work.task, Cover) and not work.task.exact:
            tokenizer = self._store.backend(model, "audio_tokenizer")
            detokenizer = self._store.backend(model, "audio_detokenizer")
            hints = [conditions.echo(tokenizer, detokenizer, clean_BTC, quiet_NC)]
        return [tasks.prepare(work.task, clean_BTC, work.spans, quiet_NC, own) for own in hints]

    def _build(
        self,
        model: ModelSpec,
        plan: Plan,
        canvases: list[tasks.Canvas],
        reference_NTC: Tensor | None,
    ) -> list[conditions.Conditions]:
        self._host.check_interrupt()
        quiet_NC = self._silences.of(model)
        words = self.words(model, plan, canvases[0].instruction)
        free = canvases[0].course.follow < 1.0
        plain = self.words(model, plan, INSTRUCTIONS["text2music"]) if free else None
        encoder = self._store.backend(model, "condition_encoder")

        def build(words: conditions.Words, canvas: tasks.Canvas) -> conditions.Conditions:
            built = conditions.build(encoder, words, canvas, quiet_NC, reference_NTC)
            require_finite(built.encoder_BLD, "Condition encoder", CURE)
            require_finite(built.context_BTC, "Audio detokenizer", CURE)
            return built

        built = [build(words, canvas) for canvas in canvases]
        if plain is None:
            return built
        instead = build(plain, tasks.silent(quiet_NC, canvases[0].frames))
        return [replace(one, free=instead) for one in built]


def check_task(task: Task, family: Family, codes: Codes | None) -> None:
    """Raise InvalidRequest where this checkpoint cannot do `task`, or not together with codes."""
    name = type(task).__name__.lower()
    if isinstance(task, BASE_ONLY) and family != "base":
        raise InvalidRequest(
            f"The task {name} needs a base checkpoint, but this one is of the {family} family, "
            "which was not trained for it. Load a base model; if this is one under another name, "
            "set family to base in Load ACE-Step."
        )
    if codes is not None and not isinstance(task, Cover):
        raise InvalidRequest(
            f"Audio codes say what the whole song plays, which leaves the task {name} nothing to "
            "do. Disconnect the codes, or connect a cover."
        )


def fit(plan: Plan, seconds: float) -> Plan:
    """`plan` for a source of `seconds`, which decides the length."""
    if abs(plan.duration - seconds) > 1.0:
        logger.warning(
            "The plan asks for %g s, but the source decides: the song lasts %g s.",
            plan.duration,
            seconds,
        )
    metadata = replace(plan.metadata, duration=math.ceil(seconds))
    return replace(plan, duration=seconds, metadata=metadata)


def _seconds_of(latents: Latents) -> float:
    """The exact length that a render was made for, else that of the frames."""
    frames = latents.values.shape[1]
    seconds = latents.record.get("seconds", 0.0)
    return seconds if frames_of(seconds) == frames else frames / FRAME_RATE


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


def _knobs(task: Task) -> tuple[Any, ...]:
    """What a task says beside its source."""
    names = (name for name in type(task).__dataclass_fields__ if name != "source")
    return tuple(getattr(task, name) for name in names)
