"""Nodes of codes as material and of spliced sound, as ComfyUI runs them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from acestep_engine.types import ModelSpec


@pytest.fixture
def codes(pack: Any) -> Any:
    """Makes codes of the pack's own class."""
    kind = pack("acestep_engine.types").Codes
    return lambda *songs: kind(tuple(map(tuple, songs)))


@pytest.fixture
def model(run: Any, models: Path, offer: Any, tiny_models: dict[str, ModelSpec]) -> Any:
    (handle,) = run("ACEStepLoad", **offer(models, "official", tiny_models["official"]))
    return handle


def test_each_operation_does_what_it_says(run: Any, codes: Any) -> None:
    first, second = codes(range(10)), codes(range(10, 30))

    def edit(operation: str, **widgets: Any) -> tuple[list[int], float]:
        values = {"codes": first, "second": second, "operation": operation, **widgets}
        edited, duration = run("ACEStepCodesEdit", **values)
        return list(edited.items[0]), duration

    assert edit("slice") == (list(range(10)), 2.0)
    assert edit("slice", start=0.4, end=1.0) == ([2, 3, 4], pytest.approx(0.6))
    assert edit("slice", start=2, end=5, unit="codes")[0] == [2, 3, 4]
    assert edit("slice", start=2, unit="codes")[0] == list(range(2, 10))
    assert edit("join") == (list(range(30)), 6.0)
    assert edit("repeat", times=3) == ([*range(10)] * 3, 6.0)
    assert edit("reverse")[0] == list(range(9, -1, -1))
    assert edit("mix", ratio=1.0)[0] == list(range(10, 20))
    faded, duration = edit("cross-fade", start=0.8, end=1.2)
    assert duration == 4.0
    assert faded[:4] + faded[6:] == [0, 1, 2, 3, *range(16, 30)]


@pytest.mark.parametrize("operation", ["join", "cross-fade", "mix"])
def test_an_operation_on_two_songs_asks_for_the_second(
    run: Any, codes: Any, operation: str
) -> None:
    with pytest.raises(Exception, match=f"'{operation}' takes two songs.* 'second'"):
        run("ACEStepCodesEdit", codes=codes([1, 2]), operation=operation)


def test_a_recording_becomes_codes_as_by_encode_and_tokenize(
    run: Any, pack: Any, model: Any
) -> None:
    waveform = torch.rand(2, 1, 44_100) - 0.5
    audio = {"waveform": waveform.clone(), "sample_rate": 44_100}
    found, seconds = run("ACEStepCodesFromAudio", model=model, audio=audio, tile=0.4)
    assert torch.equal(audio["waveform"], waveform)
    assert seconds == 1.0
    assert [len(song) for song in found.items] == [5, 5]
    (latent,) = run("ACEStepVAEEncodeTiled", model=model, audio=audio, tile=0.4)
    engine, sockets = pack("nodes.host").engine(), pack("nodes.sockets")
    assert found == engine.tokenize(model.spec, sockets.latents_from(latent))


def test_silence_has_no_codes(run: Any, model: Any) -> None:
    audio = {"waveform": torch.zeros(1, 2, 48_000), "sample_rate": 48_000}
    with pytest.raises(Exception, match="Song 1 of the encoded sound is silent"):
        run("ACEStepCodesFromAudio", model=model, audio=audio)


def audio_of(seconds: float, rate: int = 48_000) -> dict[str, Any]:
    return {"waveform": torch.rand(1, 2, round(seconds * rate)) - 0.5, "sample_rate": rate}


def test_a_region_by_hand_is_spliced_in(run: Any) -> None:
    original, new = audio_of(2.0), audio_of(2.0)
    widgets = {"start": 0.5, "end": 1.0, "crossfade": 0.0}
    (out,) = run("ACEStepSpliceAudio", original=original, new=new, **widgets)
    expected = original["waveform"].clone()
    expected[..., 24_000:48_000] = new["waveform"][..., 24_000:48_000]
    assert torch.equal(out["waveform"], expected)
    (end,) = run("ACEStepSpliceAudio", original=original, new=new, start=1.5, crossfade=0.0)
    assert torch.equal(end["waveform"][..., 72_000:], new["waveform"][..., 72_000:])
    assert torch.equal(end["waveform"][..., :72_000], original["waveform"][..., :72_000])


def test_the_regions_of_a_task_take_the_place_of_those_by_hand(run: Any) -> None:
    original, new = audio_of(2.0), audio_of(2.5)
    regions = (SimpleNamespace(start=0.2, end=0.4), SimpleNamespace(start=1.5, end=2.5))
    task = SimpleNamespace(regions=regions)
    values = {"original": original, "new": new, "start": 0.0, "end": 1.0, "task": task}
    (out,) = run("ACEStepSpliceAudio", **values)
    assert out["waveform"].shape[-1] == 120_000
    kept = slice(24_000, 60_000)
    assert torch.equal(out["waveform"][..., kept], original["waveform"][..., kept])
    assert torch.equal(out["waveform"][..., 72_000:], new["waveform"][..., 72_000:])
    with pytest.raises(Exception, match="no region"):
        run("ACEStepSpliceAudio", original=original, new=new, task=SimpleNamespace())


def test_a_decoded_song_is_spliced_at_its_own_level(run: Any, pack: Any, model: Any) -> None:
    """The tiny VAE is quiet; latents are scaled until its sound exceeds the range."""
    latent, gain = {"samples": torch.randn(1, 64, 50)}, 1.0
    while gain == 1.0:
        latent = {"samples": latent["samples"] * 4}
        (new,) = run("ACEStepVAEDecodeTiled", model=model, latent=latent)
        (gain,) = pack("nodes.sockets").audio_from(new).gain
    original = audio_of(2.0)
    widgets = {"start": 0.5, "end": 1.0, "crossfade": 0.0}
    (out,) = run("ACEStepSpliceAudio", original=original, new=new, **widgets)
    inside = new["waveform"][..., 24_000:48_000] / gain
    torch.testing.assert_close(out["waveform"][..., 24_000:48_000], inside)
