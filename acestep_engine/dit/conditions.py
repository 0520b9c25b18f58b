"""Everything a render is conditioned on, gathered once per song and reused for every seed.

Built from backends by their Protocols, one song at a time, so that no padding ever exists and a
song in a batch equals the same song alone. Knows no weights and no devices.
Dimension key: B songs (1), L tokens, D width, T latent frames, C channels, N references or codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends.base import AudioDetokenizer, AudioTokenizer, ConditionEncoder, TextEncoder
from ..errors import InvalidRequest
from ..types import FRAMES_PER_CODE, Plan
from . import tasks, text
from .course import Course
from .silence import take

TIMBRE_FRAMES = 750  # 30 s, the length of every timbre reference


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """The prompt and the lyrics as the text encoder gives them, each (1, L, D)."""

    text_BLD: Tensor
    lyric_BLD: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """What the velocity needs: a sequence to attend to, the one of "no prompt", and the context."""

    encoder_BLD: Tensor  # (1, L, D)
    null_BLD: Tensor  # (1, 1, D): all its positions are equal, so one says it all
    context_BTC: Tensor  # (1, T, 128)
    instruction: str = ""
    course: Course = Course()
    free: Conditions | None = None
    """The same song without its source, for a course that follows it for a part of the steps."""

    @property
    def frames(self) -> int:
        return self.context_BTC.shape[1]


def paint(
    detokenizer: AudioDetokenizer | None,
    codes: Sequence[int] | None,
    seconds: int | None,
    silence_NC: Tensor,
) -> tasks.Canvas:
    """The canvas of a new song; without codes the detokenizer is not needed."""
    hints_BTC = None if codes is None else hints(detokenizer, codes)
    return tasks.text2music(silence_NC, seconds, hints_BTC)


def hints(detokenizer: AudioDetokenizer | None, codes: Sequence[int]) -> Tensor:
    """What the DiT reads of the codes of one song, (1, 5 N, 64)."""
    if not codes:
        raise InvalidRequest(
            "The song has an empty list of codes. Compose codes for it, or leave the codes away."
        )
    if detokenizer is None:
        raise InvalidRequest(
            f"The song has {len(codes)} codes, but the model has no detokenizer to read them. "
            "Load a checkpoint that has one, or leave the codes away."
        )
    return detokenizer.detokenize(torch.tensor([list(codes)]))


def echo(
    tokenizer: AudioTokenizer,
    detokenizer: AudioDetokenizer,
    latents_BTC: Tensor,
    silence_NC: Tensor,
) -> Tensor:
    """What audio codes keep of latents, (1, T, 64): the hints of a cover."""
    frames = latents_BTC.shape[1]
    whole = -(-frames // FRAMES_PER_CODE) * FRAMES_PER_CODE
    indices_BN = tokenizer.tokenize(tasks.fill(latents_BTC, silence_NC, whole))
    return detokenizer.detokenize(indices_BN)[:, :frames]


def read(encoder: TextEncoder, encode: text.Encode, plan: Plan, instruction: str) -> Words:
    """The words of `plan` under an instruction of `text`.

    Lyrics are looked up only: the condition encoder has a tower of its own for them.
    """
    text_BL = torch.tensor([text.text_ids(encode, plan, instruction)])
    lyric_BL = torch.tensor([text.lyric_ids(encode, plan)])
    return Words(encoder.states(text_BL), encoder.embed(lyric_BL))


def reference(latents_BTC: Tensor) -> Tensor:
    """Timbre references (N, 750, 64) from latents of N clips of any length.

    A short clip is repeated; of a long one three windows of ten seconds count, from its front, its
    middle and its end. The windows are fixed, so that the same clip always gives the same timbre.
    """
    frames = latents_BTC.shape[1]
    if frames == 0:
        raise InvalidRequest("The timbre reference has no frames. Encode a sound with some length.")
    if frames <= TIMBRE_FRAMES:
        repeats = -(-TIMBRE_FRAMES // frames)
        return latents_BTC.repeat(1, repeats, 1)[:, :TIMBRE_FRAMES]
    window = TIMBRE_FRAMES // 3
    starts = (0, (frames - window) // 2, frames - window)
    return torch.cat([latents_BTC[:, start : start + window] for start in starts], dim=1)


def build(
    encoder: ConditionEncoder,
    words: Words,
    canvas: tasks.Canvas,
    silence_NC: Tensor,
    timbre_NTC: Tensor | None = None,
) -> Conditions:
    """Conditions of one song; without a timbre reference (N, 750, 64), silence takes its place."""
    if timbre_NTC is None:
        timbre_NTC = take(silence_NC, TIMBRE_FRAMES)
    encoder_BLD = encoder.encode(words.text_BLD, words.lyric_BLD, timbre_NTC)
    return Conditions(
        encoder_BLD, encoder.null(), canvas.context_BTC, canvas.instruction, canvas.course
    )
