"""Audio codes: the quantiser against known vectors, tokenizer and detokenizer against diffusers."""

from __future__ import annotations

import pytest
import torch
from diffusers.pipelines.ace_step.modeling_ace_step import (
    AceStepAudioTokenDetokenizer,
    AceStepAudioTokenizer,
)

from acestep_engine.backends.torch_eager import TorchAudioDetokenizer, TorchAudioTokenizer
from acestep_engine.config import EncoderConfig, FSQConfig
from acestep_engine.errors import InvalidRequest
from acestep_engine.models_spec import codebook_size, fsq_levels_of
from acestep_engine.models_torch.fsq import (
    AudioDetokenizer,
    AudioTokenizer,
    code_of,
    index_of,
    quantise,
)

LEVELS = (8, 8, 8, 5, 5, 5)
CONFIG = FSQConfig(
    tower=EncoderConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
    ),
    audio_acoustic_hidden_dim=8,
    fsq_dim=48,
)
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "audio_acoustic_hidden_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
}


@pytest.fixture(scope="module")
def tokenizer(build):
    return build(AudioTokenizer, CONFIG)


@pytest.fixture(scope="module")
def detokenizer(build):
    return build(AudioDetokenizer, CONFIG)


@pytest.fixture(scope="module")
def oracle(tokenizer, to_diffusers):
    theirs = AceStepAudioTokenizer(**SIZES, fsq_dim=48).eval()
    missing, unexpected = theirs.load_state_dict(to_diffusers(tokenizer), strict=False)
    assert not unexpected
    assert not [name for name in missing if not name.startswith("quantizer.")]
    return theirs


VECTORS = [
    ((0, 0.1, -0.1, 0, 0.3, -0.3), [4, 4, 3, 2, 3, 1], 21732),
    ((2, -2, 0.5, -0.5, 1, -1), [7, 0, 5, 1, 4, 0], 11079),
    ((0.3, 0.63, 1.12, 0.26, 0.87, -0.87), [5, 6, 7, 3, 4, 0], 12277),
]


@pytest.mark.parametrize(("values", "levels", "index"), VECTORS)
def test_known_vectors_quantise_to_known_codes(values, levels, index) -> None:
    ours = quantise(torch.tensor(values), LEVELS)
    assert ours.tolist() == levels
    assert int(index_of(ours, LEVELS)) == index


def test_known_indices_have_known_levels_and_values() -> None:
    known = {1: [1, 0, 0, 0, 0, 0], 12345: [1, 7, 0, 4, 4, 0], 40000: [0, 0, 1, 3, 0, 3]}
    known |= {35847: [7, 0, 0, 0, 4, 2], 0: [0] * 6, 63999: [7, 7, 7, 4, 4, 4]}
    for index, levels in known.items():
        assert int(index_of(torch.tensor(levels), LEVELS)) == index
        expected = 2 * torch.tensor(levels) / (torch.tensor(LEVELS) - 1) - 1
        torch.testing.assert_close(code_of(torch.tensor(index), LEVELS), expected)
    values = code_of(torch.tensor(21732), LEVELS)
    torch.testing.assert_close(values, torch.tensor([1 / 7, 1 / 7, -1 / 7, 0, 0.5, -0.5]))


def test_all_codes_survive_the_way_to_values_and_back() -> None:
    indices = torch.arange(codebook_size(LEVELS))
    values = code_of(indices, LEVELS)
    assert values.abs().max() == 1
    top = torch.tensor(LEVELS) - 1
    levels = ((values + 1) / 2 * top).round().long()
    assert torch.equal(levels, torch.from_numpy(fsq_levels_of(indices.numpy(), LEVELS)))
    assert torch.equal(index_of(levels, LEVELS), indices)
    reach = 1 + 1 / top
    exact = reach * torch.atanh(values / reach)  # what the soft clamp maps onto the value
    assert torch.equal(index_of(quantise(exact, LEVELS), LEVELS), indices)


