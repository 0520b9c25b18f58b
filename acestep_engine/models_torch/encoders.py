"""Condition encoder: text, lyrics and timbre references to one sequence for cross-attention.

It knows no prompts and no audio files. Names are those under `encoder.` in the official checkpoint,
plus `null_condition_emb`. Dimension key: B items · L tokens · D width · N timbre clips over all
items · T latent frames · C latent channels, or clips per item where it follows B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ConditionConfig
from .layers import Tower


def pack(
    first_BLD: Tensor, first_keep_BL: Tensor, second_BLD: Tensor, second_keep_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """Join two masked sequences, kept tokens to the front in their order; values and mask."""
    joined_BLD = torch.cat((first_BLD, second_BLD), dim=1)
    keep_BL = torch.cat((first_keep_BL, second_keep_BL), dim=1)
    # Integers, because not every device sorts booleans.
    order_BL = keep_BL.long().argsort(dim=1, descending=True, stable=True)
    packed_BLD = joined_BLD.gather(1, order_BL[..., None].expand_as(joined_BLD))
    places = torch.arange(keep_BL.shape[1], device=keep_BL.device)
    return packed_BLD, places < keep_BL.sum(dim=1, keepdim=True)


def unpack_timbre(vectors_ND: Tensor, order: Sequence[int], items: int) -> tuple[Tensor, Tensor]:
    """Clips to their items, (B, C, D) padded with zeros, and the mask of real ones, (B, C).

    `order[n]` is the item that clip n belongs to; clips of an item keep their order.
    """
    taken: Counter[int] = Counter()
    slots = []
    for item in order:
        slots.append(taken[item])
        taken[item] += 1
    most = max(taken.values())
    unpacked_BCD = vectors_ND.new_zeros(items, most, vectors_ND.shape[-1])
    keep_BC = torch.zeros(items, most, dtype=torch.bool, device=vectors_ND.device)
    unpacked_BCD[list(order), slots] = vectors_ND
    keep_BC[list(order), slots] = True
    return unpacked_BCD, keep_BC


class LyricEncoder(Tower):
    """Token embeddings of the lyrics, (B, L, text width), to (B, L, D)."""

    def __init__(self, config: ConditionConfig, ops: Any) -> None:
        super().__init__(config.lyric, ops)
        self.embed_tokens = ops.Linear(config.text_hidden_dim, config.lyric.hidden_size)

    def forward(self, lyric_BLD: Tensor, keep_BL: Tensor | None = None) -> Tensor:
        # The last down projection reaches 5e5, beyond half precision: the stream goes wide there.
        wide = lyric_BLD.dtype is torch.float16
        return self.run(self.embed_tokens(lyric_BLD), keep_BL, wide)

    def widen(self) -> None:
        """Put into float32 what works on a wide stream; for half precision only."""
        self.norm.float()
        for layer in self.layers:
            for part in ("input_layernorm", "post_attention_layernorm", "mlp.down_proj"):
                layer.get_submodule(part).float()


class TimbreEncoder(Tower):
    """Reference clips, (N, T, C), to one vector each, (N, D): the state at position 0.

    Position 0 is `special_token` with `timbre_cls` (XL), else the first frame of the clip. The 2B
    checkpoints hold the token as well, but were trained without it.
    """

    def __init__(self, config: ConditionConfig, ops: Any) -> None:
        super().__init__(config.timbre, ops)
        self.cls = config.timbre_cls
        self.embed_tokens = ops.Linear(config.timbre_hidden_dim, config.timbre.hidden_size)
        self.special_token = nn.Parameter(torch.empty(1, 1, config.timbre.hidden_size))

    def forward(self, timbre_NTC: Tensor) -> Tensor:
        x_NTD = self.embed_tokens(timbre_NTC)
        if self.cls:
            token = self.special_token.to(x_NTD.device, x_NTD.dtype)
            x_NTD = torch.cat((token.expand(x_NTD.shape[0], -1, -1), x_NTD), dim=1)
        return self.run_to_first(x_NTD)


class ConditionEncoder(nn.Module):
    def __init__(self, config: ConditionConfig, ops: Any = nn) -> None:
        super().__init__()
        width = config.lyric.hidden_size
        self.text_projector = ops.Linear(config.text_hidden_dim, width, bias=False)
        self.lyric_encoder = LyricEncoder(config, ops)
        self.timbre_encoder = TimbreEncoder(config, ops)
        self.null_condition_emb = nn.Parameter(torch.empty(1, 1, width))

    def forward(
        self,
        text_BLD: Tensor,
        lyric_BLD: Tensor,
        timbre_NTC: Tensor,
        order: Sequence[int],
        text_keep_BL: Tensor | None = None,
        lyric_keep_BL: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Lyric, timbre and text of each item in this order, (B, L, D), and the mask of valid ones.

        Masks are boolean, None where every token counts. `order`: the item of each timbre clip.
        """
        lyric = self.lyric_encoder(lyric_BLD, lyric_keep_BL)
        clips = self.timbre_encoder(timbre_NTC)
        timbre, timbre_keep = unpack_timbre(clips, order, lyric.shape[0])
        front, front_keep = pack(lyric, _all_if_none(lyric_keep_BL, lyric), timbre, timbre_keep)
        text = self.text_projector(text_BLD)
        return pack(front, front_keep, text, _all_if_none(text_keep_BL, text))


def _all_if_none(keep_BL: Tensor | None, x_BLD: Tensor) -> Tensor:
    if keep_BL is not None:
        return keep_BL
    return torch.ones(x_BLD.shape[:2], dtype=torch.bool, device=x_BLD.device)
