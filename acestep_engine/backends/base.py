"""The border between loops and models: what a backend must offer, whatever it is written in.

Tensors that cross it are torch tensors; a backend owns its weights, its precision and its KV
caches. Loops (`lm.decode`, `dit.sample`, `vae.tiling`) see only these Protocols.
Dimension key: B rows · L tokens · D width · V candidates · T latent frames · N codes · S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

Rows = slice | Tensor
"""Rows of the output head: a contiguous slice of the vocabulary or a vector of token ids."""


Choose = Callable[[Tensor, Tensor], Tensor]
"""From states (B, D) and a uniform number of each song (N, 1) to the drawn ids, (N,)."""

Step = Callable[[Tensor, Tensor], Tensor]
"""From the ids of each row (B, 1) and the numbers (N, 1) to the drawn ids, (N,)."""


class LMSession(Protocol):
    """A running conversation of B rows, each with its own length in a cache of fixed capacity."""

    def feed(self, ids: Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Append tokens to every row; ragged lists allowed, or a (B, L) tensor on the device.

        Returns the final hidden state after each row's last token, (B, D).
        """
        ...

    def read(self, ids_BL: Tensor) -> Tensor:
        """Append the same number of tokens to every row; the state after each, (B, L, D)."""
        ...

    def record(self, choose: Choose) -> Step:
        """`feed` of one token a row, then `choose`, as one step that may be replayed from a tape.

        `choose` is asked for the same shapes at every step, never looks at the device, and changes
        tensors only in place and so that doing it twice changes nothing more.
        """
        ...


class LanguageModel(Protocol):
    device: Any

    def open(self, rows: int, capacity: int) -> LMSession:
        """A session with room for `capacity` tokens a row."""
        ...

    def logits(self, hidden_BD: Tensor, rows: Rows) -> Tensor:
        """Scores of the given head rows only, (B, len(rows)) float32."""
        ...

    def cache_bytes(self, rows: int, capacity: int) -> int:
        """Memory that `open` will take."""
        ...

    def rows_agree(self, rows: int, unit: int, head: slice) -> bool:
        """Whether a row among `rows` rows gets the same bits as among `unit` rows, up to the scores
        of the head rows `head`."""
        ...


class TextEncoder(Protocol):
    def states(self, ids_BL: Tensor) -> Tensor:
        """Final hidden states, (B, L, D)."""
        ...

    def embed(self, ids_BL: Tensor) -> Tensor:
        """Rows of the token table, (B, L, D)."""
        ...


class ConditionEncoder(Protocol):
    def encode(self, text_BLD: Tensor, lyric_BLD: Tensor, timbre_NTC: Tensor) -> Tensor:
        """One sequence for cross-attention, lyric then timbre then text, (B, L, D)."""
        ...

    def null(self) -> Tensor:
        """The learned unconditional sequence, (1, 1, D)."""
        ...


class AudioTokenizer(Protocol):
    def tokenize(self, latents_BTC: Tensor) -> Tensor:
        """Code indices at 5 Hz, (B, T / 5) int64; T is a multiple of 5."""
        ...


class AudioDetokenizer(Protocol):
    def detokenize(self, indices_BN: Tensor) -> Tensor:
        """Latent hints at 25 Hz, (B, 5 N, 64) float32."""
        ...


class Velocity(Protocol):
    def prepare(self, encoder_BLD: Tensor) -> Any:
        """Cross-attention keys and values of every layer, computed once per condition."""
        ...

    def __call__(self, x_BTC: Tensor, t: float, context_BTC: Tensor, cross: Any) -> Tensor:
        """dx/dt at noise level t, (B, T, 64) float32."""
        ...


class Codec(Protocol):
    def encode(self, audio_BXS: Tensor) -> Tensor:
        """Posterior mean of (B, channels, S) audio, (B, 64, S // 1920) float32."""
        ...

    def decode(self, latents_BCT: Tensor) -> Tensor:
        """Waveform (B, channels, 1920 T) float32 of (B, 64, T) latents."""
        ...
