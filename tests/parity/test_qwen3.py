"""Qwen3 and its cache against transformers, golden numbers, and the sharing of prompts."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config as OracleConfig
from transformers import Qwen3ForCausalLM

from acestep_engine.backends.torch_eager import TorchLanguageModel, TorchTextEncoder
from acestep_engine.config import Qwen3Config
from acestep_engine.errors import InvalidRequest
from acestep_engine.models_torch.qwen3 import KVCache, Qwen3Model

CONFIG = Qwen3Config(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
EVERY = slice(None)

# Scores of the sine weights after tokens 1 5 3 9 2, at the last and the first position.
LAST = (
    *(0.253682, 0.908882, 1.156114, 0.884403, 0.215711, -0.549806, -1.068533, -1.107629),
    *(-0.649546, 0.100098, 0.804811, 1.148270, 0.976307, 0.366111, -0.408421, -0.999626),
)
FIRST = (
    *(0.52810, 0.23068, -0.17028, -0.49481, -0.59724, -0.43158, -0.07220, 0.31959),
    *(0.56792, 0.56134, 0.30278, -0.09168, -0.44499, -0.59856, -0.48345, -0.15134),
)


@pytest.fixture(scope="module")
def model(build):
    return build(Qwen3Model, CONFIG)


@pytest.fixture(scope="module")
def lm(model):
    return TorchLanguageModel(model, "cpu", torch.float32)


@pytest.fixture(scope="module")
def oracle(model):
    names = Qwen3Config.__dataclass_fields__
    sizes = {name: getattr(CONFIG, name) for name in names if name != "rope_theta"}
    config = OracleConfig(
        **sizes,
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    theirs = Qwen3ForCausalLM(config).eval()
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    theirs.load_state_dict(weights | {"lm_head.weight": model.embed_tokens.weight})
    return lambda ids: theirs(torch.tensor([list(ids)])).logits[0]


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 96, (400,), generator=generator).tolist()


@torch.inference_mode()
def test_prefill_and_300_cached_steps_equal_transformers(lm, oracle, tokens, gap) -> None:
    expected = oracle(tokens[:310])
    session = lm.open(1, 310)
    scores = [lm.logits(session.feed([tokens[:10]]), EVERY)]
    for token in tokens[10:310]:  # passes lengths 255, 256 and 257
        scores.append(lm.logits(session.feed([[token]]), EVERY))
    assert gap(torch.cat(scores), expected[9:310]) <= 1e-5


@torch.inference_mode()
def test_rows_of_different_length_equal_single_runs(lm, oracle, tokens, gap) -> None:
    long, short = tokens[:50], tokens[100:113]
    expected_long, expected_short = oracle(tokens[:80]), oracle(tokens[100:143])
    session = lm.open(2, 80)
    scores = lm.logits(session.feed([long, short]), EVERY)
    assert gap(scores[0], expected_long[49]) <= 1e-5
    assert gap(scores[1], expected_short[12]) <= 1e-5
    for step in range(30):
        pair = torch.tensor([[tokens[50 + step]], [tokens[113 + step]]])
        scores = lm.logits(session.feed(pair), EVERY)
    assert gap(scores[0], expected_long[79]) <= 1e-5
    assert gap(scores[1], expected_short[42]) <= 1e-5


@torch.inference_mode()
def test_chunks_of_different_length_may_follow_a_prompt(lm, oracle, tokens, gap) -> None:
    session = lm.open(2, 30)
    session.feed([tokens[:20], tokens[:9]])
    scores = lm.logits(session.feed([tokens[20:22], tokens[9:16]]), EVERY)
    assert gap(scores[0], oracle(tokens[:22])[-1]) <= 1e-5
    assert gap(scores[1], oracle(tokens[:16])[-1]) <= 1e-5
    scores = lm.logits(session.feed([tokens[22:30], tokens[16:17]]), EVERY)  # fills row 0 up
    assert gap(scores[0], oracle(tokens[:30])[-1]) <= 1e-5
    assert gap(scores[1], oracle(tokens[:17])[-1]) <= 1e-5


@torch.inference_mode()
def test_padding_past_the_capacity_leaves_other_rows_alone(lm, oracle, tokens, gap) -> None:
    session = lm.open(2, 12)
    session.feed([tokens[:11], tokens[:4]])
    session.feed([tokens[11:12], tokens[4:10]])
    scores = lm.logits(session.feed([[], tokens[10:12]]), EVERY)
    assert gap(scores[1], oracle(tokens[:12])[-1]) <= 1e-5


@torch.inference_mode()
def test_equal_prompts_and_common_beginnings_change_nothing(lm, oracle, tokens, gap) -> None:
    first, second = tokens[:40], tokens[:25] + tokens[60:70]
    rows = [second, first, second, first, first]
    session = lm.open(5, 60)
    scores = lm.logits(session.feed(rows), EVERY)
    for row, score in zip(rows, scores, strict=True):
        assert gap(score, oracle(row)[-1]) <= 1e-5
    step = [[3], [5], [8], [13], [21]]  # rows with one prompt part ways afterwards
    scores = lm.logits(session.feed(step), EVERY)
    for row, more, score in zip(rows, step, scores, strict=True):
        assert gap(score, oracle(row + more)[-1]) <= 1e-5


@torch.inference_mode()
def test_a_prompt_that_begins_another_keeps_its_last_token(lm, oracle, tokens, gap) -> None:
    rows = [tokens[:30], tokens[:20]]
    scores = lm.logits(lm.open(2, 30).feed(rows), EVERY)
    for row, score in zip(rows, scores, strict=True):
        assert gap(score, oracle(row)[-1]) <= 1e-5


@torch.inference_mode()
def test_text_encoder_states_equal_transformers_and_ignore_padding(
    model, oracle, tokens, gap
) -> None:
    encoder = TorchTextEncoder(model, "cpu", torch.float32)
    states = encoder.states(torch.tensor([tokens[:40], tokens[:30] + [0] * 10]))
    scores = states @ model.embed_tokens.weight.T
    assert gap(scores[0], oracle(tokens[:40])) <= 1e-5
    assert gap(scores[1, :30], oracle(tokens[:30])) <= 1e-5
    table = encoder.embed(torch.tensor([[5, 95]]))
    assert torch.equal(table[0], model.embed_tokens.weight[[5, 95]])


def test_head_rows_are_the_same_as_a_slice_or_as_ids(lm, randn) -> None:
    hidden = randn(2, 48)
    every = lm.logits(hidden, EVERY)
    torch.testing.assert_close(lm.logits(hidden, slice(40, 90)), every[:, 40:90])
    torch.testing.assert_close(lm.logits(hidden, torch.tensor([7, 95, 2])), every[:, [7, 95, 2]])
    assert every.dtype is torch.float32


def test_rows_can_be_permuted(lm, tokens) -> None:
    order = [2, 0, 1]
    rows = [tokens[:9], tokens[9:13], tokens[20:31]]
    plain, permuted = lm.open(3, 20), lm.open(3, 20)
    expected = plain.feed(rows)[order]
    torch.testing.assert_close(permuted.feed([rows[i] for i in order]), expected)


def test_a_full_cache_says_how_much_was_needed(lm, tokens) -> None:
    session = lm.open(1, 10)
    session.feed([tokens[:8]])
    with pytest.raises(InvalidRequest, match=r"needs 11 token positions.*opened for 10"):
        session.feed([tokens[8:11]])


def test_cache_bytes_are_what_open_takes(lm) -> None:
    cache = KVCache(CONFIG, 3, 100, torch.device("cpu"), torch.float32)
    assert lm.cache_bytes(3, 100) == cache.keys.nbytes + cache.values.nbytes


@torch.inference_mode()
def test_golden_numbers_of_the_sine_weights() -> None:
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
    )
    with torch.device("meta"):
        model = Qwen3Model(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    weights = {}
    for place, name in enumerate(sorted(shapes)):  # embedding, layers by name, final norm
        wave = torch.sin(1 + place + 0.7 * torch.arange(shapes[name].numel(), dtype=torch.float64))
        values = 1 + 0.1 * wave if len(shapes[name]) == 1 else 0.5 * wave
        weights[name] = values.float().reshape(shapes[name])
    model.load_state_dict(weights, assign=True)
    states = model(model.embed_tokens(torch.tensor([[1, 5, 3, 9, 2]])))
    scores = (states @ model.embed_tokens.weight.T)[0]
    torch.testing.assert_close(scores[-1], torch.tensor(LAST), atol=1e-6, rtol=0)
    torch.testing.assert_close(scores[0], torch.tensor(FIRST), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_joined_projections_change_nothing(build, randn, gap) -> None:
    plain, fused = build(Qwen3Model, CONFIG), build(Qwen3Model, CONFIG)
    fused.fuse()
    names = [name for name, _ in fused.named_modules()]
    assert not [name for name in names if name.endswith(("q_proj", "gate_proj"))]
    embeds = randn(2, 9, CONFIG.hidden_size)
    assert gap(fused(embeds), plain(embeds)) <= 1e-6
