"""`bench vae`: time and peak memory of tiled decode and encode, against diffusers' in the same run.

Peaks are resident memory above what stands before the call, so they hold the output as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends.torch_eager import TorchCodec
from ..config import VAEConfig
from ..errors import UnsupportedRuntime
from ..models_torch.cpu_conv import give_back
from ..models_torch.oobleck import Oobleck, Snake
from ..runtime import Runtime, Wish, choose, probe
from ..store import DTYPES
from ..types import FRAME_RATE, HOP, LATENT_CHANNELS
from ..vae.memory import MIB, Op, peak_bytes, window_frames
from ..vae.tiling import AUDIO_CHANNELS, DECODE_OVERLAP, ENCODE_OVERLAP, decode, encode
from .measure import interleave, median, no_peer, random_model, report

PEER_TILE, PEER_OVERLAP = 512, 64  # what diffusers tiles with


@dataclass(frozen=True, slots=True)
class Song:
    op: Op
    seconds: float
    precision: str
    tile: int = 0  # latent frames, 0: automatic

    @property
    def frames(self) -> int:
        return round(self.seconds * FRAME_RATE)


def run(song: Song, turns: int, peer: bool, one_shot: bool = False) -> str:
    """The table and the JSON line for `song`, tiled; `one_shot` adds rows without tiles."""
    runtime = choose(probe(), Wish(device="cpu", precision=song.precision))  # pyright: ignore[reportArgumentType]
    song = replace(song, precision=runtime.precision, tile=song.tile or runtime.tile)
    dtype = DTYPES[runtime.precision]
    vae = _model(runtime)
    given = _input(song)
    work = getattr(TorchCodec(vae, "cpu", dtype), song.op)
    tiled = decode if song.op == "decode" else encode
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: tiled(work, given, song.tile, lambda done, total: None)
    }
    if one_shot:
        calls["ours, one shot"] = lambda: work(given)
    if peer:
        calls["diffusers"] = _diffusers(vae, song.op, given.to(dtype), tiles=True)
    if peer and one_shot:
        calls["diffusers, one shot"] = _diffusers(vae, song.op, given.to(dtype), tiles=False)
    peaks = {name: peak_of(call) for name, call in calls.items()}
    times = {name: median(values) for name, values in interleave(turns, calls).items()}
    rows = [{"who": name, "s": times[name], "peak_mb": peaks[name]} for name in calls]
    return report(rows, _result(song, vae.config, times, peaks))


def _result(
    song: Song, config: VAEConfig, times: Mapping[str, float], peaks: Mapping[str, float]
) -> dict[str, Any]:
    decodes, peer = song.op == "decode", "diffusers" in times
    window = window_frames(song.op, song.tile, song.frames)
    output = song.frames * 4 * (AUDIO_CHANNELS * HOP if decodes else LATENT_CHANNELS)
    predicted = output + peak_bytes(song.op, window, config, song.precision)
    return {
        "op": song.op,
        "seconds": song.seconds,
        "dtype": song.precision,
        "tile": song.tile,
        "window": window,
        "overlap": DECODE_OVERLAP if decodes else ENCODE_OVERLAP,
        "s": times["ours"],
        "peer": f"diffusers tiled {PEER_TILE}/{PEER_OVERLAP}" if decodes else "diffusers",
        "peer_s": times.get("diffusers"),
        "ratio": times["ours"] / times["diffusers"] if peer else None,
        "peak_mb": peaks["ours"],
        "peer_peak_mb": peaks.get("diffusers"),
        "predicted_peak_mb": predicted / MIB,
    }


def _model(runtime: Runtime) -> Oobleck:
    vae = model_of(VAEConfig(), DTYPES[runtime.precision])
    TorchCodec.pack(vae, runtime)
    return vae


def model_of(config: VAEConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Oobleck:
    """Random weights, and snakes that bend as those of a trained model begin."""
    vae = random_model(lambda: Oobleck(config), dtype, device=device)
    for part in vae.modules():
        if isinstance(part, Snake):
            part.alpha.zero_()
            part.beta.zero_()
    return vae


def latents_of(seconds: float) -> Tensor:
    """Random latents (1, 64, T)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, LATENT_CHANNELS, round(seconds * FRAME_RATE), generator=generator)


def _input(song: Song) -> Tensor:
    decodes = song.op == "decode"
    shape = (1, LATENT_CHANNELS, song.frames) if decodes else (1, 2, song.frames * HOP)
    scale = 1.0 if decodes else 0.2
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale


def peak_of(call: Callable[[], object]) -> float:
    """MiB of resident memory that `call` takes at its peak; Linux only, where it can be reset."""
    give_back()  # else memory that is free already would not count when it is used again
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        raise UnsupportedRuntime("Peak memory is measured by Linux's /proc. Run this on Linux.")

    def read(name: str) -> int:
        (line,) = (line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    reset.write_text("5")
    before = read("VmRSS:")
    call()
    return (read("VmHWM:") - before) / MIB


def _diffusers(vae: Oobleck, op: Op, given: Tensor, tiles: bool) -> Callable[[], object]:
    try:
        from diffusers import AutoencoderOobleck
    except ImportError as error:
        raise no_peer("diffusers") from error
    with torch.device("meta"):
        peer = AutoencoderOobleck(downsampling_ratios=[2, 4, 4, 6, 10], sampling_rate=48_000)
    for module in peer.modules():
        if hasattr(module, "weight_g"):
            torch.nn.utils.remove_weight_norm(module)
    peer.load_state_dict(vae.state_dict(), assign=True)
    peer.eval()
    if tiles:
        peer.enable_tiling()

    @torch.inference_mode()
    def call() -> object:
        return getattr(peer, op)(given)

    return call
