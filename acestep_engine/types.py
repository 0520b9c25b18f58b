"""The nouns of the flow: one frozen dataclass each, picklable, without behaviour of a model.

They know nothing of files, devices or nodes. Dimension key of the tensors:
B songs, T latent frames (25 Hz), C latent channels (64), S samples (48 kHz).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from .checks import check_choice, check_range, check_tensor, check_text, check_whole
from .errors import InvalidRequest, NonFinite
from .runtime import Wish

SAMPLE_RATE = 48_000
HOP = 1_920  # samples per latent frame
FRAME_RATE = 25  # latent frames per second
CODE_RATE = 5  # audio codes per second
FRAMES_PER_CODE = 5
LATENT_CHANNELS = 64
MIN_FRAMES = 128  # the DiT never renders less (5.12 s); shorter songs are cut afterwards

MIN_DURATION, MAX_DURATION = 1.0, 600.0  # seconds of audio a request may ask for
DEFAULT_DURATION = 120.0  # seconds, where neither the user nor a language model decides
MAX_SONGS = 8  # songs in one batch
MAX_SEED = 2**63 - 1
MAX_STRENGTH = 3.0  # of an adapter, either way

PromptLayout = Literal["aligned", "legacy"]
SolverName = Literal["euler", "heun", "dpmpp_2m", "sde"]
GuidanceMode = Literal["apg", "cfg", "adg", "adg_w_norm", "adg_wo_clip"]
WaveletMode = Literal["off", "low", "high", "double", "pix"]


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a `<think>` block says of a song; None means not stated."""

    bpm: int | None = None
    caption: str | None = None
    duration: int | None = None  # whole seconds
    keyscale: str | None = None  # "F# minor"
    language: str | None = None  # one of lm.metadata.LANGUAGES
    timesignature: str | None = None  # "2", "3", "4" or "6"


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks for. Empty or None metadata is left to the language model.

    duration: seconds, MIN_DURATION..MAX_DURATION; None, 0 or less means automatic.
    language: a code such as "en"; "", "auto" and "unknown" mean not given.
    Validation and normalisation are done by `lm.metadata.normalise`.
    """

    caption: str = ""
    lyrics: str = ""
    duration: float | None = None
    bpm: int | None = None
    keyscale: str | None = None
    timesignature: str | None = None
    language: str | None = None
    instrumental: bool = False

    def __post_init__(self) -> None:
        check_text("caption", self.caption)
        check_text("lyrics", self.lyrics)
        for name in ("keyscale", "language"):
            if (text := getattr(self, name)) is not None:
                check_text(name, text)
        for name in ("duration", "bpm"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Real):
                raise InvalidRequest(
                    f"{name} is {value!r}, which is no number. Give a number, or None for "
                    "automatic."
                )


@dataclass(frozen=True, slots=True)
class Plan:
    """A song on paper: the user's words, and the metadata as the `<think>` block states them.

    `caption` and `lyrics` are the user's own. `metadata.caption` is the rewritten caption, if any.
    `duration` is the exact number of seconds of audio wanted. The models only speak whole seconds
    (`metadata.duration` rounds up); the surplus is cut from the rendered song.
    """

    caption: str
    lyrics: str
    metadata: Metadata
    duration: float
    seed: int = 0
    thought: bool = False  # whether a language model filled the gaps

    def __post_init__(self) -> None:
        check_text("caption of a plan", self.caption)
        check_text("lyrics of a plan", self.lyrics)
        if not isinstance(self.metadata, Metadata):
            raise InvalidRequest(
                f"metadata of a plan is {self.metadata!r}. Give a Metadata; Metadata() states "
                "nothing."
            )
        check_range("duration of a plan", self.duration, MIN_DURATION, MAX_DURATION)
        check_whole("seed of a plan", self.seed, 0, MAX_SEED)

    @property
    def dit_caption(self) -> str:
        """The caption that the diffusion half reads: the rewritten one where there is one."""
        return self.metadata.caption or self.caption

    @property
    def whole_seconds(self) -> int:
        """Length in seconds that the models are asked for."""
        return math.ceil(self.duration)


@dataclass(frozen=True, slots=True)
class Codes:
    """Audio codes at 5 Hz, one tuple of integers 0..63,999 per song, and the seed of each."""

    items: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """VAE latents (B, T, 64) at 25 Hz, float32 on the CPU; `record` tells how they were made."""

    values: Tensor
    record: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_tensor("latents", self.values, ("songs", "frames", LATENT_CHANNELS))


@dataclass(frozen=True, slots=True, eq=False)
class Audio:
    """Waveform (B, channels, S), float32 on the CPU, about -1..1.

    gain: what each song was multiplied with to keep it there, (B,); () means 1 for all.
    """

    waveform: Tensor
    sample_rate: int = SAMPLE_RATE
    gain: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_tensor("audio samples", self.waveform, ("songs", "channels", "samples"))
        if self.waveform.shape[1] == 0:
            raise InvalidRequest("The audio has no channels. Give mono or stereo sound.")
        check_whole("sample rate", self.sample_rate, 1, 10_000_000)
        if self.gain and len(self.gain) != len(self.waveform):
            raise InvalidRequest(
                f"There are gains for {len(self.gain)} songs, but {len(self.waveform)} songs. Give "
                "one for each, or none."
            )

    @property
    def seconds(self) -> float:
        return self.waveform.shape[-1] / self.sample_rate


@dataclass(frozen=True, slots=True)
class LMSampling:
    """How tokens are drawn. Order: CFG, repetition penalty, temperature, top-k, min-p, top-p.

    temperature 0 is argmax. top_k 0 and top_p 1 are off. cfg_scale acts in the codes phase only
    (1 and below: no unconditional branch); the CoT always runs at 1.0. temperature_last: the
    filters judge the scores as they are, and temperature acts on what they leave.
    """

    temperature: float = 0.85
    top_k: int = 0
    top_p: float = 0.9
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    cfg_scale: float = 2.0
    negative: str = ""
    seed: int = 0
    temperature_last: bool = False

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0.0, 5.0)
        check_whole("top_k", self.top_k, 0, 1_000_000)
        check_range("top_p", self.top_p, 1e-6, 1.0)
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("repetition_penalty", self.repetition_penalty, 0.1, 10.0)
        check_range("cfg_scale", self.cfg_scale, 0.0, 100.0)
        check_text("negative", self.negative)
        check_whole("seed", self.seed, 0, MAX_SEED)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How a plan is made. `think` off keeps the user's metadata and asks no language model."""

    think: bool = True
    rewrite_caption: bool = True
    detect_language: bool = True
    sampling: LMSampling = LMSampling()


