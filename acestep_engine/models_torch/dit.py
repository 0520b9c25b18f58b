"""Diffusion transformer: the velocity of noisy latents under context and cross-attended conditions.

It knows neither schedule nor guidance nor tasks. Names are those under `decoder.` in the official
checkpoint. Dimension key: B songs · T latent frames · C latent channels · L patches, or tokens of
the condition · D width · H query heads · G key and value heads · K head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from ..config import DiTConfig
from ..models_spec import TIMESTEP_SCALE, is_sliding, timestep_frequencies
from .layers import MLP, Attention, Rotary, attend, rotary_table

SINUSOID = 256  # width of the timestep sinusoid: 128 cosines, then 128 sines

KeysValues = tuple[Tensor, Tensor]
"""Keys and values, each (B, G, L, K)."""


class Prepared(NamedTuple):
    """What stays the same over all steps of a render under one condition."""

    cross: list[KeysValues]  # of each layer
    still: tuple[Tensor, Tensor]  # `time_embed_r` at t - r = 0, where plain sampling always is


def sinusoid(t_B: Tensor) -> Tensor:
    """Timestep features (B, 256) in float32 of noise levels 0 .. 1."""
    frequencies = torch.tensor(
        timestep_frequencies(SINUSOID // 2), dtype=torch.float32, device=t_B.device
    )
    angles = (t_B.float() * TIMESTEP_SCALE)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TimestepEmbedding(nn.Module):
    """A noise level to one vector for the head, (B, 1, D), and six for the layers, (B, 6, D)."""

    def __init__(self, width: int, ops: Any) -> None:
        super().__init__()
        self.linear_1 = ops.Linear(SINUSOID, width)
        self.linear_2 = ops.Linear(width, width)
        self.time_proj = ops.Linear(width, 6 * width)

    def forward(self, t_B: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        vector = self.linear_2(F.silu(self.linear_1(sinusoid(t_B).to(dtype))))
        six = self.time_proj(F.silu(vector))
        return vector[:, None], rearrange(six, "b (six d) -> b six d", six=6)


class DiTLayer(nn.Module):
    """Self-attention and MLP, shifted, scaled and gated by the timestep; plain cross-attention."""

    def __init__(self, config: DiTConfig, index: int, ops: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.window = config.sliding_window if is_sliding(index) else None
        self.self_attn_norm = ops.RMSNorm(width, eps=eps)
        self.self_attn = Attention(config, ops)
        self.cross_attn_norm = ops.RMSNorm(width, eps=eps)
        self.cross_attn = Attention(config, ops)
        self.mlp_norm = ops.RMSNorm(width, eps=eps)
        self.mlp = MLP(config, ops)
        self.scale_shift_table = nn.Parameter(torch.empty(1, 6, width))

    def forward(self, x_BLD: Tensor, six_B6D: Tensor, rotary: Rotary, cross: KeysValues) -> Tensor:
        table = self.scale_shift_table.to(x_BLD.device, x_BLD.dtype)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (table + six_B6D).chunk(6, dim=1)
        moved = torch.addcmul(shift_a, self.self_attn_norm(x_BLD), 1 + scale_a)
        x_BLD = torch.addcmul(x_BLD, gate_a, self.self_attn(moved, rotary, self.window))
        x_BLD = x_BLD + self._look_at(cross, self.cross_attn_norm(x_BLD))
        moved = torch.addcmul(shift_m, self.mlp_norm(x_BLD), 1 + scale_m)
        return torch.addcmul(x_BLD, gate_m, self.mlp(moved))

    def offer(self, condition_BLD: Tensor) -> KeysValues:
        """What the cross-attention of this layer may look at, laid out as every step reads it."""
        k, v = self.cross_attn.keys_values(condition_BLD)
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    def _look_at(self, cross: KeysValues, x_BLD: Tensor) -> Tensor:
        q_BHLK = self.cross_attn.queries(x_BLD).transpose(1, 2)
        k_BGLK, v_BGLK = (side.expand(x_BLD.shape[0], -1, -1, -1) for side in cross)
        return self.cross_attn.merge(attend(q_BHLK, k_BGLK, v_BGLK))


class DiT(nn.Module):
    def __init__(self, config: DiTConfig, ops: Any = nn) -> None:
        super().__init__()
        self.config = config
        width, patch = config.hidden_size, config.patch_size
        channels = config.audio_acoustic_hidden_dim
        # The convolutions are item 1 of their containers, and are named so in the checkpoint.
        self.proj_in = nn.Sequential(
            Rearrange("b t c -> b c t"),
            ops.Conv1d(config.in_channels, width, kernel_size=patch, stride=patch),
            Rearrange("b d l -> b l d"),
        )
        self.time_embed = TimestepEmbedding(width, ops)
        self.time_embed_r = TimestepEmbedding(width, ops)
        self.condition_embedder = ops.Linear(config.encoder_hidden_size, width)
        self.layers = nn.ModuleList(
            DiTLayer(config, index, ops) for index in range(config.num_hidden_layers)
        )
        self.norm_out = ops.RMSNorm(width, eps=config.rms_norm_eps)
        self.scale_shift_table = nn.Parameter(torch.empty(1, 2, width))
        self.proj_out = nn.Sequential(
            Rearrange("b l d -> b d l"),
            ops.ConvTranspose1d(width, channels, kernel_size=patch, stride=patch),
            Rearrange("b c t -> b t c"),
        )

    def prepare(self, encoder_BLD: Tensor) -> Prepared:
        """Keys and values of the condition in every layer; one item serves any number of songs."""
        condition_BLD = self.condition_embedder(encoder_BLD)
        cross = [cast(DiTLayer, layer).offer(condition_BLD) for layer in self.layers]
        zero = torch.zeros(1, device=encoder_BLD.device)
        return Prepared(cross, self.time_embed_r(zero, encoder_BLD.dtype))

    def forward(
        self, x_BTC: Tensor, t_B: Tensor, context_BTC: Tensor, prepared: Prepared
    ) -> Tensor:
        """Velocity (B, T, C) at noise level `t_B` (one for all songs, or one each).

        `context_BTC`: source latents and chunk mask side by side, (B or 1, T, 128).
        """
        frames = x_BTC.shape[1]
        joined = torch.cat((context_BTC.expand(x_BTC.shape[0], -1, -1), x_BTC), dim=-1)
        padded = F.pad(joined, (0, 0, 0, -frames % self.config.patch_size))
        x_BLD = self.proj_in(padded).contiguous()  # else every sum would keep its columns apart
        vector, six = (
            now + still
            for now, still in zip(self.time_embed(t_B, x_BTC.dtype), prepared.still, strict=True)
        )
        positions = torch.arange(x_BLD.shape[1], device=x_BLD.device)
        rotary = rotary_table(positions, self.config, x_BLD.dtype)
        for layer, cross in zip(self.layers, prepared.cross, strict=True):
            x_BLD = layer(x_BLD, six, rotary, cross)
        table = self.scale_shift_table.to(x_BLD.device, x_BLD.dtype)
        shift, scale = (table + vector).chunk(2, dim=1)
        x_BLD = torch.addcmul(shift, self.norm_out(x_BLD), 1 + scale)
        return self.proj_out(x_BLD)[:, :frames]
