"""The widgets that say what a song is, and the outputs that tell it, for every node with words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io

from ..acestep_engine.lm import metadata
from ..acestep_engine.types import MAX_DURATION, Plan, Request
from .sockets import PlanSocket

AUTO = "auto"
SIGNS = {"C": "#", "D": "b #", "E": "b", "F": "#", "G": "b #", "A": "b #", "B": "b"}  # in use
NOTES = sorted(note + sign for note, signs in SIGNS.items() for sign in ("", *signs.split()))
KEYS = [f"{note} {mode}" for note in NOTES for mode in ("major", "minor")]
METERS = ["2", "3", "4", "6"]
LANGUAGES = [code for code in metadata.LANGUAGES if code != "unknown"]

Choice = io.Custom("STRING,COMBO")
"""A text that also goes into the lists of other nodes."""


def caption_input(tooltip: str = "") -> Any:
    return io.String.Input(
        "caption",
        default="",
        multiline=True,
        dynamic_prompts=True,
        placeholder="style, instruments, mood, voice",
        tooltip=tooltip or "What the music is like: style, instruments, mood, voice, production.",
    )


def lyrics_input(tooltip: str = "") -> Any:
    return io.String.Input(
        "lyrics",
        default="",
        multiline=True,
        dynamic_prompts=True,
        placeholder="[Verse]\nthe words to sing\n\n[Chorus]\n...",
        tooltip=tooltip
        or "The words to sing, with tags such as [Verse], [Chorus], [Bridge] on lines of "
        "their own. Empty: the music has no words.",
    )


def duration_input(unset: str) -> Any:
    """`unset` says what 0 means."""
    return io.Float.Input(
        "duration",
        default=0.0,
        min=0.0,
        max=MAX_DURATION,
        step=0.1,
        tooltip=f"Length of the song in seconds. 0: {unset}.",
    )


def instrumental_input(tooltip: str) -> Any:
    return io.Boolean.Input("instrumental", default=False, tooltip=tooltip)


def metadata_inputs(unset: str, lists: tuple[str, ...] = (AUTO,)) -> list[Any]:
    """Tempo, key, meter and language; `unset` says what 0 means, `lists` stand for no value."""
    first = lists[0]
    return [
        io.Int.Input(
            "bpm",
            default=0,
            min=0,
            max=300,
            tooltip=f"Tempo in beats per minute, 30 to 300. 0: {unset}.",
        ),
        io.Combo.Input(
            "keyscale", options=[*lists, *KEYS], default=first, tooltip="Key of the song."
        ),
        io.Combo.Input(
            "timesignature",
            options=[*lists, *METERS],
            default=first,
            tooltip="Beats in a bar: 2 is 2/4, 3 is 3/4, 4 is 4/4, 6 is 6/8.",
        ),
        language_input(lists),
    ]


def language_input(lists: tuple[str, ...] = (AUTO,)) -> Any:
    return io.Combo.Input(
        "language",
        options=[*lists, *LANGUAGES],
        default=lists[0],
        tooltip="Language of the lyrics. Set it where the singing drifts into another one.",
    )


def request_of(widgets: Mapping[str, Any], unset: tuple[str, ...] = (AUTO,)) -> Request:
    """The request that the widgets state; list entries in `unset` state nothing."""
    chosen = {
        name: None if widgets[name] in unset else widgets[name]
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


def song_outputs() -> list[Any]:
    """A plan, and each of its values for other nodes."""
    return [
        PlanSocket.Output("plan", display_name="plan", tooltip="For the code and DiT samplers."),
        io.String.Output("caption", display_name="caption", tooltip="What the music is like."),
        io.String.Output("lyrics", display_name="lyrics", tooltip="The words to sing."),
        io.Int.Output("bpm", display_name="bpm", tooltip="Beats per minute; 0 where not stated."),
        Choice.Output("key", display_name="key", tooltip="Key; empty where not stated."),
        io.Float.Output("duration", display_name="duration", tooltip="Length in seconds."),
        Choice.Output(
            "language", display_name="language", tooltip="Language code; empty where not stated."
        ),
        Choice.Output(
            "timesignature",
            display_name="timesignature",
            tooltip="Beats in a bar, as 4; empty where not stated.",
        ),
    ]


def song_output(plan: Plan) -> io.NodeOutput:
    """The values of `song_outputs`."""
    stated = plan.metadata
    return io.NodeOutput(
        plan,
        plan.dit_caption,
        plan.lyrics,
        stated.bpm or 0,
        stated.keyscale or "",
        float(plan.duration),
        stated.language or "",
        stated.timesignature or "",
    )
