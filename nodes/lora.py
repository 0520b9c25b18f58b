"""ACE-Step LoRA: an adapter laid on a model, and a report of what of it fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from ..acestep_engine.errors import ModelNotFound
from ..acestep_engine.types import MAX_STRENGTH, LoRA
from ..acestep_engine.weights import adapters
from ..acestep_engine.weights.adapter_files import CONFIG, stamps
from .handle import ModelHandle
from .host import adapter_folders, bordered, model_file, model_files
from .sockets import ModelSocket

FOLDER = "loras"
NOTHING = "nothing found: see the help of this node"


class ApplyLoRA(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        options = choices()
        return io.Schema(
            node_id="ACEStepLoRA",
            display_name="ACE-Step LoRA",
            category="ACE-Step/loaders",
            description="Lays a LoRA, LoKr or DoRA on a model. Put several in a row to use them "
            "together; take the node away and the model is as it was, to the last bit.",
            search_aliases=["music", "lora", "lokr", "dora", "adapter", "style", "ace step"],
            inputs=[
                ModelSocket.Input("model", tooltip="From Load ACE-Step or another LoRA."),
                io.Combo.Input(
                    "adapter",
                    options=options,
                    default=options[0],
                    tooltip="A .safetensors file in models/loras, or a folder there with "
                    f"{CONFIG}, as trainers leave it.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-MAX_STRENGTH,
                    max=MAX_STRENGTH,
                    step=0.05,
                    tooltip="How much of the change. 0: none of it; below 0: the other way.",
                ),
            ],
            outputs=[
                ModelSocket.Output(
                    "model", display_name="model", tooltip="For every ACE-Step node."
                ),
                io.String.Output(
                    "report",
                    display_name="report",
                    tooltip="How many weights matched, rank, alpha and scale.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, adapter: str) -> bool:
        """Leaves missing files to `execute`, whose message says where to put them."""
        return True

    @classmethod
    def fingerprint_inputs(cls, adapter: str, **_: Any) -> Any:
        """A file that was trained anew under its old name counts as another."""
        path = path_of(adapter)
        return stamps(path) if path else adapter

    @classmethod
    @bordered
    def execute(cls, model: ModelHandle, adapter: str, strength: float) -> io.NodeOutput:
        path = path_of(adapter)
        if path is None:
            raise ModelNotFound(
                f"The adapter '{adapter}' is missing from models/{FOLDER}. Put a .safetensors "
                f"file or a folder with {CONFIG} there, press R and choose it."
            )
        spec = replace(model.spec, loras=(*model.spec.loras, LoRA(path, strength)))
        *_, match = adapters.inspect(spec)
        return io.NodeOutput(ModelHandle(spec), match.text)


def choices() -> list[str]:
    """Folders, then files; never empty."""
    return list(dict.fromkeys((*adapter_folders(), *model_files(FOLDER)))) or [NOTHING]


def path_of(name: str) -> str | None:
    return model_file(FOLDER, name) or adapter_folders().get(name)
