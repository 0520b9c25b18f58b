"""Qwen3 dense decoder and its static key/value cache; it serves language model and text encoder.

The twin of `models_torch.qwen3`. It knows neither tokens' meaning nor sampling, and has no output
head: the head is `embed_tokens`, read by whoever needs scores. Dimension key: B rows · L tokens of
this call · D width · H query heads · G key and value heads · K head dim · T positions of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..config import Qwen3Config
from ..errors import InvalidRequest
from .layers import MLP, Attention, Rotary, grouped_attention, rotary_from


class Span(NamedTuple):
    """Where the tokens of one call stand: their positions, and what each may see."""

    rotary: Rotary
    causal: bool  # the call sees only itself, each token those before it
    mask: mx.array | None = None  # (B or 1, 1, L, T) over the cache; None where all may be seen
    slots: slice | mx.array = slice(0)  # where in the cache keys and values go: of all, or (B, L)
    end: int = 0  # positions of the cache in use after the call


class KVCache:
    """Keys and values of B rows, allocated once; each row has its own length.

    An array for each layer, so that an update writes into the memory of the one before it. One slot
    behind the capacity takes what padding writes; no mask ever shows it.
    """

    def __init__(self, config: Qwen3Config, rows: int, capacity: int, dtype: mx.Dtype) -> None:
        shape = (rows, config.num_key_value_heads, capacity + 1, config.head_dim)
        # Zeros, because a masked slot still enters the product with weight 0, and 0 * NaN is NaN.
        self.keys = [mx.zeros(shape, dtype) for _ in range(config.num_hidden_layers)]
        self.values = [mx.zeros(shape, dtype) for _ in range(config.num_hidden_layers)]
        self.config, self.capacity = config, capacity
        self.lengths = [0] * rows

    @staticmethod
    def nbytes(config: Qwen3Config, rows: int, capacity: int, dtype: mx.Dtype) -> int:
        """Memory of the keys and values of a cache of this size."""
        per_slot = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return 2 * per_slot * rows * (capacity + 1) * dtype.size

    def spread(self, source: KVCache, index: Sequence[int]) -> None:
        """Make row i a copy of row `index[i]` of `source`."""
        lengths = [source.lengths[i] for i in index]
        end = max(lengths)
        self._check(end)
        self.lengths = lengths
        rows_B = mx.array(list(index))
        for ours, theirs in ((self.keys, source.keys), (self.values, source.values)):
            for layer, side in enumerate(theirs):
                ours[layer][:, :, :end] = side[:, :, :end][rows_B]

    def reserve(self, counts: Sequence[int]) -> Span:
        """Room for `counts[b]` more tokens in row b, right-padded to the longest of them."""
        width, starts = max(counts), self.lengths
        fresh, level = max(starts) == 0, len(set(starts)) == 1
        grown = [start + count for start, count in zip(starts, counts, strict=True)]
        end = max(grown)
        self._check(end)
        self.lengths = grown
        places_BL = mx.array(starts)[:, None] + mx.arange(width)
        mask = None
        if not fresh and not (level and width == 1):
            mask = mx.arange(end) <= places_BL[:, None, :, None]
        if level:
            slots = slice(starts[0], starts[0] + width)
            return Span(rotary_from(starts[0], self.config), fresh, mask, slots, end)
        slots = mx.minimum(places_BL, self.capacity)
        return Span(rotary_from(mx.array(starts), self.config), fresh, mask, slots, end)

    def write(self, layer: int, k_BGLK: mx.array, v_BGLK: mx.array, span: Span) -> None:
        for ours, fresh in ((self.keys, k_BGLK), (self.values, v_BGLK)):
            if isinstance(span.slots, slice):
                ours[layer][:, :, span.slots] = fresh
            else:
                row_B1 = mx.arange(fresh.shape[0])[:, None]
                ours[layer][row_B1, :, span.slots] = fresh.swapaxes(1, 2)

    def read(self, layer: int, end: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the first `end` positions, (B, G, T, K)."""
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def _check(self, end: int) -> None:
        if end > self.capacity:
            raise InvalidRequest(
                f"The language model needs {end} token positions, but its memory was opened for "
                f"{self.capacity}. Shorten the lyrics, the caption or the duration."
            )


class Qwen3Layer(nn.Module):
    def __init__(self, config: Qwen3Config, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def __call__(self, x_BLD: mx.array, span: Span, cache: KVCache | None) -> mx.array:
        x_BLD = x_BLD + self._attend(self.input_layernorm(x_BLD), span, cache)
        return x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))

    def _attend(self, x_BLD: mx.array, span: Span, cache: KVCache | None) -> mx.array:
        q_BHLK = self.self_attn.queries(x_BLD, span.rotary)
        k_BGTK, v_BGTK = self.self_attn.keys_values(x_BLD, span.rotary)
        if cache is not None:
            cache.write(self.index, k_BGTK, v_BGTK, span)
            if not span.causal:
                k_BGTK, v_BGTK = cache.read(self.index, span.end)
        mask = "causal" if span.causal else span.mask
        return self.self_attn.merge(grouped_attention(q_BHLK, k_BGTK, v_BGTK, mask))


class Qwen3Model(nn.Module):
    """Embeddings in, normed final states out."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Qwen3Layer(config, index) for index in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self,
        embeds_BLD: mx.array,
        cache: KVCache | None = None,
        counts: Sequence[int] | None = None,
    ) -> mx.array:
        """Final states, (B, L, D), of tokens that follow what `cache` holds.

        `counts`: real tokens of each row, the rest is padding on the right; all of them if None.
        """
        rows, width, _ = embeds_BLD.shape
        if cache is None:
            span = Span(rotary_from(0, self.config), causal=True)
        else:
            span = cache.reserve(counts or [width] * rows)
        for layer in self.layers:
            embeds_BLD = layer(embeds_BLD, span, cache)
        return self.norm(embeds_BLD)
