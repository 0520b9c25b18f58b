"""ComfyUI as the engine's host: memory management, progress, interrupt, and the error border.

The only importer of `comfy.*` and `folder_paths`. It knows components by name and size, never what
they compute.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.utils
import folder_paths
import torch

from ..acestep_engine.backends import mlx_device
from ..acestep_engine.engine import Engine, get_engine
from ..acestep_engine.errors import AceStepError, OutOfMemory
from ..acestep_engine.host import Progress, Resident
from ..acestep_engine.runtime import DeviceInfo, cpu_has_bf16, cpu_has_int8, has_flash_attn
from . import handle

logger = logging.getLogger(__name__)

KINDS = ("cuda", "mps", "xpu", "cpu")
OFFICIAL = "acestep"  # the model folder for official and diffusers folders
DIFFUSERS = "model_index.json"  # lies in a folder whose sub-folders are its parts
ADAPTER = "adapter_config.json"  # lies in the folder of a PEFT adapter
Result = TypeVar("Result")


class TokenTable(torch.nn.Embedding):
    """An embedding that stays whole wherever it is: its rows also serve as the output head."""

    def reset_parameters(self) -> None:
        """The values come from the file."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.to(self.weight.device)).to(input.device)


class Operations:
    """Layers of `comfy.ops`, which ComfyUI can keep partly in main memory; else those of torch."""

    Embedding = TokenTable

    def __getattr__(self, name: str) -> Any:
        return getattr(comfy.ops.disable_weight_init, name, None) or getattr(torch.nn, name)


class Bar:
    """The progress bar on the running node; every update looks for the stop button."""

    def __init__(self, total: int) -> None:
        self._bar = comfy.utils.ProgressBar(total)

    def update(self, done: int) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._bar.update_absolute(done)

    def close(self) -> None:
        """ComfyUI ends the bar with the node."""


class ComfyHost:
    """Satisfies `acestep_engine.host.Host`; ComfyUI decides what stays on the device."""

    def __init__(self) -> None:
        self.ops = Operations()
        self._patchers: dict[int, tuple[Resident, Any]] = {}

    def device_info(self) -> DeviceInfo:
        management = comfy.model_management
        device = management.get_torch_device()
        if device.type not in KINDS:
            logger.warning(
                "ACE-Step: no support for the device '%s' yet; running on the CPU.", device
            )
            device = torch.device("cpu")
        trouble, metal = mlx_device.trouble(), mlx_device.metal()
        on_cpu = device.type == "cpu"
        bf16 = cpu_has_bf16() if on_cpu else bool(management.should_use_bf16(device))
        bf16_on = ("mlx",) * metal + (device.type,) * bf16
        kind = "mlx" if device.type == "mps" and metal else device.type
        offers = (kind, device.type, "cpu") if trouble else (kind, device.type, "cpu", "mlx")
        return DeviceInfo(
            kind=kind,  # pyright: ignore[reportArgumentType]
            name=torch.cuda.get_device_name(device) if device.type == "cuda" else kind,
            bf16=kind in bf16_on,
            rocm=device.type == "cuda" and torch.version.hip is not None,
            flash_attn=device.type == "cuda" and has_flash_attn(),
            total_memory=int(management.get_total_memory(device)),
            free_memory=int(management.get_free_memory(device)),
            available=tuple(dict.fromkeys(offers)),
            bf16_on=bf16_on,
            int8=cpu_has_int8(),
            mlx_trouble=trouble,
        )

    def free_memory(self, device: torch.device) -> int:
        return int(comfy.model_management.get_free_memory(_resolve(device)))

    def begin(self) -> None:
        """ComfyUI itself forgets old stop requests when a prompt starts."""

    def progress(self, stage: str, total: int) -> Progress:
        logger.debug("ACE-Step: %s, %d steps", stage, total)
        return Bar(total)

    def check_interrupt(self) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()

    def place(
        self, component: Resident, device: torch.device, memory_required: int
    ) -> torch.device:
        if not isinstance(component.module, torch.nn.Module):
            return device  # one of MLX: no patcher can move it, its memory is that of everything
        device = _resolve(device)
        _, patcher = self._patchers.get(id(component), (None, None))
        if patcher is None or patcher.load_device != device:
            patcher = _patcher(component, device)
            self._patchers[id(component)] = (component, patcher)
        comfy.model_management.load_models_gpu([patcher], memory_required=memory_required)
        return device

    def release(self, component: Resident) -> None:
        self._patchers.pop(id(component), None)


def _resolve(device: torch.device) -> torch.device:
    """The device as ComfyUI names it: with the index that the user chose."""
    current = comfy.model_management.get_torch_device()
    return current if current.type == device.type else device


def _patcher(component: Resident, device: torch.device) -> Any:
    """What ComfyUI moves in and out. The class is looked up here: start-up options replace it."""
    offload = comfy.model_management.unet_offload_device() if device.type != "cpu" else device
    patchers = comfy.model_patcher
    patcher_class = getattr(patchers, "CoreModelPatcher", patchers.ModelPatcher)
    return patcher_class(component.module, load_device=device, offload_device=offload)


def model_files(folder: str) -> list[str]:
    """Names of the files that ComfyUI finds in its model folder `folder`; none if it is absent."""
    return folder_paths.get_filename_list(folder)


def model_file(folder: str, name: str) -> str | None:
    """Full path of the file `name` in the model folder `folder`."""
    return folder_paths.get_full_path(folder, name)


def model_folders() -> dict[str, str]:
    """Folders below `models/acestep` that hold a model, two levels deep, by their short name."""
    found: dict[str, str] = {}
    for root in map(Path, folder_paths.get_folder_paths(OFFICIAL)):
        for folder in sorted({*root.glob("*/"), *root.glob("*/*/")}):
            part_of_diffusers = (folder.parent / DIFFUSERS).is_file()
            if folder.is_dir() and not part_of_diffusers and _holds_weights(folder):
                found.setdefault(folder.relative_to(root).as_posix(), str(folder))
    return found


def adapter_folders() -> dict[str, str]:
    """Folders below `models/loras` that a trainer wrote, three levels deep, by their short name."""
    found: dict[str, str] = {}
    for root in map(Path, folder_paths.get_folder_paths("loras")):
        for depth in ("*", "*/*", "*/*/*"):
            for config in sorted(root.glob(f"{depth}/{ADAPTER}")):
                folder = config.parent
                found.setdefault(folder.relative_to(root).as_posix(), str(folder))
    return found


def _holds_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*/*.safetensors"))


def engine() -> Engine:
    """The one engine of this process, run by ComfyUI."""
    return get_engine(ComfyHost)


folder_paths.add_model_folder_path(OFFICIAL, str(Path(folder_paths.models_dir) / OFFICIAL))
handle.on_last(lambda spec, live: engine().release(spec, live))


def bordered(execute: Callable[..., Result]) -> Callable[..., Result]:
    """An `execute` whose readable errors reach the node as plain text.

    The stop request and torch's own out-of-memory errors pass untouched: ComfyUI acts on both.
    """

    @functools.wraps(execute)
    def run(*args: Any, **kwargs: Any) -> Result:
        with handle.running():
            try:
                return execute(*args, **kwargs)
            except OutOfMemory as error:
                comfy.model_management.unload_all_models()  # as ComfyUI does where torch raises it
                raise RuntimeError(str(error)) from error
            except AceStepError as error:
                raise RuntimeError(str(error)) from error

    return run
