"""Condition encoder: text, lyrics and timbre references to one sequence for cross-attention.

The twin of `models_torch.encoders` without its masks: every token counts. It knows no prompts and
no audio files. Names are those under `encoder.` in the official checkpoint, plus
`null_condition_emb`. Dimension key: B items · L tokens · D width · N timbre clips over all items ·
T latent frames · C latent channels.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..config import ConditionConfig
from .layers import Tower, front_token


class LyricEncoder(Tower):
    """Token embeddings of the lyrics, (B, L, text width), to (B, L, D)."""

    def __init__(self, config: ConditionConfig) -> None:
        super().__init__(config.lyric)
        self.embed_tokens = nn.Linear(config.text_hidden_dim, config.lyric.hidden_size)

    def __call__(self, lyric_BLD: mx.array) -> mx.array:
        # The last down projection reaches 5e5, beyond half precision: the stream goes wide there.
        return self.run(self.embed_tokens(lyric_BLD), wide=lyric_BLD.dtype == mx.float16)

    def widen(self) -> None:
        """Put into float32 what works on a wide stream; for half precision only."""
        self.norm.set_dtype(mx.float32)
        for layer in self.layers:
            for part in (layer.input_layernorm, layer.post_attention_layernorm):
                part.set_dtype(mx.float32)
            layer.mlp.down_proj.set_dtype(mx.float32)


class TimbreEncoder(Tower):
    """Reference clips, (N, T, C), to one vector each, (N, D): the state at position 0.

    Position 0 is `special_token` with `timbre_cls` (XL), else the first frame of the clip. The 2B
    checkpoints hold the token as well, but were trained without it.
    """

    def __init__(self, config: ConditionConfig) -> None:
        super().__init__(config.timbre)
        self.cls = config.timbre_cls
        self.embed_tokens = nn.Linear(config.timbre_hidden_dim, config.timbre.hidden_size)
        self.special_token = mx.zeros((1, 1, config.timbre.hidden_size))

    def __call__(self, timbre_NTC: mx.array) -> mx.array:
        x_NTD = self.embed_tokens(timbre_NTC)
        return self.run_to_first(front_token(self.special_token, x_NTD) if self.cls else x_NTD)


class ConditionEncoder(nn.Module):
    def __init__(self, config: ConditionConfig) -> None:
        super().__init__()
        width = config.lyric.hidden_size
        self.text_projector = nn.Linear(config.text_hidden_dim, width, bias=False)
        self.lyric_encoder = LyricEncoder(config)
        self.timbre_encoder = TimbreEncoder(config)
        self.null_condition_emb = mx.zeros((1, 1, width))

    def __call__(self, text_BLD: mx.array, lyric_BLD: mx.array, timbre_NTC: mx.array) -> mx.array:
        """Lyric, timbre and text of each item in this order, (B, L, D).

        Each item has the same number of clips, and they follow each other item by item.
        """
        clips_ND = self.timbre_encoder(timbre_NTC)
        timbre_BLD = mx.unflatten(clips_ND, 0, (text_BLD.shape[0], -1))
        parts = [self.lyric_encoder(lyric_BLD), timbre_BLD, self.text_projector(text_BLD)]
        return mx.concatenate(parts, axis=1)
