"""Silence: rebuilt from a short encode, and cut or repeated to any length."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderOobleck

from acestep_engine.dit.silence import EDGE, FRAMES, from_encoder, take
from acestep_engine.types import HOP


def encoder() -> AutoencoderOobleck:
    """Real strides, few channels; random biases make its silence far from zero."""
    with torch.random.fork_rng():
        torch.random.manual_seed(3)
        vae = AutoencoderOobleck(
            encoder_hidden_size=4,
            decoder_channels=2,
            decoder_input_channels=64,
            channel_multiples=[1, 2, 4, 8, 16],
            downsampling_ratios=[2, 4, 4, 6, 10],
            sampling_rate=48_000,
        )
    return vae.eval()


def mean(vae: AutoencoderOobleck, audio: torch.Tensor) -> torch.Tensor:
    """Latents of 64 channels: the tiny encoder has two, repeated."""
    return vae.encode(audio).latent_dist.mode().repeat(1, 32, 1)


@torch.inference_mode()
def test_a_short_encode_rebuilds_a_long_one_at_both_ends_and_between() -> None:
    vae = encoder()
    long = mean(vae, torch.zeros(1, 2, 200 * HOP))[0].T
    silence = from_encoder(lambda audio: mean(vae, audio))
    assert silence.shape == (FRAMES, 64)
    assert long[0].ne(long[100]).any(), "the edges of this encoder must differ from its middle"
    torch.testing.assert_close(silence[: 200 - EDGE], long[:-EDGE], atol=1e-6, rtol=0)
    torch.testing.assert_close(silence[EDGE - 200 :], long[EDGE:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("frames", [1, 100, 250, 1000])
def test_a_store_that_is_too_short_repeats_from_its_start(frames: int) -> None:
    store = torch.arange(100 * 64, dtype=torch.float32).view(100, 64)
    taken = take(store, frames)
    assert taken.shape == (1, frames, 64)
    for i in range(frames):
        assert torch.equal(taken[0, i], store[i % 100])


def test_no_frames_of_silence_is_an_empty_tensor() -> None:
    assert take(torch.zeros(100, 64), 0).shape == (1, 0, 64)
