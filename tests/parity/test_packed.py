"""Packed layers against the plain product of the same weights, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from acestep_engine.backends.torch_lm import TorchLanguageModel
from acestep_engine.config import Qwen3Config
from acestep_engine.models_torch.packed import (
    Int8Linear,
    NarrowLinear,
    int8_works,
    narrow_works,
    pack,
    quantise,
)
from acestep_engine.models_torch.qwen3 import Qwen3Model
from acestep_engine.runtime import Runtime

needs_int8 = pytest.mark.skipif(not int8_works(), reason="this CPU overflows in 8-bit products")
needs_narrow = pytest.mark.skipif(not narrow_works(), reason="this torch packs no bf16 weights")
GENERATOR = torch.Generator().manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def rounded(weight_OI: Tensor) -> Tensor:
    codes_OI, scale_O = quantise(weight_OI)
    return codes_OI.double() * scale_O.double()[:, None]


def test_weights_are_rounded_to_the_nearest_of_255_values() -> None:
    weight_OI = randn(300, 64)
    codes_OI, scale_O = quantise(weight_OI)
    assert codes_OI.dtype is torch.int8
    assert int(codes_OI.min()) >= -127
    assert (codes_OI.abs().amax(1) == 127).all()
    error = (rounded(weight_OI) - weight_OI).abs()
    assert (error <= scale_O[:, None] * 0.5001).all()


@needs_int8
@pytest.mark.parametrize("shape", [(1, 96), (2, 1, 96), (3, 5, 96), (40, 96)])
def test_only_the_weights_lose(shape: tuple[int, ...]) -> None:
    weight_OI, x = randn(80, 96), randn(*shape)
    out = Int8Linear(weight_OI)(x)
    oracle = x.double() @ rounded(weight_OI).T
    assert out.shape == oracle.shape
    assert (out - oracle).abs().max() <= 1e-4 * oracle.abs().max()


@needs_int8
def test_a_large_value_costs_its_own_row_little_and_other_rows_nothing() -> None:
    weight_OI, x_MI = randn(80, 96), randn(2, 96)
    layer = Int8Linear(weight_OI)
    before = layer(x_MI)[1]
    x_MI[0, 7] = 1_000.0
    out, oracle = layer(x_MI), x_MI.double() @ rounded(weight_OI).T
    assert torch.equal(out[1], before)
    assert (out[0] - oracle[0]).abs().max() <= 1e-3 * oracle[0].abs().max()


@needs_int8
def test_a_row_has_the_same_bits_among_any_number_of_rows() -> None:
    layer, x_MI = Int8Linear(randn(200, 128)), randn(33, 128)
    together = layer(x_MI)
    assert all(
        torch.equal(layer(row[None])[0], out) for row, out in zip(x_MI, together, strict=True)
    )


@needs_int8
def test_zeros_stay_zeros_and_what_is_no_number_is_not_hidden() -> None:
    layer = Int8Linear(randn(80, 96))
    assert not layer(torch.zeros(2, 96)).any()
    for bad in (float("nan"), float("inf")):
        x_MI = randn(2, 96)
        x_MI[1, 3] = bad
        out = layer(x_MI)
        assert out[0].isfinite().all()
        assert not out[1].isfinite().any()


@needs_int8
def test_all_inputs_and_weights_at_their_limits_do_not_overflow() -> None:
    weight_OI, x_MI = torch.ones(64, 3_072), torch.full((2, 3_072), 5.0)
    assert torch.allclose(Int8Linear(weight_OI)(x_MI), x_MI @ weight_OI.T, rtol=1e-4)


@needs_narrow
def test_narrow_products_are_those_of_bf16() -> None:
    weight_OI, x_MI = randn(80, 96).bfloat16(), randn(4, 96).bfloat16()
    out = NarrowLinear(weight_OI)(x_MI)
    oracle = x_MI.double() @ weight_OI.double().T
    assert out.dtype is torch.bfloat16
    assert (out - oracle).abs().max() <= 2**-8 * oracle.abs().max()


def test_float32_weights_are_packed_only_to_8_bits() -> None:
    assert pack(randn(8, 8), 0) is None


@pytest.fixture
def models() -> tuple[TorchLanguageModel, TorchLanguageModel]:
    """A packed language model, and a plain one whose weights stand on the grid of the packed."""

    def made(packed: bool) -> TorchLanguageModel:
        generator = torch.Generator().manual_seed(1)
        model = Qwen3Model(Qwen3Config(300, 64, 96, 3, 4, 2, 16)).eval().requires_grad_(False)
        for name, value in model.named_parameters():
            if value.ndim > 1:
                value.normal_(0, 0.1, generator=generator)
                if not packed and "embed" not in name:
                    value.copy_(rounded(value).float())
        TorchLanguageModel.finish(model, torch.float32)
        if packed:
            TorchLanguageModel.pack(model, Runtime("cpu", "fp32", "eager", 256, bits=8))
        return TorchLanguageModel(model, "cpu", torch.float32)

    return made(True), made(False)


@needs_int8
def test_a_packed_language_model_speaks_by_its_rounded_weights(models) -> None:
    packed, plain = models
    table = plain.module.embed_tokens.weight
    states = []
    for lm in models:
        session = lm.open(2, 40)
        session.feed([[5, 6, 7], [8, 9, 10, 11, 12]])
        states += [torch.cat([session.feed(torch.tensor([[i], [i + 1]])) for i in range(9)])]
    assert (states[0] - states[1]).abs().max() <= 1e-3 * states[1].abs().max()
    scores = packed.logits(states[0], slice(100, 300))
    oracle = states[0].double() @ rounded(table[100:300]).T
    assert (scores - oracle).abs().max() <= 1e-4 * oracle.abs().max()
    few = torch.tensor([3, 299, 7])
    exact = states[0].double() @ table[few].double().T
    assert (packed.logits(states[0], few) - exact).abs().max() <= 1e-5 * exact.abs().max()


@needs_int8
def test_packed_songs_go_in_step(models) -> None:
    lm, head = models[0], slice(100, 300)
    assert lm.rows_agree(16, 2, head)
    assert set(lm.module.heads) == {(100, 300)}  # what is not drawn from takes no memory
