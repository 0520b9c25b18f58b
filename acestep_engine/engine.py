"""The engine: one method per arrow of the flow, over components that load when first needed.

It knows the order of the stages and what each must have in memory; it knows no files, no formulas
and no nodes. Dimension key: B songs, T latent frames, C latent channels, X audio channels,
S samples, N stored frames of silence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import audio as sound
from .backends.base import LanguageModel
from .dit import conditions, extent, sample, silence, text
from .dit.noise import draw
from .errors import InvalidRequest
from .host import Host, LocalHost
from .lm import metadata, modes, planner, scoring
from .lm.tokenizer import load_tokenizer
from .store import Store
from .types import (
    FRAME_RATE,
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
from .weights.files import stamp
from .weights.layouts import ROLES, Role, family_of, locate
from .weights.silence import find_silence, read_silence

CURE = "Try precision fp32; if that does not help, the checkpoint file is damaged: fetch it again."
MIB = 1 << 20
LOUDEST = 8.0  # no sound is louder: such samples are integers that nobody scaled
TOKEN_MEMORY = {"fp32": MIB, "bf16": MIB // 2, "fp16": MIB // 2}  # DiT activations per patch


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
        self._remembered: tuple[Any, list[conditions.Conditions]] | None = None
        self._silences: dict[ModelSpec, tuple[Any, Tensor]] = {}
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
    ) -> Latents:
        """Plan, codes and a timbre reference to latents (B, T, 64).

        The length follows the codes where there are any, else the plan. Conditions of the last
        call are kept, so that another seed encodes nothing again.
        """
        with self._lock:
            family, _ = family_of(model)
            settings = sample.resolve(sampling, family)
            songs = range(extent.songs_of(codes, sampling))
            seeds = [(sampling.seed + item) % (MAX_SEED + 1) for item in songs]
            frames = extent.frames_of(plan, codes)
            given = self._conditions(model, plan, codes, timbre)
            memory = TOKEN_MEMORY[self.store.runtime(model).precision] * given[0].frames // 2
            velocity = self.store.backend(model, "dit", memory)
            rendered = []
            steps = len(settings.nodes) - 1
            with self._bar("Render", steps * len(seeds)) as update:
                branches = sample.prepare(velocity, given[0], settings)
                for item, seed in enumerate(seeds):
                    if 0 < item < len(given):  # else all songs share their condition
                        branches = sample.prepare(velocity, given[item], settings)
                    noise = draw(seed, given[0].frames)
                    latents_BTC = noise
                    for step in sample.denoise(velocity, branches, noise, settings):
                        latents_BTC = step.x_BTC
                        update(item * steps + step.index + 1)
                    rendered.append(latents_BTC[:, :frames].cpu())
            seconds = plan.duration if frames == frames_of(plan.duration) else frames / FRAME_RATE
            record = _record(family, settings, seeds, codes)
            return Latents(torch.cat(rendered), record | {"seconds": seconds})

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
            with self._bar("Decode", songs * frames) as update:
                audio_BXS = tiling.decode(codec.decode, latents_BCT, tile, update)
            audio = Audio(level.limit_peak(audio_BXS))
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
            peak = audio.waveform.abs().max().item()
            if peak > LOUDEST:
                raise InvalidRequest(
                    f"The samples reach {peak:g}, but sound lies within -1..1. Divide integer "
                    "samples by their range (32768 for 16 bits)."
                )
            stereo = sound.resample(sound.to_stereo(audio)).waveform.clamp(-1, 1)
            audio_BXS = pad(stereo, (0, -stereo.shape[-1] % HOP))
            songs, frames = audio_BXS.shape[0], audio_BXS.shape[-1] // HOP
            codec, tile = self._codec(model, "encode", frames, (tile, max_memory))
            with self._bar("Encode", songs * frames) as update:
                latents_BCT = tiling.encode(codec.encode, audio_BXS, tile, update)
            return Latents(latents_BCT.transpose(1, 2).contiguous(), {"from": "audio"})

    def tokenize(self, model: ModelSpec, latents: Latents) -> Codes:
        """Latents to audio codes; the tail is filled with silence to a whole code."""
        with self._lock:
            self.host.check_interrupt()
            require_finite(latents.values, "Audio tokenizer, input latents", CURE)
            missing = -latents.values.shape[1] % FRAMES_PER_CODE
            filling = silence.take(self._silence(model), missing)
            filling = filling.expand(latents.values.shape[0], -1, -1)
            latents_BTC = torch.cat((latents.values, filling), dim=1)
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
            "loaded": {part.name: part.nbytes for part in self.store.loaded()},
        }

    def release(self, model: ModelSpec, keep: tuple[ModelSpec, ...] = ()) -> None:
        """Free what was loaded for `model`, except what the models in `keep` share with it."""
        with self._lock:
            self.store.release(model, keep)
            self._remembered = None
            self._silences.pop(model, None)

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

    def _conditions(
        self, model: ModelSpec, plan: Plan, codes: Codes | None, timbre: Latents | None
    ) -> list[conditions.Conditions]:
        """One entry per song with its own codes, or one for all."""
        reference = None if timbre is None else conditions.reference(timbre.values)
        heard = None if reference is None else reference.numpy().tobytes()
        parts: tuple[Role, ...] = ("text_encoder", "condition_encoder", "audio_detokenizer")
        files = [self.store.key(model, role) for role in parts]  # a file may change on the disk
        key = (model, files, self._silence_key(model), plan, codes, heard)
        if self._remembered is None or self._remembered[0] != key:
            self._remembered = None  # before the new ones take memory
            self._remembered = (key, self._build_conditions(model, plan, codes, reference))
        return self._remembered[1]

    def _build_conditions(
        self, model: ModelSpec, plan: Plan, codes: Codes | None, reference_BTC: Tensor | None
    ) -> list[conditions.Conditions]:
        quiet_NC = self._silence(model)
        detokenizer = self.store.backend(model, "audio_detokenizer") if codes else None
        items = codes.items if codes else (None,)
        seconds = None if codes else plan.whole_seconds
        canvases = [conditions.paint(detokenizer, item, seconds, quiet_NC) for item in items]
        self.host.check_interrupt()
        reader = self.store.backend(model, "text_encoder")
        encode = load_tokenizer().encode
        words = conditions.read(reader, encode, plan, canvases[0].instruction)
        require_finite(words.text_BLD, "Text encoder", CURE)
        self.host.check_interrupt()
        encoder = self.store.backend(model, "condition_encoder")
        built = []
        for canvas in canvases:
            condition = conditions.build(encoder, words, canvas, quiet_NC, reference_BTC)
            require_finite(condition.encoder_BLD, "Condition encoder", CURE)
            require_finite(condition.context_BTC, "Audio detokenizer", CURE)
            built.append(condition)
        return built

    def _silence(self, model: ModelSpec) -> Tensor:
        """Latents of silence (N, 64): stored beside the DiT, or rebuilt from the VAE."""
        key = self._silence_key(model)
        known, latents_NC = self._silences.get(model, (None, None))
        if latents_NC is None or known != key:
            latents_NC = read_silence(model)
            if latents_NC is None:
                latents_NC = silence.from_encoder(self.store.backend(model, "vae").encode)
            self._silences[model] = key, require_finite(latents_NC, "Latents of silence", CURE)
        return latents_NC

    def _silence_key(self, model: ModelSpec) -> Any:
        """What silence is made of; a stored one of zeros was never set, and comes from the VAE."""
        file = find_silence(model)
        return file and stamp(file), self.store.key(model, "vae") if model.vae else None

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

    @contextmanager
    def _bar(self, stage: str, total: int) -> Iterator[Callable[..., None]]:
        """An update function (done, ...) for a loop; it raises where the user stops."""
        bar = self.host.progress(stage, total)
        try:
            self.host.check_interrupt()
            yield lambda done, *_: bar.update(done)
        finally:
            bar.close()


def _record(
    family: str, settings: sample.ResolvedSampling, seeds: list[int], codes: Codes | None
) -> dict[str, Any]:
    """What the render really used, ready for JSON."""
    return {
        "family": family,
        "instruction": text.INSTRUCTIONS["cover" if codes else "text2music"],
        "nodes": list(settings.nodes),
        "guidance": settings.guidance,
        "interval": list(settings.interval),
        "seeds": seeds,
        "codes": [len(item) for item in codes.items] if codes else [],
    }


_engine: Engine | None = None
_engine_lock = threading.Lock()


def get_engine(make_host: Callable[[], Host] = LocalHost) -> Engine:
    """The engine of this process, built on the first call with `make_host()`."""
    global _engine
    with _engine_lock:
        if _engine is None:
            _engine = Engine(make_host())
        return _engine
