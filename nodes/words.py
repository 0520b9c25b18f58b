"""Song Writer and Lyric Formatter: songs on paper, from an idea or from a draft. They know neither
prompts nor grammar."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..acestep_engine.types import PlanOptions
from .handle import ModelHandle
from .host import bordered, engine
from .lm_widgets import answer_options_of, length_input, order_input, sampling_inputs, seed_input
from .sockets import ModelSocket
from .song_widgets import (
    AUTO,
    caption_input,
    duration_input,
    instrumental_input,
    language_input,
    lyrics_input,
    metadata_inputs,
    request_of,
    song_output,
    song_outputs,
)

AS_WRITTEN = PlanOptions(think=False)
UNSET = "the language model decides"


class SongWriter(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepSongWriter",
            display_name="ACE-Step Song Writer",
            category="ACE-Step/planning",
            description="One line becomes a whole song on paper: description, lyrics, tempo, key, "
            "meter, length and language.",
            search_aliases=["music", "song", "lyrics generator", "idea", "inspire", "ace step"],
            inputs=[*_idea_inputs(), *sampling_inputs(), length_input(), order_input()],
            outputs=song_outputs(),
        )

    @classmethod
    @bordered
    def execute(cls, model: ModelHandle, **widgets: Any) -> io.NodeOutput:
        language = None if widgets["language"] == AUTO else widgets["language"]
        options = answer_options_of(widgets)
        request = engine().write(
            model.spec, widgets["query"], widgets["instrumental"], language, options
        )
        return song_output(engine().plan(model.spec, request, AS_WRITTEN))


class LyricFormatter(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepLyricFormatter",
            display_name="ACE-Step Lyric Formatter",
            category="ACE-Step/planning",
            description="Brings a rough description and rough lyrics into the form that the models "
            "know best, and fills in what is missing. Values you set are kept.",
            search_aliases=["music", "song", "format lyrics", "rewrite", "enhance", "ace step"],
            inputs=[*_draft_inputs(), *sampling_inputs(), length_input(), order_input()],
            outputs=song_outputs(),
        )

    @classmethod
    @bordered
    def execute(cls, model: ModelHandle, **widgets: Any) -> io.NodeOutput:
        options = answer_options_of(widgets)
        request = engine().rewrite(model.spec, request_of(widgets), options)
        return song_output(engine().plan(model.spec, request, AS_WRITTEN))


def _model_input() -> Any:
    return ModelSocket.Input(
        "model", tooltip="From Load ACE-Step, with a language model chosen there."
    )


def _idea_inputs() -> list[Any]:
    return [
        _model_input(),
        io.String.Input(
            "query",
            default="",
            multiline=True,
            dynamic_prompts=True,
            placeholder="a slow song about a lighthouse",
            tooltip="What the song is about, in a few words. Empty: a surprise.",
        ),
        seed_input("the song that is written"),
        instrumental_input("Music without a voice: no lyrics are written."),
        language_input(),
    ]


def _draft_inputs() -> list[Any]:
    return [
        _model_input(),
        caption_input(),
        lyrics_input("Your words, in any form. Empty: the music has no words."),
        duration_input(UNSET),
        seed_input("the rewriting"),
        instrumental_input("Music without a voice, whatever the lyrics box says."),
        *metadata_inputs(UNSET),
    ]
