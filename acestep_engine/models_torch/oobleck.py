"""Oobleck autoencoder: stereo 48 kHz audio to 64-channel latents at 25 Hz, and back.

It knows neither tiles nor levels. Names are those of diffusers' AutoencoderOobleck with weight norm
folded into plain weights; snake as in Ziyin et al., 2020. Written for inference: activations are
overwritten where nobody needs them again. Dimension key: B items · X audio channels · C channels ·
S samples · T latent frames.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..config import VAEConfig
from . import cpu_conv

PIECE = 1 << 17  # values that the activation works on at once on a CPU


class Snake(nn.Module):
    """x + sin(a x)^2 / b per channel, with a and b stored as logarithms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1, channels, 1))
        self.beta = nn.Parameter(torch.empty(1, channels, 1))

    def forward(self, x_BCS: Tensor, out_BCS: Tensor | None = None) -> Tensor:
        """Into `out_BCS` where it is given; that may be `x_BCS` itself."""
        cpu = x_BCS.device.type == "cpu"
        # fp16 has neither the range for 1 / b nor the digits for the phase; on the CPU they cost
        # nothing, since it works in pieces that stay in its cache.
        wide = cpu or x_BCS.dtype is torch.float16
        dtype = torch.promote_types(x_BCS.dtype, torch.float32) if wide else x_BCS.dtype
        step = max(PIECE // x_BCS.shape[1], 1) if cpu else x_BCS.shape[2]
        speed = self.alpha.to(x_BCS.device, torch.float32).exp().to(dtype)
        gain = (1 / (self.beta.to(x_BCS.device, torch.float32).exp() + 1e-9)).to(dtype)
        out_BCS = torch.empty_like(x_BCS) if out_BCS is None else out_BCS
        for part, into in zip(x_BCS.split(step, 2), out_BCS.split(step, 2), strict=True):
            part = part.to(dtype)
            wave = (part * speed).sin_()
            torch.add(wave.mul_(wave).mul_(gain), part, out=into)
        return out_BCS


def _convolve(conv: nn.Conv1d, x_BCS: Tensor) -> Tensor:
    return cpu_conv.convolve(conv, x_BCS) if x_BCS.device.type == "cpu" else conv(x_BCS)


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int, ops: Any) -> None:
        super().__init__()
        self.snake1 = Snake(channels)
        self.conv1 = ops.Conv1d(
            channels, channels, kernel_size=7, dilation=dilation, padding=3 * dilation
        )
        self.snake2 = Snake(channels)
        self.conv2 = ops.Conv1d(channels, channels, kernel_size=1)

    def forward(self, x_BCS: Tensor) -> Tensor:
        inner_BCS = _convolve(self.conv1, self.snake1(x_BCS))
        inner_BCS = self.snake2(inner_BCS, inner_BCS)
        if x_BCS.device.type == "cpu":
            return cpu_conv.add_pointwise(self.conv2, inner_BCS, x_BCS)
        return self.conv2(inner_BCS).add_(x_BCS)


