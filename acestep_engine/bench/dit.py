"""`bench dit`: seconds and peak memory of a turbo render, against diffusers in the same run.

A render is what the conditions fix, once, and then every step through the engine's own loop; the
peer is called as its pipeline calls it, so what it repeats at every step counts. Both use the same
memory for their weights, and peaks are all that the process holds.
Dimension key: B songs · T latent frames · C latent channels · L tokens · D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..backends.torch_eager import TorchVelocity
from ..config import DiTConfig
from ..dit import sample
from ..dit.conditions import Conditions
from ..dit.noise import draw
from ..models_torch.dit import DiT
from ..runtime import Wish, choose, probe
from ..store import DTYPES
from ..types import FRAME_RATE, DiTSampling
from ..weights.keymaps import official_names
from .measure import interleave, median, no_peer, random_model, report
from .vae import peak_of

SIZES = {
    "2B": DiTConfig(),
    "XL": DiTConfig(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=32, num_attention_heads=32
    ),
    "tiny": DiTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        encoder_hidden_size=32,
    ),
}
TOKENS = 220  # of the condition: a caption, two verses with a chorus, and the timbre


def run(size: str, precision: str, seconds: float, steps: int, turns: int, peer: bool) -> str:
    """The table and the JSON line for a song of `seconds`; of the eight steps the first `steps`."""
    runtime = choose(probe(), Wish(device="cpu", precision=precision))  # pyright: ignore[reportArgumentType]
    dtype = DTYPES[runtime.precision]
    model = random_model(lambda: DiT(SIZES[size]), dtype)
    TorchVelocity.finish(model, dtype)
    TorchVelocity.pack(model, runtime)
    conditions, noise_BTC = inputs(SIZES[size], round(seconds * FRAME_RATE))
    settings = sample.resolve(DiTSampling(), "turbo")
    settings = replace(settings, nodes=settings.nodes[: steps + 1])
    ours = render_of(TorchVelocity(model, "cpu", dtype), conditions, noise_BTC, settings)
    calls: dict[str, Callable[[], Tensor]] = {"ours": ours}
    peaks = {"ours": _peak_of(ours)}
    if peer:
        calls["diffusers"] = _diffusers(model, conditions, noise_BTC.to(dtype), settings.nodes)
        peaks["diffusers"] = _peak_of(calls["diffusers"])
    times = {name: median(values) for name, values in interleave(turns, calls).items()}
    rows = [{"who": name, "s": times[name], "peak_rss_mb": peaks[name]} for name in calls]
    result = {
        "seconds": seconds,
        "steps": len(settings.nodes) - 1,
        "precision": runtime.precision,
        "s_per_render": times["ours"],
        "peer": "diffusers AceStepTransformer1DModel",
        "peer_s_per_render": times.get("diffusers"),
        "ratio": times["ours"] / times["diffusers"] if peer else None,
        "peak_rss_mb": peaks["ours"],
        "peer_peak_rss_mb": peaks.get("diffusers"),
    }
    return report(rows, result)


def render_of(
    velocity: TorchVelocity,
    conditions: Conditions,
    noise_BTC: Tensor,
    settings: sample.ResolvedSampling,
) -> Callable[[], Tensor]:
    """A whole render through the engine's loop."""

    def render() -> Tensor:
        branches = sample.prepare(velocity, conditions, settings)
        *_, last = sample.denoise(velocity, branches, noise_BTC, settings)
        return last.x_BTC

    return render


def inputs(config: DiTConfig, frames: int) -> tuple[Conditions, Tensor]:
    generator = torch.Generator().manual_seed(0)
    encoder_BLD = torch.randn(1, TOKENS, config.encoder_hidden_size, generator=generator)
    context_BTC = torch.randn(1, frames, 2 * config.audio_acoustic_hidden_dim, generator=generator)
    return Conditions(encoder_BLD, encoder_BLD[:, :1], context_BTC), draw(0, frames)


def _peak_of(call: Callable[[], object]) -> float:
    """MiB of resident memory of the process at the peak of `call`."""
    peak_of(call)
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def _diffusers(
    model: DiT, conditions: Conditions, noise_BTC: Tensor, nodes: tuple[float, ...]
) -> Callable[[], Tensor]:
    """The same weights in diffusers, and its pipeline's loop without guidance."""
    try:
        from diffusers import AceStepTransformer1DModel
    except ImportError as error:
        raise no_peer("diffusers") from error
    with torch.device("meta"):
        peer = AceStepTransformer1DModel(**asdict(model.config))
    ours = model.state_dict()
    names = official_names("dit", "diffusers", peer.state_dict())
    peer.load_state_dict({theirs: ours[name] for name, theirs in names.items()}, assign=True)
    peer.eval()
    encoder_BLD = conditions.encoder_BLD.to(noise_BTC)
    context_BTC = conditions.context_BTC.to(noise_BTC)

    @torch.inference_mode()
    def call() -> Tensor:
        x_BTC = noise_BTC
        for t, t_next in pairwise(nodes):
            t_B = torch.full((1,), t, dtype=x_BTC.dtype)
            (v_BTC,) = peer(x_BTC, t_B, t_B, encoder_BLD, context_BTC, return_dict=False)
            x_BTC = x_BTC - (t - t_next) * v_BTC
        return x_BTC

    return call
