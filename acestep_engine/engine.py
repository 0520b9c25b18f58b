"""The engine: one method per arrow of the flow, over components that load when first needed.

It knows the order of the stages and what each must have in memory; it knows no files, no formulas
and no nodes. Dimension key: B songs, T latent frames, C latent channels, X audio channels,
S samples.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.nn.functional import pad

from . import audio as sound
from .backends.base import LanguageModel
from .dit import conditions, tasks
from .errors import InvalidRequest
from .host import Host, LocalHost, watched
from .lm import metadata, modes, planner, scoring
from .remix import Task
from .rendering import Renderer
from .silences import CURE, Silences
from .store import Store
from .types import (
    FRAMES_PER_CODE,
    HOP,
    MAX_SEED,
    AnswerOptions,
    Audio,
    Codes,
    ComposeOptions,
    DiTSampling,
    Latents,
    ModelSpec,
    Plan,
    PlanOptions,
    Request,
    Score,
    crop,
    frames_of,
    require_finite,
)
from .vae import level, memory, tiling
from .weights import adapters
from .weights.layouts import ROLES, family_of, locate

LOUDEST = 8.0  # no sound is louder: such samples are integers that nobody scaled


class _Turn:
    """One call at a time; the host is told when one begins."""

    def __init__(self, host: Host) -> None:
        self._host, self._lock, self._depth = host, threading.RLock(), 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._host.begin()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()


class Engine:
    """All of ACE-Step 1.5 behind the arrows of the flow. One per process: see `get_engine`.

    Every method takes the model as a `ModelSpec`, raises `errors.AceStepError` with a text for the
    user, and reports progress and looks for the stop request through its host.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.store = Store(host)
        self._lock = _Turn(host)
        self._silences = Silences(self.store)
        self._renderer = Renderer(self.store, host, self._silences, self.encode)
        self.windows: dict[str, memory.Window] = {}
        """The tile of the last decode and encode, and the memory it was expected to take."""

    def plan(
        self, model: ModelSpec, request: Request, options: PlanOptions = PlanOptions()
    ) -> Plan:
        """Request to Plan: the language model fills in what the user left open."""
        with self._lock:
            normal = metadata.normalise(request)
            thinks = bool(model.lm) and planner.needs_lm(normal, options)
            if not thinks:
                return planner.plan(None, normal, options, self.host)
            lm = self._lm(model, lambda lm: planner.plan_memory(lm, normal, options))
            return planner.plan(lm, normal, options, self.host)

    def compose(
        self,
        model: ModelSpec,
        plans: Plan | Sequence[Plan],
        options: ComposeOptions = ComposeOptions(),
    ) -> Codes:
        """A plan, or several, to audio codes, five a second: `options.batch` songs of each."""
        with self._lock:
            lm = self._lm(model, lambda lm: planner.compose_memory(lm, plans, options))
            return planner.compose(lm, plans, options, self.host)

    def write(
        self,
        model: ModelSpec,
        query: str,
        instrumental: bool = False,
        language: str | None = None,
        options: AnswerOptions = AnswerOptions(),
    ) -> Request:
        """A few words to a whole song on paper: caption, lyrics and metadata."""
        return self._answer(model, modes.write(query, instrumental, language), options)

    def rewrite(
        self, model: ModelSpec, request: Request, options: AnswerOptions = AnswerOptions()
    ) -> Request:
        """A draft to a fuller one: caption and lyrics rewritten, open metadata filled in."""
        return self._answer(model, modes.rewrite(request), options)

    def understand(
        self, model: ModelSpec, codes: Codes, options: AnswerOptions = modes.HEARING
    ) -> tuple[Request, ...]:
        """Audio codes to what they are of: metadata, caption and lyrics, one for each song."""
        answers = []
        with self._lock:
            for item, question in enumerate(modes.understand(codes)):
                seed = (options.sampling.seed + item) % (MAX_SEED + 1)
                own = replace(options, sampling=replace(options.sampling, seed=seed))
                answers.append(self._answer(model, question, own))
            return tuple(answers)

    def score(self, model: ModelSpec, codes: Codes, plan: Plan) -> tuple[Score, ...]:
        """How well the codes carry the plan, one score for each song."""
        with self._lock:
            lm = self._lm(model, lambda lm: scoring.score_memory(lm, codes, plan))
            return scoring.score(lm, codes, plan, self.host)

    def render(
        self,
        model: ModelSpec,
        plan: Plan,
        codes: Codes | None = None,
        sampling: DiTSampling = DiTSampling(),
        timbre: Latents | None = None,
        task: Task | None = None,
    ) -> Latents:
        """Plan, codes and a timbre reference to latents (B, T, 64), or a task on a source.

        The length follows the source of the task; without one, the codes where there are any, else
        the plan. Conditions and source of the last call are kept, so that another seed encodes
        nothing again.
        """
        with self._lock:
            return self._renderer.render(model, plan, codes, sampling, timbre, task)

    def words(self, model: ModelSpec, plan: Plan, instruction: str) -> conditions.Words:
        """What the DiT reads of a plan under an instruction of `dit.text`, for other samplers."""
        with self._lock:
            return self._renderer.words(model, plan, instruction)

    def decode(
        self, model: ModelSpec, latents: Latents, tile: int = 0, max_memory: int = 0
    ) -> Audio:
        """Latents to 48 kHz stereo; `tile` in latent frames, 0: the largest that fits.

        It fits into `max_memory` bytes beside the weights, or, where that is 0, into what is free.
        What `render` made gets the exact length that was asked for.
        """
        with self._lock:
            latents_BCT = latents.values.transpose(1, 2)
            songs, _, frames = latents_BCT.shape
            codec, tile = self._codec(model, "decode", frames, (tile, max_memory))
            with watched(self.host, "Decode", songs * frames) as update:
                audio_BXS = tiling.decode(codec.decode, latents_BCT, tile, update)
            audio = level.limit_peak(audio_BXS)
            seconds = latents.record.get("seconds", audio.seconds)
            whole = latents.values.shape[1] == frames_of(
                seconds
            )  # else somebody cut or joined them
            return crop(audio, seconds) if whole else audio

    def encode(self, model: ModelSpec, audio: Audio, tile: int = 0, max_memory: int = 0) -> Latents:
        """Audio of any rate and channel count to latents; the end is padded to a whole frame.

        `tile` and `max_memory` are those of `decode`.
        """
        with self._lock:
            if audio.waveform.shape[-1] == 0:
                raise InvalidRequest("The audio has no samples. Connect a sound with some length.")
            peaks = audio.waveform.abs().amax(dim=(1, 2)).tolist()
            if max(peaks) > LOUDEST:
                raise InvalidRequest(
                    f"The samples reach {max(peaks):g}, but sound lies within -1..1. Divide "
                    "integer samples by their range (32768 for 16 bits)."
                )
            stereo = sound.resample(sound.to_stereo(audio)).waveform.clamp(-1, 1)
            audio_BXS = pad(stereo, (0, -stereo.shape[-1] % HOP))
            songs, frames = audio_BXS.shape[0], audio_BXS.shape[-1] // HOP
            codec, tile = self._codec(model, "encode", frames, (tile, max_memory))
            with watched(self.host, "Encode", songs * frames) as update:
                latents_BCT = tiling.encode(codec.encode, audio_BXS, tile, update)
            record = {"from": "audio", "peaks": peaks}
            return Latents(latents_BCT.transpose(1, 2).contiguous(), record)

    def tokenize(self, model: ModelSpec, latents: Latents) -> Codes:
        """Latents to audio codes; the tail is filled with silence to a whole code."""
        with self._lock:
            self.host.check_interrupt()
            require_finite(latents.values, "Audio tokenizer, input latents", CURE)
            whole = -(-latents.values.shape[1] // FRAMES_PER_CODE) * FRAMES_PER_CODE
            latents_BTC = tasks.fill(latents.values, self._silences.of(model), whole)
            indices_BN = self.store.backend(model, "audio_tokenizer").tokenize(latents_BTC)
            return Codes(tuple(tuple(row) for row in indices_BN.tolist()))

    def describe(self, model: ModelSpec) -> dict[str, Any]:
        """What `model` is made of and how it runs here, ready for JSON. Loads no weights."""
        runtime = self.store.runtime(model)
        family, reason = family_of(model)
        parts: dict[str, Any] = {}
        for role in ROLES:
            if role != "lm" or model.lm:
                source = locate(model, role)
                files = [str(path) for path in source.files]
                parts[role] = {"layout": source.layout, "files": files}
        return {
            "family": family,
            "family_reason": reason,
            "device": runtime.device,
            "precision": runtime.precision,
            "bits": runtime.bits,
            "mode": runtime.mode,
            "tile": runtime.tile,
            "reasons": list(runtime.reasons),
            "parts": parts,
            "adapters": [match.text for match in adapters.inspect(model)],
            "loaded": {part.name: part.nbytes for part in self.store.loaded()},
        }

    def release(self, model: ModelSpec, keep: tuple[ModelSpec, ...] = ()) -> None:
        """Free what was loaded for `model`, except what the models in `keep` share with it."""
        with self._lock:
            self.store.release(model, keep)
            self._renderer.forget()
            self._silences.forget(model)

    def _lm(self, model: ModelSpec, need: Callable[[LanguageModel], int]) -> LanguageModel:
        """The language model, placed with room for the bytes that `need` says its task takes."""
        lm: LanguageModel = self.store.backend(model, "lm")
        return self.store.backend(model, "lm", need(lm))

    def _answer(
        self, model: ModelSpec, question: modes.Question, options: AnswerOptions
    ) -> Request:
        with self._lock:
            lm = self._lm(model, lambda lm: modes.answer_memory(lm, question, options))
            return modes.answer(lm, question, options, self.host)

    def _codec(
        self, model: ModelSpec, op: memory.Op, frames: int, wish: tuple[int, int]
    ) -> tuple[Any, int]:
        """The VAE, placed with room for a window, and the tile: `wish` is (tile, bytes)."""
        tile, limit = wish
        runtime = self.store.runtime(model)
        config, precision = self.store.backend(model, "vae").module.config, runtime.precision
        most = memory.peak_bytes(op, min(tile or runtime.tile, frames), config, precision)
        room = min(limit, most) if limit else most
        codec = self.store.backend(model, "vae", room)  # the host makes room before it is measured
        free = limit or self.host.free_memory(codec.device)
        budget = memory.Budget(tile, runtime.tile, free, limit > 0, runtime.device != "cpu")
        self.windows[op] = memory.choose(op, frames, config, precision, budget)
        return codec, self.windows[op].tile


_engine: Engine | None = None
_engine_lock = threading.Lock()


def get_engine(make_host: Callable[[], Host] = LocalHost) -> Engine:
    """The engine of this process, built on the first call with `make_host()`."""
    global _engine
    with _engine_lock:
        if _engine is None:
            _engine = Engine(make_host())
        return _engine
