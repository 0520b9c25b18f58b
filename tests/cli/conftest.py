"""What commands are run on: the tiny model, and a short recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from acestep_engine import audio
from acestep_engine.cli.main import main
from acestep_engine.types import Audio, ModelSpec

RATE = 44_100

Run = Callable[..., None]


@pytest.fixture
def run(tiny_model: ModelSpec) -> Run:
    """Runs a command on the tiny model, in this process; it must end well."""

    def run(command: str, *arguments: object) -> None:
        model = ("--model", Path(tiny_model.vae).parent)
        assert main([command, *map(str, (*model, *arguments))]) == 0

    return run


@pytest.fixture
def refused(tiny_model: ModelSpec, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end in an error, and gives its last line."""

    def refused(command: str, *arguments: object) -> str:
        model = ("--model", Path(tiny_model.vae).parent)
        assert main([command, *map(str, (*model, *arguments))]) == 1
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("Error: ")
        return line

    return refused


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seconds of noise in stereo at 44.1 kHz, half as loud as a file can be."""
    path = tmp_path_factory.mktemp("recording") / "source.wav"
    noise_BXS = torch.rand(1, 2, 2 * RATE, generator=torch.Generator().manual_seed(3)) - 0.5
    return audio.save(Audio(noise_BXS, RATE), path)