class EncoderBlock(nn.Module):
    """Three residual units, then `stride` times fewer samples."""

    def __init__(self, channels: int, out_channels: int, stride: int, ops: Any) -> None:
        super().__init__()
        self.res_unit1 = ResidualUnit(channels, 1, ops)
        self.res_unit2 = ResidualUnit(channels, 3, ops)
        self.res_unit3 = ResidualUnit(channels, 9, ops)
        self.snake1 = Snake(channels)
        self.conv1 = ops.Conv1d(
            channels, out_channels, kernel_size=2 * stride, stride=stride, padding=-(-stride // 2)
        )

    def forward(self, x_BCS: Tensor) -> Tensor:
        x_BCS = self.res_unit1(x_BCS)  # one name, so that no state outlives its use
        x_BCS = self.res_unit2(x_BCS)
        x_BCS = self.res_unit3(x_BCS)
        return _convolve(self.conv1, self.snake1(x_BCS, x_BCS))


class DecoderBlock(nn.Module):
    """`stride` times more samples, then three residual units."""

    def __init__(self, channels: int, out_channels: int, stride: int, ops: Any) -> None:
        super().__init__()
        self.snake1 = Snake(channels)
        self.conv_t1 = ops.ConvTranspose1d(
            channels, out_channels, kernel_size=2 * stride, stride=stride, padding=-(-stride // 2)
        )
        self.res_unit1 = ResidualUnit(out_channels, 1, ops)
        self.res_unit2 = ResidualUnit(out_channels, 3, ops)
        self.res_unit3 = ResidualUnit(out_channels, 9, ops)

    def forward(self, x_BCS: Tensor) -> Tensor:
        x_BCS = self.snake1(x_BCS, x_BCS)
        if x_BCS.device.type == "cpu":
            x_BCS = cpu_conv.spread(self.conv_t1, x_BCS)
        else:
            x_BCS = self.conv_t1(x_BCS)
        x_BCS = self.res_unit1(x_BCS)  # one name, so that no state outlives its use
        x_BCS = self.res_unit2(x_BCS)
        return self.res_unit3(x_BCS)


class Encoder(nn.Module):
    """Audio to mean and scale of the posterior, stacked on channels."""

    def __init__(self, config: VAEConfig, ops: Any) -> None:
        super().__init__()
        base = config.encoder_hidden_size
        widths = [base * multiple for multiple in (1, *config.channel_multiples)]
        self.conv1 = ops.Conv1d(config.audio_channels, widths[0], kernel_size=7, padding=3)
        self.block = nn.ModuleList(
            EncoderBlock(width, wider, stride, ops)
            for width, wider, stride in zip(
                widths[:-1], widths[1:], config.downsampling_ratios, strict=True
            )
        )
        self.snake1 = Snake(widths[-1])
        posterior = 2 * config.decoder_input_channels  # mean and scale
        self.conv2 = ops.Conv1d(widths[-1], posterior, kernel_size=3, padding=1)

    def forward(self, x_BCS: Tensor) -> Tensor:
        x_BCS = _convolve(self.conv1, x_BCS)
        for block in self.block:
            x_BCS = block(x_BCS)
        return _convolve(self.conv2, self.snake1(x_BCS, x_BCS))


class Decoder(nn.Module):
    """Latents to audio, unbounded."""

    def __init__(self, config: VAEConfig, ops: Any) -> None:
        super().__init__()
        base = config.decoder_channels
        widths = [base * multiple for multiple in (1, *config.channel_multiples)][::-1]
        self.conv1 = ops.Conv1d(config.decoder_input_channels, widths[0], kernel_size=7, padding=3)
        self.block = nn.ModuleList(
            DecoderBlock(width, narrower, stride, ops)
            for width, narrower, stride in zip(
                widths[:-1], widths[1:], config.downsampling_ratios[::-1], strict=True
            )
        )
        self.snake1 = Snake(widths[-1])
        self.conv2 = ops.Conv1d(
            widths[-1], config.audio_channels, kernel_size=7, padding=3, bias=False
        )

    def forward(self, x_BCS: Tensor) -> Tensor:
        x_BCS = _convolve(self.conv1, x_BCS)
        for block in self.block:
            x_BCS = block(x_BCS)
        return _convolve(self.conv2, self.snake1(x_BCS, x_BCS))


class Oobleck(nn.Module):
    def __init__(self, config: VAEConfig, ops: Any = nn) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, ops)
        self.decoder = Decoder(config, ops)

    def encode(self, audio_BXS: Tensor) -> Tensor:
        """Posterior mean, (B, C, T), of audio with a whole number of frames."""
        return self.encoder(audio_BXS).chunk(2, dim=1)[0]

    def decode(self, latents_BCT: Tensor) -> Tensor:
        """Waveform, (B, X, S)."""
        return self.decoder(latents_BCT)
