"""The task nodes, from sockets and widgets to what the engine is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from acestep_engine.types import ModelSpec

SECONDS = 6


@pytest.fixture(scope="module")
def audio() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    waveform = torch.rand(1, 2, SECONDS * 48_000, generator=generator) - 0.5
    return {"waveform": waveform, "sample_rate": 48_000}


def test_several_regions_take_the_place_of_start_and_end(run: Any, audio: dict[str, Any]) -> None:
    (task,) = run("ACEStepRepaint", audio=audio, start=1.0, end=2.0)
    assert task.regions == ((1.0, 2.0),)
    (task,) = run("ACEStepRepaint", audio=audio, start=1.0)
    assert task.regions == ((1.0, None),)
    (task,) = run("ACEStepRepaint", audio=audio, regions="-2-0.5, 3-4\n5-")
    assert task.regions == ((-2.0, 0.5), (3.0, 4.0), (5.0, None))


def test_each_track_is_a_task_of_its_own(run: Any, audio: dict[str, Any]) -> None:
    found, names = run(
        "ACEStepExtract", audio=audio, tracks="Vocals, backing vocals,\ndrums, drums"
    )
    assert names == ["vocals", "backing_vocals", "drums"]
    assert [task.track for task in found] == names
    assert run("ACEStepExtract", audio=audio, tracks="")[1] == ["any"]
    (added,) = run("ACEStepComplete", audio=audio, tracks="bass, fx")
    assert added.tracks == ("bass", "fx")


def test_a_track_plays_all_along_or_in_a_part(run: Any, audio: dict[str, Any]) -> None:
    (task,) = run("ACEStepLego", audio=audio, track="any")
    assert (task.track, task.regions) == (None, ())
    (task,) = run("ACEStepLego", audio=audio, track="bass", start=1.0, end=3.0)
    assert (task.track, task.regions) == ("bass", ((1.0, 3.0),))


@pytest.mark.parametrize("node", ["Cover", "Repaint", "Extract", "Lego", "Complete"])
def test_exactly_one_source_is_connected(run: Any, audio: dict[str, Any], node: str) -> None:
    latent = {"samples": torch.zeros(1, 64, 150), "type": "audio"}
    with pytest.raises(Exception, match="no recording"):
        run(f"ACEStep{node}")
    with pytest.raises(Exception, match="Disconnect one"):
        run(f"ACEStep{node}", audio=audio, latent=latent)


@pytest.mark.parametrize(
    ("node", "widgets", "words"),
    [
        ("Repaint", {"regions": "4 to 6"}, "START-END"),
        ("Repaint", {"start": 3.0, "end": 2.0}, "is empty"),
        ("Extract", {"tracks": "kazoo"}, "no track 'kazoo'"),
    ],
)
def test_mistakes_are_told_in_words(
    run: Any, audio: dict[str, Any], node: str, widgets: dict[str, Any], words: str
) -> None:
    with pytest.raises(Exception, match=words):
        run(f"ACEStep{node}", audio=audio, **widgets)


def test_a_repainted_song_goes_through_the_nodes_and_keeps_its_rest(
    run: Any,
    models: Path,
    offer: Any,
    tiny_models: dict[str, ModelSpec],
    audio: dict[str, Any],
) -> None:
    (model,) = run("ACEStepLoad", **offer(models, "official", tiny_models["official"]))
    plan, *_ = run("ACEStepCoTPlanner", model=model, caption="x", think=False)
    (task,) = run("ACEStepRepaint", audio=audio, start=2.0, end=3.0)
    (latent,) = run("ACEStepDiTSampler", model=model, plan=plan, task=task, steps=2)
    (made,) = run("ACEStepVAEDecodeTiled", model=model, latent=latent)
    (whole,) = run("ACEStepSpliceAudio", original=audio, new=made, task=task, crossfade=0.0)
    outside = torch.ones(SECONDS * 48_000, dtype=torch.bool)
    outside[96_000:144_000] = False
    assert torch.equal(whole["waveform"][..., outside], audio["waveform"][..., outside])
    assert not torch.equal(whole["waveform"], audio["waveform"])


def test_latents_are_a_source_as_they_are(
    run: Any, models: Path, offer: Any, tiny_models: dict[str, ModelSpec]
) -> None:
    (model,) = run("ACEStepLoad", **offer(models, "official", tiny_models["official"]))
    plan, *_ = run("ACEStepCoTPlanner", model=model, caption="x", think=False)
    samples = torch.randn(1, 64, 150, generator=torch.Generator().manual_seed(1))
    (task,) = run(
        "ACEStepRepaint",
        latent={"samples": samples, "type": "audio"},
        start=3.0,
        end=4.0,
        mode="conservative",
    )
    (latent,) = run("ACEStepDiTSampler", model=model, plan=plan, task=task, steps=2)
    assert torch.equal(latent["samples"][..., :50], samples[..., :50])
