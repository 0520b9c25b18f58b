"""Official tensors into MLX modules: names, shapes, faults of files, precision and packing."""

from __future__ import annotations

import importlib
import inspect

import mlx.core as mx
import mlx.nn as nn
import pytest
import torch
from mlx.utils import tree_flatten

from acestep_engine.backends import mlx as backends
from acestep_engine.backends import torch_eager
from acestep_engine.backends.mlx_load import build, fill, nbytes, official_shapes
from acestep_engine.config import DiTConfig, Qwen3Config
from acestep_engine.errors import BadCheckpoint
from acestep_engine.weights.parts import ROLES

FILES = ("layers", "qwen3", "encoders", "fsq", "dit", "oobleck")
TORCH_ONLY = {"FusedAttention", "FusedMLP"}
LM = Qwen3Config(100, 128, 192, 3, 4, 2, 32)
DIT = DiTConfig(128, 192, 3, 4, 2, 32, encoder_hidden_size=64)


def classes(package: str, file: str) -> list[str]:
    module = importlib.import_module(f"acestep_engine.{package}.{file}")
    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]


@pytest.mark.parametrize("file", FILES)
def test_files_hold_the_same_classes_in_the_same_order(file) -> None:
    expected = [name for name in classes("models_torch", file) if name not in TORCH_ONLY]
    assert classes("models_mlx", file) == expected


def test_the_twins_cover_the_same_roles() -> None:
    assert set(backends.BUILDERS) == set(torch_eager.BUILDERS) == set(ROLES)
    for role, (model_class, _) in backends.BUILDERS.items():
        assert model_class.__name__ == torch_eager.BUILDERS[role][0].__name__


@pytest.mark.parametrize("role", ROLES)
def test_parameters_have_the_names_and_shapes_of_the_checkpoint(role, stored) -> None:
    _, config = stored(role)
    with torch.device("meta"):
        theirs = torch_eager.BUILDERS[role][0](config).state_dict()
    ours = backends.BUILDERS[role][0](config)
    expected = {name: tuple(value.shape) for name, value in theirs.items()}
    assert official_shapes(ours) == expected
    assert {name for name, _ in tree_flatten(ours.parameters())} == set(expected)


@pytest.mark.parametrize("role", ROLES)
def test_nothing_lazy_is_left(role, stored) -> None:
    tensors, config = stored(role)
    module = build(role, config, tensors, torch.bfloat16)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.eval(module.state)
    assert mx.get_active_memory() == before
    narrow = [value for name, value in tree_flatten(module.parameters()) if "quantizer" not in name]
    assert {value.dtype for value in narrow} == {mx.bfloat16}
    wide = [value for name, value in tree_flatten(module.parameters()) if "quantizer" in name]
    assert {value.dtype for value in wide} <= {mx.float32}


def test_a_misfit_is_reported_in_full_before_anything_is_read(stored, saved) -> None:
    tensors, config = stored("vae")
    table = dict(tensors)
    del table["encoder.conv1.bias"]
    table["encoder.conv9.bias"] = torch.zeros(3)
    table["decoder.block.0.conv_t1.weight"] = torch.zeros(3, 2, 1)
    table["decoder.snake1.alpha"] = torch.zeros(1, 3, 1)
    with pytest.raises(BadCheckpoint) as caught:
        fill(backends.Oobleck(config), saved("vae", table), torch.float32)
    text = str(caught.value)
    assert "1 missing (encoder.conv1.bias)" in text
    assert "1 unexpected (encoder.conv9.bias)" in text
    assert "2 misshapen" in text
    shape = list(tensors["decoder.block.0.conv_t1.weight"].shape)
    assert f"conv_t1.weight is [3, 2, 1] instead of {shape}" in text


def test_unfinished_downloads_are_refused(stored, saved) -> None:
    tensors, config = stored("text_encoder")
    table = dict(tensors) | {"norm.weight": torch.zeros(16)}
    with pytest.raises(BadCheckpoint, match=r"norm\.weight is all zeros"):
        fill(backends.Qwen3Model(config), saved("text_encoder", table), torch.float32)


