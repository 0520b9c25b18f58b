"""CoT Planner: words in, a song on paper out. It knows neither prompts nor grammar."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..acestep_engine.lm import metadata
from ..acestep_engine.types import MAX_DURATION, Plan, PlanOptions, Request
from .handle import ModelHandle
from .host import bordered, engine
from .lm_widgets import sampling_inputs, sampling_of, seed_input
from .sockets import ModelSocket, PlanSocket

AUTO = "auto"
SIGNS = {"C": "#", "D": "b #", "E": "b", "F": "#", "G": "b #", "A": "b #", "B": "b"}  # in use
NOTES = sorted(note + sign for note, signs in SIGNS.items() for sign in ("", *signs.split()))
KEYS = [f"{note} {mode}" for note in NOTES for mode in ("major", "minor")]
METERS = ["2", "3", "4", "6"]
LANGUAGES = [code for code in metadata.LANGUAGES if code != "unknown"]


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
            inputs=[*_word_inputs(), *_metadata_inputs(), *_thinking_inputs(), *sampling_inputs()],
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
        return _output_of(engine().plan(model.spec, _request_of(widgets), options))


def _word_inputs() -> list[Any]:
    return [
        ModelSocket.Input("model", tooltip="From Load ACE-Step."),
        io.String.Input(
            "caption",
            default="",
            multiline=True,
            dynamic_prompts=True,
            placeholder="style, instruments, mood, voice",
            tooltip="What the music is like: style, instruments, mood, voice, production.",
        ),
        io.String.Input(
            "lyrics",
            default="",
            multiline=True,
            dynamic_prompts=True,
            placeholder="[Verse]\nthe words to sing\n\n[Chorus]\n...",
            tooltip="The words to sing, with tags such as [Verse], [Chorus], [Bridge] on lines of "
            "their own. Empty: the music has no words.",
        ),
        io.Float.Input(
            "duration",
            default=0.0,
            min=0.0,
            max=MAX_DURATION,
            step=0.1,
            tooltip="Length of the song in seconds. 0: the planner decides.",
        ),
        seed_input("the plan"),
        io.Boolean.Input(
            "instrumental",
            default=False,
            tooltip="Music without a voice, whatever the lyrics box says.",
        ),
        io.Boolean.Input(
            "think",
            default=True,
            tooltip="Let the language model fill what you leave automatic. Off, or with no "
            "language model loaded: only your own words and values go on.",
        ),
    ]


def _metadata_inputs() -> list[Any]:
    return [
        io.Int.Input(
            "bpm",
            default=0,
            min=0,
            max=300,
            tooltip="Tempo in beats per minute, 30 to 300. 0: the planner decides.",
        ),
        io.Combo.Input("keyscale", options=[AUTO, *KEYS], default=AUTO, tooltip="Key of the song."),
        io.Combo.Input(
            "timesignature",
            options=[AUTO, *METERS],
            default=AUTO,
            tooltip="Beats in a bar: 2 is 2/4, 3 is 3/4, 4 is 4/4, 6 is 6/8.",
        ),
        io.Combo.Input(
            "language",
            options=[AUTO, *LANGUAGES],
            default=AUTO,
            tooltip="Language of the lyrics. Set it where the singing drifts into another one.",
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


def _request_of(widgets: dict[str, Any]) -> Request:
    chosen = {
        name: None if widgets[name] == AUTO else widgets[name]
        for name in ("keyscale", "timesignature", "language")
    }
    return Request(
        caption=widgets["caption"],
        lyrics=widgets["lyrics"],
        duration=widgets["duration"] or None,
        bpm=widgets["bpm"] or None,
        instrumental=widgets["instrumental"],
        **chosen,
    )


def _output_of(plan: Plan) -> io.NodeOutput:
    stated = plan.metadata
    text = metadata.dump(stated)
    return io.NodeOutput(plan, text, stated.bpm or 0, stated.keyscale or "", float(plan.duration))
