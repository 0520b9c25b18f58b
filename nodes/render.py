"""DiT Sampler: plan and codes become latents of sound. It knows no schedule and no guidance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io

from ..acestep_engine.errors import InvalidRequest
from ..acestep_engine.remix import Task
from ..acestep_engine.types import MAX_SONGS, Codes, DiTSampling, Plan
from .handle import ModelHandle
from .host import bordered, engine
from .lm_widgets import seed_input
from .sockets import CodesSocket, ModelSocket, PlanSocket, TaskSocket, latent_of, latents_from
from .solver_widgets import solver_fields, solver_inputs


class DiTSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepDiTSampler",
            display_name="ACE-Step DiT Sampler",
            category="ACE-Step/sampling",
            description="Plays the song: diffusion from noise to latents, led by the plan, the "
            "audio codes and, if you like, the sound of a reference.",
            search_aliases=["music", "song", "ksampler", "diffusion", "timbre", "ace step sampler"],
            inputs=[*_inputs(), *_rare_inputs(), *_optional_inputs(), *solver_inputs()],
            outputs=[
                io.Latent.Output(
                    "latent",
                    display_name="latent",
                    tooltip="Audio latents at 25 frames a second, for any LATENT node.",
                )
            ],
        )

    @classmethod
    @bordered
    def execute(
        cls,
        model: ModelHandle,
        plan: Plan,
        codes: Codes | None = None,
        timbre: Mapping[str, Any] | None = None,
        task: Task | None = None,
        **widgets: Any,
    ) -> io.NodeOutput:
        reference = latents_from(timbre) if timbre is not None else None
        sampling = _sampling_of(widgets)
        latents = engine().render(model.spec, plan, codes, sampling, reference, task)
        return io.NodeOutput(latent_of(latents))


def _inputs() -> list[Any]:
    return [
        ModelSocket.Input("model", tooltip="From Load ACE-Step."),
        PlanSocket.Input("plan", tooltip="From the CoT Planner."),
        seed_input("the performance: sound, voice and detail"),
        io.Int.Input(
            "steps",
            default=0,
            min=0,
            max=1000,
            tooltip="Denoising steps. 0: what the checkpoint was made for (turbo 8, others 50).",
        ),
        io.Float.Input(
            "guidance",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            tooltip="How strongly the words lead. 0: what the checkpoint was made for. 1: off, "
            "which turbo models want.",
        ),
        io.Int.Input(
            "batch",
            default=1,
            min=1,
            max=MAX_SONGS,
            tooltip="Songs to render, each with its own seed, counting up from seed. Where codes "
            "are connected, they decide the number.",
        ),
    ]


def _rare_inputs() -> list[Any]:
    return [
        io.Float.Input(
            "shift",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            advanced=True,
            tooltip="Above 1 spends more steps on the structure, below 1 more on the detail. 0: "
            "what the checkpoint was made for.",
        ),
        io.Float.Input(
            "guidance_start",
            default=0.0,
            min=0.0,
            max=1.0,
            step=0.01,
            advanced=True,
            tooltip="Lowest noise level at which guidance acts (0 is the finished sound).",
        ),
        io.Float.Input(
            "guidance_end",
            default=1.0,
            min=0.0,
            max=1.0,
            step=0.01,
            advanced=True,
            tooltip="Highest noise level at which guidance acts (1 is pure noise).",
        ),
        io.String.Input(
            "timesteps",
            default="",
            advanced=True,
            placeholder="1.0, 0.75, 0.5, 0.25",
            tooltip="Your own noise levels, falling from at most 1 and separated by commas. They "
            "replace steps and shift.",
        ),
    ]


def _optional_inputs() -> list[Any]:
    return [
        CodesSocket.Input(
            "codes",
            optional=True,
            tooltip="From the Audio Code Sampler. Without, the DiT invents the music by itself.",
        ),
        io.Latent.Input(
            "timbre",
            optional=True,
            tooltip="Latents of a recording whose sound the song should take on. Only the sound is "
            "taken, not the melody.",
        ),
        TaskSocket.Input(
            "task",
            optional=True,
            tooltip="What to do with a recording: Cover, Repaint, Extract, Lego or Complete. It "
            "decides the length.",
        ),
    ]


def _sampling_of(widgets: Mapping[str, Any]) -> DiTSampling:
    """The widgets as the engine reads them; 0 and an empty text mean automatic."""
    return DiTSampling(
        steps=widgets["steps"] or None,
        shift=widgets["shift"] or None,
        guidance=widgets["guidance"] or None,
        interval=(widgets["guidance_start"], widgets["guidance_end"]),
        timesteps=_timesteps_of(widgets["timesteps"]),
        seed=widgets["seed"],
        batch=widgets["batch"],
        **solver_fields(widgets),
    )


def _timesteps_of(text: str) -> tuple[float, ...] | None:
    try:
        return tuple(float(part) for part in text.replace(",", " ").split()) or None
    except ValueError as error:
        raise InvalidRequest(
            f"timesteps is '{text}', but must be numbers separated by commas, such as "
            "'1.0, 0.75, 0.5, 0.25'. Correct it, or clear it to use steps and shift."
        ) from error
