"""From the loader to sound through the nodes themselves, with tiny checkpoints of every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from acestep_engine.engine import Engine
from acestep_engine.types import (
    ComposeOptions,
    DiTSampling,
    LMSampling,
    ModelSpec,
    PlanOptions,
    Request,
)

SECONDS = 2.0
LAYOUTS = ("comfy_split", "comfy_aio", "official", "diffusers")


def make_song(run: Any, choice: dict[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and sound of a short song through all stages."""
    (model,) = run("ACEStepLoad", **choice)
    words = {"caption": "calm piano", "lyrics": "la la", "duration": SECONDS, "think": False}
    plan, *_ = run("ACEStepCoTPlanner", model=model, bpm=90, **words)
    (codes,) = run("ACEStepAudioCodeSampler", model=model, plan=plan, seed=3)
    (latent,) = run("ACEStepDiTSampler", model=model, plan=plan, codes=codes, seed=4, steps=2)
    (audio,) = run("ACEStepVAEDecodeTiled", model=model, latent=latent)
    assert audio["sample_rate"] == 48_000
    return latent["samples"], audio["waveform"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_song_is_the_same_from_every_layout_and_from_the_engine_alone(
    run: Any,
    models: Path,
    offer: Any,
    tiny_models: dict[str, ModelSpec],
    engine: Engine,
    layout: str,
) -> None:
    samples, waveform = make_song(run, offer(models, layout, tiny_models[layout]))
    assert waveform.shape == (1, 2, int(SECONDS * 48_000))

    spec, request = tiny_models[layout], Request("calm piano", "la la", duration=SECONDS, bpm=90)
    plan = engine.plan(spec, request, PlanOptions(think=False))
    codes = engine.compose(spec, plan, ComposeOptions(sampling=LMSampling(seed=3)))
    latents = engine.render(spec, plan, codes, DiTSampling(seed=4, steps=2))
    assert torch.allclose(samples, latents.values.transpose(1, 2), atol=1e-5)


def test_the_plan_comes_out_for_other_nodes(
    run: Any, models: Path, offer: Any, tiny_models: dict[str, ModelSpec]
) -> None:
    (model,) = run("ACEStepLoad", **offer(models, "official", tiny_models["official"]))
    words = {"caption": "x", "duration": 12.5, "think": False, "bpm": 99, "keyscale": "F# minor"}
    plan, text, bpm, key, duration = run("ACEStepCoTPlanner", model=model, **words)
    assert (bpm, key, duration) == (99, "F# minor", 12.5)
    assert "bpm: 99" in text
    assert plan.metadata.timesignature is None


def test_a_timbre_goes_in_as_sound_and_changes_the_song(
    run: Any, models: Path, offer: Any, tiny_models: dict[str, ModelSpec]
) -> None:
    (model,) = run("ACEStepLoad", **offer(models, "official", tiny_models["official"]))
    waveform = torch.randn(1, 1, 44_100) * 0.1
    audio = {"waveform": waveform.clone(), "sample_rate": 44_100}
    (timbre,) = run("ACEStepVAEEncodeTiled", model=model, audio=audio)
    assert torch.equal(audio["waveform"], waveform)
    assert timbre["samples"].shape == (1, 64, 25)
    words = {"caption": "x", "duration": SECONDS, "think": False}
    plan, *_ = run("ACEStepCoTPlanner", model=model, **words)
    (plain,) = run("ACEStepDiTSampler", model=model, plan=plan, steps=1)
    (tinted,) = run("ACEStepDiTSampler", model=model, plan=plan, steps=1, timbre=timbre)
    assert not torch.equal(plain["samples"], tinted["samples"])


def test_a_wrong_file_is_told_by_the_loader(
    run: Any, models: Path, offer: Any, tiny_models: dict[str, ModelSpec]
) -> None:
    choice = offer(models, "comfy_split", tiny_models["comfy_split"])
    choice["lm"] = choice["text_encoder"]
    with pytest.raises(Exception, match="language model") as caught:
        run("ACEStepLoad", **choice)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_bad_timesteps_are_told_with_their_text(
    run: Any, models: Path, offer: Any, tiny_models: dict[str, ModelSpec]
) -> None:
    (model,) = run("ACEStepLoad", **offer(models, "official", tiny_models["official"]))
    words = {"caption": "x", "duration": SECONDS, "think": False}
    plan, *_ = run("ACEStepCoTPlanner", model=model, **words)
    with pytest.raises(Exception, match="'1, half'"):
        run("ACEStepDiTSampler", model=model, plan=plan, timesteps="1, half")


@pytest.mark.slow
def test_mlx_makes_the_same_song_and_keeps_its_weights_from_comfyui(
    run: Any, pack: Any, models: Path, offer: Any, tiny_models: dict[str, ModelSpec]
) -> None:
    choice = offer(models, "comfy_split", tiny_models["comfy_split"]) | {"precision": "fp32"}
    latents, sound = make_song(run, choice)
    patchers = pack("nodes.host").engine().host._patchers
    assert patchers == {}  # those of the first song left with their handle
    mlx_latents, mlx_sound = make_song(run, choice | {"device": "mlx"})
    assert patchers == {}
    torch.testing.assert_close(mlx_latents, latents, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mlx_sound, sound, rtol=1e-4, atol=1e-4)


def test_weights_belong_to_comfyui_and_leave_with_the_handle(
    run: Any, pack: Any, models: Path, offer: Any, tiny_models: dict[str, ModelSpec]
) -> None:
    choice = offer(models, "comfy_split", tiny_models["comfy_split"])
    (model,) = run("ACEStepLoad", **choice)
    engine, patchers = pack("nodes.host").engine(), pack("nodes.host").engine().host._patchers
    words = {"caption": "x", "duration": SECONDS, "think": False}
    plan, *_ = run("ACEStepCoTPlanner", model=model, **words)
    run("ACEStepDiTSampler", model=model, plan=plan, steps=1)
    assert {part.name for part in engine.store.loaded()} >= {"dit", "text_encoder"}
    assert {component for component, _ in patchers.values()} == set(engine.store.loaded())
    del model
    assert engine.store.loaded() == []
    assert patchers == {}
