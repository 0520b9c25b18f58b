"""Blocks that the models share: rotary positions, grouped-query attention, SwiGLU, encoder tower.

The twin of `models_torch.layers`; it knows neither files nor caches. Constants enter as numpy
arrays and no table is kept, so that a model loaded in one thread runs in any other.
Dimension key: B items · L tokens · D width · H query heads · G key and value heads · K head dim ·
T positions looked at · N blocks of a window.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import DiTConfig, EncoderConfig, Qwen3Config
from ..models_spec import is_sliding, rope_frequencies

Sizes = Qwen3Config | EncoderConfig | DiTConfig


class Rotary(NamedTuple):
    """Where tokens stand: the position of the first, for all rows or of each, and the periods."""

    start: int | mx.array
    periods: mx.array  # 1 / frequency of each pair of elements, (K / 2,)


def rotary_from(start: int | mx.array, sizes: Sizes) -> Rotary:
    """Positions start, start + 1, ...; explicit periods, because a base loses digits far out."""
    periods = 1 / rope_frequencies(sizes.head_dim, sizes.rope_theta)
    return Rotary(start, mx.array(periods.astype(np.float32)))


def rotate(x_BHLK: mx.array, rotary: Rotary) -> mx.array:
    """Turn element i against element i + K / 2 by the angle of its position."""
    return mx.fast.rope(
        x_BHLK,
        x_BHLK.shape[-1],
        traditional=False,
        base=None,
        scale=1.0,
        offset=rotary.start,
        freqs=rotary.periods,
    )


def grouped_attention(
    q_BHLK: mx.array, k_BGTK: mx.array, v_BGTK: mx.array, mask: mx.array | str | None = None
) -> mx.array:
    """Attention where H / G query heads share a head of keys and values, (B, H, L, K).

    `mask`: true where a query may look, or "causal".
    """
    scale = q_BHLK.shape[-1] ** -0.5
    return mx.fast.scaled_dot_product_attention(q_BHLK, k_BGTK, v_BGTK, scale=scale, mask=mask)


def attend(
    q_BHLK: mx.array, k_BGLK: mx.array, v_BGLK: mx.array, window: int | None = None
) -> mx.array:
    """Attention in both directions, to keys at most `window` away."""
    if window is not None and k_BGLK.shape[2] > window + 1:
        return _attend_in_blocks(q_BHLK, k_BGLK, v_BGLK, window)
    return grouped_attention(q_BHLK, k_BGLK, v_BGLK)


def _attend_in_blocks(
    q_BHLK: mx.array, k_BGLK: mx.array, v_BGLK: mx.array, window: int
) -> mx.array:
    """Windowed attention with work linear in the length.

    A block of `window` queries sees its own keys and those of the block before and after it.
    """
    batch, _, length, _ = q_BHLK.shape
    blocks = -(-length // window)
    tail = blocks * window - length

    def cut(x_BHLK: mx.array, rim: int) -> mx.array:
        padded = mx.pad(x_BHLK, [(0, 0), (0, 0), (rim, rim + tail), (0, 0)])
        return padded.reshape(*padded.shape[:2], -1, window, padded.shape[-1]).swapaxes(1, 2)

    def neighbourhoods(x_BGLK: mx.array) -> mx.array:
        cells = cut(x_BGLK, window)
        return mx.concatenate([cells[:, :-2], cells[:, 1:-1], cells[:, 2:]], axis=3).flatten(0, 1)

    steps = mx.arange(3 * window) - window
    distance = steps - mx.arange(window)[:, None]
    key_NJ = mx.arange(blocks)[:, None] * window + steps
    present_NJ = (key_NJ >= 0) & (key_NJ < length)
    near = mx.abs(distance) <= window
    itself = distance == 0  # what only fills a block up sees itself, and stays finite
    mask = (near & present_NJ[:, None]) | itself
    mask = mx.tile(mask[:, None], (batch, 1, 1, 1))
    out = grouped_attention(
        cut(q_BHLK, 0).flatten(0, 1), neighbourhoods(k_BGLK), neighbourhoods(v_BGLK), mask
    )
    return mx.unflatten(out, 0, (batch, blocks)).swapaxes(1, 2).flatten(2, 3)[:, :, :length]


class Attention(nn.Module):
    """Projections and head norms of grouped-query attention; a call is the two-way self form."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, dim = sizes.hidden_size, sizes.head_dim
        inner, narrow = sizes.num_attention_heads * dim, sizes.num_key_value_heads * dim
        self.head_dim = dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, narrow, bias=False)
        self.v_proj = nn.Linear(width, narrow, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=sizes.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=sizes.rms_norm_eps)

    def queries(self, x_BLD: mx.array, rotary: Rotary | None = None) -> mx.array:
        """(B, H, L, K): normed per head, then turned where positions count."""
        q_BHLK = self.q_norm(self._heads(self.q_proj(x_BLD))).swapaxes(1, 2)
        return q_BHLK if rotary is None else rotate(q_BHLK, rotary)

    def keys_values(
        self, x_BLD: mx.array, rotary: Rotary | None = None
    ) -> tuple[mx.array, mx.array]:
        """Keys, treated like queries, and plain values, both (B, G, L, K)."""
        k_BGLK = self.k_norm(self._heads(self.k_proj(x_BLD))).swapaxes(1, 2)
        v_BGLK = self._heads(self.v_proj(x_BLD)).swapaxes(1, 2)
        return (k_BGLK if rotary is None else rotate(k_BGLK, rotary)), v_BGLK

    def merge(self, out_BHLK: mx.array) -> mx.array:
        """Heads side by side, back to the width of the stream."""
        return self.o_proj(out_BHLK.swapaxes(1, 2).flatten(2))

    def __call__(self, x_BLD: mx.array, rotary: Rotary, window: int | None = None) -> mx.array:
        out_BHLK = attend(self.queries(x_BLD, rotary), *self.keys_values(x_BLD, rotary), window)
        return self.merge(out_BHLK)

    def first(self, x_BLD: mx.array, rotary: Rotary) -> mx.array:
        """What a call gives at position 0, (B, 1, D), of all the tokens that it sees."""
        q_BHLK = self.queries(x_BLD[:, :1], rotary)
        return self.merge(grouped_attention(q_BHLK, *self.keys_values(x_BLD, rotary)))

    def _heads(self, x_BLD: mx.array) -> mx.array:
        return mx.unflatten(x_BLD, -1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, inner = sizes.hidden_size, sizes.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x: mx.array, out_dtype: mx.Dtype | None = None) -> mx.array:
        """`out_dtype`: precision of the down projection, that of `x` if not given."""
        inner = nn.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner.astype(out_dtype or x.dtype))


