"""An adapter gives the same song in MLX as in torch, and the plain one comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
import torch
from safetensors.torch import save_file

from acestep_engine.config import DiTConfig
from acestep_engine.engine import Engine
from acestep_engine.host import LocalHost
from acestep_engine.lm.metadata import stated
from acestep_engine.models_torch.dit import DiT
from acestep_engine.runtime import Wish
from acestep_engine.types import DiTSampling, LoRA, ModelSpec, Plan, Request

PLAN = Plan("calm piano", "la la", stated(Request(caption="calm piano", duration=6)), 6.0)
OPTIONS = DiTSampling(seed=3, steps=4)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(LocalHost(show=False))


@pytest.fixture
def loras(tmp_path: Path, randn) -> tuple[LoRA, ...]:
    """A LoRA on attention, then a DoRA on a LoKr of the MLP and a LoRA of a convolution."""
    table = {}
    for name in ("self_attn.q_proj", "cross_attn.o_proj"):
        layer = f"diffusion_model.decoder.layers.1.{name}"
        table |= {
            f"{layer}.lora_up.weight": randn(32, 4),
            f"{layer}.lora_down.weight": randn(4, 32),
        }
    save_file(table, tmp_path / "lora.safetensors")
    layer = "lycoris_layers_0_mlp_up_proj"
    table = {
        f"{layer}.lokr_w1": randn(4, 4),
        f"{layer}.lokr_w2": randn(12, 8) / 8,
        f"{layer}.dora_scale": randn(48, 1).abs() + 1,
        "lycoris_proj_in_1.lora_up.weight": randn(32, 2, 1) / 4,
        "lycoris_proj_in_1.lora_down.weight": randn(2, 192, 2) / 20,
    }
    save_file(table, tmp_path / "lokr.safetensors")
    return tuple(LoRA(str(tmp_path / f"{name}.safetensors"), 0.8) for name in ("lora", "lokr"))


@pytest.mark.slow
def test_an_adapter_sounds_the_same_and_leaves_no_trace(engine, tiny_model, loras, gap) -> None:
    plain, dressed = [], []
    for wish in (Wish("cpu", "fp32"), Wish("mlx", "fp32")):
        base = replace(tiny_model, wish=wish)
        model = replace(base, loras=loras)
        first, changed, again = (
            engine.render(spec, PLAN, None, OPTIONS).values for spec in (base, model, base)
        )
        engine.release(model, keep=(base,))
        assert torch.equal(again, first)
        assert torch.equal(engine.render(base, PLAN, None, OPTIONS).values, first)
        plain.append(first)
        dressed.append(changed)
    assert gap(dressed[0], plain[0]) > 0.02
    assert gap(dressed[1], dressed[0]) <= 1e-4


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4)])
def test_packed_weights_are_those_with_the_adapter(
    engine, saved, randn, tmp_path, precision, bits
) -> None:
    config = DiTConfig(64, 128, 1, 2, 1, 32, encoder_hidden_size=64)
    with torch.device("meta"):
        shapes = DiT(config).state_dict()
    table = {name: randn(*value.shape) for name, value in shapes.items()}
    saved("dit", table)
    base = ModelSpec(dit=str(tmp_path / "dit.safetensors"), wish=Wish("mlx", precision))
    up, down = randn(64, 4), randn(4, 64)
    layer = "lycoris_layers_0_self_attn_q_proj"
    file = tmp_path / "lora.safetensors"
    save_file({f"{layer}.lora_up.weight": up, f"{layer}.lora_down.weight": down}, file)
    model = replace(base, loras=(LoRA(str(file)),))
    packed = engine.store.backend(model, "dit").module.layers[0].self_attn.q_proj
    merged = table["layers.0.self_attn.q_proj.weight"] + up @ down
    values, scales, biases = mx.quantize(mx.array(merged), group_size=64, bits=bits)
    expected = mx.dequantize(values, scales, biases, group_size=64, bits=bits)
    found = mx.dequantize(packed.weight, packed.scales, packed.biases, group_size=64, bits=bits)
    assert mx.abs(found - expected).max() <= 0.03 * mx.abs(expected).max()
