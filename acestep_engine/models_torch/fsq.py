"""Audio tokenizer (25 Hz latents to 5 Hz codes) and detokenizer (back), around a scalar quantiser.

It knows neither code strings nor files. Names are those under `tokenizer.` and `detokenizer.` in
the official checkpoint; the detokenizer carries its own copy of `quantizer.project_out`, so that
codes can be rendered without the tokenizer in memory. Finite scalar quantisation: Mentzer et al.,
2023, with the soft clamp of residual FSQ; its weights are float32 whatever the rest is, for a code
near a threshold flips on the least rounding. Dimension key: B items · N codes · T latent frames ·
C latent channels · D width · Q quantiser dimensions · P frames per code.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ..config import FSQConfig
from ..models_spec import fsq_basis
from .layers import Tower


def quantise(x_Q: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Integer level of each dimension, 0 .. L - 1, of projections (..., Q)."""
    top = torch.tensor(levels, dtype=torch.float32, device=x_Q.device) - 1
    reach = 1 + 1 / top  # the clamp lets values overshoot, so that the outer levels are reached
    bounded = (reach * torch.tanh(x_Q.float() / reach)).clamp(-1, 1)
    return torch.floor(top * (bounded + 1) / 2 + 0.5).long()


def index_of(level_Q: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Code index of integer levels (..., Q), mixed radix with the first dimension fastest."""
    return (level_Q * torch.as_tensor(fsq_basis(levels), device=level_Q.device)).sum(dim=-1)


def code_of(index: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Values in -1 .. 1 that a code index stands for, (..., Q) float32."""
    base = torch.as_tensor(fsq_basis(levels), device=index.device)
    count = torch.tensor(levels, device=index.device)
    level_Q = torch.div(index[..., None], base, rounding_mode="floor") % count
    return 2 * level_Q.float() / (count - 1) - 1


class Codebook(nn.Module):
    """Code indices to features: the implicit grid of values, then a projection, all in float32."""

    def __init__(self, config: FSQConfig, ops: Any) -> None:
        super().__init__()
        self.levels = config.fsq_input_levels
        self.project_out = ops.Linear(len(self.levels), config.fsq_dim)

    def forward(self, index_BN: Tensor) -> Tensor:
        return self.project_out(code_of(index_BN, self.levels))


class Quantizer(Codebook):
    """The codebook with its way in."""

    def __init__(self, config: FSQConfig, ops: Any) -> None:
        super().__init__(config, ops)
        self.project_in = ops.Linear(config.fsq_dim, len(self.levels))

    def indices(self, features_BND: Tensor) -> Tensor:
        """Nearest code of each feature, (B, N) int64."""
        return index_of(quantise(self.project_in(features_BND.float()), self.levels), self.levels)


class AttentionPooler(Tower):
    """Groups of frames, (B, N, P, D), to one feature each: the state of a learned first token."""

    def __init__(self, config: FSQConfig, ops: Any) -> None:
        super().__init__(config.tower, ops)
        width = config.tower.hidden_size
        self.embed_tokens = ops.Linear(width, width)
        self.special_token = nn.Parameter(torch.empty(1, 1, width))

    def forward(self, x_BNPD: Tensor) -> Tensor:
        groups = rearrange(self.embed_tokens(x_BNPD), "b n p d -> (b n) p d")
        token = self.special_token.to(groups.device, groups.dtype)
        groups = torch.cat((token.expand(groups.shape[0], -1, -1), groups), dim=1)
        return self.run_to_first(groups).unflatten(0, x_BNPD.shape[:2])


class AudioTokenizer(nn.Module):
    def __init__(self, config: FSQConfig, ops: Any = nn) -> None:
        super().__init__()
        self.pool = config.pool_window_size
        self.audio_acoustic_proj = ops.Linear(
            config.audio_acoustic_hidden_dim, config.tower.hidden_size
        )
        self.attention_pooler = AttentionPooler(config, ops)
        self.quantizer = Quantizer(config, ops)

    def forward(self, latents_BTC: Tensor) -> Tensor:
        """Code indices, (B, T / P) int64; T is a multiple of P."""
        groups = rearrange(latents_BTC, "b (n p) c -> b n p c", p=self.pool)
        return self.quantizer.indices(self.attention_pooler(self.audio_acoustic_proj(groups)))


class AudioDetokenizer(Tower):
    """Each code becomes P frames on its own: neighbours never see each other."""

    def __init__(self, config: FSQConfig, ops: Any = nn) -> None:
        super().__init__(config.tower, ops)
        width = config.tower.hidden_size
        self.quantizer = Codebook(config, ops)
        self.embed_tokens = ops.Linear(width, width)
        self.special_tokens = nn.Parameter(torch.empty(1, config.pool_window_size, width))
        self.proj_out = ops.Linear(width, config.audio_acoustic_hidden_dim)

    def forward(self, index_BN: Tensor, dtype: torch.dtype) -> Tensor:
        """Latent hints, (B, P N, C), worked out in `dtype`."""
        return self.expand_features(self.quantizer(index_BN).to(dtype))

    def expand_features(self, features_BND: Tensor) -> Tensor:
        """Quantised features to latent hints, (B, P N, C)."""
        seeds = rearrange(self.embed_tokens(features_BND), "b n d -> (b n) 1 d")
        frames = self.run(seeds + self.special_tokens.to(seeds.device, seeds.dtype))
        items = features_BND.shape[0]
        return rearrange(self.proj_out(frames), "(b n) p c -> b (n p) c", b=items)
