"""`bench gpu`: what has to be seen on a CUDA device, in one run of minutes and without a network.

Each part is a process of its own, because an error on a device may spoil all that follows in the
same process; its failure is reported and the others still run. The same code runs on a CPU at tiny
size. Dimension key: B rows · D width.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends.torch_eager import TorchCodec, TorchLanguageModel, TorchVelocity
from ..backends.torch_graph import GraphLanguageModel
from ..config import VAEConfig
from ..dit import sample
from ..errors import UnsupportedRuntime
from ..host import LocalHost
from ..lm import sampling as draws
from ..lm.decode import CodesCourse, Task, decode
from ..lm.tokenizer import QWEN3, Vocabulary
from ..models_torch import flash
from ..models_torch.dit import DiT
from ..models_torch.qwen3 import Qwen3Model
from ..types import FRAME_RATE, DiTSampling, LMSampling
from ..vae import tiling
from . import dit, lm, vae
from .measure import bandwidth, interleave, median, random_model, report

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 90  # seconds of one part
MIB, GIB = 1 << 20, 1 << 30

CONTEXT = 500  # tokens in the middle of the measurement
BACKENDS = {"eager": TorchLanguageModel, "graph": GraphLanguageModel}
FEW = Vocabulary(
    size=1_100, text=80, start=5, end=9, think_open=6, think_close=7, first_code=80, codes=1_000
)
PROMPTS = ([1, 2, 3, *range(10, 40)], [4])  # conditional and unconditional
WHOLE = 1 << 20  # frames: more than any song, so the decode is one tile


@dataclass(frozen=True, slots=True)
class Setting:
    device: torch.device
    tiny: bool

    @property
    def turns(self) -> int:
        return 1 if self.tiny else 3

    @property
    def steps(self) -> int:
        """Codes of one timed call."""
        return 5 if self.tiny else 50

    @property
    def codes(self) -> int:
        """How many codes both backends must draw alike."""
        return 40 if self.tiny else 300


def run(device: str, size: str) -> str:
    """The table of all parts and the JSON line."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedRuntime(
            "This check needs a CUDA device, and torch sees none. Run it on such a machine, or try "
            "the script itself with --device cpu --size tiny."
        )
    results: dict[str, Any] = {}
    rows = []
    for name in PARTS:
        start = time.perf_counter()
        results[name] = apart(name, device, size)
        seconds = round(time.perf_counter() - start, 1)
        rows.append({"part": name, "s": seconds, "outcome": results[name].get("error", "done")})
    failed = [name for name in PARTS if "error" in results[name]]
    total = sum(row["s"] for row in rows)
    return report(rows, {**results, "failed": failed, "seconds": total})


def apart(name: str, device: str, size: str) -> dict[str, Any]:
    """The result of one part, run in a process of its own, or its error."""
    options = ["--part", name, "--device", device, "--size", size]
    command = [sys.executable, "-m", __name__.split(".")[0], "bench", "gpu", *options]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT} s"}
    told = done.stderr.strip().splitlines()[-3:]
    if done.returncode:
        return {"error": " ".join(told) or f"exit status {done.returncode}"}
    result = json.loads(done.stdout.splitlines()[-1])
    return {**result, "warnings": told} if told else result


def run_part(name: str, device: str, size: str) -> str:
    """The JSON line of one part."""
    with torch.inference_mode():
        result = PARTS[name](Setting(torch.device(device), size == "tiny"))
    return report([], result)


