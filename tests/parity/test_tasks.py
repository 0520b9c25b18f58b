"""Every task of diffusers' AceStepPipeline through our engine, from one folder of tiny weights.

Inputs are chosen where both agree: sources of 129 frames and more, regions on the grid of frames,
no strength below 1. Both get their latents from our encoder, which has a test of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    AceStepPipeline,
    AceStepTransformer1DModel,
    AutoencoderOobleck,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.pipelines.ace_step.modeling_ace_step import (
    AceStepAudioTokenDetokenizer,
    AceStepAudioTokenizer,
    AceStepConditionEncoder,
)
from tokenizers import AddedToken, Tokenizer, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Model

from acestep_engine.dit.noise import draw
from acestep_engine.dit.text import END, text_prompt
from acestep_engine.engine import Engine
from acestep_engine.host import LocalHost
from acestep_engine.lm.tokenizer import load_tokenizer
from acestep_engine.remix import Complete, Cover, Extract, Lego, Region, Repaint, Task
from acestep_engine.rendering import fit
from acestep_engine.runtime import Wish
from acestep_engine.types import Audio, Codes, DiTSampling, Metadata, ModelSpec, Plan
from acestep_engine.weights.tiny import write_tiny

END_TEXT = "<|endoftext|>"
PLAN = Plan(
    caption="warm analogue synthesizers over a steady beat",
    lyrics="[Verse]\nwalking home\n\n[Chorus]\nla la la",
    metadata=Metadata(bpm=96, keyscale="A minor", timesignature="4", language="en"),
    duration=30.0,
)
TURBO = DiTSampling(steps=8, shift=3.0, guidance=1.0, seed=3)
APG = DiTSampling(steps=6, shift=2.0, guidance=7.0, seed=4)


def noise(frames: int, seed: int) -> Audio:
    """White noise of whole frames, 48 kHz stereo."""
    generator = torch.Generator().manual_seed(seed)
    return Audio(torch.rand(1, 2, frames * 1_920, generator=generator) - 0.5)


SOURCE, ODD = noise(250, 1), noise(153, 2)  # 10 s, and 6.12 s: no multiple of five frames
TIMBRE = noise(750, 3)
CODES = tuple(1_597 * i % 64_000 for i in range(50))


@dataclass(frozen=True)
class Both:
    pipeline: AceStepPipeline
    engine: Engine
    model: ModelSpec


def tokenizer() -> PreTrainedTokenizerFast:
    """The bundled vocabulary with the end token, which is appended to every text."""
    bpe = Tokenizer.from_str(load_tokenizer()._bpe.to_str())
    bpe.add_special_tokens([AddedToken(END_TEXT, special=True)])
    assert bpe.token_to_id(END_TEXT) == END
    bpe.post_processor = processors.TemplateProcessing(
        single=f"$A {END_TEXT}", special_tokens=[(END_TEXT, END)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=END_TEXT, padding_side="right")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    root = tmp_path_factory.mktemp("base")
    silence = torch.randn(15_000, 64, generator=torch.Generator().manual_seed(9))
    model = write_tiny(root, "diffusers", family="base", lm=False, silence=silence)
    model = replace(model, wish=Wish(precision="fp32"))
    home = Path(model.dit)

    def load(part: Any, name: str) -> Any:
        return part.from_pretrained(home, subfolder=name).eval()

    pipeline = AceStepPipeline(
        vae=AutoencoderOobleck(
            encoder_hidden_size=4,
            downsampling_ratios=[2, 4, 4, 6, 10],
            channel_multiples=[1, 1, 1, 1, 1],
            decoder_channels=4,
            decoder_input_channels=64,
            audio_channels=2,
            sampling_rate=48_000,
        ),
        text_encoder=load(Qwen3Model, "text_encoder"),
        tokenizer=tokenizer(),
        transformer=load(AceStepTransformer1DModel, "transformer"),
        condition_encoder=load(AceStepConditionEncoder, "condition_encoder"),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
        audio_tokenizer=load(AceStepAudioTokenizer, "audio_tokenizer"),
        audio_token_detokenizer=load(AceStepAudioTokenDetokenizer, "audio_token_detokenizer"),
    )
    pipeline.set_progress_bar_config(disable=True)
    engine = Engine(LocalHost(show=False))

    def encode(audio_BXS: Tensor) -> SimpleNamespace:
        latents = engine.encode(model, Audio(audio_BXS)).values.transpose(1, 2)
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: latents))

    pipeline.vae.encode = encode  # ours has its own oracle; diffusers draws around the mean
    return Both(pipeline, engine, model)


def theirs(
    both: Both, sampling: DiTSampling, source: Audio | None, frames: int, **task: Any
) -> Tensor:
    return both.pipeline(
        prompt=PLAN.caption,
        lyrics=PLAN.lyrics,
        audio_duration=-(-frames // 25),
        vocal_language=PLAN.metadata.language,
        bpm=PLAN.metadata.bpm,
        keyscale=PLAN.metadata.keyscale,
        timesignature=PLAN.metadata.timesignature,
        src_audio=None if source is None else source.waveform[0],
        num_inference_steps=sampling.steps,
        shift=sampling.shift,
        guidance_scale=sampling.guidance,
        latents=draw(sampling.seed, frames),
        output_type="latent",
        **task,
    ).audios


def region(start: float, end: float | None) -> dict[str, float | None]:
    return {"repainting_start": start, "repainting_end": end}


def aggressive(*places: float) -> Repaint:
    return Repaint(SOURCE, (Region(*places),), mode="aggressive")


CASES: dict[str, tuple[Task, dict[str, Any]]] = {
    "cover": (Cover(SOURCE), {"task_type": "cover"}),
    "cover-odd": (Cover(ODD), {"task_type": "cover"}),
    "repaint-all": (aggressive(0.0), {"task_type": "repaint"}),
    "repaint": (aggressive(4.0, 6.0), {"task_type": "repaint"} | region(4.0, 6.0)),
    "repaint-end": (aggressive(7.48), {"task_type": "repaint"} | region(7.48, None)),
    "repaint-last": (aggressive(9.96, 10), {"task_type": "repaint"} | region(9.96, 10)),
    "extract": (Extract(SOURCE), {"task_type": "extract"}),
    "extract-track": (
        Extract(SOURCE, "backing_vocals"),
        {"task_type": "extract", "track_name": "backing_vocals"},
    ),
    "lego": (Lego(ODD), {"task_type": "lego"}),
    "lego-track": (Lego(SOURCE, "fx"), {"task_type": "lego", "track_name": "fx"}),
    "lego-region": (
        Lego(SOURCE, "bass", (Region(2.0, 3.2),)),
        {"task_type": "lego", "track_name": "bass"} | region(2.0, 3.2),
    ),
    "complete": (Complete(SOURCE), {"task_type": "complete"}),
    "complete-tracks": (
        Complete(ODD, ("drums", "backing_vocals")),
        {"task_type": "complete", "complete_track_classes": ["drums", "backing_vocals"]},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sampling", [TURBO, APG], ids=["plain", "apg"])
def test_a_task_equals_that_of_the_pipeline(both: Both, name: str, sampling: DiTSampling) -> None:
    task, wanted = CASES[name]
    assert isinstance(task.source, Audio)
    frames = task.source.waveform.shape[-1] // 1_920
    found = both.engine.render(both.model, PLAN, sampling=sampling, task=task).values
    expected = theirs(both, sampling, task.source, frames, **wanted)
    assert (found - draw(sampling.seed, frames)).abs().max() > 0.5, "the models must do something"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["cover", "repaint", "extract"])
def test_a_timbre_of_thirty_seconds_is_heard_as_in_the_pipeline(both: Both, name: str) -> None:
    task, wanted = CASES[name]
    timbre = both.engine.encode(both.model, TIMBRE)
    found = both.engine.render(both.model, PLAN, None, TURBO, timbre, task).values
    expected = theirs(both, TURBO, SOURCE, 250, reference_audio=TIMBRE.waveform[0], **wanted)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    without = both.engine.render(both.model, PLAN, None, TURBO, None, task).values
    assert (found - without).abs().max() > 1e-2


@pytest.mark.parametrize("task", [None, Cover(SOURCE)], ids=["text2music", "cover"])
@pytest.mark.parametrize("sampling", [TURBO, APG], ids=["plain", "apg"])
def test_codes_are_followed_as_in_the_pipeline(
    both: Both, task: Task | None, sampling: DiTSampling
) -> None:
    """Codes say what is played even where there is a source."""
    plan = fit(PLAN, 10.0)
    found = both.engine.render(both.model, plan, Codes((CODES,)), sampling, None, task).values
    text = "".join(f"<|audio_code_{code}|>" for code in CODES)
    expected = theirs(both, sampling, None, 250, audio_codes=text)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_new_song_equals_that_of_the_pipeline(both: Both) -> None:
    found = both.engine.render(both.model, fit(PLAN, 10.0), sampling=APG).values
    torch.testing.assert_close(found, theirs(both, APG, None, 250), atol=1e-4, rtol=0)


def test_no_task_is_another_in_disguise(both: Both) -> None:
    songs = {
        name: both.engine.render(both.model, PLAN, sampling=TURBO, task=task).values[:, :153]
        for name, (task, _) in CASES.items()
    }
    names = list(songs)
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            assert (songs[one] - songs[other]).abs().max() > 1e-2, (one, other)


@pytest.mark.parametrize("name", CASES)
def test_the_prompt_of_a_task_equals_that_of_the_pipeline(both: Both, name: str) -> None:
    task, wanted = CASES[name]
    assert isinstance(task.source, Audio)
    record = both.engine.render(both.model, PLAN, sampling=DiTSampling(steps=1), task=task).record
    seconds = task.source.seconds
    expected, _ = both.pipeline._format_prompt(
        PLAN.caption,
        audio_duration=-(-seconds // 1),
        instruction=both.pipeline._get_task_instruction(
            wanted["task_type"], wanted.get("track_name"), wanted.get("complete_track_classes")
        ),
        bpm=PLAN.metadata.bpm,
        keyscale=PLAN.metadata.keyscale,
        timesignature=PLAN.metadata.timesignature,
    )
    assert text_prompt(fit(PLAN, seconds), record["instruction"]) + END_TEXT + "\n" == expected
    assert record["seconds"] == pytest.approx(seconds)
