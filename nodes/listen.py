"""Understand and Score: the language model listens to audio codes. They know no token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io

from ..acestep_engine.errors import InvalidRequest
from ..acestep_engine.lm.modes import HEARING
from ..acestep_engine.types import MAX_SONGS, Codes, Plan, PlanOptions, Score
from .handle import ModelHandle
from .host import bordered, engine
from .lm_widgets import answer_options_of, length_input, order_input, sampling_inputs, seed_input
from .sockets import CodesSocket, ModelSocket, PlanSocket, latents_from
from .song_widgets import song_output, song_outputs

WITH_LM = "From Load ACE-Step, with a language model chosen there."


class Understand(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepUnderstand",
            display_name="ACE-Step Understand",
            category="ACE-Step/understanding",
            description="Listens to a song and writes it down: description, lyrics, tempo, key, "
            "meter and language. From encoded sound or from audio codes.",
            search_aliases=["music", "transcribe", "caption audio", "bpm", "key", "ace step"],
            inputs=[*_listening_inputs(), length_input(), *_heard_inputs(), order_input()],
            outputs=song_outputs(),
        )

    @classmethod
    @bordered
    def execute(
        cls,
        model: ModelHandle,
        song: int,
        latent: Mapping[str, Any] | None = None,
        codes: Codes | None = None,
        **widgets: Any,
    ) -> io.NodeOutput:
        heard = _one(codes or _codes_of(model, latent), song)
        (request,) = engine().understand(model.spec, heard, answer_options_of(widgets))
        return song_output(engine().plan(model.spec, request, PlanOptions(think=False)))


class ScoreCodes(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepScore",
            display_name="ACE-Step Score",
            category="ACE-Step/understanding",
            description="How well each song of a batch of codes carries its plan, by the language "
            "model's own ear, and the best of them. Compose several, render one.",
            search_aliases=["music", "rank", "best of", "quality", "reward", "ace step"],
            inputs=[
                ModelSocket.Input("model", tooltip=WITH_LM),
                PlanSocket.Input("plan", tooltip="The plan that the codes were made from."),
                CodesSocket.Input("codes", tooltip="Codes of one or more songs."),
            ],
            outputs=[
                CodesSocket.Output("codes", display_name="codes", tooltip="The best song alone."),
                io.Float.Output(
                    "reward", display_name="reward", tooltip="Its score from 0 to 1, all parts."
                ),
                io.String.Output(
                    "report", display_name="report", tooltip="The scores of all songs, to read."
                ),
            ],
        )

    @classmethod
    @bordered
    def execute(cls, model: ModelHandle, plan: Plan, codes: Codes) -> io.NodeOutput:
        scores = engine().score(model.spec, codes, plan)
        rewards = [score.reward for score in scores]
        best = rewards.index(max(rewards)) + 1
        report = "\n".join(_line(song, score) for song, score in enumerate(scores, 1))
        return io.NodeOutput(_one(codes, best), rewards[best - 1], f"{report}\nbest: song {best}")


def _listening_inputs() -> list[Any]:
    return [
        ModelSocket.Input("model", tooltip=WITH_LM),
        seed_input("the description"),
        io.Int.Input(
            "song",
            default=1,
            min=1,
            max=MAX_SONGS,
            tooltip="Which song of a batch to listen to, counted from 1.",
        ),
        *sampling_inputs(HEARING.sampling.temperature),
    ]


def _heard_inputs() -> list[Any]:
    return [
        io.Latent.Input("latent", optional=True, tooltip="The sound, from VAE Encode (Tiled)."),
        CodesSocket.Input(
            "codes", optional=True, tooltip="Audio codes; where connected, the latent is not used."
        ),
    ]


def _codes_of(model: ModelHandle, latent: Mapping[str, Any] | None) -> Codes:
    if latent is None:
        raise InvalidRequest(
            "There is nothing to listen to. Connect a latent from VAE Encode (Tiled), or codes."
        )
    return engine().tokenize(model.spec, latents_from(latent))


def _one(codes: Codes, song: int) -> Codes:
    """Song number `song`, counted from 1, alone."""
    if song > len(codes.items):
        raise InvalidRequest(
            f"song is {song}, but there are only {len(codes.items)}. Choose one of them."
        )
    return Codes(codes.items[song - 1 : song], codes.seeds[song - 1 : song])


def _line(song: int, score: Score) -> str:
    parts = {"caption": score.caption, "lyrics": score.lyrics, **score.metadata}
    told = ", ".join(f"{name} {value:.2f}" for name, value in parts.items() if value is not None)
    return f"song {song}: {score.reward:.3f} ({told})"
