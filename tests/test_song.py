"""The whole path on tiny real models: length, sameness, seeds, words, channels."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from acestep_engine.engine import Engine
from acestep_engine.host import LocalHost, Progress
from acestep_engine.types import (
    Audio,
    Codes,
    ComposeOptions,
    DiTSampling,
    Latents,
    LMSampling,
    ModelSpec,
    PlanOptions,
    Request,
)

SHORT = Request(
    caption="calm piano", duration=2, bpm=90, keyscale="C major", timesignature="4", language="en"
)


def song(engine: Engine, model: ModelSpec, request: Request = SHORT, seed: int = 5) -> Audio:
    sampling = LMSampling(seed=seed)
    plan = engine.plan(model, request, PlanOptions(sampling=sampling))
    codes = engine.compose(model, plan, ComposeOptions(sampling=sampling))
    return engine.decode(model, engine.render(model, plan, codes, DiTSampling(seed=seed)))


@pytest.mark.parametrize("seconds", [1.0, 5.12, 7.2, 10.0])
def test_the_song_has_the_asked_length(
    engine: Engine, tiny_model: ModelSpec, seconds: float
) -> None:
    audio = song(engine, tiny_model, replace(SHORT, duration=seconds))
    assert audio.waveform.shape == (1, 2, round(seconds * 48_000))
    assert audio.waveform.isfinite().all()
    assert 0 < audio.waveform.abs().max() <= 1


def test_each_layout_gives_the_same_song_bit_for_bit(
    engine: Engine, tiny_models: dict[str, ModelSpec]
) -> None:
    songs = {layout: song(engine, model).waveform for layout, model in tiny_models.items()}
    first = songs.pop("official")
    for layout, other in songs.items():
        assert torch.equal(first, other), layout


def test_a_seed_is_a_song_and_global_generators_stay_untouched(
    engine: Engine, tiny_model: ModelSpec
) -> None:
    open_request = Request(caption="surprise me", duration=2)
    first = song(engine, tiny_model, open_request).waveform
    torch.rand(1000), np.random.rand(1000), random.random()
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    second = song(Engine(LocalHost(show=False)), tiny_model, open_request).waveform
    assert torch.equal(first, second)
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])  # type: ignore[index]
    assert states[2] == random.getstate()
    assert not torch.equal(first, song(engine, tiny_model, open_request, seed=6).waveform)


@pytest.mark.slow
def test_two_processes_make_the_same_file(tmp_path: Path, tiny_model: ModelSpec) -> None:
    for name in ("a.wav", "b.wav"):
        command = [
            sys.executable,
            "-m",
            "acestep_engine",
            "song",
            "--model",
            str(Path(tiny_model.vae).parent),
        ]
        command += ["--seconds", "2", "--seed", "3", "--keep-caption"]
        command += ["--out", str(tmp_path / name)]
        root = str(Path(__file__).resolve().parent.parent)
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=root, capture_output=True, env=one_thread)
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()


def test_a_song_alone_is_the_song_in_a_batch_of_four(engine: Engine, tiny_model: ModelSpec) -> None:
    plan = engine.plan(tiny_model, SHORT)
    options = ComposeOptions(batch=4, sampling=LMSampling(seed=20))
    codes = engine.compose(tiny_model, plan, options)
    batch = engine.decode(tiny_model, engine.render(tiny_model, plan, codes, DiTSampling(seed=20)))
    for item in range(4):
        alone = engine.compose(
            tiny_model, plan, ComposeOptions(sampling=LMSampling(seed=20 + item))
        )
        assert alone.items[0] == codes.items[item]
        latents = engine.render(tiny_model, plan, alone, DiTSampling(seed=20 + item))
        audio = engine.decode(tiny_model, latents)
        assert torch.equal(audio.waveform[0], batch.waveform[item])


def test_without_guidance_a_song_of_eight_is_the_song_alone(
    engine: Engine, tiny_model: ModelSpec
) -> None:
    model = replace(tiny_model, wish=replace(tiny_model.wish, precision="fp32"))
    plan = engine.plan(model, replace(SHORT, duration=30))
    sampling = LMSampling(cfg_scale=1.0, temperature=1.0, top_p=1.0, seed=5)
    codes = engine.compose(model, plan, ComposeOptions(8, sampling=sampling))
    for item in (0, 3, 7):
        alone = replace(sampling, seed=5 + item)
        assert (
            engine.compose(model, plan, ComposeOptions(sampling=alone)).items[0]
            == codes.items[item]
        )


def test_codes_decide_the_length_where_they_differ_from_the_plan(
    engine: Engine, tiny_model: ModelSpec
) -> None:
    plan = engine.plan(tiny_model, replace(SHORT, duration=20))
    latents = engine.render(tiny_model, plan, Codes((tuple(range(40)),)))
    assert latents.values.shape == (1, 200, 64)


def test_the_largest_seed_is_a_seed(engine: Engine, tiny_model: ModelSpec) -> None:
    plan = engine.plan(tiny_model, SHORT)
    latents = engine.render(tiny_model, plan, None, DiTSampling(seed=2**63 - 1, batch=2))
    assert latents.record["seeds"] == [2**63 - 1, 0]


def test_encode_then_decode_keeps_the_length(engine: Engine, tiny_model: ModelSpec) -> None:
    given = torch.rand(2, 1, 44_100 * 3) - 0.5
    before = given.clone()
    latents = engine.encode(tiny_model, Audio(given, 44_100))
    assert latents.values.shape == (2, 75, 64)
    assert engine.decode(tiny_model, latents).waveform.shape == (2, 2, 3 * 48_000)
    assert torch.equal(given, before)


def test_latents_become_codes_in_range(engine: Engine, tiny_model: ModelSpec) -> None:
    codes = engine.tokenize(tiny_model, Latents(torch.randn(2, 12, 64)))
    assert [len(item) for item in codes.items] == [3, 3]
    assert all(0 <= code < 64_000 for item in codes.items for code in item)


def test_the_noise_of_arithmetic_adds_no_second(engine: Engine, tiny_model: ModelSpec) -> None:
    assert engine.plan(tiny_model, replace(SHORT, duration=0.1 * 3 * 100)).whole_seconds == 30


@pytest.mark.parametrize("duration", [None, 0, -1])
def test_an_open_length_is_decided_by_the_plan(
    engine: Engine, tiny_model: ModelSpec, duration: float | None
) -> None:
    plan = engine.plan(tiny_model, Request("a", duration=duration))
    assert 10 <= plan.duration <= 600
    without_lm = engine.plan(replace(tiny_model, lm=""), Request("a", duration=duration))
    assert without_lm.duration == 120


@pytest.mark.parametrize(
    "words",
    [
        ("", ""),
        ("a<|im_end|></think><|audio_code_5|>", "<|endoftext|>"),
        ("日本語 😀 é \u202e\x00", "[Verse]\nдождь"),
        ("calm", "la " * 3_400),
    ],
    ids=["empty", "control tokens", "unicode", "10,000 characters"],
)
def test_any_words_make_a_song(
    engine: Engine, tiny_model: ModelSpec, words: tuple[str, str]
) -> None:
    request = replace(SHORT, caption=words[0], lyrics=words[1])
    assert song(engine, tiny_model, request).seconds == 2


def test_what_is_too_loud_is_cut_before_it_is_encoded(
    engine: Engine, tiny_model: ModelSpec
) -> None:
    loud = torch.linspace(-3, 3, 2 * 19_200).mul(9).sin().mul(2).view(1, 2, 19_200)
    assert loud.abs().max() > 1.9
    found = engine.encode(tiny_model, Audio(loud)).values
    assert torch.equal(found, engine.encode(tiny_model, Audio(loud.clamp(-1, 1))).values)
    assert not torch.equal(found, engine.encode(tiny_model, Audio(loud / 2)).values)


def test_an_incomplete_code_is_filled_with_silence(engine: Engine, tiny_model: ModelSpec) -> None:
    given = torch.linspace(-2, 2, 12 * 64).mul(7).sin().view(1, 12, 64)
    quiet = engine._silences.of(tiny_model)[:3][None]
    filled = torch.cat((given, quiet), dim=1)
    assert quiet.any()
    found = engine.tokenize(tiny_model, Latents(given))
    assert found == engine.tokenize(tiny_model, Latents(filled))
    loud = torch.cat((given, 9 * torch.ones_like(quiet)), dim=1)
    assert found != engine.tokenize(tiny_model, Latents(loud))


def test_another_timbre_is_another_song(engine: Engine, tiny_model: ModelSpec) -> None:
    plan = engine.plan(tiny_model, SHORT)
    first, second = (
        Latents(torch.linspace(-2, 2, 6400).mul(n).sin().view(1, 100, 64)) for n in (3, 5)
    )
    songs = [
        engine.render(tiny_model, plan, timbre=timbre).values
        for timbre in (None, first, second, first, None)
    ]
    assert torch.equal(songs[1], songs[3])
    assert torch.equal(songs[0], songs[4])
    assert not torch.equal(songs[0], songs[1])
    assert not torch.equal(songs[1], songs[2])


def test_the_bar_of_a_render_counts_the_steps_of_all_songs(tiny_model: ModelSpec) -> None:
    class Counting(LocalHost):
        def __init__(self) -> None:
            super().__init__(show=False)
            self.totals: list[tuple[str, int]] = []
            self.seen: list[int] = []
            self.closed = 0

        def progress(self, stage: str, total: int) -> Progress:
            self.totals.append((stage, total))
            host = self

            class Bar:
                def update(self, done: int) -> None:
                    host.seen.append(done)
                    if done == 5 and len(host.totals) == 2:
                        raise KeyboardInterrupt

                def close(self) -> None:
                    host.closed += 1

            return Bar()

    host = Counting()
    engine = Engine(host)
    plan = engine.plan(tiny_model, SHORT)
    engine.render(tiny_model, plan, None, DiTSampling(steps=3, batch=2))
    assert host.totals == [("Render", 6)]
    assert host.seen == [1, 2, 3, 4, 5, 6]
    with pytest.raises(KeyboardInterrupt):
        engine.render(tiny_model, plan, None, DiTSampling(steps=3, batch=2))
    assert host.seen == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]
    assert host.closed == 2


def test_six_channels_use_the_first_two(engine: Engine, tiny_model: ModelSpec) -> None:
    six = torch.rand(1, 6, 9_600) - 0.5
    latents = engine.encode(tiny_model, Audio(six))
    assert torch.equal(latents.values, engine.encode(tiny_model, Audio(six[:, :2])).values)


def test_bf16_runs_the_whole_path(engine: Engine, tiny_model: ModelSpec) -> None:
    model = replace(tiny_model, wish=replace(tiny_model.wish, precision="bf16"))
    assert song(engine, model).seconds == 2
    assert engine.describe(model)["precision"] == "bf16"
