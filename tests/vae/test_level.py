"""Output level: clipping is prevented, the peak is set, silence stays silence."""

from __future__ import annotations

import pytest
import torch

from acestep_engine.errors import InvalidRequest
from acestep_engine.vae.level import limit_peak, normalise_peak


def song(peak: float) -> torch.Tensor:
    """One song (1, 2, 100) whose loudest sample, a negative one, is at `peak`."""
    audio = torch.rand(1, 2, 100, generator=torch.Generator().manual_seed(0)) * 0.9 * peak
    audio[0, 1, 30] = -peak
    return audio


def test_audio_inside_the_range_is_untouched_by_the_limit() -> None:
    for peak in (0.0, 1e-8, 0.5, 1.0):
        assert torch.equal(limit_peak(song(peak)).waveform, song(peak))


def test_only_the_song_that_exceeds_the_range_is_scaled() -> None:
    batch = torch.cat((song(0.5), song(4.0)))
    limited = limit_peak(batch)
    assert torch.equal(limited.waveform[:1], song(0.5))
    torch.testing.assert_close(limited.waveform[1:], song(4.0) / 4.0)
    assert limited.gain == (1.0, 0.25)


@pytest.mark.parametrize("peak", [1e-5, 0.3, 1.0, 7.0])
def test_the_peak_is_set_to_minus_one_decibel(peak: float) -> None:
    assert normalise_peak(song(peak)).abs().max().item() == pytest.approx(0.8912509, rel=1e-6)


def test_another_level_may_be_asked_for_and_each_song_gets_its_own_gain() -> None:
    out = normalise_peak(torch.cat((song(0.1), song(0.9))), db=-6.0)
    assert out.abs().amax(dim=(1, 2)).tolist() == pytest.approx([0.5011872] * 2, rel=1e-6)


def test_silence_is_untouched_beside_a_loud_song() -> None:
    batch = torch.cat((torch.zeros(1, 2, 100), song(5e-7), song(0.5)))
    out = normalise_peak(batch)
    assert torch.equal(out[:2], batch[:2])


def test_a_level_that_would_clip_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"3\.0 dBFS"):
        normalise_peak(song(0.5), db=3.0)
