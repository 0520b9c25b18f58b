"""Blocks that the models share: rotary positions, grouped-query attention, SwiGLU, encoder tower.

They know neither files nor caches. `ops` is the namespace that makes every layer with weights
(torch.nn, or one that casts weights on the fly), so nothing here reads `.weight`.
Dimension key: B items · L tokens · D width · H query heads · G key and value heads · K head dim ·
N blocks of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..config import DiTConfig, EncoderConfig, Qwen3Config
from ..models_spec import is_sliding, rope_frequencies

Sizes = Qwen3Config | EncoderConfig | DiTConfig

DENSE = 3  # windows in a length up to which masking all pairs costs less than cutting blocks


class Rotary(NamedTuple):
    """Cosines and sines of the positions, (..., L, 1, K / 2), to broadcast over heads."""

    cos: Tensor
    sin: Tensor


def rotary_table(positions: Tensor, sizes: Sizes, dtype: torch.dtype) -> Rotary:
    """The rotation of each position; angles in float32, then rounded to `dtype`."""
    frequencies = torch.tensor(
        rope_frequencies(sizes.head_dim, sizes.rope_theta),
        dtype=torch.float32,
        device=positions.device,
    )
    angles = (positions[..., None].float() * frequencies)[..., None, :]
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x_BLHK: Tensor, rotary: Rotary) -> Tensor:
    """Turn element i against element i + K / 2 by the angle of its position."""
    first, second = x_BLHK.chunk(2, dim=-1)
    return torch.cat(
        (
            torch.addcmul(first * rotary.cos, second, rotary.sin, value=-1),
            torch.addcmul(second * rotary.cos, first, rotary.sin),
        ),
        dim=-1,
    )


def grouped_attention(
    q_BHLK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention where H / G query heads share a head of keys and values, (B, H, L, K)."""
    shared = q_BHLK.shape[1] // k_BGTK.shape[1]
    if shared > 1 and q_BHLK.shape[2] == 1 and not causal and not _is_narrow_on_cpu(q_BHLK):
        # One query: those that share a head of keys are as good as a row of queries.
        q_BGRK = q_BHLK.reshape(q_BHLK.shape[0], -1, shared, q_BHLK.shape[3])
        out = F.scaled_dot_product_attention(q_BGRK, k_BGTK, v_BGTK, attn_mask=mask)
        return out.reshape(q_BHLK.shape)
    if shared > 1 and not _groups_are_native(q_BHLK, mask):
        k_BGTK, v_BGTK = (x.repeat_interleave(shared, dim=1) for x in (k_BGTK, v_BGTK))
        shared = 1
    return F.scaled_dot_product_attention(
        q_BHLK, k_BGTK, v_BGTK, attn_mask=mask, is_causal=causal, enable_gqa=shared > 1
    )


def _is_narrow_on_cpu(q_BHLK: Tensor) -> bool:
    """Whether one query at a time is faster: in half precision, CPUs lose by rows of them."""
    return q_BHLK.device.type == "cpu" and q_BHLK.dtype is not torch.float32


def _groups_are_native(q_BHLK: Tensor, mask: Tensor | None) -> bool:
    """Whether a fast kernel takes unequal head counts: elsewhere Metal fails, CUDA gets slow."""
    if q_BHLK.device.type == "cuda":
        return mask is None and q_BHLK.dtype is not torch.float32
    return q_BHLK.device.type == "cpu"


def attend(
    q_BHLK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    window: int | None = None,
    keep_BL: Tensor | None = None,
) -> Tensor:
    """Attention in both directions, to keys at most `window` away and not masked by `keep_BL`.

    A masked position still sees itself, so that its output stays finite; nobody reads it.
    """
    length = k_BGLK.shape[2]
    if window is None or length <= window + 1:
        window = length
    elif length > DENSE * window:
        return _attend_in_blocks(q_BHLK, k_BGLK, v_BGLK, window, keep_BL)
    mask = None
    if window < length or keep_BL is not None:
        places = torch.arange(length, device=k_BGLK.device)
        distance = (places[:, None] - places).abs()
        mask = distance <= window
        if keep_BL is not None:
            mask = (mask & keep_BL[:, None, None, :]) | (distance == 0)
    return grouped_attention(q_BHLK, k_BGLK, v_BGLK, mask)


