"""Audio Code Sampler: the plan sketched as audio codes. It knows no token and no logit."""

from __future__ import annotations

from typing import Any, get_args

from comfy_api.latest import io

from ..acestep_engine.types import MAX_SONGS, ComposeOptions, LMSampling, Plan, PromptLayout
from .handle import ModelHandle
from .host import bordered, engine
from .lm_widgets import order_input, sampling_inputs, sampling_of, seed_input
from .sockets import CodesSocket, ModelSocket, PlanSocket


class AudioCodeSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepAudioCodeSampler",
            display_name="ACE-Step Audio Code Sampler",
            category="ACE-Step/codes",
            description="The language model composes: five audio codes a second, which fix melody, "
            "rhythm and structure. The DiT sampler turns them into sound.",
            search_aliases=["music", "song", "compose", "melody", "audio tokens", "ace step codes"],
            inputs=[*_inputs(), *sampling_inputs(), *_rare_inputs(), order_input()],
            outputs=[
                CodesSocket.Output(
                    "codes", display_name="codes", tooltip="The composition, for the DiT sampler."
                )
            ],
        )

    @classmethod
    @bordered
    def execute(cls, model: ModelHandle, plan: Plan, **widgets: Any) -> io.NodeOutput:
        options = ComposeOptions(
            batch=widgets["batch"],
            layout=widgets["prompt_layout"],
            sampling=sampling_of(
                widgets, cfg_scale=widgets["cfg_scale"], negative=widgets["negative"]
            ),
        )
        return io.NodeOutput(engine().compose(model.spec, plan, options))


def _inputs() -> list[Any]:
    return [
        ModelSocket.Input(
            "model", tooltip="From Load ACE-Step, with a language model chosen there."
        ),
        PlanSocket.Input("plan", tooltip="From the CoT Planner."),
        seed_input("the composition"),
        io.Int.Input(
            "batch",
            default=1,
            min=1,
            max=MAX_SONGS,
            tooltip="Songs to compose from this plan; their seeds count up from seed.",
        ),
        io.Float.Input(
            "cfg_scale",
            default=LMSampling().cfg_scale,
            min=0.0,
            max=100.0,
            step=0.1,
            tooltip="How closely the composition follows the words. 1 is off and twice as fast.",
        ),
    ]


def _rare_inputs() -> list[Any]:
    return [
        io.String.Input(
            "negative",
            default="",
            multiline=True,
            advanced=True,
            placeholder="what the music should move away from",
            tooltip="A caption of what you do not want. It acts only where cfg_scale is above 1.",
        ),
        io.Combo.Input(
            "prompt_layout",
            options=list(get_args(PromptLayout)),
            default="aligned",
            advanced=True,
            tooltip="aligned: the prompt as in training. legacy: as ComfyUI's own nodes write "
            "it, to repeat older songs.",
        ),
    ]
