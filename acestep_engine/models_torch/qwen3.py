"""Qwen3 dense decoder and its static key/value cache; it serves language model and text encoder.

It knows neither tokens' meaning nor sampling, and has no output head: the head is `embed_tokens`,
read by whoever needs scores. Dimension key: B rows · L tokens of this call · D width · H query
heads · G key and value heads · K head dim · T positions of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..config import Qwen3Config
from ..errors import InvalidRequest
from . import flash
from .layers import (
    MLP,
    Attention,
    FusedAttention,
    FusedMLP,
    Rotary,
    grouped_attention,
    rotary_table,
)
from .packed import pack


class Span(NamedTuple):
    """Where the tokens of one call stand: their positions, and what each may see."""

    rotary: Rotary
    causal: bool  # the call sees only itself, each token those before it
    mask: Tensor | None = None  # (B, 1, L, T) over the cache; None where all of it may be seen
    slots_BL: Tensor | None = None  # where in the cache keys and values go
    end: int = 0  # positions of the cache in use after the call
    seen_B: Tensor | None = None  # of one token a row: how many positions it sees, int32


class KVCache:
    """Keys and values of B rows, allocated once; each row has its own length.

    One slot behind the capacity takes what padding writes; no mask ever shows it.
    """

    def __init__(
        self,
        config: Qwen3Config,
        rows: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        stream: torch.dtype | None = None,
    ) -> None:
        """`stream`: precision of the states where it is not that of the cache."""
        shape = (
            config.num_hidden_layers,
            rows,
            config.num_key_value_heads,
            capacity + 1,
            config.head_dim,
        )
        # Zeros, because a masked slot still enters the product with weight 0, and 0 * NaN is NaN.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        positions = torch.arange(capacity + 1, device=device)
        self.table = rotary_table(positions, config, stream or dtype)
        self.lengths = [0] * rows
        self._lengths_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self._rows_B1 = torch.arange(rows, device=device)[:, None]

    @staticmethod
    def nbytes(config: Qwen3Config, rows: int, capacity: int, dtype: torch.dtype) -> int:
        """Memory of the keys and values of a cache of this size."""
        per_slot = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return 2 * per_slot * rows * (capacity + 1) * dtype.itemsize

    @property
    def capacity(self) -> int:
        return self.keys.shape[3] - 1

    def first(self, rows: int) -> KVCache:
        """The first rows as a cache of their own, on the same memory."""
        part = object.__new__(KVCache)
        part.keys, part.values, part.table = self.keys[:, :rows], self.values[:, :rows], self.table
        part.lengths, part._lengths_B = self.lengths[:rows], self._lengths_B[:rows].clone()
        part._rows_B1 = self._rows_B1[:rows]
        return part

    def spread(self, source: KVCache, index: Sequence[int]) -> None:
        """Make row i a copy of row `index[i]` of `source`, which may share our memory."""
        self.lengths = [source.lengths[i] for i in index]
        end = max(self.lengths)
        index_B = torch.tensor(index, device=self.keys.device)
        self._lengths_B.copy_(source._lengths_B[index_B])
        for ours, theirs in ((self.keys, source.keys), (self.values, source.values)):
            for layer in range(ours.shape[0]):  # one layer at a time bounds the copy in between
                ours[layer, :, :, :end] = theirs[layer, index_B, :, :end]

    def reserve(self, counts: Sequence[int]) -> Span:
        """Room for `counts[b]` more tokens in row b, right-padded to the longest of them."""
        width, fresh = max(counts), max(self.lengths) == 0
        level = len(set(self.lengths)) == 1
        grown = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        end, device = max(grown), self.keys.device
        self.check(end)
        places_BL = self._lengths_B[:, None] + torch.arange(width, device=device)
        slots_BL = places_BL.clamp(max=self.capacity)
        mask = None
        if not fresh and not (level and width == 1):
            mask = torch.arange(end, device=device) <= places_BL[:, None, :, None]
        same = len(set(counts)) == 1  # then no host-to-device copy is needed
        self._lengths_B += width if same else torch.tensor(counts, device=device)
        self.lengths = grown
        rotary = Rotary(self.table.cos[slots_BL], self.table.sin[slots_BL])
        seen_B = self._lengths_B.int() if width == 1 and same else None
        return Span(rotary, fresh, mask, slots_BL, end, seen_B)

    def check(self, end: int) -> None:
        """Refuse positions beyond the capacity."""
        if end > self.capacity:
            raise InvalidRequest(
                f"The language model needs {end} token positions, but its memory was opened for "
                f"{self.capacity}. Shorten the lyrics, the caption or the duration."
            )

    def steady(self) -> Span:
        """The span of one more token a row, from tensors alone: the same operations every time.

        `advance` makes its positions count.
        """
        slots_B1 = self._lengths_B[:, None]
        end = self.keys.shape[3]
        mask = torch.arange(end, device=slots_B1.device) <= slots_B1[:, None, :, None]
        rotary = Rotary(self.table.cos[slots_B1], self.table.sin[slots_B1])
        return Span(rotary, False, mask, slots_B1, end, (self._lengths_B + 1).int())

    def advance(self) -> None:
        """Count the token that a steady step has written in each row."""
        self.lengths = [length + 1 for length in self.lengths]
        self._lengths_B += 1

    def write(self, layer: int, k_BLGK: Tensor, v_BLGK: Tensor, span: Span) -> None:
        self.keys[layer][self._rows_B1, :, span.slots_BL] = k_BLGK.to(self.keys.dtype)
        self.values[layer][self._rows_B1, :, span.slots_BL] = v_BLGK.to(self.values.dtype)

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `end` positions, (B, G, T, K) views."""
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Qwen3Layer(nn.Module):
    def __init__(self, config: Qwen3Config, index: int, ops: Any) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = ops.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn: Attention | FusedAttention = Attention(config, ops)
        self.post_attention_layernorm = ops.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp: MLP | FusedMLP = MLP(config, ops)

    def fuse(self) -> None:
        if isinstance(self.self_attn, Attention) and isinstance(self.mlp, MLP):
            self.self_attn, self.mlp = FusedAttention(self.self_attn), FusedMLP(self.mlp)

    def pack(self, bits: int) -> None:
        """Put packed layers in the place of the fused ones."""
        for owner in (self.self_attn, self.mlp):
            for name, part in list(owner.named_children()):
                if packed := pack(cast(Tensor, part.weight), bits):
                    setattr(owner, name, packed)

    def forward(self, x_BLD: Tensor, span: Span, cache: KVCache | None) -> Tensor:
        x_BLD = x_BLD + self._attend(self.input_layernorm(x_BLD), span, cache)
        return x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))

    def _attend(self, x_BLD: Tensor, span: Span, cache: KVCache | None) -> Tensor:
        q, k, v = self.self_attn.queries_keys_values(x_BLD, span.rotary)
        if cache is not None:
            cache.write(self.index, k, v, span)
        out_BHLK = self._by_flash(q, k, v, span, cache) if flash.usable(q) else None
        if out_BHLK is None:
            if cache is None or span.causal:
                k_BGTK, v_BGTK = k.transpose(1, 2), v.transpose(1, 2)
            else:
                k_BGTK, v_BGTK = cache.read(self.index, span.end)
            q_BHLK = q.transpose(1, 2).to(k_BGTK.dtype)
            out_BHLK = grouped_attention(q_BHLK, k_BGTK, v_BGTK, span.mask, span.causal)
        return self.self_attn.merge(out_BHLK.to(x_BLD.dtype))

    def _by_flash(
        self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, span: Span, cache: KVCache | None
    ) -> Tensor | None:
        """Attention of the spans that flash-attn knows, (B, H, L, K); None for the others.

        The cache goes in whole, so that a replayed step and a plain one are the same call.
        """
        if span.causal:
            return flash.causal(q_BLHK, k_BLGK, v_BLGK).transpose(1, 2)
        if cache is None or span.seen_B is None:
            return None
        k_BGTK, v_BGTK = cache.read(self.index, cache.capacity + 1)
        return flash.one_token(q_BLHK, k_BGTK, v_BGTK, span.seen_B).transpose(1, 2)