def _attend_in_blocks(
    q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, window: int, keep_BL: Tensor | None
) -> Tensor:
    """Windowed attention with work linear in the length.

    A block of `window` queries sees its own keys and those of the block before and after it: three
    windows of keys, from which a mask that is the same for every block cuts |i - j| <= window.
    """
    batch, _, length, _ = q_BHLK.shape
    blocks = -(-length // window)
    tail = blocks * window - length

    def neighbourhoods(x_BGLK: Tensor) -> Tensor:
        padded = F.pad(x_BGLK, (0, 0, window, window + tail))
        return rearrange(padded.unfold(2, 3 * window, window), "b g n k j -> (b n) g j k")

    if keep_BL is None:
        keep_BL = torch.ones(1, length, dtype=torch.bool, device=q_BHLK.device)
    present = F.pad(keep_BL, (window, window + tail)).unfold(1, 3 * window, window)
    present = present.expand(batch, -1, -1)
    steps = torch.arange(3 * window, device=q_BHLK.device)
    distance = steps - (steps[:window, None] + window)
    near = distance.abs() <= window
    mask = (near & rearrange(present, "b n j -> (b n) 1 1 j")) | (distance == 0)
    out = grouped_attention(
        rearrange(F.pad(q_BHLK, (0, 0, 0, tail)), "b h (n i) k -> (b n) h i k", n=blocks),
        neighbourhoods(k_BGLK),
        neighbourhoods(v_BGLK),
        mask,
    )
    return rearrange(out, "(b n) h i k -> b h (n i) k", n=blocks)[:, :, :length]


class Attention(nn.Module):
    """Projections and head norms of grouped-query attention; `forward` is the two-way self form."""

    def __init__(self, sizes: Sizes, ops: Any) -> None:
        super().__init__()
        width, dim = sizes.hidden_size, sizes.head_dim
        inner, narrow = sizes.num_attention_heads * dim, sizes.num_key_value_heads * dim
        self.head_dim = dim
        self.q_proj = ops.Linear(width, inner, bias=False)
        self.k_proj = ops.Linear(width, narrow, bias=False)
        self.v_proj = ops.Linear(width, narrow, bias=False)
        self.o_proj = ops.Linear(inner, width, bias=False)
        self.q_norm = ops.RMSNorm(dim, eps=sizes.rms_norm_eps)
        self.k_norm = ops.RMSNorm(dim, eps=sizes.rms_norm_eps)

    def queries(self, x_BLD: Tensor, rotary: Rotary | None = None) -> Tensor:
        """(B, L, H, K): normed per head, then turned where positions count."""
        q_BLHK = self.q_norm(self.q_proj(x_BLD).unflatten(-1, (-1, self.head_dim)))
        return q_BLHK if rotary is None else rotate(q_BLHK, rotary)

    def keys_values(self, x_BLD: Tensor, rotary: Rotary | None = None) -> tuple[Tensor, Tensor]:
        """Keys, treated like queries, and plain values, both (B, L, G, K)."""
        k_BLGK = self.k_norm(self.k_proj(x_BLD).unflatten(-1, (-1, self.head_dim)))
        v_BLGK = self.v_proj(x_BLD).unflatten(-1, (-1, self.head_dim))
        return (k_BLGK if rotary is None else rotate(k_BLGK, rotary)), v_BLGK

    def queries_keys_values(self, x_BLD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """`queries` and `keys_values` of the same tokens."""
        return self.queries(x_BLD, rotary), *self.keys_values(x_BLD, rotary)

    def merge(self, out_BHLK: Tensor) -> Tensor:
        """Heads side by side, back to the width of the stream."""
        return self.o_proj(out_BHLK.transpose(1, 2).flatten(2))

    def first(self, x_BLD: Tensor, rotary: Rotary) -> Tensor:
        """What `forward` gives at position 0, (B, 1, D), of all the tokens that it sees."""
        q_BLHK = self.queries(x_BLD[:, :1], Rotary(rotary.cos[:1], rotary.sin[:1]))
        k, v = self.keys_values(x_BLD, rotary)
        out = grouped_attention(q_BLHK.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.merge(out)

    def forward(
        self,
        x_BLD: Tensor,
        rotary: Rotary,
        window: int | None = None,
        keep_BL: Tensor | None = None,
    ) -> Tensor:
        q, (k, v) = self.queries(x_BLD, rotary), self.keys_values(x_BLD, rotary)
        out_BHLK = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), window, keep_BL)
        return self.merge(out_BHLK)


class FusedAttention(nn.Module):
    """`Attention` with one projection, one norm and one turn for queries, keys and values.

    Fewer and larger products: at a token a time their number costs as much as their size.
    """

    def __init__(self, plain: Attention) -> None:
        super().__init__()
        self.head_dim, self.eps = plain.head_dim, plain.q_norm.eps
        self.qkv_proj = stack((plain.q_proj, plain.k_proj, plain.v_proj))
        self.o_proj = plain.o_proj
        self.heads, self.groups = (
            part.weight.shape[0] // self.head_dim for part in (plain.q_proj, plain.k_proj)
        )
        q_HK = plain.q_norm.weight.expand(self.heads, -1)
        k_GK = plain.k_norm.weight.expand(self.groups, -1)
        self.norm_HK = nn.Parameter(torch.cat((q_HK, k_GK)), requires_grad=False)

    def queries_keys_values(self, x_BLD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """(B, L, H, K), (B, L, G, K) and (B, L, G, K), as `Attention` gives them."""
        qkv = self.qkv_proj(x_BLD).unflatten(-1, (-1, self.head_dim))
        turning, v_BLGK = qkv.split((self.heads + self.groups, self.groups), dim=-2)
        normed = F.rms_norm(turning, (self.head_dim,), eps=self.eps)
        turned = rotate(normed * self.norm_HK.to(x_BLD.device, x_BLD.dtype), rotary)
        q_BLHK, k_BLGK = turned.split((self.heads, self.groups), dim=-2)
        return q_BLHK, k_BLGK, v_BLGK

    def merge(self, out_BHLK: Tensor) -> Tensor:
        """Heads side by side, back to the width of the stream."""
        return self.o_proj(out_BHLK.transpose(1, 2).flatten(2))


def stack(parts: Sequence[nn.Linear]) -> nn.Linear:
    """One layer of the same kind that gives the outputs of `parts` side by side."""
    weight = torch.cat([part.weight for part in parts])
    with torch.device("meta"):
        fused = type(parts[0])(weight.shape[1], weight.shape[0], bias=False)
    fused.weight = nn.Parameter(weight, requires_grad=False)
    return fused


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, sizes: Sizes, ops: Any) -> None:
        super().__init__()
        width, inner = sizes.hidden_size, sizes.intermediate_size
        self.gate_proj = ops.Linear(width, inner, bias=False)
        self.up_proj = ops.Linear(width, inner, bias=False)
        self.down_proj = ops.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """`out_dtype`: precision of the down projection, that of `x` if not given."""
        inner = F.silu(self.gate_proj(x), inplace=True).mul_(self.up_proj(x))
        return self.down_proj(inner.to(out_dtype or x.dtype))


class FusedMLP(nn.Module):
    """`MLP` with one product for gate and up."""

    def __init__(self, plain: MLP) -> None:
        super().__init__()
        self.gate_up_proj = stack((plain.gate_proj, plain.up_proj))
        self.down_proj = plain.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class EncoderLayer(nn.Module):
    """One pre-norm layer of a two-way tower; even layers see a window only."""

    def __init__(self, sizes: EncoderConfig, index: int, ops: Any) -> None:
        super().__init__()
        self.window = sizes.sliding_window if is_sliding(index) else None
        self.input_layernorm = ops.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.self_attn = Attention(sizes, ops)
        self.post_attention_layernorm = ops.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.mlp = MLP(sizes, ops)

    def forward(self, x_BLD: Tensor, rotary: Rotary, keep_BL: Tensor | None = None) -> Tensor:
        """The stream may be wider (float32) than the work of the layer, which follows `rotary`."""
        dtype = rotary.cos.dtype
        normed = self.input_layernorm(x_BLD).to(dtype)
        x_BLD = x_BLD + self.self_attn(normed, rotary, self.window, keep_BL)
        return self._through_mlp(x_BLD, dtype)

    def first(self, x_BLD: Tensor, rotary: Rotary) -> Tensor:
        """What `forward` gives at position 0, (B, 1, D), without the work for the others."""
        seen = x_BLD.shape[1] if self.window is None else self.window + 1
        dtype, near = rotary.cos.dtype, Rotary(rotary.cos[:seen], rotary.sin[:seen])
        normed = self.input_layernorm(x_BLD[:, :seen]).to(dtype)
        return self._through_mlp(x_BLD[:, :1] + self.self_attn.first(normed, near), dtype)

    def _through_mlp(self, x_BLD: Tensor, dtype: torch.dtype) -> Tensor:
        normed = self.post_attention_layernorm(x_BLD).to(dtype)
        return x_BLD + self.mlp(normed, x_BLD.dtype)


class Tower(nn.Module):
    """Encoder layers and a final norm, on positions 0, 1, 2, ...; models add what lies around."""

    def __init__(self, sizes: EncoderConfig, ops: Any) -> None:
        super().__init__()
        self.sizes = sizes
        self.layers = nn.ModuleList(
            EncoderLayer(sizes, index, ops) for index in range(sizes.num_hidden_layers)
        )
        self.norm = ops.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)

    def run(self, x_BLD: Tensor, keep_BL: Tensor | None = None, wide: bool = False) -> Tensor:
        """Normed states, (B, L, D). `wide` carries the residual stream in float32."""
        rotary = self._rotary(x_BLD)
        stream = x_BLD.float() if wide else x_BLD
        for layer in self.layers:
            stream = layer(stream, rotary, keep_BL)
        return self.norm(stream).to(x_BLD.dtype)

    def run_to_first(self, x_BLD: Tensor) -> Tensor:
        """The state of `run` at position 0, (B, D): the last layer works for that one alone."""
        rotary = self._rotary(x_BLD)
        for layer in self.layers[:-1]:
            x_BLD = layer(x_BLD, rotary)
        last = cast(EncoderLayer, self.layers[-1])
        return self.norm(last.first(x_BLD, rotary))[:, 0]

    def _rotary(self, x_BLD: Tensor) -> Rotary:
        positions = torch.arange(x_BLD.shape[1], device=x_BLD.device)
        return rotary_table(positions, self.sizes, x_BLD.dtype)
