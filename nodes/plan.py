"""CoT Planner: words in, a song on paper out. It knows neither prompts nor grammar."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..acestep_engine.lm import metadata
from ..acestep_engine.types import Plan, PlanOptions
from .handle import ModelHandle
from .host import bordered, engine
from .lm_widgets import order_input, sampling_inputs, sampling_of, seed_input
from .sockets import ModelSocket, PlanSocket
from .song_widgets import (
    caption_input,
    duration_input,
    instrumental_input,
    lyrics_input,
    metadata_inputs,
    request_of,
)


class CoTPlanner(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepCoTPlanner",
            display_name="ACE-Step CoT Planner",
            category="ACE-Step/planning",
            description="Thinks a song through before a note is played: tempo, key, meter, length, "
            "language and a fuller description. Whatever you set yourself is kept.",
            search_aliases=[
                "music",
                "song",
                "lyrics",
                "caption",
                "metadata",
                "bpm",
                "ace step plan",
            ],
            inputs=[
                *_word_inputs(),
                *metadata_inputs("the planner decides"),
                *_thinking_inputs(),
                *sampling_inputs(),
                order_input(),
            ],
            outputs=_outputs(),
        )

    @classmethod
    @bordered
    def execute(cls, model: ModelHandle, **widgets: Any) -> io.NodeOutput:
        options = PlanOptions(
            think=widgets["think"],
            rewrite_caption=widgets["rewrite_caption"],
            detect_language=widgets["detect_language"],
            sampling=sampling_of(widgets),
        )
        return _output_of(engine().plan(model.spec, request_of(widgets), options))


def _word_inputs() -> list[Any]:
    return [
        ModelSocket.Input("model", tooltip="From Load ACE-Step."),
        caption_input(),
        lyrics_input(),
        duration_input("the planner decides"),
        seed_input("the plan"),
        instrumental_input("Music without a voice, whatever the lyrics box says."),
        io.Boolean.Input(
            "think",
            default=True,
            tooltip="Let the language model fill what you leave automatic. Off, or with no "
            "language model loaded: only your own words and values go on.",
        ),
    ]


def _thinking_inputs() -> list[Any]:
    return [
        io.Boolean.Input(
            "rewrite_caption",
            default=True,
            advanced=True,
            tooltip="Let the planner write a fuller caption. Off: yours is used word for word.",
        ),
        io.Boolean.Input(
            "detect_language",
            default=True,
            advanced=True,
            tooltip="Let the planner name the language of the lyrics where you leave it automatic.",
        ),
    ]


def _outputs() -> list[Any]:
    return [
        PlanSocket.Output("plan", display_name="plan", tooltip="For the code and DiT samplers."),
        io.String.Output("text", display_name="text", tooltip="The plan as text, to read or save."),
        io.Int.Output("bpm", display_name="bpm", tooltip="Beats per minute; 0 where not stated."),
        io.String.Output("key", display_name="key", tooltip="Key; empty where not stated."),
        io.Float.Output("duration", display_name="duration", tooltip="Length in seconds."),
    ]


def _output_of(plan: Plan) -> io.NodeOutput:
    stated = plan.metadata
    text = metadata.dump(stated)
    return io.NodeOutput(plan, text, stated.bpm or 0, stated.keyscale or "", float(plan.duration))
