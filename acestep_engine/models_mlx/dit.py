"""Diffusion transformer: the velocity of noisy latents under context and cross-attended conditions.

The twin of `models_torch.dit`. It knows neither schedule nor guidance nor tasks. Names are those
under `decoder.` in the official checkpoint. Dimension key: B songs · T latent frames · C latent
channels · L patches, or tokens of the condition · D width · H query heads · G key and value heads ·
K head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import DiTConfig
from ..models_spec import TIMESTEP_SCALE, is_sliding, timestep_frequencies
from .layers import MLP, Attention, Rotary, attend, rotary_from

SINUSOID = 256  # width of the timestep sinusoid: 128 cosines, then 128 sines

KeysValues = tuple[mx.array, mx.array]
"""Keys and values, each (B, G, L, K)."""


class Prepared(NamedTuple):
    """What stays the same over all steps of a render under one condition."""

    cross: list[KeysValues]  # of each layer
    still: tuple[mx.array, mx.array]  # `time_embed_r` at t - r = 0, where plain sampling always is


def sinusoid(t_B: mx.array) -> mx.array:
    """Timestep features (B, 256) in float32 of noise levels 0 .. 1."""
    frequencies = mx.array(timestep_frequencies(SINUSOID // 2).astype(np.float32))
    angles = (t_B.astype(mx.float32) * TIMESTEP_SCALE)[:, None] * frequencies
    return mx.concatenate([mx.cos(angles), mx.sin(angles)], axis=-1)


class TimestepEmbedding(nn.Module):
    """A noise level to one vector for the head, (B, 1, D), and six for the layers, (B, 6, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(SINUSOID, width)
        self.linear_2 = nn.Linear(width, width)
        self.time_proj = nn.Linear(width, 6 * width)

    def __call__(self, t_B: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        vector = self.linear_2(nn.silu(self.linear_1(sinusoid(t_B).astype(dtype))))
        six = self.time_proj(nn.silu(vector))
        return vector[:, None], mx.unflatten(six, -1, (6, -1))


class DiTLayer(nn.Module):
    """Self-attention and MLP, shifted, scaled and gated by the timestep; plain cross-attention."""

    def __init__(self, config: DiTConfig, index: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.window = config.sliding_window if is_sliding(index) else None
        self.self_attn_norm = nn.RMSNorm(width, eps=eps)
        self.self_attn = Attention(config)
        self.cross_attn_norm = nn.RMSNorm(width, eps=eps)
        self.cross_attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(width, eps=eps)
        self.mlp = MLP(config)
        self.scale_shift_table = mx.zeros((1, 6, width))

    def __call__(
        self, x_BLD: mx.array, six_B6D: mx.array, rotary: Rotary, cross: KeysValues
    ) -> mx.array:
        moves = mx.split(self.scale_shift_table + six_B6D, 6, axis=1)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = moves
        moved = self.self_attn_norm(x_BLD) * (1 + scale_a) + shift_a
        x_BLD = x_BLD + gate_a * self.self_attn(moved, rotary, self.window)
        x_BLD = x_BLD + self._look_at(cross, self.cross_attn_norm(x_BLD))
        moved = self.mlp_norm(x_BLD) * (1 + scale_m) + shift_m
        return x_BLD + gate_m * self.mlp(moved)

    def offer(self, condition_BLD: mx.array) -> KeysValues:
        """What the cross-attention of this layer may look at."""
        return self.cross_attn.keys_values(condition_BLD)

    def _look_at(self, cross: KeysValues, x_BLD: mx.array) -> mx.array:
        songs = x_BLD.shape[0]
        k_BGLK, v_BGLK = (mx.broadcast_to(side, (songs, *side.shape[1:])) for side in cross)
        return self.cross_attn.merge(attend(self.cross_attn.queries(x_BLD), k_BGLK, v_BGLK))


class DiT(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.hidden_size, config.patch_size
        channels = config.audio_acoustic_hidden_dim
        # The convolutions are item 1 of their containers, and are named so in the checkpoint.
        self.proj_in = [
            nn.Identity(),
            nn.Conv1d(config.in_channels, width, kernel_size=patch, stride=patch),
        ]
        self.time_embed = TimestepEmbedding(width)
        self.time_embed_r = TimestepEmbedding(width)
        self.condition_embedder = nn.Linear(config.encoder_hidden_size, width)
        self.layers = [DiTLayer(config, index) for index in range(config.num_hidden_layers)]
        self.norm_out = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.scale_shift_table = mx.zeros((1, 2, width))
        self.proj_out = [
            nn.Identity(),
            nn.ConvTranspose1d(width, channels, kernel_size=patch, stride=patch),
        ]

    def prepare(self, encoder_BLD: mx.array) -> Prepared:
        """Keys and values of the condition in every layer; one item serves any number of songs."""
        condition_BLD = self.condition_embedder(encoder_BLD)
        cross = [layer.offer(condition_BLD) for layer in self.layers]
        return Prepared(cross, self.time_embed_r(mx.array([0.0]), encoder_BLD.dtype))

    def __call__(
        self, x_BTC: mx.array, t_B: mx.array, context_BTC: mx.array, prepared: Prepared
    ) -> mx.array:
        """Velocity (B, T, C) at noise level `t_B` (one for all songs, or one each).

        `context_BTC`: source latents and chunk mask side by side, (B or 1, T, 128).
        """
        songs, frames, _ = x_BTC.shape
        context_BTC = mx.broadcast_to(context_BTC, (songs, *context_BTC.shape[1:]))
        joined = mx.concatenate([context_BTC, x_BTC], axis=-1)
        missing = -frames % self.config.patch_size
        x_BLD = self.proj_in[1](mx.pad(joined, [(0, 0), (0, missing), (0, 0)]))
        vector, six = (
            now + still
            for now, still in zip(self.time_embed(t_B, x_BTC.dtype), prepared.still, strict=True)
        )
        rotary = rotary_from(0, self.config)
        for layer, cross in zip(self.layers, prepared.cross, strict=True):
            x_BLD = layer(x_BLD, six, rotary, cross)
        shift, scale = mx.split(self.scale_shift_table + vector, 2, axis=1)
        x_BLD = self.norm_out(x_BLD) * (1 + scale) + shift
        return self.proj_out[1](x_BLD)[:, :frames]