def machine(setting: Setting) -> dict[str, Any]:
    """What this machine is, and how fast it reads."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    package = flash.package()
    found["flash_attn"] = getattr(package, "__version__", "of no version") if package else None
    if setting.device.type == "cuda":
        device = torch.cuda.get_device_properties(setting.device)
        found |= {
            "name": device.name,
            "capability": [device.major, device.minor],
            "memory_gib": device.total_memory / GIB,
            "cuda": torch.version.cuda,
            "rocm": torch.version.hip,
        }
    else:
        found |= {"name": platform.processor() or platform.machine()}
    return found | {"bandwidth_gb_s": _bandwidth(setting) / 1e9}


def parity(setting: Setting) -> dict[str, Any]:
    """Whether the graph draws what the eager step draws, and how far the device is from the CPU.

    Where flash-attn is installed, bf16 goes through its kernels and fp32 through those of torch.
    """
    config = replace(lm.SIZES["tiny"], vocab_size=FEW.size)
    found: dict[str, Any] = {}
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        model = random_model(lambda: Qwen3Model(config), dtype, scale=0.2).to(setting.device)
        TorchLanguageModel.finish(model, dtype)
        eager, graph = (
            _codes(kind(model, setting.device, dtype), setting.codes) for kind in BACKENDS.values()
        )
        first = next((i for i, (a, b) in enumerate(zip(eager, graph, strict=True)) if a != b), None)
        found[name] = {
            "same": eager == graph,
            "first_difference": first,
            "flash_attn": flash.usable(torch.zeros(1, device=setting.device, dtype=dtype)),
        }
    model = random_model(lambda: Qwen3Model(config), torch.float32, scale=0.2)
    there = _states(TorchLanguageModel(model, "cpu", torch.float32))
    here = _states(TorchLanguageModel(model.to(setting.device), setting.device, torch.float32))
    return found | {"states_gap_fp32": float((there - here).abs().max())}


def _codes(model: TorchLanguageModel, count: int) -> list[int]:
    course = CodesCourse(FEW, count, count, model.device)
    sampling = LMSampling(temperature=0.9, repetition_penalty=1.2)
    decode(model, Task("codes", PROMPTS, sampling), course, LocalHost(show=False))
    return list(course.songs[0])


def _states(model: TorchLanguageModel) -> Tensor:
    """States after prompts of unequal length and after one more token, on the CPU."""
    session = model.open(len(PROMPTS), 100)
    first_BD = session.feed(PROMPTS)
    return torch.cat((first_BD, session.feed([[7]] * len(PROMPTS)))).cpu()


def rate_of(size: str) -> Callable[[Setting], dict[str, Any]]:
    """Codes a second with CFG of a language model of this size, eagerly and by the graph."""

    def measure(setting: Setting) -> dict[str, Any]:
        config = lm.SIZES["tiny" if setting.tiny else size]
        dtype = torch.bfloat16
        model = random_model(lambda: Qwen3Model(config), dtype, device=setting.device)
        TorchLanguageModel.finish(model, dtype)
        backends = {name: kind(model, setting.device, dtype) for name, kind in BACKENDS.items()}
        calls = {name: _codes_phase(backend, setting) for name, backend in backends.items()}
        times = interleave(setting.turns, calls)
        bound = _bandwidth(setting) / lm.weight_bytes(backends["eager"])
        found: dict[str, Any] = {"context": CONTEXT, "bound_tok_s": bound}
        for name in calls:
            rate = setting.steps / median(times[name])
            found |= {f"{name}_tok_s": rate, f"{name}_share": rate / bound}
        return found

    return measure


def _codes_phase(model: TorchLanguageModel, setting: Setting) -> Callable[[], Tensor]:
    """Recorded steps of one song with CFG, drawn as in the loop."""
    total = (setting.turns + 1) * setting.steps
    before = CONTEXT - total // 2
    session = model.open(2, before + total)
    session.feed([[row + 5] * before for row in range(2)])

    def choose(states_BD: Tensor, uniform_N1: Tensor) -> Tensor:
        conditional, unconditional = model.logits(states_BD, QWEN3.code_ids).chunk(2)
        guided = draws.guide(conditional, unconditional, lm.SAMPLING.cfg_scale)
        return QWEN3.first_code + draws.draw(guided, uniform_N1, lm.SAMPLING)

    step = session.record(choose)
    uniforms = draws.uniforms(0, setting.steps, model.device)

    def phase() -> Tensor:
        ids_B1 = torch.full((2, 1), QWEN3.first_code, device=model.device)
        for uniform in uniforms:
            ids_B1 = step(ids_B1, uniform.view(1, 1)).repeat(2)[:, None]
        return ids_B1

    return phase


def render(setting: Setting) -> dict[str, Any]:
    """Seconds of one render by the diffusion transformer, in bf16."""
    seconds, dtype = (1.0 if setting.tiny else 10.0), torch.bfloat16
    config = dit.SIZES["tiny" if setting.tiny else "2B"]
    model = random_model(lambda: DiT(config), dtype, device=setting.device)
    TorchVelocity.finish(model, dtype)
    settings = sample.resolve(DiTSampling(), "turbo")
    velocity = TorchVelocity(model, setting.device, dtype)
    conditions, noise_BTC = dit.inputs(config, round(seconds * FRAME_RATE))
    call = dit.render_of(velocity, conditions, noise_BTC, settings)
    return {
        "seconds": seconds,
        "steps": len(settings.nodes) - 1,
        "s_per_render": median(interleave(setting.turns, {"render": call})["render"]),
        "peak_mib": _peak(setting, call),
    }


def vae_decode(setting: Setting) -> dict[str, Any]:
    """Seconds and peak memory of the decode in tiles and in one piece, in bf16."""
    tiny = VAEConfig(4, 2, channel_multiples=(1,) * 5)
    seconds, dtype = (2.0 if setting.tiny else 30.0), torch.bfloat16
    model = vae.model_of(tiny if setting.tiny else VAEConfig(), dtype, setting.device)
    codec, latents_BCT = TorchCodec(model, setting.device, dtype), vae.latents_of(seconds)
    found: dict[str, Any] = {"seconds": seconds}
    for name, tile in {"tile_256": 256, "tile_512": 512, "one_shot": WHOLE}.items():

        def call(tile: int = tile) -> Tensor:
            return tiling.decode(codec.decode, latents_BCT, tile, lambda done, total: None)

        found[name] = {"peak_mib": _peak(setting, call)}  # first, so that it is not warm
        found[name]["s"] = median(interleave(setting.turns, {"decode": call})["decode"])
    return found


def _bandwidth(setting: Setting) -> float:
    """Bytes a second that the device reads."""
    return bandwidth(1 << 26 if setting.tiny else 1 << 31, device=setting.device)


def _peak(setting: Setting, call: Callable[[], object]) -> float:
    """MiB that `call` takes on the device at its peak, above what is there before."""
    if setting.device.type != "cuda":
        return vae.peak_of(call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "machine": machine,
    "parity": parity,
    "lm_0.6B": rate_of("0.6B"),
    "lm_1.7B": rate_of("1.7B"),
    "dit_2B": render,
    "vae": vae_decode,
}
