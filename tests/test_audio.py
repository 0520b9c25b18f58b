"""Sound files: exact lengths, faithful samples, no half-written file, untouched inputs."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
import torch

from acestep_engine.audio import check_target, load, resample, save, to_stereo
from acestep_engine.errors import InvalidRequest
from acestep_engine.types import Audio, crop


def tone(seconds: float, rate: int, channels: int = 2, hertz: float = 440.0) -> Audio:
    t_S = torch.arange(round(seconds * rate), dtype=torch.float64) / rate
    rows = [0.5 * torch.sin(2 * math.pi * hertz * (n + 1) * t_S) for n in range(channels)]
    return Audio(torch.stack(rows)[None].float(), rate)


@pytest.mark.parametrize(("suffix", "tolerance"), [(".wav", 2e-7), (".flac", 2e-7)])
def test_lossless_files_give_back_the_samples(
    tmp_path: Path, suffix: str, tolerance: float
) -> None:
    audio = tone(1.3, 48_000)
    back = load(save(audio, tmp_path / f"song{suffix}"))
    assert back.sample_rate == 48_000
    assert back.waveform.shape == audio.waveform.shape
    assert (back.waveform - audio.waveform).abs().max() <= tolerance


def test_wav_header_says_stereo_48_khz_24_bits(tmp_path: Path) -> None:
    head = save(tone(0.5, 48_000), tmp_path / "song.wav").read_bytes()[:40]
    assert head[:4] + head[8:16] == b"RIFFWAVEfmt "
    channels, rate, _, _, bits = struct.unpack_from("<HIIHH", head, 22)
    assert (channels, rate, bits) == (2, 48_000, 24)


def test_mp3_keeps_tone_and_length(tmp_path: Path) -> None:
    back = load(save(tone(2.0, 48_000), tmp_path / "song.mp3"))
    assert abs(back.seconds - 2.0) < 0.06
    spectrum = torch.fft.rfft(back.waveform[0, 0]).abs()
    assert abs(spectrum.argmax() / back.seconds - 440) < 1


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 96_000])
def test_resampling_has_the_exact_length_and_follows_the_sine(rate: int) -> None:
    audio = tone(1.5, rate, channels=1)
    before = audio.waveform.clone()
    out = resample(audio)
    assert out.waveform.shape == (1, 1, round(audio.waveform.shape[-1] * 48_000 / rate))
    error = (out.waveform - tone(1.5, 48_000, channels=1).waveform)[..., 1_000:-1_000].abs().max()
    assert error < 2e-3
    assert torch.equal(audio.waveform, before)


@pytest.mark.parametrize("rate", [1, 8_000, 22_050, 44_100, 88_200, 192_000, 1_000_000])
@pytest.mark.parametrize("samples", [1, 2, 7, 21, 22, 100])
def test_a_few_samples_are_resampled_like_many(rate: int, samples: int) -> None:
    out = resample(Audio(torch.full((1, 1, samples), 0.5), rate)).waveform
    assert out.shape == (1, 1, max(1, round(samples * 48_000 / rate)))
    assert (out - 0.5).abs().max() < 1e-3


@pytest.mark.parametrize("rate", [22_050, 44_100, 96_000])
def test_sound_that_does_not_lie_in_one_piece_is_resampled_the_same(rate: int) -> None:
    waveform = tone(0.5, rate, channels=4).waveform
    interleaved = waveform.transpose(1, 2).contiguous().transpose(1, 2)
    every_second = waveform.repeat_interleave(2, dim=-1)[..., ::2]
    expected = resample(Audio(waveform, rate)).waveform
    for odd in (interleaved, every_second):
        assert not odd.is_contiguous()
        assert torch.equal(resample(Audio(odd, rate)).waveform, expected)


def test_songs_and_channels_do_not_hear_each_other_when_resampled() -> None:
    batch = torch.rand(2, 3, 10_000, generator=torch.Generator().manual_seed(0)) - 0.5
    out = resample(Audio(batch, 44_100)).waveform
    for song in range(2):
        for channel in range(3):
            alone = resample(Audio(batch[song : song + 1, channel : channel + 1], 44_100)).waveform
            assert torch.equal(out[song, channel], alone[0, 0])


@pytest.mark.slow
def test_ten_minutes_are_resampled_to_the_sample_without_drift() -> None:
    audio = tone(600, 44_100, channels=1)
    out = resample(audio).waveform
    assert out.shape == (1, 1, 600 * 48_000)
    end = torch.arange(599 * 48_000, 600 * 48_000 - 1_000, dtype=torch.float64) / 48_000
    sine = 0.5 * torch.sin(2 * math.pi * 440 * end)
    assert (out[0, 0, 599 * 48_000 : -1_000] - sine).abs().max() < 2e-3


def test_gains_belong_to_the_songs_at_any_rate_and_length() -> None:
    audio = Audio(tone(0.1, 44_100, 1).waveform, 44_100, (0.5,))
    assert resample(audio).gain == to_stereo(audio).gain == crop(audio, 0.05).gain == (0.5,)


def test_every_channel_count_becomes_stereo() -> None:
    mono, six = tone(0.1, 48_000, 1), tone(0.1, 48_000, 6)
    assert torch.equal(*to_stereo(mono).waveform.unbind(1))
    assert torch.equal(to_stereo(six).waveform, six.waveform[:, :2])


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    broken = Audio(torch.zeros(1, 3, 100))
    with pytest.raises(InvalidRequest, match="3 channels"):
        save(broken, tmp_path / "song.wav")
    with pytest.raises(InvalidRequest, match=r"\.ogg"):
        save(tone(0.1, 48_000), tmp_path / "song.ogg")
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    (tmp_path / "song.wav").mkdir()
    with pytest.raises(InvalidRequest, match="it is a folder"):
        check_target(tmp_path / "song.wav")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"folder '.*file'"):
        check_target(tmp_path / "file" / "song.wav")
    check_target(tmp_path / "new" / "song.wav")
    assert list((tmp_path / "new").iterdir()) == []


def test_what_is_not_sound_is_refused_with_the_name(tmp_path: Path) -> None:
    path = tmp_path / "words.wav"
    path.write_text("not sound")
    with pytest.raises(InvalidRequest, match=r"words\.wav"):
        load(path)
    with pytest.raises(InvalidRequest, match=r"gone\.wav"):
        load(tmp_path / "gone.wav")


def test_mp3_takes_any_rate(tmp_path: Path) -> None:
    made = load(save(tone(1.0, 96_000), tmp_path / "x.mp3"))
    assert made.sample_rate == 48_000
    assert abs(made.seconds - 1.0) < 0.06
