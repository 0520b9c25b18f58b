"""The policy as a table: machine and wish in, decision out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from acestep_engine.backends import mlx_device
from acestep_engine.errors import UnsupportedRuntime
from acestep_engine.runtime import GIB, DeviceInfo, Wish, choose, probe

CUDA = DeviceInfo(
    kind="cuda",
    name="NVIDIA H200",
    bf16=True,
    flash_attn=True,
    total_memory=140 * GIB,
    free_memory=130 * GIB,
    available=("cuda", "cpu"),
)


def cuda(**changes: object) -> DeviceInfo:
    values = {name: getattr(CUDA, name) for name in CUDA.__slots__} | changes
    return DeviceInfo(**values)  # type: ignore[arg-type]


SMALL = cuda(name="GTX 1060", bf16=False, total_memory=6 * GIB, free_memory=5 * GIB)
JETSON = cuda(name="Orin (nvgpu)", total_memory=30 * GIB, free_memory=20 * GIB)
MPS = DeviceInfo(
    kind="mps", name="Apple M3", bf16=True, total_memory=36 * GIB, available=("mps", "cpu")
)
METAL = DeviceInfo(
    kind="mlx",
    name="mlx",
    bf16=True,
    total_memory=36 * GIB,
    free_memory=18 * GIB,
    available=("mlx", "mps", "cpu"),
    bf16_on=("mlx", "mps"),
)
CPU = DeviceInfo(kind="cpu", total_memory=16 * GIB, free_memory=8 * GIB, int8=True)


@pytest.mark.parametrize(
    ("info", "device", "precision", "tile"),
    [
        (CUDA, "cuda", "bf16", 512),
        (SMALL, "cuda", "fp32", 256),
        (cuda(free_memory=2 * GIB, total_memory=4 * GIB), "cuda", "bf16", 128),
        (JETSON, "cuda", "bf16", 512),
        (cuda(rocm=True, name="AMD Radeon"), "cuda", "bf16", 512),
        (MPS, "mps", "bf16", 256),
        (METAL, "mlx", "bf16", 512),
        (replace(METAL, free_memory=0), "mlx", "bf16", 512),
        (CPU, "cpu", "fp32", 256),
        (replace(CPU, bf16=True), "cpu", "bf16", 256),
    ],
)
def test_automatic_choice(info: DeviceInfo, device: str, precision: str, tile: int) -> None:
    runtime = choose(info)
    assert (runtime.device, runtime.precision, runtime.tile) == (device, precision, tile)


@pytest.mark.parametrize("info", [CUDA, SMALL, MPS, METAL, CPU])
def test_fp16_is_never_chosen_by_itself(info: DeviceInfo) -> None:
    assert choose(info).precision != "fp16"


RISKY = [
    (JETSON, "Jetson"),
    (cuda(name="NVIDIA Tegra X1"), "Jetson"),
    (cuda(name="Xavier"), "Jetson"),
    (cuda(name="NVIDIA Jetson Thor"), "Jetson"),
    (cuda(rocm=True, name="AMD Instinct MI300X"), "ROCm"),
]


@pytest.mark.parametrize("info", [CUDA, SMALL, cuda(name="NVIDIA GeForce RTX 4090")])
def test_graphs_are_chosen_on_cuda_with_flash_attn(info: DeviceInfo) -> None:
    runtime = choose(info)
    assert runtime.mode == "graph"
    assert any(reason.startswith("mode graph") for reason in runtime.reasons)


@pytest.mark.parametrize(
    ("info", "word"),
    [
        *RISKY,
        (cuda(flash_attn=False), "flash-attn"),
        (MPS, "CUDA only"),
        (METAL, "CUDA only"),
        (CPU, "CUDA only"),
    ],
)
def test_eager_says_why_graphs_are_not_chosen(info: DeviceInfo, word: str) -> None:
    runtime = choose(info)
    assert runtime.mode == "eager"
    assert any(word in reason for reason in runtime.reasons)


@pytest.mark.parametrize("info", [CUDA, cuda(flash_attn=False)])
def test_graphs_that_are_asked_for_need_only_cuda(
    info: DeviceInfo, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(info, Wish(mode="graph")).mode == "graph"
    assert not caplog.text


@pytest.mark.parametrize(("info", "word"), RISKY)
def test_graphs_that_are_asked_for_where_they_are_risky_are_taken_with_a_warning(
    info: DeviceInfo, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(info, Wish(mode="graph")).mode == "graph"
    assert word in caplog.text


@pytest.mark.parametrize("info", [MPS, CPU, replace(CPU, kind="xpu"), cuda(usual="cpu")])
def test_graphs_without_cuda_are_refused(info: DeviceInfo) -> None:
    with pytest.raises(UnsupportedRuntime, match=r"CUDA only, this is \w+\. .*'auto'"):
        choose(info, Wish(mode="graph"))


def test_every_automatic_choice_has_a_reason() -> None:
    text = "\n".join(choose(CUDA).reasons)
    for word in ("device", "precision", "mode", "tile"):
        assert word in text


def test_explicit_wishes_are_kept() -> None:
    runtime = choose(CUDA, Wish(device="cpu", precision="bf16", mode="eager"))
    assert (runtime.device, runtime.precision, runtime.mode) == ("cpu", "bf16", "eager")


@pytest.mark.parametrize("wish", [Wish(device="mps"), Wish("cpu", mode="graph")])
def test_impossible_wish_is_an_error_with_the_cure(wish: Wish) -> None:
    with pytest.raises(UnsupportedRuntime, match="'auto'"):
        choose(CUDA, wish)


def test_forced_fp16_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert choose(CUDA, Wish(precision="fp16")).precision == "fp16"
    assert "overflows in fp16" in caplog.text


@pytest.mark.parametrize("info", [CUDA, MPS])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_packed_weights_are_refused_where_no_kernel_gains_by_them(
    info: DeviceInfo, precision: str
) -> None:
    with pytest.raises(UnsupportedRuntime, match=f"{precision}.*on {info.kind}.*'auto'"):
        choose(info, Wish(precision=precision))  # type: ignore[arg-type]


def test_the_environment_says_what_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACESTEP_DEVICE", "cpu")
    runtime = choose(probe())
    assert runtime.device == "cpu"
    assert "device cpu: asked for by ACESTEP_DEVICE" in runtime.reasons


def test_an_explicit_device_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACESTEP_DEVICE", "abacus")
    assert choose(probe(), Wish(device="cpu")).device == "cpu"
    with pytest.raises(UnsupportedRuntime, match=r"'abacus' was asked for by ACESTEP_DEVICE"):
        choose(probe())


def test_an_explicit_device_keeps_its_own_precision() -> None:
    info = cuda(usual="cpu", bf16_on=("cuda",))
    assert (choose(info).device, choose(info).precision) == ("cpu", "fp32")
    runtime = choose(info, Wish(device="cuda"))
    assert (runtime.device, runtime.precision) == ("cuda", "bf16")
    assert choose(replace(info, bf16_on=("cuda", "cpu"))).precision == "bf16"


BESIDE = replace(CUDA, available=("cuda", "cpu", "mlx"))  # MLX computes on the CPU there


@pytest.mark.parametrize(
    ("info", "wish", "device", "precision", "bits"),
    [
        (BESIDE, Wish(), "cuda", "bf16", 0),
        (BESIDE, Wish(device="mlx"), "mlx", "fp32", 0),
        (BESIDE, Wish(device="mlx", precision="bf16"), "mlx", "bf16", 0),
        (BESIDE, Wish(device="mlx", precision="int8"), "mlx", "fp32", 8),
        (replace(CPU, bf16=True, available=("cpu", "mlx")), Wish(device="mlx"), "mlx", "fp32", 0),
        (METAL, Wish(device="mlx", precision="int4"), "mlx", "bf16", 4),
        (METAL, Wish(precision="int8"), "mlx", "bf16", 8),
        (METAL, Wish(device="mps"), "mps", "bf16", 0),
        (METAL, Wish(device="cpu"), "cpu", "fp32", 0),
        (replace(METAL, kind="mps"), Wish(device="mlx"), "mlx", "bf16", 0),
    ],
)
def test_mlx_computes_in_bf16_on_metal_only_and_packs_weights_on_both(
    info: DeviceInfo, wish: Wish, device: str, precision: str, bits: int
) -> None:
    runtime = choose(info, wish)
    assert (runtime.device, runtime.precision, runtime.bits) == (device, precision, bits)


def test_without_mlx_the_wish_for_it_says_what_the_import_said_and_how_to_get_it() -> None:
    info = replace(CPU, mlx_trouble="libmlx.so: cannot open shared object file")
    with pytest.raises(UnsupportedRuntime, match=r"libmlx\.so.*pip install 'acestep-engine\[mlx"):
        choose(info, Wish(device="mlx"))


def test_a_machine_without_metal_offers_mlx_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_device, "trouble", lambda: None)
    monkeypatch.setattr(mlx_device, "metal", lambda: False)
    info = probe()
    assert info.kind != "mlx"
    assert info.available[-1] == "mlx"
    assert ("mlx" in info.bf16_on, info.mlx_trouble) == (False, None)


def test_with_metal_mlx_comes_before_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_device, "trouble", lambda: None)
    monkeypatch.setattr(mlx_device, "metal", lambda: True)
    info = probe()
    assert (info.kind, info.available[0], info.bf16, "mlx" in info.bf16_on) == (
        "mlx",
        "mlx",
        True,
        True,
    )


def test_a_machine_without_mlx_keeps_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_device, "trouble", lambda: "No module named 'mlx'")
    monkeypatch.setattr(mlx_device, "metal", lambda: False)
    info = probe()
    assert "mlx" not in info.available
    assert info.mlx_trouble == "No module named 'mlx'"


@pytest.mark.parametrize(
    ("info", "wish", "bits"),
    [
        (CPU, Wish(), 8),
        (CPU, Wish(precision="int8"), 8),
        (CPU, Wish(precision="bf16"), 0),
        (CPU, Wish(precision="fp32"), 0),
        (replace(CPU, int8=False), Wish(), 0),
        (CUDA, Wish(), 0),
        (replace(CUDA, int8=True), Wish(device="cpu"), 8),
        (replace(CUDA, int8=True), Wish(), 0),
    ],
)
def test_a_cpu_packs_the_language_model_unless_a_precision_is_asked_for(
    info: DeviceInfo, wish: Wish, bits: int
) -> None:
    runtime = choose(info, wish)
    assert runtime.bits == bits
    assert any("8 bits" in reason for reason in runtime.reasons) == bool(bits)


def test_8_bits_are_refused_where_the_cpu_would_overflow() -> None:
    with pytest.raises(UnsupportedRuntime, match=r"on cpu the kernels .* none"):
        choose(replace(CPU, int8=False), Wish(precision="int8"))
