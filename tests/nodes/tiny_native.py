"""ComfyUI's own ACE-Step 1.5 classes at tiny size: a file of nodes for the server of a test.

ComfyUI's loaders know the real sizes only, so two nodes stand in their place. What they build are
ComfyUI's classes as they are. What the DiT was given last is written down, for the test to read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.supported_models
import comfy.supported_models_base
import comfy.text_encoders.ace15
import comfy.utils
import folder_paths
import torch
from safetensors.torch import save_file

SEEN = "conditions.safetensors"  # in the output folder
DIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_dit_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_lyric_layers": 2,
    "num_timbre_layers": 2,
    "text_hidden_dim": 16,
    "encoder_hidden_size": 32,
    "encoder_intermediate_size": 48,
    "encoder_num_heads": 4,
    "fsq_dim": 32,
}
QWEN3 = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _read(folder: str, name: str) -> dict[str, torch.Tensor]:
    return comfy.utils.load_torch_file(folder_paths.get_full_path_or_raise(folder, name))


def _write_down(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    seen = {name: kwargs[name] for name in ("encoder_hidden_states", "context_latents")}
    path = Path(folder_paths.get_output_directory()) / SEEN
    path.parent.mkdir(exist_ok=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in seen.items()}, path)


class TinyUNETLoader:
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        names = folder_paths.get_filename_list("diffusion_models")
        return {"required": {"unet_name": (names,), "weight_dtype": (["default"],)}}

    def load(self, unet_name: str, weight_dtype: str) -> tuple[Any]:
        config = comfy.supported_models.ACEStep15(DIT)
        config.set_inference_dtype(torch.float32, None)
        table = _read("diffusion_models", unet_name)
        model = config.get_model(table, "", device=torch.device("cpu"))
        model.load_model_weights(table, "")
        model.diffusion_model.decoder.register_forward_pre_hook(_write_down, with_kwargs=True)
        devices = comfy.model_management
        return (
            comfy.model_patcher.ModelPatcher(
                model,
                load_device=devices.get_torch_device(),
                offload_device=devices.unet_offload_device(),
            ),
        )


class TinyDualCLIPLoader:
    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        names = (folder_paths.get_filename_list("text_encoders"),)
        choices = {"clip_name1": names, "clip_name2": names}
        return {"required": {**choices, "type": (["ace"],), "device": (["default"],)}}

    def load(self, clip_name1: str, clip_name2: str, type: str, device: str) -> tuple[Any]:
        ace15 = comfy.text_encoders.ace15
        made = ace15.te(dtype_llama=torch.float32, lm_model="qwen3_2b")
        target = comfy.supported_models_base.ClipTarget(ace15.ACE15Tokenizer, made)
        options = {"_model_config": QWEN3, "dtype": torch.float32}
        clip = comfy.sd.CLIP(target, model_options=options)
        for part, name in (("qwen3_06b", clip_name1), ("qwen3_2b", clip_name2)):
            getattr(clip.cond_stage_model, part).load_sd(_read("text_encoders", name))
        return (clip,)


NODE_CLASS_MAPPINGS = {
    "TinyUNETLoader": TinyUNETLoader,
    "TinyDualCLIPLoader": TinyDualCLIPLoader,
}
