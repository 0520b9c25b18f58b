"""The command line on MLX, in processes of its own: they must end in peace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from acestep_engine import audio
from acestep_engine.types import ModelSpec

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path, compiled: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "acestep_engine", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if compiled:
        del environment["MLX_DISABLE_COMPILE"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "compiled"), [("auto", True), ("int8", False)], ids=["compiled", "packed"]
)
def test_a_song_by_mlx_ends_in_peace(tmp_path: Path, precision: str, compiled: bool) -> None:
    out = tmp_path / "x.wav"
    wish = ("--device", "mlx", "--precision", precision)
    arguments = ("song", "--model", "tiny", *wish, "--seconds", "2", "--out", out)
    result = run(*arguments, compiled=compiled)
    assert result.returncode == 0, result.stderr
    assert audio.load(out).waveform.shape == (1, 2, 96_000)
    report = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert report["model"]["device"] == "mlx"


def test_inspect_says_what_mlx_would_do(tiny_model: ModelSpec) -> None:
    model = ("--model", Path(tiny_model.vae).parent)
    result = run("inspect", *model, "--device", "mlx", "--precision", "int4")
    assert result.returncode == 0, result.stderr
    described = json.loads(result.stdout)
    assert (described["device"], described["bits"], described["tile"]) == ("mlx", 4, 512)
    assert described["precision"] == ("bf16" if sys.platform == "darwin" else "fp32")
    assert "device mlx: asked for" in described["reasons"]
