"""The stored latents of silence: read from either home, refused when they are something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from acestep_engine.errors import BadCheckpoint
from acestep_engine.types import ModelSpec
from acestep_engine.weights.layouts import Layout
from acestep_engine.weights.load import read_silence
from acestep_engine.weights.tiny import write_tiny


@pytest.fixture
def silence() -> torch.Tensor:
    return torch.randn(200, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", ["official", "diffusers"])
def test_silence_comes_back_frame_by_frame(
    tmp_path: Path, silence: torch.Tensor, layout: Layout
) -> None:
    spec = write_tiny(tmp_path, layout, lm=False, silence=silence)
    found = read_silence(spec)
    assert found is not None
    assert found.dtype is torch.float32
    assert torch.equal(found, silence)


@pytest.mark.parametrize("layout", ["official", "comfy_split", "comfy_aio", "diffusers"])
def test_layouts_without_silence_give_none(
    tmp_path: Path, tiny_models: dict[str, ModelSpec], layout: Layout
) -> None:
    assert read_silence(tiny_models[layout]) is None
    assert read_silence(ModelSpec()) is None
    assert read_silence(ModelSpec(dit=str(tmp_path / "none"))) is None


def test_a_buffer_that_was_never_set_counts_as_absent(tmp_path: Path) -> None:
    spec = write_tiny(tmp_path, "diffusers", lm=False, silence=torch.zeros(30, 64))
    assert read_silence(spec) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(1, 20, 64), r"\[1, 20, 64\]"),
        (torch.ones(64, 20), r"\[64, 20\]"),
        (torch.ones(1, 64, 20, dtype=torch.int64), "holds Tensor"),
        (torch.ones(1, 64, 0), r"\[1, 64, 0\]"),
        ({"latent": torch.ones(1, 64, 20)}, "holds dict"),
    ],
)
def test_anything_else_in_its_file_is_refused(tmp_path: Path, value: object, words: str) -> None:
    torch.save(value, tmp_path / "silence_latent.pt")
    with pytest.raises(BadCheckpoint, match=words):
        read_silence(ModelSpec(dit=str(tmp_path)))


class Trap:
    """Runs when a pickle is opened without care."""

    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("the pickle was run",))


def test_a_pickle_that_runs_code_is_refused_unopened(tmp_path: Path) -> None:
    torch.save(Trap(), tmp_path / "silence_latent.pt")
    with pytest.raises(
        BadCheckpoint, match=r"silence_latent\.pt cannot be read as a plain tensor"
    ) as caught:
        read_silence(ModelSpec(dit=str(tmp_path)))
    assert "weights" not in str(caught.value).lower()


@pytest.mark.parametrize("content", [b"", b"<html></html>", b"PK\x03\x04 half"])
def test_a_damaged_file_is_named_with_the_cure(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "silence_latent.pt").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"silence_latent\.pt.*Delete it"):
        read_silence(ModelSpec(dit=str(tmp_path)))


def test_a_buffer_of_another_shape_is_refused(tmp_path: Path, silence: torch.Tensor) -> None:
    spec = write_tiny(tmp_path, "diffusers", lm=False, silence=silence)
    file = Path(spec.dit) / "condition_encoder" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(file) | {"silence_latent": torch.ones(1, 64, 200)}, file)
    with pytest.raises(BadCheckpoint, match=r"a buffer \[1, 64, 200\]"):
        read_silence(spec)