@pytest.fixture
def big(saved):
    """A model wide enough for groups of 64, and its tensors."""

    def big(role, config):
        with torch.device("meta"):
            shapes = torch_eager.BUILDERS[role][0](config).state_dict()
        generator = torch.Generator().manual_seed(0)
        table = {}
        for name, value in shapes.items():
            values = torch.randn(value.shape, generator=generator)
            wide = value.dim() > 1 and not name.endswith("table")
            plain = values / value[0].numel() ** 0.5 if wide else 0.2 * values
            table[name] = 1 + plain if "norm" in name else plain
        return config, saved(role, table)

    return big


def likeness(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


def rounded(tensors, bits: int) -> dict[str, torch.Tensor]:
    """The tensors with those of the large layers on the grid that packing leaves."""
    table = dict(tensors)
    for name, value in table.items():
        if name.startswith("layers.") and name.endswith("proj.weight"):
            packed = mx.quantize(mx.array(value), group_size=64, bits=bits)
            grid = mx.dequantize(*packed, group_size=64, bits=bits)
            table[name] = torch.tensor(grid.tolist())
    return table


def read_and_score(lm) -> torch.Tensor:
    session = lm.open(2, 50)
    session.feed([[i * 7 % 100 for i in range(40)], [3, 4, 5]])
    return lm.logits(session.feed(torch.tensor([[1], [2]])), slice(0, 100))


@pytest.mark.parametrize(("bits", "least"), [(8, 0.999), (4, 0.9)])
def test_a_packed_language_model_speaks_by_its_rounded_weights(
    big, saved, twins, gap, bits, least
) -> None:
    config, tensors = big("lm", LM)
    in_torch, in_mlx = twins
    plain = in_torch("lm", config, tensors, torch.float32)
    packed = in_mlx("lm", config, tensors, torch.float32, bits)
    down = packed.module.layers[2].mlp.down_proj
    assert isinstance(down, nn.QuantizedLinear)
    assert (down.group_size, down.bits) == (64, bits)
    scores = read_and_score(packed)
    assert likeness(scores, read_and_score(plain)) >= least
    oracle = in_torch("lm", config, saved("lm", rounded(tensors, bits)), torch.float32)
    assert gap(scores, read_and_score(oracle)) <= 1e-5


@pytest.mark.parametrize(("bits", "least"), [(8, 0.999), (4, 0.9)])
def test_a_packed_dit_moves_by_its_rounded_weights(
    big, saved, twins, gap, randn, bits, least
) -> None:
    config, tensors = big("dit", DIT)
    in_torch, in_mlx = twins
    x, context, words = randn(1, 301, 64), randn(1, 301, 128), randn(1, 9, 64)
    plain = in_torch("dit", config, tensors, torch.float32)
    packed = in_mlx("dit", config, tensors, torch.float32, bits)
    assert isinstance(packed.module.layers[0].cross_attn.k_proj, nn.QuantizedLinear)
    assert isinstance(packed.module.time_embed.time_proj, nn.Linear)
    oracle = in_torch("dit", config, saved("dit", rounded(tensors, bits)), torch.float32)
    first, ours, exact = (
        dit(x, 0.7, context, dit.prepare(words)) for dit in (plain, packed, oracle)
    )
    assert likeness(ours, first) >= least
    assert gap(ours, exact) <= 1e-4


def test_packing_takes_memory_for_the_packed_form_only(big) -> None:
    config, tensors = big("lm", LM)
    sizes = {bits: nbytes(build("lm", config, tensors, torch.float32, bits)) for bits in (8, 4)}
    around = 4 * (100 * 128 + 128 + 3 * (2 * 128 + 2 * 32))  # token table and norms
    plain = nbytes(build("lm", config, tensors, torch.float32)) - around
    for bits, size in sizes.items():
        assert size - around == plain * (bits / 32 + 2 / 64)  # a scale and a bias for each group


def test_a_packed_model_computes_in_the_asked_precision(big, twins) -> None:
    config, tensors = big("lm", LM)
    module = twins[1]("lm", config, tensors, torch.bfloat16, 4).module
    assert module(module.embed_tokens(mx.array([[1, 2, 3]]))).dtype == mx.bfloat16
