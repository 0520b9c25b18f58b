"""LATENT and AUDIO in both directions, without a trace in what other nodes hold."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch


@pytest.fixture
def sockets(pack: Any) -> Any:
    return pack("nodes.sockets")


class LazyAudio(Mapping[str, Any]):
    """An AUDIO that is no dict, as some loaders give it."""

    def __init__(self, waveform: torch.Tensor) -> None:
        self.values_read = {"waveform": waveform, "sample_rate": 44_100}

    def __getitem__(self, key: str) -> Any:
        return self.values_read[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_read)

    def __len__(self) -> int:
        return len(self.values_read)


def test_a_latent_has_the_native_form(pack: Any, sockets: Any) -> None:
    latents = pack("acestep_engine.types").Latents(torch.randn(2, 7, 64), {"seeds": [1, 2]})
    latent = sockets.latent_of(latents)
    assert latent["samples"].shape == (2, 64, 7)
    assert latent["samples"].is_contiguous()
    assert latent["type"] == "audio"


def test_latents_come_back_with_their_record(pack: Any, sockets: Any) -> None:
    latents = pack("acestep_engine.types").Latents(torch.randn(1, 7, 64), {"seeds": [5]})
    back = sockets.latents_from(sockets.latent_of(latents))
    assert torch.equal(back.values, latents.values)
    assert back.record == {"seeds": [5]}


def test_a_record_does_not_outlive_a_cut(pack: Any, sockets: Any) -> None:
    latents = pack("acestep_engine.types").Latents(torch.randn(1, 7, 64), {"seeds": [5]})
    latent = sockets.latent_of(latents)
    cut = {**latent, "samples": latent["samples"][..., :3]}
    assert sockets.latents_from(cut).record == {}


def test_a_latent_without_type_or_record_is_welcome(sockets: Any) -> None:
    latent = {"samples": torch.randn(1, 64, 5, dtype=torch.float16)}
    assert sockets.latents_from(latent).values.dtype == torch.float32


def test_a_latent_is_not_shared_with_the_engine(sockets: Any) -> None:
    samples = torch.zeros(1, 64, 5)
    sockets.latents_from({"samples": samples}).values.fill_(1)
    assert not samples.any()


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (1, 8, 16, 100), (1, 32, 5)])
def test_a_foreign_latent_is_refused_with_its_shape(
    pack: Any, sockets: Any, shape: tuple[int, ...]
) -> None:
    error = pack("acestep_engine.errors").InvalidRequest
    with pytest.raises(error, match=str(shape[1])):
        sockets.latents_from({"samples": torch.zeros(shape)})


def test_a_lazy_audio_is_read_by_its_two_keys(sockets: Any) -> None:
    audio = sockets.audio_from(LazyAudio(torch.randn(1, 1, 100)))
    assert audio.waveform.shape == (1, 1, 100)
    assert audio.sample_rate == 44_100


def test_an_audio_without_songs_is_refused(pack: Any, sockets: Any) -> None:
    with pytest.raises(pack("acestep_engine.errors").InvalidRequest, match="songs, channels"):
        sockets.audio_from({"waveform": torch.zeros(2, 100), "sample_rate": 48_000})


@pytest.fixture
def scaled(pack: Any, sockets: Any) -> dict[str, Any]:
    """An AUDIO of a song that was halved."""
    return sockets.audio_of(pack("acestep_engine.types").Audio(torch.rand(1, 2, 100), gain=(0.5,)))


def test_an_audio_comes_back_with_its_gain(sockets: Any, scaled: dict[str, Any]) -> None:
    assert sockets.audio_from(scaled).gain == (0.5,)
    for same in (dict(scaled), copy.deepcopy(scaled), pickle.loads(pickle.dumps(scaled))):
        assert sockets.audio_from(same).gain == (0.5,)


def test_a_gain_does_not_outlive_its_sound(sockets: Any, scaled: dict[str, Any]) -> None:
    """Whether cut, joined, or louder at the same length."""
    for other in (scaled["waveform"][..., :50], scaled["waveform"].repeat(2, 1, 1)):
        assert sockets.audio_from({**scaled, "waveform": other}).gain == ()
    assert sockets.audio_from({**scaled, "waveform": scaled["waveform"] * 2}).gain == ()
    native = {"waveform": scaled["waveform"], "sample_rate": 48_000}
    assert sockets.audio_from(native).gain == ()


def test_of_a_foreign_audio_no_other_key_is_asked_for(sockets: Any) -> None:
    class Strict(LazyAudio):
        def __getitem__(self, key: str) -> Any:
            assert key in self.values_read
            return super().__getitem__(key)

    assert sockets.audio_from(Strict(torch.zeros(1, 1, 5))).gain == ()


def test_audio_of_any_type_and_layout_is_taken_and_left_as_it_is(sockets: Any) -> None:
    for dtype in (torch.float16, torch.float64):
        waveform = torch.rand(100, 2, dtype=dtype, requires_grad=True).T[None]
        before = waveform.clone()
        audio = sockets.audio_from({"waveform": waveform, "sample_rate": torch.tensor(44_100)})
        assert audio.waveform.dtype == torch.float32
        assert not audio.waveform.requires_grad
        assert audio.sample_rate == 44_100
        assert torch.equal(waveform, before)
