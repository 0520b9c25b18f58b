"""New sound in an original: bit for bit outside, no step at the joins, one level, exact lengths."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from acestep_engine.audio import resample
from acestep_engine.engine import Engine
from acestep_engine.errors import InvalidRequest
from acestep_engine.remix import Region
from acestep_engine.splice import splice
from acestep_engine.types import Audio, Latents, ModelSpec

RATE = 48_000
SECONDS = 10


def noise(seconds: float, rate: int = RATE, channels: int = 2, songs: int = 1, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shape = songs, channels, round(seconds * rate)
    return Audio(torch.rand(shape, generator=generator) - 0.5, rate)


def flat(value: float, seconds: float, rate: int = RATE) -> Audio:
    return Audio(torch.full((1, 2, round(seconds * rate)), value), rate)


ORIGINAL, NEW = noise(SECONDS, seed=1), noise(SECONDS, seed=2)


def pieces(audio: Tensor, start: float, end: float, fade: float = 0.0) -> tuple[Tensor, Tensor]:
    """What lies outside start - fade .. end + fade seconds, and what lies inside start .. end."""
    low, high = round((start - fade) * RATE), round((end + fade) * RATE)
    outside = torch.cat((audio[..., :low], audio[..., high:]), dim=-1)
    return outside, audio[..., round(start * RATE) : round(end * RATE)]


@pytest.mark.parametrize("fade", [0.0, 0.1])
def test_outside_is_the_original_and_inside_the_new_bit_for_bit(fade: float) -> None:
    out = splice(ORIGINAL, NEW, [Region(4, 6)], fade).waveform
    kept, _ = pieces(ORIGINAL.waveform, 4, 6, fade)
    _, made = pieces(NEW.waveform, 4, 6, fade)
    outside, inside = pieces(out, 4, 6, fade)
    assert torch.equal(outside, kept)
    assert torch.equal(inside, made)
    assert out.shape == ORIGINAL.waveform.shape


def test_a_cross_fade_takes_equal_steps_outside_the_region() -> None:
    original, new = flat(0.0, 0.02, 1000), flat(1.0, 0.02, 1000)
    row = splice(original, new, [Region(0.008, 0.011)], 0.004).waveform[0, 0]
    ramp = [0.2, 0.4, 0.6, 0.8]
    expected = [0.0] * 4 + ramp + [1.0] * 3 + ramp[::-1] + [0.0] * 5
    torch.testing.assert_close(row, torch.tensor(expected))


def test_a_cross_fade_is_shorter_where_the_sound_ends() -> None:
    original, new = flat(0.0, 0.008, 1000), flat(1.0, 0.008, 1000)
    row = splice(original, new, [Region(0.002, 0.007)], 0.004).waveform[0, 0]
    torch.testing.assert_close(row, torch.tensor([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.5]))


@pytest.mark.parametrize("start", [4.0, 4.1, 4.123456])
def test_the_joins_step_no_more_than_the_sounds_do(start: float) -> None:
    t_S = torch.arange(SECONDS * RATE) / RATE
    low, high = ((hertz * 2 * torch.pi * t_S).sin()[None, None] * 0.5 for hertz in (110, 300))
    out = splice(Audio(low), Audio(high), [Region(start, 6)], 0.1).waveform
    steps = out.diff(dim=-1).abs()
    interior = max(low.diff(dim=-1).abs().max().item(), high.diff(dim=-1).abs().max().item())
    assert steps.max().item() <= interior
    hard = splice(Audio(low), Audio(high + 0.4), [Region(start, 6)], 0).waveform
    assert hard.diff(dim=-1).abs().max() > 3 * interior


def test_several_regions_are_each_put_in() -> None:
    regions = [Region(7, 8), Region(1, 2), Region(4, 5)]
    out = splice(ORIGINAL, NEW, regions, 0).waveform
    expected = ORIGINAL.waveform.clone()
    for start, end in ((1, 2), (4, 5), (7, 8)):
        expected[..., start * RATE : end * RATE] = NEW.waveform[..., start * RATE : end * RATE]
    assert torch.equal(out, expected)


def test_fades_that_meet_do_not_reach_into_a_region() -> None:
    original, new = flat(0.0, 0.02, 1000), flat(1.0, 0.02, 1000)
    row = splice(original, new, [Region(0.004, 0.008), Region(0.01, 0.014)], 0.004).waveform[0, 0]
    assert row[4:8].eq(1).all()
    assert row[10:14].eq(1).all()
    torch.testing.assert_close(row[8:10], torch.tensor([0.8, 0.8]))


def test_a_region_before_and_behind_the_original_makes_it_longer() -> None:
    new = noise(SECONDS + 3.5, seed=2)
    out = splice(ORIGINAL, new, [Region(-1.5, 0.5), Region(9, 12)], 0).waveform
    assert out.shape[-1] == round((SECONDS + 3.5) * RATE)
    begin, end = 2 * RATE, round(10.5 * RATE)
    kept = ORIGINAL.waveform[..., RATE // 2 : 9 * RATE]
    assert torch.equal(out[..., begin:end], kept)
    assert torch.equal(out[..., :begin], new.waveform[..., :begin])
    assert torch.equal(out[..., end:], new.waveform[..., end:])


def test_a_gap_between_the_original_and_a_region_is_silent() -> None:
    out = splice(ORIGINAL, noise(13), [Region(12, 13)], 0).waveform
    assert torch.equal(out[..., : SECONDS * RATE], ORIGINAL.waveform)
    assert not out[..., SECONDS * RATE : 12 * RATE].any()


def test_regions_that_leave_nothing_leave_the_new_sound_as_it_is() -> None:
    loud = Audio(NEW.waveform, gain=(0.5,))
    for regions in ([Region(0)], [Region(0, 5), Region(5, 10)], [Region(0, 10)]):
        out = splice(ORIGINAL, loud, regions)
        assert torch.equal(out.waveform, NEW.waveform)
        assert out.gain == (0.5,)


def test_a_mono_original_of_another_rate_decides_the_rate_and_is_heard_on_both_sides() -> None:
    original, new = noise(3, 44_100, channels=1), noise(3, seed=2)
    out = splice(original, new, [Region(1, 2)], 0)
    assert out.sample_rate == 44_100
    assert out.waveform.shape == (1, 2, 3 * 44_100)
    for side_S in out.waveform[0]:
        assert torch.equal(side_S[:44_100], original.waveform[0, 0, :44_100])
        assert torch.equal(side_S[2 * 44_100 :], original.waveform[0, 0, 2 * 44_100 :])
    made = resample(new, 44_100).waveform
    assert torch.equal(out.waveform[..., 44_100 : 2 * 44_100], made[..., 44_100 : 2 * 44_100])


def test_the_gain_of_each_song_is_undone() -> None:
    original, made = noise(1, songs=2, seed=1), noise(1, songs=2, seed=2)
    scaled = made.waveform * torch.tensor([0.5, 1.0])[:, None, None]
    out = splice(original, Audio(scaled, gain=(0.5, 1.0)), [Region(0.2, 0.7)], 0.05)
    assert torch.equal(out.waveform, splice(original, made, [Region(0.2, 0.7)], 0.05).waveform)
    assert out.gain == ()


def test_a_decoded_song_goes_back_at_the_level_it_was_decoded_with(
    engine: Engine, tiny_model: ModelSpec
) -> None:
    """The tiny VAE is quiet; latents are scaled until its sound exceeds the range."""
    latents, scale = torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(0)), 1.0
    while not (sound := engine.decode(tiny_model, Latents(latents * scale))).gain[0] < 1:
        scale *= 4
    assert sound.waveform.abs().max().item() == pytest.approx(1, abs=1e-6)
    quiet = flat(0.0, 2)
    out = splice(quiet, sound, [Region(0.5, 1.5)], 0).waveform
    inside = sound.waveform[..., RATE // 2 : 3 * RATE // 2] / sound.gain[0]
    torch.testing.assert_close(out[..., RATE // 2 : 3 * RATE // 2], inside)


@pytest.mark.parametrize(("songs", "made"), [(2, 2), (1, 2), (2, 1)])
def test_batches_go_song_by_song(songs: int, made: int) -> None:
    original, new = noise(1, songs=songs, seed=1), noise(1, songs=made, seed=2)
    out = splice(original, new, [Region(0.4, 0.6)]).waveform
    for song in range(2):
        alone = splice(
            Audio(original.waveform[song % songs : song % songs + 1]),
            Audio(new.waveform[song % made : song % made + 1]),
            [Region(0.4, 0.6)],
        )
        assert torch.equal(out[song : song + 1], alone.waveform)


def test_what_the_new_sound_has_too_much_or_lacks_by_less_than_a_frame_is_the_originals() -> None:
    kept = ORIGINAL.waveform
    longer = Audio(torch.cat((NEW.waveform, noise(0.03, seed=3).waveform), dim=-1))
    long = splice(ORIGINAL, longer, [Region(4, 6)], 0).waveform
    assert torch.equal(long, splice(ORIGINAL, NEW, [Region(4, 6)], 0).waveform)
    short = splice(ORIGINAL, noise(9.97, seed=2), [Region(4)], 0).waveform
    cut = round(9.97 * RATE)
    assert short.shape == kept.shape
    assert torch.equal(short[..., cut:], kept[..., cut:])


def test_neither_sound_is_changed() -> None:
    original, new = noise(1, 44_100, channels=1), noise(2)
    before = original.waveform.clone(), new.waveform.clone()
    splice(original, new, [Region(-0.2, 0.5)]).waveform.fill_(9)
    splice(original, new, [Region(0)]).waveform.fill_(9)
    assert torch.equal(original.waveform, before[0])
    assert torch.equal(new.waveform, before[1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: splice(ORIGINAL, NEW, []), "no region"),
        (lambda: splice(ORIGINAL, NEW, [Region(4, 4)]), r"from 4 to 4 s is empty.* lasts 10 s"),
        (lambda: splice(ORIGINAL, NEW, [Region(6, 4)]), "from 6 to 4 s"),
        (lambda: splice(ORIGINAL, NEW, [Region(1, 2), Region(10)]), "from 10 to 10 s"),
        (lambda: splice(ORIGINAL, NEW, [Region(1, 1 + 1e-9)]), "is empty"),
        (lambda: splice(ORIGINAL, NEW, [Region(float("nan"), 1)]), "nan"),
        (lambda: splice(ORIGINAL, NEW, [Region(0, float("inf"))]), "inf"),
        (lambda: splice(ORIGINAL, noise(5), [Region(4, 6)]), "ends at 5 s.* until 6 s"),
        (lambda: splice(ORIGINAL, NEW, [Region(-2, 1), Region(9)]), "until 12 s"),
        (lambda: splice(ORIGINAL, noise(9.99), [Region(9.995)]), "ends at 9.99 s"),
        (lambda: splice(ORIGINAL, NEW, [Region(4, 6)], -1), "crossfade is -1"),
        (lambda: splice(ORIGINAL, NEW, [Region(4, 6)], float("nan")), "crossfade is nan"),
        (lambda: splice(noise(1, songs=2), noise(1, songs=3), [Region(0)]), "2 songs.* 3"),
    ],
)
def test_what_cannot_be_spliced_is_told_with_the_values(
    call: Callable[[], object], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        call()


def test_anything_with_a_start_and_an_end_is_a_region() -> None:
    foreign = SimpleNamespace(start=4.0, end=None)
    out = splice(ORIGINAL, NEW, (foreign,)).waveform
    assert torch.equal(out, splice(ORIGINAL, NEW, (Region(4, 10),)).waveform)
