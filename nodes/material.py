"""Codes Edit and Codes From Audio: compositions as material. They know no level and no tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io

from ..acestep_engine.codes import crossfade, cut, join, mix, position_of, repeat, reverse
from ..acestep_engine.errors import InvalidRequest
from ..acestep_engine.types import CODE_RATE, FRAME_RATE, MAX_DURATION, Codes
from ..acestep_engine.vae.level import audible
from .audio import MIB, memory_input, tile_input
from .handle import ModelHandle
from .host import bordered, engine
from .sockets import CodesSocket, ModelSocket, audio_from

OPERATIONS = ("slice", "join", "repeat", "reverse", "cross-fade", "mix")
OF_TWO = ("join", "cross-fade", "mix")


class CodesEdit(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepCodesEdit",
            display_name="ACE-Step Codes Edit",
            category="ACE-Step/codes",
            description="Cuts, joins, repeats, reverses and blends compositions before they are "
            "played.",
            search_aliases=["music", "cut", "loop", "mashup", "crossfade", "mix", "ace step codes"],
            inputs=_edit_inputs(),
            outputs=[
                CodesSocket.Output("codes", display_name="codes", tooltip="For the DiT sampler."),
                io.Float.Output(
                    "duration", display_name="duration", tooltip="Seconds of the first song."
                ),
            ],
        )

    @classmethod
    @bordered
    def execute(
        cls, codes: Codes, operation: str, second: Codes | None = None, **widgets: Any
    ) -> io.NodeOutput:
        if operation in OF_TWO and second is None:
            raise InvalidRequest(
                f"The operation '{operation}' takes two songs. Connect the other one to 'second'."
            )
        edited = _edited(operation, codes, second or codes, widgets)
        return io.NodeOutput(edited, len(edited.items[0]) / CODE_RATE)


class CodesFromAudio(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepCodesFromAudio",
            display_name="ACE-Step Codes From Audio",
            category="ACE-Step/codes",
            description="The composition of a recording as audio codes, five a second: melody, "
            "rhythm and structure, to be played anew, edited or understood.",
            search_aliases=["music", "audio to codes", "tokenize", "cover", "remix", "ace step"],
            inputs=[
                ModelSocket.Input("model", tooltip="From Load ACE-Step."),
                io.Audio.Input("audio", tooltip="Any sound; it is brought to 48 kHz stereo."),
                tile_input(),
                memory_input(),
            ],
            outputs=[
                CodesSocket.Output(
                    "codes", display_name="codes", tooltip="For the DiT sampler and Codes Edit."
                ),
                io.Float.Output(
                    "duration", display_name="duration", tooltip="Seconds of the recording."
                ),
            ],
        )

    @classmethod
    @bordered
    def execute(
        cls, model: ModelHandle, audio: Mapping[str, Any], tile: float, max_memory: int = 0
    ) -> io.NodeOutput:
        sound = audio_from(audio)
        limits = round(tile * FRAME_RATE), max_memory * MIB
        latents = engine().encode(model.spec, sound, *limits)
        return io.NodeOutput(engine().tokenize(model.spec, audible(latents)), sound.seconds)


def _edit_inputs() -> list[Any]:
    return [
        CodesSocket.Input("codes", tooltip="The composition to change, of one or more songs."),
        io.Combo.Input(
            "operation",
            options=list(OPERATIONS),
            default="slice",
            tooltip="slice: from start to end. join: the second song after the first. repeat: as "
            "many times as times says. reverse: last code first. cross-fade: the first song until "
            "start, the second from end on. mix: both at once.",
        ),
        _place_input("start", 0.0, "Where slice and cross-fade begin, in seconds."),
        _place_input("end", -1.0, "Where they end, in seconds. -1: the end of the shorter song."),
        io.Int.Input(
            "times", default=2, min=1, max=100, tooltip="How many times repeat plays the song."
        ),
        io.Float.Input(
            "ratio",
            default=0.5,
            min=0.0,
            max=1.0,
            step=0.01,
            tooltip="How much of the second song a mix has: 0 only the first, 1 only the second.",
        ),
        io.Combo.Input(
            "unit",
            options=["seconds", "codes"],
            default="seconds",
            advanced=True,
            tooltip="How start and end count. seconds: to the nearest code, five a second. codes: "
            "the number of the code, from 0.",
        ),
        CodesSocket.Input(
            "second", optional=True, tooltip="The other song, for join, cross-fade and mix."
        ),
    ]


def _place_input(name: str, default: float, tooltip: str) -> Any:
    most = MAX_DURATION * CODE_RATE  # in codes
    return io.Float.Input(
        name, default=default, min=min(default, 0.0), max=most, step=0.2, tooltip=tooltip
    )


def _edited(operation: str, codes: Codes, second: Codes, widgets: Mapping[str, Any]) -> Codes:
    scale = 1 if widgets["unit"] == "seconds" else CODE_RATE
    start, end = (position_of(widgets[name] / scale) for name in ("start", "end"))
    last = None if end < 0 else end
    if operation == "slice":
        return cut(codes, start, last)
    if operation == "join":
        return join(codes, second)
    if operation == "repeat":
        return repeat(codes, widgets["times"])
    if operation == "reverse":
        return reverse(codes)
    if operation == "cross-fade":
        return crossfade(codes, second, start, last)
    return mix(codes, second, widgets["ratio"])