class Qwen3Model(nn.Module):
    """Embeddings in, normed final states out."""

    def __init__(self, config: Qwen3Config, ops: Any = nn) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = ops.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Qwen3Layer(config, index, ops) for index in range(config.num_hidden_layers)
        )
        self.norm = ops.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.bits: int | None = None  # of packed weights: 0 as they were, None for plain layers
        self.heads: dict[tuple[int, int], nn.Module] = {}  # packed rows of the token table

    def fuse(self) -> None:
        """Join the projections of each layer, once the weights are there; one layer at a time."""
        for layer in self.layers:
            cast(Qwen3Layer, layer).fuse()

    def pack(self, bits: int) -> None:
        """Pack the fused layers for a CPU. With 8 bits the states are float32 between them."""
        self.bits = bits
        for layer in self.layers:
            cast(Qwen3Layer, layer).pack(bits)
        if bits:
            self.layers.float()  # what is left in there are norms
            self.norm.float()

    def head(self, rows: slice) -> nn.Module | None:
        """The packed head of these rows of the token table, kept once made; None where plain."""
        if self.bits is None:
            return None
        key = (rows.start, rows.stop)
        if key not in self.heads:
            packed = pack(self.embed_tokens.weight[rows], self.bits)
            if packed is None:
                return None
            self.heads[key] = packed
        return self.heads[key]

    def forward(
        self,
        embeds_BLD: Tensor,
        cache: KVCache | None = None,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Final states, (B, L, D), of tokens that follow what `cache` holds.

        `counts`: real tokens of each row, the rest is padding on the right; all of them if None.
        """
        rows, width, _ = embeds_BLD.shape
        if cache is None:
            positions = torch.arange(width, device=embeds_BLD.device)
            span = Span(rotary_table(positions, self.config, embeds_BLD.dtype), causal=True)
        else:
            span = cache.reserve(counts or [width] * rows)
        return self._run(embeds_BLD, span, cache)

    def steady(self, embeds_BLD: Tensor, cache: KVCache) -> Tensor:
        """`forward` of one token a row by the same operations at every position."""
        return self._run(embeds_BLD, cache.steady(), cache)

    def _run(self, embeds_BLD: Tensor, span: Span, cache: KVCache | None) -> Tensor:
        for layer in self.layers:
            embeds_BLD = layer(embeds_BLD, span, cache)
        return self.norm(embeds_BLD)
