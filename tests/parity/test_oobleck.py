"""The autoencoder against diffusers at the real strides, lengths and reach of a frame."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderOobleck

from acestep_engine.backends.torch_eager import TorchCodec
from acestep_engine.config import VAEConfig
from acestep_engine.errors import OutOfMemory
from acestep_engine.models_torch import cpu_conv
from acestep_engine.models_torch.oobleck import Oobleck, Snake
from acestep_engine.runtime import Runtime

CONFIG = VAEConfig(encoder_hidden_size=8, decoder_channels=4, decoder_input_channels=4)


@pytest.fixture(scope="module", params=["as loaded", "arranged"])
def codec(build, request):
    module = build(Oobleck, CONFIG)
    for name, parameter in module.named_parameters():
        if name.endswith("weight"):
            parameter.mul_(0.6)  # else snakes blow the signal up, and its rounding with it
    if request.param == "arranged":
        cpu_conv.arrange(module)
    return TorchCodec(module, "cpu", torch.float32)


@pytest.fixture(scope="module")
def oracle(codec):
    theirs = AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=list(CONFIG.downsampling_ratios),
        channel_multiples=list(CONFIG.channel_multiples),
        decoder_channels=4,
        decoder_input_channels=4,
        audio_channels=2,
        sampling_rate=48_000,
    ).eval()
    plain = codec.module.state_dict()
    weights = {}
    for name in theirs.state_dict():
        if name.endswith("weight_g"):  # a gain equal to the norm makes the direction the weight
            weight = plain[name.removesuffix("_g")]
            weights[name] = weight.flatten(1).norm(dim=1)[:, None, None]
        else:
            weights[name] = plain[name.replace("weight_v", "weight")]
    theirs.load_state_dict(weights)
    return theirs


@torch.inference_mode()
@pytest.mark.parametrize(("frames", "items"), [(1, 1), (7, 2), (20, 1)])
def test_decoding_equals_diffusers(frames, items, codec, oracle, randn, gap) -> None:
    latents = randn(items, 4, frames)
    ours = codec.decode(latents)
    assert ours.shape == (items, 2, 1920 * frames)
    assert gap(ours, oracle.decode(latents).sample) <= 1e-5


@torch.inference_mode()
@pytest.mark.parametrize(("samples", "items"), [(1920, 1), (5 * 1920, 2), (7 * 1920 + 700, 1)])
def test_the_encoded_mean_equals_diffusers(samples, items, codec, oracle, randn, gap) -> None:
    audio = randn(items, 2, samples)
    ours = codec.encode(audio)
    assert ours.shape == (items, 4, samples // 1920)
    assert gap(ours, oracle.encode(audio).latent_dist.mode()) <= 1e-5


@torch.inference_mode()
def test_inputs_are_left_as_they_were(codec, randn) -> None:
    latents, audio = randn(1, 4, 3), randn(1, 2, 1920)
    before = latents.clone(), audio.clone()
    codec.decode(latents)
    codec.encode(audio)
    assert torch.equal(latents, before[0])
    assert torch.equal(audio, before[1])


@torch.inference_mode()
def test_one_latent_frame_reaches_8_and_a_third_frames_to_each_side(codec, randn) -> None:
    latents = randn(1, 4, 24)
    changed = latents.clone()
    changed[:, :, 11] += 1
    moved = (codec.decode(changed) - codec.decode(latents)).abs().amax((0, 1)).nonzero()
    first, last = int(moved.min()), int(moved.max())
    assert first >= 11 * 1920 - 16_005
    assert last <= 12 * 1920 - 1 + 16_005
    assert last - first + 1 > 12 * 1920  # and far beyond its own cell


def test_snake_has_the_known_value(randn) -> None:
    snake = Snake(1)
    snake.load_state_dict(
        {"alpha": torch.full((1, 1, 1), 0.3), "beta": torch.full((1, 1, 1), -0.2)}
    )
    with torch.inference_mode():
        x = torch.full((1, 1, 1), 1.5)
        assert abs(float(snake(x)) - 2.4864881188) < 1e-6
        assert float(x) == 1.5
        half = snake(torch.full((1, 1, 1), 100.0, dtype=torch.float16))
        assert abs(float(half) - float(snake(torch.full((1, 1, 1), 100.0)))) < 0.1


@pytest.mark.parametrize(("device", "arranged"), [("cpu", True), ("cuda", False)])
def test_weights_are_laid_out_for_the_cpu_alone(device, arranged, build) -> None:
    module = build(Oobleck, CONFIG)
    TorchCodec.pack(module, Runtime(device, "fp32", "eager", 256))
    conv, spread = module.decoder.block[0].res_unit1.conv1, module.decoder.block[0].conv_t1
    assert conv.weight.permute(cpu_conv.CONV).is_contiguous() == arranged
    assert spread.weight.permute(cpu_conv.TRANSPOSED).is_contiguous() == arranged


def test_a_failed_allocation_is_an_out_of_memory_error() -> None:
    class Greedy(Oobleck):
        def decode(self, latents_BCT: torch.Tensor) -> torch.Tensor:
            return torch.empty(1 << 58)

    codec = TorchCodec(Greedy(CONFIG), "cpu", torch.float32)
    with pytest.raises(OutOfMemory, match="cpu ran out of memory"):
        codec.decode(torch.zeros(1, 4, 2))
