"""Oobleck autoencoder: stereo 48 kHz audio to 64-channel latents at 25 Hz, and back.

The twin of `models_torch.oobleck`, with channels last. It knows neither tiles nor levels. Names are
those of diffusers' AutoencoderOobleck with weight norm folded into plain weights; snake as in Ziyin
et al., 2020. Dimension key: B items · X audio channels · C channels · S samples · T latent frames.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..config import VAEConfig


class Snake(nn.Module):
    """x + sin(a x)^2 / b per channel, with a and b stored as logarithms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = mx.zeros((channels,))
        self.beta = mx.zeros((channels,))

    def __call__(self, x_BSC: mx.array) -> mx.array:
        # Half precision has neither the range for 1 / b nor the digits for the phase.
        dtype = mx.float32 if x_BSC.dtype == mx.float16 else x_BSC.dtype
        speed = mx.exp(self.alpha.astype(mx.float32)).astype(dtype)
        gain = (1 / (mx.exp(self.beta.astype(mx.float32)) + 1e-9)).astype(dtype)
        return _wave(x_BSC.astype(dtype), speed, gain).astype(x_BSC.dtype)


@partial(mx.compile, shapeless=True)  # one pass over the widest arrays of all, without a copy
def _wave(x_BSC: mx.array, speed_C: mx.array, gain_C: mx.array) -> mx.array:
    return x_BSC + gain_C * mx.square(mx.sin(x_BSC * speed_C))


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.snake1 = Snake(channels)
        self.conv1 = nn.Conv1d(
            channels, channels, kernel_size=7, dilation=dilation, padding=3 * dilation
        )
        self.snake2 = Snake(channels)
        self.conv2 = nn.Conv1d(channels, channels, kernel_size=1)

    def __call__(self, x_BSC: mx.array) -> mx.array:
        return x_BSC + self.conv2(self.snake2(self.conv1(self.snake1(x_BSC))))


class EncoderBlock(nn.Module):
    """Three residual units, then `stride` times fewer samples."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.res_unit1 = ResidualUnit(channels, 1)
        self.res_unit2 = ResidualUnit(channels, 3)
        self.res_unit3 = ResidualUnit(channels, 9)
        self.snake1 = Snake(channels)
        self.conv1 = nn.Conv1d(
            channels, out_channels, kernel_size=2 * stride, stride=stride, padding=-(-stride // 2)
        )

    def __call__(self, x_BSC: mx.array) -> mx.array:
        x_BSC = self.res_unit3(self.res_unit2(self.res_unit1(x_BSC)))
        return self.conv1(self.snake1(x_BSC))


class DecoderBlock(nn.Module):
    """`stride` times more samples, then three residual units."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.snake1 = Snake(channels)
        self.conv_t1 = nn.ConvTranspose1d(
            channels, out_channels, kernel_size=2 * stride, stride=stride, padding=-(-stride // 2)
        )
        self.res_unit1 = ResidualUnit(out_channels, 1)
        self.res_unit2 = ResidualUnit(out_channels, 3)
        self.res_unit3 = ResidualUnit(out_channels, 9)

    def __call__(self, x_BSC: mx.array) -> mx.array:
        x_BSC = self.conv_t1(self.snake1(x_BSC))
        return self.res_unit3(self.res_unit2(self.res_unit1(x_BSC)))


class Encoder(nn.Module):
    """Audio to mean and scale of the posterior, stacked on channels."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        base = config.encoder_hidden_size
        widths = [base * multiple for multiple in (1, *config.channel_multiples)]
        self.conv1 = nn.Conv1d(config.audio_channels, widths[0], kernel_size=7, padding=3)
        self.block = [
            EncoderBlock(width, wider, stride)
            for width, wider, stride in zip(
                widths[:-1], widths[1:], config.downsampling_ratios, strict=True
            )
        ]
        self.snake1 = Snake(widths[-1])
        posterior = 2 * config.decoder_input_channels  # mean and scale
        self.conv2 = nn.Conv1d(widths[-1], posterior, kernel_size=3, padding=1)

    def __call__(self, x_BSC: mx.array) -> mx.array:
        x_BSC = self.conv1(x_BSC)
        for block in self.block:
            x_BSC = block(x_BSC)
        return self.conv2(self.snake1(x_BSC))


class Decoder(nn.Module):
    """Latents to audio, unbounded."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        base = config.decoder_channels
        widths = [base * multiple for multiple in (1, *config.channel_multiples)][::-1]
        self.conv1 = nn.Conv1d(config.decoder_input_channels, widths[0], kernel_size=7, padding=3)
        self.block = [
            DecoderBlock(width, narrower, stride)
            for width, narrower, stride in zip(
                widths[:-1], widths[1:], config.downsampling_ratios[::-1], strict=True
            )
        ]
        self.snake1 = Snake(widths[-1])
        self.conv2 = nn.Conv1d(
            widths[-1], config.audio_channels, kernel_size=7, padding=3, bias=False
        )

    def __call__(self, x_BSC: mx.array) -> mx.array:
        x_BSC = self.conv1(x_BSC)
        for block in self.block:
            x_BSC = block(x_BSC)
        return self.conv2(self.snake1(x_BSC))


class Oobleck(nn.Module):
    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def encode(self, audio_BSX: mx.array) -> mx.array:
        """Posterior mean, (B, T, C), of audio with a whole number of frames."""
        return mx.split(self.encoder(audio_BSX), 2, axis=-1)[0]

    def decode(self, latents_BTC: mx.array) -> mx.array:
        """Waveform, (B, S, X)."""
        return self.decoder(latents_BTC)
