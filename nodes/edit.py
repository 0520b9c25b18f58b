"""Plan Edit and Codes Text: what travels between the stages, changed by hand. They run no model."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..acestep_engine.errors import InvalidRequest
from ..acestep_engine.lm.notation import NOTATIONS, read_codes, write_codes
from ..acestep_engine.lm.revise import revise
from ..acestep_engine.types import CODE_RATE, Codes, Plan
from .host import bordered
from .sockets import CodesSocket, PlanSocket
from .song_widgets import (
    caption_input,
    duration_input,
    instrumental_input,
    lyrics_input,
    metadata_inputs,
    request_of,
    song_output,
    song_outputs,
)

KEEP, CLEAR = "keep", "clear"
LISTS = ("keyscale", "timesignature", "language")


class PlanEdit(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        kept = "what the plan says"
        return io.Schema(
            node_id="ACEStepPlanEdit",
            display_name="ACE-Step Plan Edit",
            category="ACE-Step/planning",
            description="Changes single values of a plan, and hands all of them out. What you "
            "leave empty, at 0 or on keep stays.",
            search_aliases=["music", "song", "change plan", "metadata", "bpm", "ace step"],
            inputs=[
                PlanSocket.Input("plan", tooltip="From the CoT Planner or the Song Writer."),
                caption_input("New description, for planner and sound alike. Empty: as it is."),
                lyrics_input("New words to sing. Empty: as they are."),
                duration_input(kept),
                instrumental_input("Take the words away: music without a voice."),
                *metadata_inputs(kept, (KEEP, CLEAR)),
            ],
            outputs=song_outputs(),
        )

    @classmethod
    @bordered
    def execute(cls, plan: Plan, **widgets: Any) -> io.NodeOutput:
        change = request_of(widgets, (KEEP, CLEAR))
        return song_output(revise(plan, change, [n for n in LISTS if widgets[n] == CLEAR]))


class CodesText(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepCodesText",
            display_name="ACE-Step Codes Text",
            category="ACE-Step/codes",
            description="Audio codes to text, to keep, edit or share, and text to audio codes.",
            search_aliases=["music", "audio tokens", "save codes", "paste codes", "ace step"],
            inputs=[
                io.String.Input(
                    "text",
                    default="",
                    multiline=True,
                    placeholder="<|audio_code_123|><|audio_code_45|>... or 123, 45, ...",
                    tooltip="Codes to read: tokens or numbers, an empty line between songs. Where "
                    "it is filled, connected codes are not used.",
                ),
                io.Combo.Input(
                    "notation",
                    options=list(NOTATIONS),
                    default="tokens",
                    tooltip="How codes are written. tokens: as the language model has them. "
                    "numbers: with commas between.",
                ),
                CodesSocket.Input("codes", optional=True, tooltip="Codes to write as text."),
            ],
            outputs=[
                CodesSocket.Output("codes", display_name="codes", tooltip="For the DiT sampler."),
                io.String.Output("text", display_name="text", tooltip="The codes as text."),
                io.Float.Output(
                    "duration", display_name="duration", tooltip="Seconds of the first song."
                ),
            ],
        )

    @classmethod
    @bordered
    def execute(cls, text: str, notation: Any, codes: Codes | None = None) -> io.NodeOutput:
        if not text.strip() and codes is None:
            raise InvalidRequest("There are no codes. Connect some, or write them into the box.")
        chosen = read_codes(text) if text.strip() or codes is None else codes
        seconds = len(chosen.items[0]) / CODE_RATE
        return io.NodeOutput(chosen, write_codes(chosen, notation), seconds)
