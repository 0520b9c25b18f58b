"""Weight norm is folded as torch folds it, and packed formats are refused in plain words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from acestep_engine.errors import BadCheckpoint
from acestep_engine.weights.files import Entry
from acestep_engine.weights.tensors import first_bad, fold_weight_norm, refuse_quantised


@pytest.mark.parametrize("conv_class", [nn.Conv1d, nn.ConvTranspose1d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folded_weights_are_those_of_torchs_parametrisation(
    conv_class: type, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = weight_norm(conv_class(6, 4, 12))
    g, v = (p for _, p in layer.parametrizations.weight.named_parameters())  # pyright: ignore
    with torch.no_grad():
        g.copy_((torch.randn(g.shape, generator=generator) + 2).to(dtype))
        v.copy_(torch.randn(v.shape, generator=generator).to(dtype))
    folded = fold_weight_norm(g.detach().to(dtype), v.detach().to(dtype))
    assert folded.dtype is torch.float32
    torch.testing.assert_close(folded, layer.weight.detach(), rtol=1e-6, atol=1e-7)


def test_a_transposed_convolution_has_one_gain_per_input_channel() -> None:
    v = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    gain = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    torch.testing.assert_close(fold_weight_norm(gain, v).flatten(1).norm(dim=1), gain.flatten())


@pytest.mark.parametrize(
    ("key", "dtype"),
    [
        ("layers.0.mlp.up_proj.scale_weight", "F32"),
        ("layers.0.mlp.up_proj.weight_scale", "F32"),
        ("layers.0.mlp.up_proj.comfy_quant", "U8"),
        ("layers.0.mlp.up_proj.weight.absmax", "F32"),
        ("layers.0.mlp.up_proj.weight", "I8"),
        ("layers.0.mlp.up_proj.qweight", "I32"),
    ],
)
def test_quantised_weights_are_refused_with_the_cure(key: str, dtype: str) -> None:
    entry = Entry(Path("x_fp8.safetensors"), key, (4,), dtype)
    with pytest.raises(BadCheckpoint, match=r"x_fp8.*quantised.*bf16") as caught:
        refuse_quantised([entry])
    assert key in str(caught.value)


def test_scale_shift_tables_are_no_quantisation() -> None:
    refuse_quantised([Entry(Path("x"), "layers.0.scale_shift_table", (1, 6, 8), "BF16")])


def test_values_that_no_training_leaves_are_noticed() -> None:
    assert first_bad("layers.0.input_layernorm.weight", torch.ones(4)) is None
    assert first_bad("proj.bias", torch.zeros(4)) is None
    assert "zeros" in (first_bad("layers.0.input_layernorm.weight", torch.zeros(4)) or "")
    assert "NaN" in (first_bad("proj.bias", torch.tensor([1.0, torch.nan])) or "")
