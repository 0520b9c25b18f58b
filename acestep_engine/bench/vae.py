"""`bench vae`: time and peak memory of the tiled decode, against diffusers' in the same run.

Peaks are resident memory above what stands before the call, so they hold the output as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..backends.torch_eager import TorchCodec
from ..config import VAEConfig
from ..errors import UnsupportedRuntime
from ..models_torch.oobleck import Oobleck, Snake
from ..runtime import Wish, choose, probe
from ..store import DTYPES
from ..types import FRAME_RATE, LATENT_CHANNELS
from ..vae.tiling import DECODE_OVERLAP, decode
from .measure import interleave, median, random_model, report

MIB = 1 << 20
PEER_TILE, PEER_OVERLAP = 512, 64  # what diffusers tiles with


def run(seconds: float, precision: str, tile: int, turns: int, peer: bool) -> str:
    """The table and the JSON line for a song of `seconds`, decoded in tiles of `tile` frames."""
    runtime = choose(probe(), Wish(device="cpu", precision=precision))  # pyright: ignore[reportArgumentType]
    dtype = DTYPES[runtime.precision]
    vae = random_model(lambda: Oobleck(VAEConfig()), dtype)
    for part in vae.modules():
        if isinstance(part, Snake):
            part.alpha.zero_()
            part.beta.zero_()
    codec = TorchCodec(vae, "cpu", dtype)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, LATENT_CHANNELS, round(seconds * FRAME_RATE), generator=generator)
    tile = tile or runtime.tile
    calls: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: decode(codec.decode, latents, tile, lambda done, total: None)
    }
    if peer:
        calls["diffusers"] = _diffusers(vae, latents.to(dtype))
    peaks = {name: peak_of(call) for name, call in calls.items()}
    times = {name: median(values) for name, values in interleave(turns, calls).items()}
    rows = [{"who": name, "s": times[name], "peak_mb": peaks[name]} for name in calls]
    result = {
        "op": "decode",
        "seconds": seconds,
        "dtype": runtime.precision,
        "tile": tile,
        "overlap": DECODE_OVERLAP,
        "s": times["ours"],
        "peer": f"diffusers tiled {PEER_TILE}/{PEER_OVERLAP}",
        "peer_s": times.get("diffusers"),
        "ratio": times["ours"] / times["diffusers"] if peer else None,
        "peak_mb": peaks["ours"],
        "peer_peak_mb": peaks.get("diffusers"),
    }
    return report(rows, result)


def peak_of(call: Callable[[], object]) -> float:
    """MiB of resident memory that `call` takes at its peak; Linux only, where it can be reset."""
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


def _diffusers(vae: Oobleck, latents_BCT: Tensor) -> Callable[[], Tensor]:
    try:
        from diffusers import AutoencoderOobleck
    except ImportError as error:
        raise UnsupportedRuntime(
            "The peer of this benchmark is diffusers, which is not installed. "
            "Install the extra 'test', or run with --no-peer."
        ) from error
    with torch.device("meta"):
        peer = AutoencoderOobleck(downsampling_ratios=[2, 4, 4, 6, 10], sampling_rate=48_000)
    for module in peer.modules():
        if hasattr(module, "weight_g"):
            torch.nn.utils.remove_weight_norm(module)
    peer.load_state_dict(vae.state_dict(), assign=True)
    peer.eval().enable_tiling()

    @torch.inference_mode()
    def call() -> Tensor:
        decoded = peer.decode(latents_BCT)  # pyright: ignore[reportArgumentType]
        return decoded.sample  # pyright: ignore[reportAttributeAccessIssue]

    return call
