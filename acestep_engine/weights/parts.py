"""The parts of a model by role: what each is called, and where its files come from and go.

Knows no file formats. A role is loaded alone; several roles may lie in one file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal[
    "lm",
    "text_encoder",
    "condition_encoder",
    "audio_tokenizer",
    "audio_detokenizer",
    "dit",
    "vae",
]
ROLES: tuple[Role, ...] = get_args(Role)

Field = Literal["dit", "text_encoder", "lm", "vae"]
"""Path of a `ModelSpec`."""

MAIN_REPO = "ACE-Step/Ace-Step1.5"
COMFY_REPO = "Comfy-Org/ace_step_1.5_ComfyUI_files"


@dataclass(frozen=True, slots=True)
class Part:
    """Where a role comes from. `diffusers` is its folder in a diffusers model."""

    field: Field
    label: str
    official: str  # folder in the main repository
    comfy_file: str  # path in the ComfyUI repository
    comfy_folder: str  # folder below ComfyUI's models
    diffusers: str


_DIT = (
    "acestep-v15-turbo",
    "split_files/diffusion_models/acestep_v1.5_turbo.safetensors",
    "diffusion_models",
)

PARTS: dict[Role, Part] = {
    "lm": Part(
        "lm",
        "language model (5 Hz LM)",
        "acestep-5Hz-lm-1.7B",
        "split_files/text_encoders/qwen_1.7b_ace15.safetensors",
        "text_encoders",
        "",
    ),
    "text_encoder": Part(
        "text_encoder",
        "text encoder (Qwen3-Embedding-0.6B)",
        "Qwen3-Embedding-0.6B",
        "split_files/text_encoders/qwen_0.6b_ace15.safetensors",
        "text_encoders",
        "text_encoder",
    ),
    "condition_encoder": Part("dit", "condition encoder", *_DIT, "condition_encoder"),
    "audio_tokenizer": Part("dit", "audio tokenizer", *_DIT, "audio_tokenizer"),
    "audio_detokenizer": Part("dit", "audio detokenizer", *_DIT, "audio_token_detokenizer"),
    "dit": Part("dit", "diffusion transformer (DiT)", *_DIT, "transformer"),
    "vae": Part(
        "vae",
        "VAE (1920 samples a frame)",
        "vae",
        "split_files/vae/ace_1.5_vae.safetensors",
        "vae",
        "vae",
    ),
}


def cure(role: Role) -> str:
    """Where to get the files of `role` and where to put them."""
    part = PARTS[role]
    return (
        f"Get the folder {part.official}/ from {MAIN_REPO} into models/acestep/{part.official}, "
        f"or the .safetensors file {part.comfy_file} from {COMFY_REPO} into "
        f"models/{part.comfy_folder}; both are on Hugging Face."
    )
