"""Audio tokenizer (25 Hz latents to 5 Hz codes) and detokenizer (back), around a scalar quantiser.

The twin of `models_torch.fsq`. It knows neither code strings nor files. Names are those under
`tokenizer.` and `detokenizer.` in the official checkpoint. Finite scalar quantisation: Mentzer et
al., 2023, with the soft clamp of residual FSQ; its weights are float32 whatever the rest is.
Dimension key: B items · N codes · T latent frames · C latent channels · D width ·
Q quantiser dimensions · P frames per code.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import FSQConfig
from ..models_spec import fsq_basis
from .layers import Tower, front_token


def quantise(x_Q: mx.array, levels: tuple[int, ...]) -> mx.array:
    """Integer level of each dimension, 0 .. L - 1, of projections (..., Q)."""
    top = mx.array(np.array(levels, dtype=np.float32) - 1)
    reach = 1 + 1 / top  # the clamp lets values overshoot, so that the outer levels are reached
    bounded = mx.clip(reach * mx.tanh(x_Q.astype(mx.float32) / reach), -1, 1)
    return mx.floor(top * (bounded + 1) / 2 + 0.5).astype(mx.int64)


def index_of(level_Q: mx.array, levels: tuple[int, ...]) -> mx.array:
    """Code index of integer levels (..., Q), mixed radix with the first dimension fastest."""
    return (level_Q * mx.array(fsq_basis(levels))).sum(axis=-1)


def code_of(index: mx.array, levels: tuple[int, ...]) -> mx.array:
    """Values in -1 .. 1 that a code index stands for, (..., Q) float32."""
    count = mx.array(np.array(levels))
    level_Q = (index[..., None] // mx.array(fsq_basis(levels))) % count
    return 2 * level_Q.astype(mx.float32) / (count - 1).astype(mx.float32) - 1


class Codebook(nn.Module):
    """Code indices to features: the implicit grid of values, then a projection, all in float32."""

    def __init__(self, config: FSQConfig) -> None:
        super().__init__()
        self.levels = config.fsq_input_levels
        self.project_out = nn.Linear(len(self.levels), config.fsq_dim)

    def __call__(self, index_BN: mx.array) -> mx.array:
        return self.project_out(code_of(index_BN, self.levels))


class Quantizer(Codebook):
    """The codebook with its way in."""

    def __init__(self, config: FSQConfig) -> None:
        super().__init__(config)
        self.project_in = nn.Linear(config.fsq_dim, len(self.levels))

    def indices(self, features_BND: mx.array) -> mx.array:
        """Nearest code of each feature, (B, N) int64."""
        projected = self.project_in(features_BND.astype(mx.float32))
        return index_of(quantise(projected, self.levels), self.levels)


class AttentionPooler(Tower):
    """Groups of frames, (B, N, P, D), to one feature each: the state of a learned first token."""

    def __init__(self, config: FSQConfig) -> None:
        super().__init__(config.tower)
        width = config.tower.hidden_size
        self.embed_tokens = nn.Linear(width, width)
        self.special_token = mx.zeros((1, 1, width))

    def __call__(self, x_BNPD: mx.array) -> mx.array:
        groups = front_token(self.special_token, self.embed_tokens(x_BNPD).flatten(0, 1))
        return mx.unflatten(self.run_to_first(groups), 0, x_BNPD.shape[:2])


class AudioTokenizer(nn.Module):
    def __init__(self, config: FSQConfig) -> None:
        super().__init__()
        self.pool = config.pool_window_size
        self.audio_acoustic_proj = nn.Linear(
            config.audio_acoustic_hidden_dim, config.tower.hidden_size
        )
        self.attention_pooler = AttentionPooler(config)
        self.quantizer = Quantizer(config)

    def __call__(self, latents_BTC: mx.array) -> mx.array:
        """Code indices, (B, T / P) int64; T is a multiple of P."""
        groups = mx.unflatten(latents_BTC, 1, (-1, self.pool))
        return self.quantizer.indices(self.attention_pooler(self.audio_acoustic_proj(groups)))


class AudioDetokenizer(Tower):
    """Each code becomes P frames on its own: neighbours never see each other."""

    def __init__(self, config: FSQConfig) -> None:
        super().__init__(config.tower)
        width = config.tower.hidden_size
        self.quantizer = Codebook(config)
        self.embed_tokens = nn.Linear(width, width)
        self.special_tokens = mx.zeros((1, config.pool_window_size, width))
        self.proj_out = nn.Linear(width, config.audio_acoustic_hidden_dim)

    def __call__(self, index_BN: mx.array, dtype: mx.Dtype) -> mx.array:
        """Latent hints, (B, P N, C), worked out in `dtype`."""
        features_BND = self.quantizer(index_BN).astype(dtype)
        seeds = self.embed_tokens(features_BND).flatten(0, 1)[:, None]
        frames = self.proj_out(self.run(seeds + self.special_tokens))
        return frames.reshape(index_BN.shape[0], -1, frames.shape[-1])
