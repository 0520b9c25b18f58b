"""Tasks: what each kind of render hands to the DiT beside the words.

Pure functions over latents; they know no models. T is never below the 128 frames the DiT was
trained on: a shorter song is cut after decoding.
Dimension key: B songs (1 here), T latent frames (25 Hz), C channels, N stored frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidRequest
from ..types import MIN_FRAMES, frames_of
from .silence import take


@dataclass(frozen=True, slots=True, eq=False)
class Canvas:
    """Source latents and mask (1, T, 64), and the key of the instruction in `text.INSTRUCTIONS`.

    mask: 1 where the DiT invents, 0 where it keeps the source.
    """

    source_BTC: Tensor
    mask_BTC: Tensor
    instruction: str

    @property
    def frames(self) -> int:
        return self.source_BTC.shape[1]

    @property
    def context_BTC(self) -> Tensor:
        """What the DiT reads at every frame next to the noise, (1, T, 128)."""
        return torch.cat((self.source_BTC, self.mask_BTC), dim=-1)


def text2music(silence_NC: Tensor, seconds: int | None, hints_BTC: Tensor | None) -> Canvas:
    """A new song: of `seconds`, guided by `hints_BTC` (1, 5 N, 64) where there are codes.

    seconds None takes the length of the hints; hints shorter than `seconds` are filled with
    silence, longer ones are kept.
    """
    if seconds is None and hints_BTC is None:
        raise InvalidRequest(
            "The song has neither a length nor codes to take it from. Set a duration in the plan."
        )
    hints = silence_NC[None, :0] if hints_BTC is None else hints_BTC
    frames = max(hints.shape[1], MIN_FRAMES, frames_of(seconds or 0))
    filling = take(silence_NC, frames - hints.shape[1]).to(hints)
    source = torch.cat((hints, filling), dim=1)
    instruction = "text2music" if hints_BTC is None else "cover"
    return Canvas(source, torch.ones_like(source), instruction)
