"""Tasks through the engine: what stays of a source, how long it is followed, what is done once."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch

from acestep_engine.dit import schedule
from acestep_engine.dit.course import Course, Keep, soften
from acestep_engine.engine import Engine
from acestep_engine.errors import InvalidRequest
from acestep_engine.host import LocalHost, Progress
from acestep_engine.remix import Complete, Cover, Extract, Lego, Region, Repaint, Task
from acestep_engine.splice import splice
from acestep_engine.types import Audio, Codes, DiTSampling, Latents, Metadata, ModelSpec, Plan

PLAN = Plan("a slow waltz", "[Verse]\nla", Metadata(bpm=90, language="en"), 10.0)


def noise(seconds: float, seed: int = 0, rate: int = 48_000, channels: int = 2) -> Audio:
    generator = torch.Generator().manual_seed(seed)
    samples = round(seconds * rate)
    return Audio(torch.rand(1, channels, samples, generator=generator) - 0.5, rate)


def latents(frames: int, seed: int = 0) -> Latents:
    return Latents(torch.randn(1, frames, 64, generator=torch.Generator().manual_seed(seed)))


class Counting(LocalHost):
    """A host that counts the bars of each stage."""

    def __init__(self) -> None:
        super().__init__(show=False)
        self.stages: Counter[str] = Counter()

    def progress(self, stage: str, total: int) -> Progress:
        self.stages[stage] += 1
        return super().progress(stage, total)


SOURCE = noise(10)
TASKS: dict[str, Task] = {
    "cover": Cover(SOURCE, strength=0.5, noise_strength=0.3),
    "repaint": Repaint(SOURCE, (Region(4, 6),)),
    "extract": Extract(SOURCE, "vocals"),
    "lego": Lego(SOURCE, "drums", (Region(2, 4),)),
    "complete": Complete(SOURCE, ("bass",)),
}


@pytest.fixture(scope="module")
def base(tiny_models: dict[str, ModelSpec]) -> ModelSpec:
    return replace(tiny_models["official"], family="base")


SHORT = DiTSampling(steps=3, guidance=4.0, seed=5)


@pytest.mark.parametrize("name", TASKS)
def test_the_same_seed_gives_the_same_bits_alone_and_in_a_batch(
    engine: Engine, base: ModelSpec, name: str
) -> None:
    state = torch.random.get_rng_state()
    batch = engine.render(base, PLAN, None, replace(SHORT, batch=3), None, TASKS[name])
    for item in range(3):
        sampling = replace(SHORT, seed=5 + item)
        alone = Engine(LocalHost(show=False)).render(base, PLAN, None, sampling, None, TASKS[name])
        assert torch.equal(alone.values[0], batch.values[item])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_source_is_never_changed(engine: Engine, tiny_model: ModelSpec) -> None:
    audio, stored = noise(6), latents(150)
    copies = audio.waveform.clone(), stored.values.clone()
    engine.render(tiny_model, PLAN, None, DiTSampling(), None, Cover(audio))
    engine.render(tiny_model, PLAN, None, DiTSampling(), None, Repaint(stored, (Region(-1, 2),)))
    assert torch.equal(audio.waveform, copies[0])
    assert torch.equal(stored.values, copies[1])


@pytest.mark.parametrize("mode", ["conservative", "balanced", "aggressive"])
@pytest.mark.parametrize("regions", [(Region(4, 6),), (Region(1, 2), Region(4, 5), Region(8.5))])
def test_after_the_splice_the_rest_is_the_original_bit_for_bit(
    engine: Engine, tiny_model: ModelSpec, mode, regions: tuple[Region, ...]
) -> None:
    task = Repaint(SOURCE, regions, mode)
    made = engine.decode(
        tiny_model, engine.render(tiny_model, PLAN, None, DiTSampling(), None, task)
    )
    whole = splice(SOURCE, made, regions, 0.0).waveform
    new = torch.zeros(whole.shape[-1], dtype=torch.bool)
    for start, end in regions:
        new[round(start * 48_000) : round((10.0 if end is None else end) * 48_000)] = True
    assert whole.shape == SOURCE.waveform.shape
    assert torch.equal(whole[..., ~new], SOURCE.waveform[..., ~new])
    assert not torch.equal(whole[..., new], SOURCE.waveform[..., new])


def test_a_conservative_repaint_keeps_the_latents_outside_exactly(
    engine: Engine, tiny_model: ModelSpec
) -> None:
    source = latents(250)
    task = Repaint(source, (Region(4, 6),), "conservative")
    found = engine.render(tiny_model, PLAN, None, DiTSampling(), None, task).values
    assert torch.equal(found[:, :75], source.values[:, :75])  # 25 frames of fade, then the region
    assert torch.equal(found[:, 175:], source.values[:, 175:])
    assert (found[:, 100:150] - source.values[:, 100:150]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("region", "seconds"),
    [
        (Region(-3), 13.0),
        (Region(-3, 0), 13.0),
        (Region(10, 14), 14.0),
        (Region(-1.5, 11.5), 13.0),
    ],
)
@pytest.mark.parametrize("source", [SOURCE, latents(250)], ids=["audio", "latents"])
def test_a_region_beyond_the_source_makes_the_song_longer(
    engine: Engine, tiny_model: ModelSpec, source, region: Region, seconds: float
) -> None:
    task = Repaint(source, (region,))
    song = engine.render(tiny_model, PLAN, None, DiTSampling(), None, task)
    frame = 0.04 if isinstance(source, Latents) else 0.0  # latents begin on a whole one
    assert seconds - 1e-6 <= song.record["seconds"] <= seconds + 2 * frame + 1e-6
    if source is SOURCE:
        assert engine.decode(tiny_model, song).seconds == pytest.approx(seconds)


def test_a_source_decides_the_length_and_says_so(
    engine: Engine, tiny_model: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    plan = replace(PLAN, duration=120.0)
    with caplog.at_level(logging.WARNING):
        song = engine.render(tiny_model, plan, None, DiTSampling(), None, Cover(latents(5_625)))
    assert song.values.shape == (1, 5_625, 64)
    assert song.record["seconds"] == 225.0
    assert "120" in caplog.text
    assert "225" in caplog.text


@pytest.mark.parametrize("family", ["turbo", "base"])
def test_a_cover_of_no_strength_is_a_new_song_of_that_length(
    engine: Engine, tiny_model: ModelSpec, family
) -> None:
    model = replace(tiny_model, family=family)
    sampling = DiTSampling(steps=4, seed=3)
    cover = engine.render(model, PLAN, None, sampling, None, Cover(SOURCE, 0.0))
    new = engine.render(model, PLAN, None, sampling)
    assert torch.equal(cover.values, new.values)
    full = engine.render(model, PLAN, None, sampling, None, Cover(SOURCE))
    assert not torch.equal(full.values, new.values)


@pytest.mark.parametrize(
    ("strength", "steps", "followed"),
    [(1.0, 8, 8), (0.0, 8, 0), (0.5, 8, 4), (0.49, 8, 3), (0.99, 8, 7), (0.1, 8, 0), (0.34, 3, 1)],
)
def test_a_share_of_the_steps_follows_the_source(strength, steps, followed) -> None:
    course = Course(follow=strength)
    assert [course.follows(step, steps) for step in range(steps)] == [
        step < followed for step in range(steps)
    ]


@pytest.mark.parametrize(
    ("strength", "first", "steps"),
    [(0.1, 0.9, 6), (0.3, 0.75, 4), (0.5, 0.5, 2), (0.7, 0.3, 1), (0.9, 0.3, 1), (1.0, 0.3, 1)],
)
def test_noise_strength_begins_at_the_nearest_level(strength, first, steps) -> None:
    nodes = schedule.nodes(8, 3.0)
    left = Course(start=1.0 - strength, origin_BTC=torch.zeros(1, 1, 64)).nodes(nodes)
    assert left[0] == pytest.approx(first)
    assert len(left) - 1 == steps


def test_the_first_step_mixes_source_and_noise() -> None:
    origin, given = torch.randn(2, 1, 4, 64, generator=torch.Generator().manual_seed(1))
    course = Course(start=0.75, origin_BTC=origin)
    torch.testing.assert_close(course.begin(given, 0.75), 0.75 * given + 0.25 * origin)
    assert Course().begin(given, 1.0) is given


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values)[None, :, None]


def test_ramps_lie_outside_and_are_cut_by_ends_and_neighbours() -> None:
    region = row(*[0] * 6, 1, 1, *[0] * 6)
    soft = soften(region, 4)[0, :, 0]
    torch.testing.assert_close(
        soft, torch.tensor([0, 0, 0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0])
    )
    torch.testing.assert_close(
        soften(row(0, 1, 0, 0, 1), 4)[0, :, 0], torch.tensor([0.5, 1, 2 / 3, 2 / 3, 1])
    )
    for flat in (row(0, 0, 0), row(1, 1, 1)):
        assert torch.equal(soften(flat, 4), flat)


def test_a_share_of_the_steps_puts_the_source_back_at_their_noise_level() -> None:
    clean, given, x = torch.randn(3, 1, 3, 64, generator=torch.Generator().manual_seed(2))
    course = Course(keep=Keep(clean, row(0, 1, 0), share=0.5, fade=0))
    held = course.settle(x, given, 0.25, step=3, steps=8)
    torch.testing.assert_close(held[:, ::2], (0.25 * given + 0.75 * clean)[:, ::2])
    assert torch.equal(held[:, 1], x[:, 1])
    assert torch.equal(course.settle(x, given, 0.25, step=4, steps=8), x)


def test_stems_of_one_source_encode_it_once_and_equal_single_runs(base: ModelSpec) -> None:
    host = Counting()
    engine = Engine(host)
    tracks = ("vocals", "drums", "bass", "guitar")
    found = [
        engine.render(base, PLAN, None, SHORT, None, Extract(SOURCE, track)).values
        for track in tracks
    ]
    assert host.stages["Encode"] == 1
    for track, together in zip(tracks, found, strict=True):
        alone = Engine(LocalHost(show=False))
        single = alone.render(base, PLAN, None, SHORT, None, Extract(SOURCE, track)).values
        assert torch.equal(single, together)
    engine.release(base)
    engine.render(base, PLAN, None, SHORT, None, Extract(SOURCE, "vocals"))
    assert host.stages["Encode"] == 2


def test_cover_timbre_and_codes_each_have_their_say(engine: Engine, tiny_model: ModelSpec) -> None:
    codes, sampling = Codes((tuple(range(0, 5_000, 100)),)), DiTSampling(seed=1)
    timbre = latents(200, seed=7)

    def song(task: Task, given: Codes | None, reference: Latents | None) -> torch.Tensor:
        return engine.render(tiny_model, PLAN, given, sampling, reference, task).values

    followed = song(Cover(SOURCE), codes, None)
    other = song(Cover(noise(10, seed=4)), codes, None)
    assert torch.equal(followed, other), "codes take the place of what is read from the source"
    assert not torch.equal(followed, song(Cover(SOURCE), codes, timbre))
    assert not torch.equal(followed, song(Cover(SOURCE), None, None))
    started = song(Cover(SOURCE, noise_strength=0.3), codes, None)
    assert not torch.equal(started, song(Cover(noise(10, 4), noise_strength=0.3), codes, None))


@pytest.mark.parametrize(
    ("task", "codes", "words"),
    [
        (Extract(SOURCE, "vocals"), None, "needs a base checkpoint"),
        (Lego(SOURCE), None, "set family to base"),
        (Complete(SOURCE), None, "needs a base checkpoint"),
        (Repaint(SOURCE), Codes(((1, 2, 3),)), "Disconnect the codes"),
        (Cover(noise(0.5)), None, "lasts 0.5 s"),
        (Cover(Audio(torch.zeros(1, 2, 96_000))), None, "silent"),
        (Repaint(SOURCE, (Region(12),)), None, "holds nothing"),
        (Repaint(SOURCE, (Region(-5, 600),)), None, "at most 600 s"),
    ],
)
def test_what_cannot_be_done_is_told_before_any_weight_is_loaded(
    tiny_model: ModelSpec, task: Task, codes: Codes | None, words: str
) -> None:
    engine = Engine(LocalHost(show=False))
    with pytest.raises(InvalidRequest, match=words):
        engine.render(tiny_model, PLAN, codes, DiTSampling(), None, task)
    assert engine.store.loaded() == []


def test_a_task_needs_one_source_that_exists() -> None:
    for source in (None, "song.wav"):
        with pytest.raises(InvalidRequest, match="Connect the recording"):
            Cover(source)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="2 songs"):
        Cover(Latents(torch.zeros(2, 150, 64)))
    with pytest.raises(InvalidRequest, match="no track 'kazoo'"):
        Extract(SOURCE, "kazoo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="empty"):
        Repaint(SOURCE, (Region(4, 4),))


@pytest.mark.parametrize("audio", [noise(5.13, rate=44_100, channels=1), noise(1.0, rate=96_000)])
def test_sources_of_any_rate_and_length(
    engine: Engine, tiny_model: ModelSpec, audio: Audio
) -> None:
    for task in (Cover(audio), Repaint(audio, (Region(0.111, 0.777),))):
        song = engine.render(tiny_model, PLAN, None, DiTSampling(), None, task)
        assert engine.decode(tiny_model, song).seconds == pytest.approx(audio.seconds, abs=1e-4)
