"""What a task asks of the denoise loop: where it starts, what it keeps, how long it follows.

It knows latents and noise levels, neither models nor tasks.
Dimension key: B songs (1), T latent frames, C latent channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FADE = 25  # frames over which a conservative repaint goes from new to old


@dataclass(frozen=True, slots=True, eq=False)
class Keep:
    """Clean latents (1, T, 64) that stay outside a region (1, T, 1), which is 1 where all is new.

    share: of the steps, from the first one on, after which the outside is put back.
    fade: frames outside of the region over which the end result goes from new to old.
    """

    clean_BTC: Tensor
    region_BT1: Tensor
    share: float
    fade: int

    def hold(self, x_BTC: Tensor, noise_BTC: Tensor, t: float) -> Tensor:
        """`x_BTC` with the source at noise level `t` outside the region."""
        kept_BTC = t * noise_BTC + (1.0 - t) * self.clean_BTC
        return torch.where(self.region_BT1.to(x_BTC.device) > 0, x_BTC, kept_BTC.to(x_BTC))

    def join(self, x_BTC: Tensor) -> Tensor:
        """The finished latents, faded into the clean ones around the region."""
        if self.fade == 0:
            return x_BTC
        new_BT1 = soften(self.region_BT1, self.fade).to(x_BTC)
        return torch.lerp(self.clean_BTC.to(x_BTC), x_BTC, new_BT1)


def soften(region_BT1: Tensor, fade: int) -> Tensor:
    """`region_BT1` with ramps of `fade` frames outside: k frames rise by 1 / (k + 1) each.

    A ramp that the end or another region cuts off is as long as it can be. A region that is empty
    or everywhere stays as it is.
    """
    inside = region_BT1.flatten() > 0
    frames = len(inside)
    soft = inside.float()
    edges = torch.diff(inside.int()).nonzero().flatten().tolist()
    for edge in edges:  # the region ends after this frame, or begins after it
        rises = bool(inside[edge + 1])
        reach = range(edge, max(edge - fade, -1), -1) if rises else range(edge + 1, frames)
        ramp: list[int] = []
        for frame in list(reach)[:fade]:
            if inside[frame]:
                break
            ramp.append(frame)
        for place, frame in enumerate(ramp, start=1):
            value = 1.0 - place / (len(ramp) + 1)
            soft[frame] = max(float(soft[frame]), value)
    return soft.view_as(region_BT1)


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """The way through the steps. follow: share of them that see the source, before the conditions
    without it take over. origin_BTC: latents that the first step starts from, mixed with noise to
    the noise level `start`; None starts from noise alone."""

    follow: float = 1.0
    start: float = 1.0
    origin_BTC: Tensor | None = None
    keep: Keep | None = None

    def nodes(self, nodes: tuple[float, ...]) -> tuple[float, ...]:
        """The noise levels that are left: from the one nearest to `start`."""
        if self.origin_BTC is None:
            return nodes
        nearest = min(range(len(nodes) - 1), key=lambda i: abs(nodes[i] - self.start))
        return nodes[nearest:]

    def begin(self, noise_BTC: Tensor, t: float) -> Tensor:
        """Latents at noise level `t`, the first of `nodes`."""
        if self.origin_BTC is None:
            return noise_BTC
        return t * noise_BTC + (1.0 - t) * self.origin_BTC

    def follows(self, step: int, steps: int) -> bool:
        """Whether `step` (from 0) of `steps` sees the source."""
        return self.follow >= 1.0 or step < int(steps * self.follow)

    def settle(self, x_BTC: Tensor, noise_BTC: Tensor, t: float, step: int, steps: int) -> Tensor:
        """Latents after `step`, at noise level `t`, with what is to stay put back."""
        if self.keep is None:
            return x_BTC
        if step < round(steps * self.keep.share):
            x_BTC = self.keep.hold(x_BTC, noise_BTC, t)
        return self.keep.join(x_BTC) if step == steps - 1 else x_BTC
