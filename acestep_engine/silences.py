"""Latents of silence for each model in use: stored beside the DiT, or rebuilt from the VAE.

It knows where they come from and keeps them; what they are for is the business of others.
Dimension key: N frames, 64 channels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .dit import silence
from .store import Store
from .types import ModelSpec, require_finite
from .weights.files import stamp
from .weights.silence import find_silence, read_silence

CURE = "Try precision fp32; if that does not help, the checkpoint file is damaged: fetch it again."


class Silences:
    """One for each model, made anew where its files changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[ModelSpec, tuple[Any, Tensor]] = {}

    def of(self, model: ModelSpec) -> Tensor:
        """Silence for `model`, (N, 64)."""
        key = self.key(model)
        known, latents_NC = self._known.get(model, (None, None))
        if latents_NC is None or known != key:
            latents_NC = read_silence(model)
            if latents_NC is None:
                latents_NC = silence.from_encoder(self._store.backend(model, "vae").encode)
            self._known[model] = key, require_finite(latents_NC, "Latents of silence", CURE)
        return latents_NC

    def key(self, model: ModelSpec) -> Any:
        """What silence is made of; a stored one of zeros was never set, and comes from the VAE."""
        file = find_silence(model)
        return file and stamp(file), self._store.key(model, "vae") if model.vae else None

    def forget(self, model: ModelSpec) -> None:
        self._known.pop(model, None)
