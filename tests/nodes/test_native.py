"""Adapters to ComfyUI's own ACE-Step types: conditioning both ways, and the mask of a latent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from acestep_engine.dit.conditions import read
from acestep_engine.engine import Engine
from acestep_engine.lm.tokenizer import load_tokenizer
from acestep_engine.types import Metadata, ModelSpec, Plan

WORDS = {"caption": "calm piano", "lyrics": "la la", "bpm": 90, "think": False}
SONGS = "1, 2, 63999" + ", 7" * 7


@pytest.fixture
def model(run: Any, models: Path, offer: Any, tiny_models: dict[str, ModelSpec]) -> Any:
    return run("ACEStepLoad", **offer(models, "comfy_split", tiny_models["comfy_split"]))[0]


def plan_of(run: Any, model: Any, duration: float = 2.0) -> Any:
    return run("ACEStepCoTPlanner", model=model, duration=duration, **WORDS)[0]


def codes_of(run: Any, text: str) -> Any:
    return run("ACEStepCodesText", text=text)[0]


def test_words_and_codes_stand_where_the_native_model_looks_for_them(
    run: Any, model: Any, engine: Engine, tiny_models: dict[str, ModelSpec]
) -> None:
    plan, codes = plan_of(run, model), codes_of(run, SONGS)
    conditioning, latent = run("ACEStepToConditioning", model=model, plan=plan, codes=codes)
    ((text_BLD, values),) = conditioning

    spec = tiny_models["comfy_split"]
    song = Plan("calm piano", "la la", Metadata(bpm=90), 2.0)
    reader = engine.store.backend(spec, "text_encoder")
    words = read(reader, load_tokenizer().encode, song, "cover")
    torch.testing.assert_close(text_BLD, words.text_BLD)
    torch.testing.assert_close(values["conditioning_lyrics"], words.lyric_BLD)
    assert values["audio_codes"] == [[1, 2, 63999, *[7] * 7]]
    assert "reference_audio_timbre_latents" not in values
    assert text_BLD.dtype == values["conditioning_lyrics"].dtype == torch.float32
    assert latent["samples"].shape == (1, 64, 50)
    assert not latent["samples"].any()


def test_without_codes_the_prompt_asks_for_free_music(run: Any, model: Any) -> None:
    plan = plan_of(run, model)
    free, _ = run("ACEStepToConditioning", model=model, plan=plan)
    led, _ = run("ACEStepToConditioning", model=model, plan=plan, codes=codes_of(run, SONGS))
    assert "audio_codes" not in free[0][1]
    assert not torch.equal(free[0][0][:, :20], led[0][0][:, :20])


def test_each_song_of_the_codes_has_a_place_in_the_batch(run: Any, model: Any) -> None:
    plan, codes = plan_of(run, model), codes_of(run, f"{SONGS}\n\n{SONGS.replace('7', '8')}")
    conditioning, latent = run("ACEStepToConditioning", model=model, plan=plan, codes=codes)
    assert torch.tensor(conditioning[0][1]["audio_codes"]).shape == (2, 10)
    assert latent["samples"].shape == (2, 64, 50)


def test_a_timbre_goes_along_as_a_copy_and_is_read_as_a_cover(run: Any, model: Any) -> None:
    plan, timbre = plan_of(run, model), {"samples": torch.randn(1, 64, 30)}
    sung, _ = run("ACEStepToConditioning", model=model, plan=plan, timbre=timbre)
    led, _ = run("ACEStepToConditioning", model=model, plan=plan, codes=codes_of(run, SONGS))
    (reference,) = sung[0][1]["reference_audio_timbre_latents"]
    assert torch.equal(reference, timbre["samples"])
    assert reference.data_ptr() != timbre["samples"].data_ptr()
    assert torch.equal(sung[0][0], led[0][0])


def test_codes_and_a_timbre_together_are_refused_instead_of_dropped(run: Any, model: Any) -> None:
    plan, timbre = plan_of(run, model), {"samples": torch.randn(1, 64, 30)}
    codes = codes_of(run, SONGS)
    with pytest.raises(Exception, match="would drop the codes"):
        run("ACEStepToConditioning", model=model, plan=plan, codes=codes, timbre=timbre)


@pytest.mark.parametrize(("count", "frames", "samples"), [(15, 60, 115_200), (20, 100, 192_000)])
def test_the_empty_latent_is_decoded_to_the_length_that_was_asked_for(
    run: Any, model: Any, count: int, frames: int, samples: int
) -> None:
    plan, codes = plan_of(run, model, 2.4), codes_of(run, ", ".join(["5"] * count))
    _, latent = run("ACEStepToConditioning", model=model, plan=plan, codes=codes)
    assert latent["samples"].shape[-1] == frames
    sampled = {**latent, "samples": torch.randn(latent["samples"].shape)}
    (audio,) = run("ACEStepVAEDecodeTiled", model=model, latent=sampled)
    assert audio["waveform"].shape[-1] == samples


def test_codes_come_out_of_a_conditioning_of_several_entries(run: Any) -> None:
    text = torch.zeros(1, 4, 16)
    conditioning = [
        [text, {"audio_codes": [[1, 2, 3, 4, 5]]}],
        [text, {}],
        [text, {"audio_codes": torch.tensor([[6, 7, 8, 9, 10]])}],
        [text, {"audio_codes": [[1, 2, 3, 4, 5]], "start_percent": 0.5}],
    ]
    codes, duration = run("ACEStepFromConditioning", conditioning=conditioning)
    assert codes.items == ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10))
    assert duration == 1.0


@pytest.mark.parametrize("values", [{}, {"audio_codes": [[]]}])
def test_a_conditioning_without_codes_is_told(run: Any, values: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="generate_audio_codes"):
        run("ACEStepFromConditioning", conditioning=[[torch.zeros(1, 4, 16), values]])


def test_codes_go_there_and_back(run: Any, model: Any) -> None:
    plan, codes = plan_of(run, model), codes_of(run, f"{SONGS}\n\n{SONGS.replace('7', '8')}")
    conditioning, _ = run("ACEStepToConditioning", model=model, plan=plan, codes=codes)
    assert run("ACEStepFromConditioning", conditioning=conditioning)[0].items == codes.items


def masked(run: Any, seconds: float, **widgets: Any) -> list[float]:
    latent = {"samples": torch.randn(1, 64, round(seconds * 25)), "batch_index": [0]}
    (out,) = run("ACEStepLatentNoiseMask", latent=latent, **widgets)
    assert out["samples"] is latent["samples"]
    assert out["batch_index"] == [0]
    assert "noise_mask" not in latent
    assert out["noise_mask"].shape == (1, 1, latent["samples"].shape[-1])
    return out["noise_mask"].flatten().tolist()


def test_regions_are_marked_frame_by_frame(run: Any) -> None:
    values = masked(run, 4.0, regions="-0.2, 1-1.4,3.6-")
    assert [i for i, value in enumerate(values) if value] == [
        *range(5),
        *range(25, 35),
        *range(90, 100),
    ]
    assert set(values) == {0.0, 1.0}


def test_a_soft_edge_lies_inside_and_only_where_there_is_something_to_mix(run: Any) -> None:
    values = masked(run, 2.0, regions="0.4-1.2, 1.6-2", soft_edge=0.12)
    assert values[9:15] == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])
    assert values[26:31] == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert values[39:43] == pytest.approx([0, 0.25, 0.5, 0.75])
    assert values[-1] == 1


@pytest.mark.parametrize("regions", ["5", "a-b", "3-2", "10-12", "1-2,", ""])
def test_a_region_that_marks_nothing_is_told(run: Any, regions: str) -> None:
    with pytest.raises(Exception, match=r"cannot be read|holds nothing|is outside"):
        masked(run, 4.0, regions=regions)