class EncoderLayer(nn.Module):
    """One pre-norm layer of a two-way tower; even layers see a window only."""

    def __init__(self, sizes: EncoderConfig, index: int) -> None:
        super().__init__()
        self.window = sizes.sliding_window if is_sliding(index) else None
        self.input_layernorm = nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.mlp = MLP(sizes)

    def __call__(self, x_BLD: mx.array, rotary: Rotary, dtype: mx.Dtype) -> mx.array:
        """The stream may be wider (float32) than `dtype`, in which the layer works."""
        normed = self.input_layernorm(x_BLD).astype(dtype)
        x_BLD = x_BLD + self.self_attn(normed, rotary, self.window)
        return self._through_mlp(x_BLD, dtype)

    def first(self, x_BLD: mx.array, rotary: Rotary) -> mx.array:
        """What a call gives at position 0, (B, 1, D), without the work for the others."""
        seen = x_BLD.shape[1] if self.window is None else self.window + 1
        normed = self.input_layernorm(x_BLD[:, :seen])
        x_BLD = x_BLD[:, :1] + self.self_attn.first(normed, rotary)
        return self._through_mlp(x_BLD, x_BLD.dtype)

    def _through_mlp(self, x_BLD: mx.array, dtype: mx.Dtype) -> mx.array:
        normed = self.post_attention_layernorm(x_BLD).astype(dtype)
        return x_BLD + self.mlp(normed, x_BLD.dtype)


class Tower(nn.Module):
    """Encoder layers and a final norm, on positions 0, 1, 2, ...; models add what lies around."""

    def __init__(self, sizes: EncoderConfig) -> None:
        super().__init__()
        self.sizes = sizes
        self.layers = [EncoderLayer(sizes, index) for index in range(sizes.num_hidden_layers)]
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)

    def run(self, x_BLD: mx.array, wide: bool = False) -> mx.array:
        """Normed states, (B, L, D). `wide` carries the residual stream in float32."""
        rotary = rotary_from(0, self.sizes)
        stream = x_BLD.astype(mx.float32) if wide else x_BLD
        for layer in self.layers:
            stream = layer(stream, rotary, x_BLD.dtype)
        return self.norm(stream).astype(x_BLD.dtype)

    def run_to_first(self, x_BLD: mx.array) -> mx.array:
        """The state of `run` at position 0, (B, D): the last layer works for that one alone."""
        rotary = rotary_from(0, self.sizes)
        *before, last = self.layers
        for layer in before:
            x_BLD = layer(x_BLD, rotary, x_BLD.dtype)
        return self.norm(last.first(x_BLD, rotary))[:, 0]


def front_token(token_11D: mx.array, x_BLD: mx.array) -> mx.array:
    """`x_BLD` with a learned token in front of every item."""
    token_B1D = mx.broadcast_to(token_11D, (x_BLD.shape[0], *token_11D.shape[1:]))
    return mx.concatenate([token_B1D, x_BLD], axis=1)
