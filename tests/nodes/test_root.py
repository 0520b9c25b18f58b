"""The root module: nothing is imported, and any folder name can be collected."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_importing_the_pack_imports_nothing() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {node.module for node in imports if isinstance(node, ast.ImportFrom)} <= {
        "__future__",
        "typing",
    }
    assert not [node for node in imports if isinstance(node, ast.Import)]


@pytest.mark.parametrize("name", ["plain", "comfyui-ace.step"])
@pytest.mark.parametrize("mode", ["importlib", "prepend"])
def test_pytest_collects_from_a_folder_of_any_name(tmp_path: Path, name: str, mode: str) -> None:
    folder = tmp_path / name
    (folder / "tests").mkdir(parents=True)
    shutil.copy(ROOT / "__init__.py", folder)
    (folder / "tests" / "test_one.py").write_text("def test_one():\n    pass\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        f"--import-mode={mode}",
        "-p",
        "no:cacheprovider",
    ]
    run = subprocess.run([*command, str(folder)], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
