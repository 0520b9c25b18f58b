"""The tasks: what the DiT Sampler is to do with a sound that exists. They run no model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast, get_args

from comfy_api.latest import io

from ..acestep_engine.errors import InvalidRequest
from ..acestep_engine.remix import (
    TRACKS,
    Complete,
    Cover,
    Extract,
    Lego,
    Region,
    Repaint,
    RepaintMode,
    Source,
    Track,
    read_region,
)
from ..acestep_engine.types import MAX_DURATION
from .host import bordered
from .sockets import TaskSocket, audio_from, latents_from

CODES, LATENTS = "audio codes", "latents"
ANY = "any"
BASE = " Needs a base model."
MODES = list(get_args(RepaintMode))


class CoverTask(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "Cover",
            "A recording played anew: its melody, rhythm and structure in the style of your words.",
            ["remix", "style transfer", "audio to audio", "img2img"],
            [
                _share(
                    "strength",
                    1.0,
                    "Share of the steps that follow the recording, from the first one on. Less "
                    "leaves the rest of them to your words alone.",
                ),
                _share(
                    "noise_strength",
                    0.0,
                    "How much of the recording's own sound the first step starts from. 0: none.",
                    rare=True,
                ),
                io.Combo.Input(
                    "follow",
                    options=[CODES, LATENTS],
                    default=CODES,
                    advanced=True,
                    tooltip="audio codes: what the composition is, as the model was trained. "
                    "latents: every detail of the sound.",
                ),
            ],
        )

    @classmethod
    @bordered
    def execute(
        cls,
        strength: float,
        noise_strength: float,
        follow: str,
        audio: Mapping[str, Any] | None = None,
        latent: Mapping[str, Any] | None = None,
    ) -> io.NodeOutput:
        source = _source(audio, latent)
        return io.NodeOutput(Cover(source, strength, noise_strength, follow == LATENTS))


class RepaintTask(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "Repaint",
            "Parts of a recording made anew, or a recording made longer; the rest stays. Splice "
            "Audio after the decode makes the rest the original, bit for bit.",
            ["inpaint", "edit", "extend", "outpaint", "replace"],
            [
                _place(
                    "start",
                    -MAX_DURATION,
                    "Second where the new part begins. Below 0 it comes before the recording.",
                ),
                _end_input(),
                io.String.Input(
                    "regions",
                    default="",
                    placeholder="4-6, 12.5-20, 30-",
                    tooltip="Several parts at once, in seconds. They take the place of start and "
                    "end. An open end reaches to the end of the recording.",
                ),
                io.Combo.Input(
                    "mode",
                    options=MODES,
                    default="balanced",
                    tooltip="How the rest is held. conservative: at every step. balanced: by "
                    "strength. aggressive: not at all, so that the new part decides.",
                ),
                _share("strength", 0.5, "For balanced: 0 holds the rest most, 1 least.", rare=True),
            ],
        )

    @classmethod
    @bordered
    def execute(
        cls,
        start: float,
        end: float,
        regions: str,
        mode: str,
        strength: float,
        audio: Mapping[str, Any] | None = None,
        latent: Mapping[str, Any] | None = None,
    ) -> io.NodeOutput:
        places = _regions(start, end, regions)
        source = _source(audio, latent)
        return io.NodeOutput(Repaint(source, places, cast(RepaintMode, mode), strength))


class ExtractTask(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "Extract",
            "Single tracks out of a recording, such as the voice. Several are rendered one after "
            "the other." + BASE,
            ["stem separation", "isolate", "karaoke", "acapella"],
            [_tracks_input("vocals, drums, bass", "The tracks to take out")],
            [
                io.String.Output(
                    "track", display_name="track", is_output_list=True, tooltip="Their names."
                )
            ],
            many=True,
        )

    @classmethod
    @bordered
    def execute(
        cls,
        tracks: str,
        audio: Mapping[str, Any] | None = None,
        latent: Mapping[str, Any] | None = None,
    ) -> io.NodeOutput:
        source, names = _source(audio, latent), _tracks(tracks)
        if not names:
            return io.NodeOutput([Extract(source)], [ANY])
        return io.NodeOutput([Extract(source, name) for name in names], list(names))


class LegoTask(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "Lego",
            "A new track that goes with a recording, all along or in a part of it." + BASE,
            ["add instrument", "accompaniment", "layer", "stem"],
            [
                io.Combo.Input(
                    "track",
                    options=[ANY, *TRACKS],
                    default="drums",
                    tooltip="The track to make.",
                ),
                _place("start", 0.0, "Second where the track begins."),
                _end_input(),
            ],
        )

    @classmethod
    @bordered
    def execute(
        cls,
        track: str,
        start: float,
        end: float,
        audio: Mapping[str, Any] | None = None,
        latent: Mapping[str, Any] | None = None,
    ) -> io.NodeOutput:
        name = None if track == ANY else cast(Track, track)
        whole = start == 0.0 and end < 0
        places = () if whole else _regions(start, end, "")
        return io.NodeOutput(Lego(_source(audio, latent), name, places))


class CompleteTask(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "Complete",
            "A recording of a few tracks, filled up with others." + BASE,
            ["accompaniment", "arrange", "add instruments", "backing"],
            [_tracks_input("drums, bass", "The tracks to add")],
        )

    @classmethod
    @bordered
    def execute(
        cls,
        tracks: str,
        audio: Mapping[str, Any] | None = None,
        latent: Mapping[str, Any] | None = None,
    ) -> io.NodeOutput:
        return io.NodeOutput(Complete(_source(audio, latent), _tracks(tracks)))


def _schema(
    name: str,
    description: str,
    aliases: list[str],
    widgets: list[Any],
    more_outputs: list[Any] | None = None,
    many: bool = False,
) -> io.Schema:
    """A task node: its widgets, then a recording or latents."""
    output = TaskSocket.Output(
        "task", display_name="task", is_output_list=many, tooltip="For the DiT Sampler."
    )
    return io.Schema(
        node_id=f"ACEStep{name}",
        display_name=f"ACE-Step {name}",
        category="ACE-Step/tasks",
        description=description,
        search_aliases=["music", *aliases, "ace step"],
        inputs=[*widgets, *_source_inputs()],
        outputs=[output, *(more_outputs or [])],
    )


def _source_inputs() -> list[Any]:
    return [
        io.Audio.Input(
            "audio",
            optional=True,
            tooltip="The recording. It is encoded when the DiT Sampler first needs it.",
        ),
        io.Latent.Input(
            "latent",
            optional=True,
            tooltip="The recording as latents of a sampler or of VAE Encode (Tiled), used as they "
            "are. Connect this or audio.",
        ),
    ]


def _share(name: str, default: float, tooltip: str, rare: bool = False) -> Any:
    return io.Float.Input(
        name, default=default, min=0.0, max=1.0, step=0.01, advanced=rare, tooltip=tooltip
    )


def _place(name: str, least: float, tooltip: str) -> Any:
    return io.Float.Input(
        name, default=0.0, min=least, max=MAX_DURATION, step=0.01, tooltip=tooltip
    )


def _end_input() -> Any:
    return io.Float.Input(
        "end",
        default=-1.0,
        min=-1.0,
        max=MAX_DURATION,
        step=0.01,
        tooltip="Second where the new part ends; one behind the end makes a repaint longer. -1: "
        "the end of the recording.",
    )


def _tracks_input(default: str, what: str) -> Any:
    return io.String.Input(
        "tracks",
        default=default,
        placeholder="vocals, drums",
        tooltip=f"{what}, separated by commas, of: {', '.join(TRACKS)}. Empty: the model decides.",
    )


def _source(audio: Mapping[str, Any] | None, latent: Mapping[str, Any] | None) -> Source:
    if audio is not None and latent is not None:
        raise InvalidRequest("Both audio and latent are connected. Disconnect one of them.")
    if audio is not None:
        return audio_from(audio)
    if latent is not None:
        return latents_from(latent)
    raise InvalidRequest(
        "There is no recording to work on. Connect one to audio, or its latents to latent."
    )


def _regions(start: float, end: float, text: str) -> tuple[Region, ...]:
    if text.strip():
        return tuple(read_region(part) for part in re.split(r"[,\n]", text) if part.strip())
    return (Region(start, None if end < 0 else end),)


def _tracks(text: str) -> tuple[Track, ...]:
    """The names in `text`, each once; `remix` refuses unknown ones."""
    names = (part.strip().lower().replace(" ", "_") for part in re.split(r"[,\n]", text))
    return cast(tuple[Track, ...], tuple(dict.fromkeys(name for name in names if name)))
