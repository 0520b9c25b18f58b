"""Which backend, device, precision and mode a machine gets: one pure function and its reasons.

`choose` reads nothing but its arguments; `probe` is the only place that looks at the machine.
torch is imported inside functions, so the policy can be read and tested anywhere.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from .errors import UnsupportedRuntime

logger = logging.getLogger(__name__)

DeviceWish = Literal["auto", "cuda", "mlx", "mps", "xpu", "cpu"]
DeviceKind = Literal["cuda", "mlx", "mps", "xpu", "cpu"]
Precision = Literal["fp32", "bf16", "fp16"]
PrecisionWish = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"]
ModeWish = Literal["auto", "eager", "graph"]
Mode = Literal["eager", "graph"]

PACKED: dict[str, tuple[int, ...]] = {"mlx": (8, 4), "cpu": (8,)}
"""Bits that large weights can be packed to on each kind of device, where its kernels gain by it."""

VARIABLE = "ACESTEP_DEVICE"  # of the environment
JETSON_NAMES = ("orin", "xavier", "tegra", "jetson")
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What `choose` may know of a machine."""

    kind: DeviceKind = "cpu"
    name: str = ""
    bf16: bool = False  # native bf16 arithmetic
    rocm: bool = False
    flash_attn: bool = False
    total_memory: int = 0  # bytes
    free_memory: int = 0  # bytes
    available: tuple[str, ...] = ("cpu",)  # device kinds that may be asked for
    bf16_on: tuple[str, ...] = ()  # those of them with native bf16 arithmetic
    int8: bool = False  # the CPU multiplies 8-bit integers exactly
    usual: str = ""  # what the wish "auto" means here, where the environment says so
    mlx_trouble: str | None = None  # why MLX cannot be imported, where it cannot


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for; "auto" leaves it to the policy."""

    device: DeviceWish = "auto"
    precision: PrecisionWish = "auto"
    mode: ModeWish = "auto"


@dataclass(frozen=True, slots=True)
class Runtime:
    """The decision, with a reason for each automatic choice."""

    device: str
    precision: Precision  # of the work
    mode: Mode
    tile: int  # latent frames per VAE tile
    bits: int = 0  # of packed weights, for the parts whose size is felt; 0: none are packed
    reasons: tuple[str, ...] = ()


def choose(info: DeviceInfo, wish: Wish = Wish()) -> Runtime:
    """The runtime for `info` that honours `wish`.

    Raises UnsupportedRuntime where an explicit wish cannot be met.
    """
    reasons: list[str] = []
    info = _choose_device(info, wish, reasons)
    precision = _choose_precision(info, wish, reasons)
    mode = _choose_mode(info, wish, reasons)
    tile = _choose_tile(info, reasons)
    bits = _choose_bits(info, wish, reasons)
    return Runtime(info.kind, precision, mode, tile, bits, tuple(reasons))


def _choose_device(info: DeviceInfo, wish: Wish, reasons: list[str]) -> DeviceInfo:
    if wish.device == "auto" and not info.usual:
        reasons.append(f"device {info.kind}: the fastest one found ({info.name or 'no name'})")
        return info
    usual = wish.device == "auto"
    device, by = (info.usual, f" by {VARIABLE}") if usual else (wish.device, "")
    if device == "mlx" and info.mlx_trouble:
        raise UnsupportedRuntime(
            f"MLX was asked for{by}, but cannot be imported here ({info.mlx_trouble}). On Apple "
            "silicon or Linux: pip install 'acestep-engine[mlx]'. Else choose device 'auto'."
        )
    if device not in info.available:
        raise UnsupportedRuntime(
            f"The device '{device}' was asked for{by}, but this machine offers only "
            f"{', '.join(info.available)}. Choose one of them, or 'auto'"
            f"{f' by taking {VARIABLE} out of the environment' * usual}."
        )
    reasons.append(f"device {device}: asked for{by}")
    if device == info.kind:
        return info
    return replace(info, kind=device, name="", bf16=device in info.bf16_on)


def _choose_precision(info: DeviceInfo, wish: Wish, reasons: list[str]) -> Precision:
    if wish.precision == "fp16":
        logger.warning(
            "fp16 was asked for: the lyric encoder of ACE-Step 1.5 reaches 5e5, which overflows in "
            "fp16, so that part runs in fp32; bf16 or fp32 for all is safer."
        )
    if wish.precision in get_args(Precision):
        reasons.append(f"precision {wish.precision}: asked for")
        return cast(Precision, wish.precision)
    if info.bf16:
        reasons.append("precision bf16: the device computes it natively")
        return "bf16"
    reasons.append("precision fp32: the device does not compute bf16 natively; fp16 overflows here")
    return "fp32"


def _choose_bits(info: DeviceInfo, wish: Wish, reasons: list[str]) -> int:
    possible = PACKED.get(info.kind, ()) if info.kind != "cpu" or info.int8 else ()
    if wish.precision == "auto" and info.kind == "cpu" and possible:
        reasons.append("language model in 8 bits: a CPU is as fast as it reads the weights")
        return possible[0]
    if not wish.precision.startswith("int"):
        return 0
    bits = int(wish.precision.removeprefix("int"))
    if bits not in possible:
        offers = ", ".join(f"int{width}" for width in possible) or "none"
        raise UnsupportedRuntime(
            f"Weights packed to {bits} bits were asked for (precision {wish.precision}), but on "
            f"{info.kind} the kernels for packed weights are: {offers}. Choose precision 'auto'."
        )
    reasons.append(f"weights packed to {bits} bits: asked for")
    return bits


def _choose_mode(info: DeviceInfo, wish: Wish, reasons: list[str]) -> Mode:
    if wish.mode == "graph" and info.kind != "cuda":
        raise UnsupportedRuntime(
            f"Graph mode was asked for, but {_graph_blocker(info)}. "
            "Set mode to 'auto' or 'eager', or choose the device 'cuda'."
        )
    if wish.mode != "auto":
        risk = _capture_risk(info)
        if wish.mode == "graph" and risk:
            logger.warning(
                "Graph mode was asked for, but %s. If songs are wrong or the process hangs, set "
                "mode to 'eager'.",
                risk,
            )
        reasons.append(f"mode {wish.mode}: asked for")
        return wish.mode
    if blocker := _graph_blocker(info):
        reasons.append(f"mode eager: {blocker}")
        return "eager"
    reasons.append("mode graph: CUDA with flash-attn; the language model's step is captured once")
    return "graph"


def _graph_blocker(info: DeviceInfo) -> str | None:
    """Why CUDA graphs are not chosen here, or None."""
    if info.kind != "cuda":
        return f"graphs exist on CUDA only, this is {info.kind}"
    if risk := _capture_risk(info):
        return risk
    if not info.flash_attn:
        return "graph mode is chosen with flash-attn only, which does not run here"
    return None


def _capture_risk(info: DeviceInfo) -> str | None:
    """Why the capture itself may go wrong on this CUDA device, or None."""
    if info.rocm:
        return "graph capture is not reliable on ROCm"
    if any(name in info.name.lower() for name in JETSON_NAMES):
        return f"graph capture fails on Jetson ({info.name})"
    return None


def _choose_tile(info: DeviceInfo, reasons: list[str]) -> int:
    if info.kind == "mlx":
        reasons.append("VAE tile 512 frames: on mlx always; one that does not fit is halved")
        return 512
    free = info.free_memory / GIB
    roomy = info.kind not in ("mps", "cpu") and free >= 8
    tile = 512 if roomy else 128 if info.kind == "cuda" and free < 3 else 256
    reasons.append(f"VAE tile {tile} frames: {_gib(info.free_memory)} free on {info.kind}")
    return tile


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def probe() -> DeviceInfo:
    """Look at this machine once: the best device, its memory, and what may be asked for."""
    import torch

    from .backends import mlx_device

    available = ["cpu"]
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        available.insert(0, "xpu")
    trouble = mlx_device.trouble()
    if not trouble:  # without Metal it is slow, and only taken where it is asked for
        available.insert(0 if mlx_device.metal() else len(available), "mlx")
    kind, usual = available[0], os.environ.get(VARIABLE, "").removeprefix("auto")
    native = tuple(device for device in available if _has_bf16(device))
    if kind == "cuda":
        props = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        return DeviceInfo(
            kind="cuda",
            name=props.name,
            bf16=kind in native,
            rocm=torch.version.hip is not None,
            flash_attn=has_flash_attn(),
            total_memory=total,
            free_memory=free,
            available=tuple(available),
            bf16_on=native,
            int8=cpu_has_int8(),
            usual=usual,
            mlx_trouble=trouble,
        )
    free, total = host_memory()
    return DeviceInfo(
        kind=kind,  # pyright: ignore[reportArgumentType]
        name=kind,
        bf16=kind in native,
        total_memory=total,
        free_memory=free,
        available=tuple(available),
        bf16_on=native,
        int8=cpu_has_int8(),
        usual=usual,
        mlx_trouble=trouble,
    )


def _has_bf16(device: str) -> bool:
    import torch

    from .backends import mlx_device

    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device == "mlx":
        return mlx_device.metal()
    return device in ("mps", "xpu") or cpu_has_bf16()


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 in hardware; elsewhere it is slower than fp32."""
    import torch

    tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # older torch lacks some
    return any(getattr(torch.cpu, name, bool)() for name in tests)


def cpu_has_int8() -> bool:
    """Whether torch multiplies 8-bit integers on the CPU without overflow; tried out once."""
    from .models_torch.packed import int8_works

    return int8_works()


def has_flash_attn() -> bool:
    """Whether flash-attn can be imported and has kernels for this GPU; tried out once."""
    from .models_torch import flash

    return flash.package() is not None


def host_memory() -> tuple[int, int]:
    """(free, total) bytes of main memory; zeros where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return table["MemAvailable"], table["MemTotal"]
    except (OSError, KeyError, ValueError):
        pass
    try:
        page, count = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
        return page * count // 2, page * count
    except (ValueError, OSError, AttributeError):
        return 0, 0