@dataclass(frozen=True, slots=True)
class ComposeOptions:
    """How codes are made: `batch` songs of each plan; song i of them all has the seed
    `sampling.seed + i`."""

    batch: int = 1
    layout: PromptLayout = "aligned"
    sampling: LMSampling = LMSampling()

    def __post_init__(self) -> None:
        check_whole("batch", self.batch, 1, MAX_SONGS)
        check_choice("layout", self.layout, PromptLayout)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How a song in words is written. Lyrics stop where the answer has `max_tokens` tokens."""

    max_tokens: int = 3_500
    sampling: LMSampling = LMSampling()

    def __post_init__(self) -> None:
        check_whole("max_tokens", self.max_tokens, 1, 10_000)


@dataclass(frozen=True, slots=True)
class Score:
    """How well the codes of one song carry a plan, each part 0..1; None where the plan is silent.

    caption, lyrics: 0.5 means that hearing the codes makes these words no likelier.
    metadata: field name to recall. reward: all parts weighted.
    """

    reward: float
    caption: float | None
    lyrics: float | None
    metadata: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Wavelet:
    """Correction of each step, see `dit.wavelet`; high_scaler is for the high band of "double"."""

    mode: WaveletMode = "off"
    scaler: float = 0.05
    high_scaler: float = 0.02

    def __post_init__(self) -> None:
        check_choice("dcw", self.mode, WaveletMode)
        check_range("dcw_scaler", self.scaler, 0.0, 1.0)
        check_range("dcw_high", self.high_scaler, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class DiTSampling:
    """How latents are denoised. None means the default of the checkpoint's family.

    steps: of the solver. shift: warp of the time grid. guidance: scale (1 is off).
    interval: noise levels t in which guidance acts. timesteps: own grid, falling from at most 1;
    a final 0 may be left out. batch: songs with seeds `seed + item` (codes decide where given).
    velocity_clamp: longest velocity, in lengths of the latents; 0 is off. velocity_ema: share of
    the steps before. retake: 0 is the noise of `seed`, 1 that of `retake_seed` (both `+ item`).
    """

    steps: int | None = None
    shift: float | None = None
    guidance: float | None = None
    interval: tuple[float, float] = (0.0, 1.0)
    timesteps: tuple[float, ...] | None = None
    seed: int = 0
    batch: int = 1
    solver: SolverName = "euler"
    guidance_mode: GuidanceMode = "apg"
    velocity_clamp: float = 0.0
    velocity_ema: float = 0.0
    retake: float = 0.0
    retake_seed: int = 1
    dcw: Wavelet = Wavelet()

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_whole("steps", self.steps, 1, 1000)
        if self.shift is not None:
            check_range("shift", self.shift, 0.01, 100.0)
        if self.guidance is not None:
            check_range("guidance", self.guidance, 0.0, 100.0)
        for end in self.interval:
            check_range("guidance interval", end, 0.0, 1.0)
        check_whole("seed", self.seed, 0, MAX_SEED)
        check_whole("batch", self.batch, 1, MAX_SONGS)
        check_choice("solver", self.solver, SolverName)
        check_choice("guidance_mode", self.guidance_mode, GuidanceMode)
        for name, most in (("velocity_clamp", 100.0), ("velocity_ema", 0.99), ("retake", 1.0)):
            check_range(name, getattr(self, name), 0.0, most)
        check_whole("retake_seed", self.retake_seed, 0, MAX_SEED)


@dataclass(frozen=True, slots=True)
class LoRA:
    """An adapter of the DiT's file, of any kind that `weights.adapters` reads: a file or a folder.

    strength: -MAX_STRENGTH..MAX_STRENGTH; 0 is no adapter.
    """

    path: str
    strength: float = 1.0

    def __post_init__(self) -> None:
        check_text("path of an adapter", self.path)
        check_range("strength of an adapter", self.strength, -MAX_STRENGTH, MAX_STRENGTH)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which files make up a model, and the wishes for how it runs. Light, hashable, picklable.

    Each path is a file or folder in any layout that `weights.layouts` knows; several may be equal
    (all-in-one file, diffusers folder). An empty path means that part is not there. `family` "auto"
    is read from config.json or the file name. `loras` change the weights as they are loaded.
    """

    dit: str = ""  # condition encoder, tokenizer and detokenizer come from the same place
    text_encoder: str = ""
    lm: str = ""
    vae: str = ""
    family: Literal["auto", "turbo", "sft", "base"] = "auto"
    wish: Wish = Wish()
    loras: tuple[LoRA, ...] = ()


def frames_of(seconds: float) -> int:
    """Latent frames that hold `seconds` of audio, rounding up."""
    return math.ceil(round(seconds * FRAME_RATE, 6))


def crop(audio: Audio, seconds: float) -> Audio:
    """The first `seconds` of `audio`."""
    samples = round(seconds * audio.sample_rate)
    return replace(audio, waveform=audio.waveform[..., :samples])


def require_finite(tensor: Tensor, stage: str, cure: str) -> Tensor:
    """`tensor`, or NonFinite naming the stage."""
    if not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise NonFinite(f"{stage}: {bad} of {tensor.numel()} values are NaN or infinite. {cure}")
    return tensor
