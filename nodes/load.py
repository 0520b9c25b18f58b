"""Load ACE-Step: which files make up a model. It reads none of them."""

from __future__ import annotations

from typing import Any, get_args

from comfy_api.latest import io

from ..acestep_engine.runtime import DeviceWish, ModeWish, PrecisionWish, Wish
from ..acestep_engine.weights.parts import Field
from . import choices
from .handle import ModelHandle
from .host import bordered, engine
from .sockets import ModelSocket


class LoadACEStep(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ACEStepLoad",
            display_name="Load ACE-Step",
            category="ACE-Step/loaders",
            description="Chooses the files of an ACE-Step 1.5 model. Each part is loaded when a "
            "node first needs it, and ComfyUI moves it in and out like any other model.",
            search_aliases=[
                "music",
                "song",
                "ace step",
                "model loader",
                "checkpoint",
                "load model",
            ],
            inputs=[*_file_inputs(), *_wish_inputs()],
            outputs=[
                ModelSocket.Output(
                    "model", display_name="model", tooltip="For every ACE-Step node."
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, dit: str, text_encoder: str, lm: str, vae: str) -> bool:
        """Leaves missing files to `execute`, whose message says where to get them."""
        return True

    @classmethod
    @bordered
    def execute(
        cls, dit: str, text_encoder: str, lm: str, vae: str, **wishes: Any
    ) -> io.NodeOutput:
        wish = Wish(wishes["device"], wishes["precision"], wishes["mode"])
        parts: dict[Field, str] = {"dit": dit, "text_encoder": text_encoder, "lm": lm, "vae": vae}
        handle = ModelHandle(choices.model_of(parts, wishes["family"], wish))
        engine().describe(handle.spec)  # a wrong or damaged file is better told here than later
        return io.NodeOutput(handle)


def _file_inputs() -> list[Any]:
    tooltips: dict[Field, str] = {
        "dit": "The diffusion model, which makes the sound: a file in models/diffusion_models, an "
        "all-in-one file in models/checkpoints, or a folder in models/acestep.",
        "text_encoder": "Reads caption and lyrics (qwen_0.6b_ace15), from models/text_encoders.",
        "lm": "The language model, which plans and composes (qwen_1.7b_ace15 or qwen_4b_ace15), "
        "from models/text_encoders. 'none' does without.",
        "vae": "Turns latents into sound and back (ace_1.5_vae), from models/vae.",
    }
    inputs = []
    for part, tooltip in tooltips.items():
        options = choices.options(part)
        inputs.append(io.Combo.Input(part, options=options, default=options[0], tooltip=tooltip))
    return inputs


def _wish_inputs() -> list[Any]:
    wishes = {
        "family": (
            choices.FAMILIES,
            "Kind of checkpoint: it decides steps and guidance. auto: from the file or its name.",
        ),
        "device": (
            get_args(DeviceWish),
            "Where it runs. auto: where ComfyUI runs, on a Mac with MLX if that is installed.",
        ),
        "precision": (
            get_args(PrecisionWish),
            "Number format of the computation. auto: bf16 where the device has it, else fp32, and "
            "on a CPU the language model in 8 bits. int8 and int4 pack large weights, where the "
            "device gains by it.",
        ),
        "mode": (
            get_args(ModeWish),
            "How the language model runs. auto: the fastest that is safe on this machine.",
        ),
    }
    return [
        io.Combo.Input(name, options=list(options), default="auto", advanced=True, tooltip=tooltip)
        for name, (options, tooltip) in wishes.items()
    ]