def test_levels_change_at_the_known_thresholds() -> None:
    for size, thresholds in ((8, (0.0, 0.2919, 0.627778, 1.111949)), (5, (0.253416, 0.866434))):
        for threshold in thresholds:
            below, above = quantise(torch.tensor([[threshold - 1e-4], [threshold + 1e-4]]), (size,))
            assert int(above) == int(below) + 1


@torch.inference_mode()
def test_codes_equal_diffusers(tokenizer, oracle, randn) -> None:
    latents = randn(2, 400, 8) * 2
    _, expected = oracle.tokenize(latents)
    ours = TorchAudioTokenizer(tokenizer, "cpu", torch.float32).tokenize(latents)
    assert ours.shape == (2, 80)
    assert ours.unique().numel() > 50
    assert torch.equal(ours, expected[..., 0])


@torch.inference_mode()
def test_the_quantiser_alone_equals_diffusers(tokenizer, oracle, randn, gap) -> None:
    features = randn(1, 5000, 48) * 1.5
    _, expected = oracle.quantizer(features)
    ours = tokenizer.quantizer.indices(features)
    assert torch.equal(ours, expected[..., 0])
    indices = torch.arange(0, 64000, 7)[None]
    expected = oracle.quantizer.get_output_from_indices(indices)
    assert gap(tokenizer.quantizer(indices), expected) <= 1e-6


@torch.inference_mode()
def test_hints_equal_diffusers(detokenizer, to_diffusers, randn, gap) -> None:
    theirs = AceStepAudioTokenDetokenizer(**SIZES).eval()
    weights = to_diffusers(detokenizer)
    theirs.load_state_dict({k: v for k, v in weights.items() if not k.startswith("quantizer.")})
    features = randn(2, 13, 48)
    assert gap(detokenizer.expand_features(features), theirs(features)) <= 1e-5


@torch.inference_mode()
def test_codes_are_rendered_alone_as_in_a_row(detokenizer, gap) -> None:
    backend = TorchAudioDetokenizer(detokenizer, "cpu", torch.float32)
    codes = torch.tensor([[5, 63999, 31000, 5]])
    together = backend.detokenize(codes)
    assert together.shape == (1, 20, 8)
    for place in range(4):
        alone = backend.detokenize(codes[:, place : place + 1])
        assert gap(together[:, 5 * place : 5 * place + 5], alone) <= 1e-6
    changed = backend.detokenize(torch.tensor([[5, 63999, 31001, 5]]))
    moved = (changed - together).abs().amax((0, 2)) > 0
    assert moved.tolist() == [False] * 10 + [True] * 5 + [False] * 5


@pytest.mark.parametrize("index", [-1, 64000])
def test_a_code_that_does_not_exist_is_refused(detokenizer, index) -> None:
    backend = TorchAudioDetokenizer(detokenizer, "cpu", torch.float32)
    with pytest.raises(InvalidRequest, match=f"between 0 and 63999.*{index}"):
        backend.detokenize(torch.tensor([[7, index]]))


@torch.inference_mode()
def test_a_padded_length_gives_a_code_per_begun_group(tokenizer, detokenizer, randn) -> None:
    latents = randn(1, 23, 8)
    padded = torch.nn.functional.pad(latents, (0, 0, 0, -23 % 5))
    codes = TorchAudioTokenizer(tokenizer, "cpu", torch.float32).tokenize(padded)
    assert codes.shape == (1, 5)
    back = TorchAudioDetokenizer(detokenizer, "cpu", torch.float32).detokenize(codes)
    assert back[:, :23].shape == latents.shape


@torch.inference_mode()
def test_low_precision_leaves_the_rounding_exact(build, randn) -> None:
    tokenizer = build(AudioTokenizer, CONFIG)
    rough = TorchAudioTokenizer(tokenizer.bfloat16(), "cpu", torch.bfloat16)
    rough.finish(tokenizer, torch.bfloat16)
    features = randn(1, 300, 48).bfloat16()
    quantizer = rough.module.quantizer
    expected = quantise(quantizer.project_in(features.float()), LEVELS)
    assert torch.equal(quantizer.indices(features), index_of(expected, LEVELS))
    assert rough.tokenize(randn(1, 10, 8)).shape == (1, 2)
