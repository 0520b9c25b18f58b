"""What the engine refuses, and which stage it names: requests, sounds, latents, files, weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from acestep_engine.engine import Engine
from acestep_engine.errors import AceStepError, InvalidRequest, ModelNotFound, NonFinite
from acestep_engine.types import Audio, Codes, DiTSampling, Latents, ModelSpec, Request

SHORT = Request(
    caption="calm piano", duration=2, bpm=90, keyscale="C major", timesignature="4", language="en"
)


def song(engine: Engine, model: ModelSpec) -> Audio:
    plan = engine.plan(model, SHORT)
    return engine.decode(model, engine.render(model, plan, engine.compose(model, plan)))


@pytest.mark.parametrize(
    "values",
    [torch.full((1, 20, 64), float("nan")), torch.full((1, 20, 64), float("inf"))],
    ids=["nan", "inf"],
)
def test_broken_latents_name_the_stage(
    engine: Engine, tiny_model: ModelSpec, values: torch.Tensor
) -> None:
    with pytest.raises(NonFinite, match="VAE decode"):
        engine.decode(tiny_model, Latents(values))


def test_empty_latents_are_refused(engine: Engine, tiny_model: ModelSpec) -> None:
    with pytest.raises(AceStepError, match="all zeros"):
        engine.decode(tiny_model, Latents(torch.zeros(1, 20, 64)))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"duration": 1e6}, "600"),
        ({"duration": float("nan")}, "duration"),
        ({"bpm": 1000}, "300"),
        ({"timesignature": "7"}, "7"),
        ({"keyscale": "H dur"}, "H dur"),
        ({"language": "klingon"}, "klingon"),
    ],
)
def test_impossible_requests_say_what_is_possible(
    engine: Engine, tiny_model: ModelSpec, change: dict[str, object], word: str
) -> None:
    with pytest.raises(InvalidRequest, match=word):
        engine.plan(tiny_model, replace(SHORT, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("waveform", "word"),
    [
        (torch.zeros(1, 2, 0), "no samples"),
        (torch.full((1, 2, 4000), float("nan")), "input audio"),
        (torch.full((1, 2, 4000), 30_000.0), "reach 30000"),
    ],
    ids=["empty", "nan", "integers"],
)
def test_broken_audio_is_refused(
    engine: Engine, tiny_model: ModelSpec, waveform: torch.Tensor, word: str
) -> None:
    with pytest.raises(AceStepError, match=word):
        engine.encode(tiny_model, Audio(waveform))


@pytest.mark.parametrize("quiet", [0.0, 9e-7])
def test_a_silent_sound_is_encoded_but_is_no_timbre(
    engine: Engine, tiny_model: ModelSpec, quiet: float
) -> None:
    waveform = torch.rand(2, 1, 9_600) - 0.5
    waveform[1] = quiet
    silent = engine.encode(tiny_model, Audio(waveform))
    plan = engine.plan(tiny_model, SHORT)
    with pytest.raises(InvalidRequest, match=r"Song 2 .*silent.* can be heard"):
        engine.render(tiny_model, plan, timbre=silent)
    waveform[1] = 2e-6
    heard = engine.encode(tiny_model, Audio(waveform))
    engine.render(tiny_model, plan, sampling=DiTSampling(steps=1), timbre=heard)


def test_broken_latents_do_not_become_codes(engine: Engine, tiny_model: ModelSpec) -> None:
    with pytest.raises(NonFinite, match="Audio tokenizer"):
        engine.tokenize(tiny_model, Latents(torch.full((1, 10, 64), float("nan"))))


def test_no_codes_at_all_are_refused(engine: Engine, tiny_model: ModelSpec) -> None:
    with pytest.raises(InvalidRequest, match="no audio codes"):
        engine.render(tiny_model, engine.plan(tiny_model, SHORT), Codes(()))


@pytest.mark.parametrize("part", ["lm", "vae", "text_encoder", "dit"])
def test_a_missing_part_is_named_with_the_cure(
    engine: Engine, tiny_model: ModelSpec, part: str
) -> None:
    broken = replace(tiny_model, **{part: str(Path(tiny_model.dit).parent / "gone.safetensors")})
    with pytest.raises(ModelNotFound, match=r"gone\.safetensors"):
        song(engine, broken)


@pytest.mark.parametrize(
    ("part", "name", "stage"),
    [
        ("lm", "layers.0.mlp.down_proj.weight", "Codes"),
        ("text_encoder", "layers.0.mlp.down_proj.weight", "Text encoder"),
        ("dit", "encoder.text_projector.weight", "Condition encoder"),
        ("dit", "detokenizer.proj_out.weight", "Audio detokenizer"),
        ("dit", "decoder.layers.0.mlp.down_proj.weight", "DiT sampling, step 1 of 8"),
        ("vae", "decoder.conv2.weight_v", "VAE decode"),
    ],
)
def test_broken_weights_name_the_stage_that_meets_them(
    engine: Engine, tiny_model: ModelSpec, tmp_path: Path, part: str, name: str, stage: str
) -> None:
    folder = shutil.copytree(
        getattr(tiny_model, part), tmp_path / Path(getattr(tiny_model, part)).name
    )
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(NonFinite, match=stage):
        song(engine, replace(tiny_model, **{part: str(folder)}))
