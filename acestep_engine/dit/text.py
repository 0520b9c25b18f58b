"""What the diffusion half reads: the text prompt and the lyric prompt as token ids.

Knows the wording the checkpoints were trained on, but no tokenizer: it is given `encode`, which
never produces control tokens, so that a caption saying `<|endoftext|>` stays text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..types import Plan

logger = logging.getLogger(__name__)

Encode = Callable[[str], list[int]]

END = 151_643  # <|endoftext|> of the Qwen3 vocabulary
TEXT_TOKENS = 256  # the longest sequences seen in training, end token included
LYRIC_TOKENS = 2_048
ABSENT = "N/A"

INSTRUCTIONS: dict[str, str] = {
    "text2music": "Fill the audio semantic mask based on the given conditions:",
    "cover": "Generate audio semantic tokens based on the given conditions:",
    "repaint": "Repaint the mask area based on the given conditions:",
}


def extract_instruction(track: str | None) -> str:
    """What the DiT is told to take out of a source."""
    return f"Extract the {_of(track)}track from the audio:"


def lego_instruction(track: str | None) -> str:
    """What the DiT is told to add beside a source."""
    return f"Generate the {_of(track)}track based on the audio context:"


def complete_instruction(tracks: Sequence[str]) -> str:
    """What the DiT is told to add to a source."""
    listed = " | ".join(track.upper() for track in tracks)
    return f"Complete the input track with {listed}:" if listed else "Complete the input track:"


def _of(track: str | None) -> str:
    return f"{track.upper()} " if track else ""


def text_ids(encode: Encode, plan: Plan, instruction: str) -> list[int]:
    """Token ids of the text prompt, at most TEXT_TOKENS."""
    ids = [*encode(text_prompt(plan, instruction)), END, *encode("\n")]
    return _finish(
        ids, TEXT_TOKENS, "The text prompt", "Its metadata come last: shorten the caption."
    )


def lyric_ids(encode: Encode, plan: Plan) -> list[int]:
    """Token ids of the lyric prompt, at most LYRIC_TOKENS."""
    ids = [*encode(lyric_prompt(plan)), END]
    return _finish(
        ids, LYRIC_TOKENS, "The lyric prompt", "The last words are lost: shorten the lyrics."
    )


def text_prompt(plan: Plan, instruction: str) -> str:
    """The text prompt up to its first end token."""
    if not instruction.endswith(":"):
        instruction += ":"
    metadata = plan.metadata
    return (
        f"# Instruction\n{instruction}\n\n"
        f"# Caption\n{_bare_caption(plan.dit_caption)}\n\n"
        f"# Metas\n"
        f"- bpm: {metadata.bpm or ABSENT}\n"
        f"- timesignature: {metadata.timesignature or ABSENT}\n"
        f"- keyscale: {metadata.keyscale or ABSENT}\n"
        f"- duration: {plan.whole_seconds} seconds\n"
    )


def lyric_prompt(plan: Plan) -> str:
    """The lyric prompt up to its first end token; the lyrics are taken as they are."""
    return f"# Languages\n{plan.metadata.language or 'unknown'}\n\n# Lyric\n{plan.lyrics}"


def _bare_caption(caption: str) -> str:
    """`caption`, or the caption inside it where somebody pasted a complete prompt."""
    if "# Instruction" not in caption or "# Caption" not in caption:
        return caption
    return caption.split("# Caption", 1)[1].split("# Metas", 1)[0].strip()


def _finish(ids: list[int], limit: int, name: str, cure: str) -> list[int]:
    """`ids` cut to make room for the closing end token, which the text encoder relies on."""
    excess = len(ids) + 1 - limit
    if excess > 0:
        logger.warning(
            "%s has %d tokens but the model reads %d: the last %d are cut. %s",
            name,
            len(ids) + 1,
            limit,
            excess,
            cure,
        )
    return [*ids[: limit - 1], END]
