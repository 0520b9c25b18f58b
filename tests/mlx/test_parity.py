"""Every MLX model against its twin in torch, with the same weights."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
import torch

from acestep_engine.errors import InvalidRequest
from acestep_engine.models_mlx.fsq import code_of, index_of, quantise
from acestep_engine.models_spec import codebook_size
from acestep_engine.models_torch import fsq
from acestep_engine.vae import tiling
from acestep_engine.weights.sources import TEXT_ROWS

EVERY = slice(0, 217_204)
CODES = slice(TEXT_ROWS, TEXT_ROWS + 64_000)
LEVELS = (8, 8, 8, 5, 5, 5)


def prompts(*lengths: int, shared: int = 0) -> list[list[int]]:
    """Rows of token ids with a common beginning of `shared` tokens."""
    front = [7 * i % 5_000 for i in range(shared)]
    return [front + [(131 * i + 17 * n) % 90_000 for i in range(n - shared)] for n in lengths]


@pytest.mark.parametrize("frames", [1, 2, 19])
def test_the_vae_decodes_the_same(pair, randn, gap, frames) -> None:
    ours, theirs = pair("vae")
    latents = randn(2, 64, frames)
    expected = ours.decode(latents)
    audio = theirs.decode(latents)
    assert audio.shape == (2, 2, 1920 * frames)
    assert audio.dtype is torch.float32
    assert gap(audio, expected) <= 1e-5


@pytest.mark.parametrize("samples", [1920, 7 * 1920, 7 * 1920 + 500])
def test_the_vae_encodes_the_same(pair, randn, gap, samples) -> None:
    ours, theirs = pair("vae")
    audio = randn(2, 2, samples) / 3
    expected = ours.encode(audio)
    assert gap(theirs.encode(audio), expected) <= 1e-5


def test_a_tiled_decode_equals_one_pass(pair, randn, gap) -> None:
    _, codec = pair("vae")
    latents = randn(1, 64, 97)
    tiled = tiling.decode(codec.decode, latents, 40, lambda done, total: None)
    assert gap(tiled, codec.decode(latents)) <= 2e-6


def test_a_tiled_encode_equals_one_pass(pair, randn, gap) -> None:
    _, codec = pair("vae")
    audio = randn(1, 2, 61 * 1920) / 3
    tiled = tiling.encode(codec.encode, audio, 24, lambda done, total: None)
    assert gap(tiled, codec.encode(audio)) <= 2e-6


@pytest.mark.parametrize(
    "rows",
    [
        prompts(9),
        prompts(12, 12),
        prompts(30, 8),
        prompts(40, 33, 33, shared=25),
        prompts(5, 5) * 2,
    ],
    ids=["one row", "level", "ragged", "common beginning", "equal rows"],
)
def test_prefill_and_steps_give_the_same_scores(pair, gap, rows) -> None:
    torch_lm, mlx_lm = pair("lm")
    capacity = max(map(len, rows)) + 8
    ours, theirs = torch_lm.open(len(rows), capacity), mlx_lm.open(len(rows), capacity)
    step = torch.arange(5, 5 + len(rows))[:, None]
    chunks = [[11 * row + i for i in range(1 + row % 3)] for row in range(len(rows))]
    for feed in (rows, step, chunks, step + 1, step + 2, step + 3, step + 4):
        expected, states = ours.feed(feed), theirs.feed(feed)
        assert gap(states, expected) <= 1e-5
        assert gap(mlx_lm.logits(states, CODES), torch_lm.logits(expected, CODES)) <= 1e-5


def test_a_row_alone_is_the_row_in_company(pair, gap) -> None:
    _, lm = pair("lm")
    rows = prompts(30, 8, 17)
    together = lm.open(3, 40)
    alone = [lm.open(1, 40) for _ in rows]
    step = torch.tensor([[3], [5], [8]])
    for feed in (rows, step, step):
        expected = torch.cat(
            [session.feed(feed[row : row + 1]) for row, session in enumerate(alone)]
        )
        assert gap(together.feed(feed), expected) <= 1e-5


def test_head_rows_are_the_same_as_a_slice_or_as_ids(pair, randn) -> None:
    _, lm = pair("lm")
    hidden = randn(2, 16)
    every = lm.logits(hidden, EVERY)
    assert every.dtype is torch.float32
    torch.testing.assert_close(lm.logits(hidden, CODES), every[:, CODES])
    ids = torch.tensor([7, 217_203, 2])
    torch.testing.assert_close(lm.logits(hidden, ids), every[:, ids])


def test_a_slice_of_the_head_costs_the_slice_only(pair, randn) -> None:
    _, lm = pair("lm")
    hidden = randn(1, 16)
    lm.logits(hidden, slice(0, 1000))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    lm.logits(hidden, slice(1000, 2000))
    assert mx.get_peak_memory() - before < 100_000  # the whole head has 14 MB


def test_rows_that_agree_are_found_out(pair) -> None:
    _, lm = pair("lm")
    assert lm.rows_agree(2, 2, slice(1000, 2000))
    assert isinstance(lm.rows_agree(8, 2, slice(1000, 2000)), bool)


def test_a_full_cache_says_how_much_was_needed(pair) -> None:
    _, lm = pair("lm")
    session = lm.open(1, 10)
    with pytest.raises(InvalidRequest, match=r"needs 11 token positions.*opened for 10"):
        session.feed(prompts(11))
    session.feed(prompts(8))
    with pytest.raises(InvalidRequest, match=r"needs 11 token positions.*opened for 10"):
        session.feed([[1, 2, 3]])


def test_cache_bytes_are_what_open_takes(pair) -> None:
    _, lm = pair("lm")
    mx.clear_cache()
    before = mx.get_active_memory()
    session = lm.open(3, 1000)
    assert mx.get_active_memory() - before == lm.cache_bytes(3, 1000)
    del session


def test_the_cache_is_written_in_place(pair) -> None:
    _, lm = pair("lm")
    session = lm.open(2, 20_000)
    session.feed(prompts(30, 8))
    step = torch.tensor([[3], [5]])
    session.feed(step)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    session.feed(step)
    assert mx.get_peak_memory() - before < lm.cache_bytes(2, 20_000) / 10


def test_the_text_encoder_gives_the_same_states_and_rows(pair, gap) -> None:
    ours, theirs = pair("text_encoder")
    ids = torch.tensor(prompts(50, 50))
    assert gap(theirs.states(ids), ours.states(ids)) <= 1e-5
    assert torch.equal(theirs.embed(ids), ours.embed(ids))


@pytest.mark.parametrize("xl", [False, True], ids=["2B", "XL"])
@pytest.mark.parametrize("items", [1, 2])
def test_conditions_are_the_same(pair, randn, gap, tiny_model, xl_model, xl, items) -> None:
    ours, theirs = pair("condition_encoder", spec=xl_model if xl else tiny_model)
    assert theirs.module.timbre_encoder.cls is xl
    text, lyric, timbre = randn(items, 9, 16), randn(items, 301, 16), randn(2 * items, 750, 64)
    expected = ours.encode(text, lyric, timbre)
    assert expected.shape[1] == 301 + 2 + 9
    assert gap(theirs.encode(text, lyric, timbre), expected) <= 1e-5
    assert torch.equal(theirs.null(), ours.null())


def test_codes_are_equal(pair, randn) -> None:
    ours, theirs = pair("audio_tokenizer")
    latents = randn(2, 500, 64) * 2
    codes = theirs.tokenize(latents)
    assert codes.dtype is torch.int64
    assert torch.equal(codes, ours.tokenize(latents))


def test_hints_of_codes_are_the_same(pair, gap) -> None:
    ours, theirs = pair("audio_detokenizer")
    codes = torch.arange(2 * 40).reshape(2, 40) * 797
    assert gap(theirs.detokenize(codes), ours.detokenize(codes)) <= 1e-5


@pytest.mark.parametrize("codes", [[[0, 64_000]], [[-1, 5]]])
def test_codes_out_of_range_are_refused(pair, codes) -> None:
    _, detokenizer = pair("audio_detokenizer")
    with pytest.raises(InvalidRequest, match="between 0 and 63999"):
        detokenizer.detokenize(torch.tensor(codes))


def test_the_quantiser_equals_torch_on_every_code() -> None:
    indices = torch.arange(codebook_size(LEVELS))
    values = fsq.code_of(indices, LEVELS)
    torch.testing.assert_close(torch.tensor(code_of(mx.array(indices), LEVELS).tolist()), values)
    spread = torch.linspace(-3, 3, 5_001)[:, None].expand(-1, 6) + 1e-4
    levels = quantise(mx.array(spread), LEVELS)
    assert levels.tolist() == fsq.quantise(spread, LEVELS).tolist()
    expected = fsq.index_of(fsq.quantise(spread, LEVELS), LEVELS)
    assert index_of(levels, LEVELS).tolist() == expected.tolist()


@pytest.mark.parametrize("xl", [False, True], ids=["2B", "XL"])
@pytest.mark.parametrize("frames", [1, 40, 61, 601, 768], ids=lambda n: f"{n} frames")
def test_velocity_is_the_same(pair, randn, gap, tiny_model, xl_model, xl, frames) -> None:
    """Beyond 258 frames the window of the even layers is exceeded."""
    ours, theirs = pair("dit", spec=xl_model if xl else tiny_model)
    x, context, condition = randn(2, frames, 64), randn(1, frames, 128), randn(1, 23, 32)
    for t in (1.0, 0.37):
        expected = ours(x, t, context, ours.prepare(condition))
        velocity = theirs(x, t, context, theirs.prepare(condition))
        assert velocity.dtype is torch.float32
        assert gap(velocity, expected) <= 1e-4


def test_prepared_keys_serve_every_step(pair, randn) -> None:
    _, velocity = pair("dit")
    x, context, condition = randn(1, 20, 64), randn(1, 20, 128), randn(1, 9, 32)
    prepared = velocity.prepare(condition)
    for t in (0.9, 0.2):
        again = velocity(x, t, context, velocity.prepare(condition))
        assert torch.equal(velocity(x, t, context, prepared), again)


GIVEN = {
    "condition_encoder": ((1, 5, 16), (1, 200, 16), (1, 750, 64)),
    "dit": ((1, 301, 64), (1, 301, 128), (1, 9, 32)),
    "vae": ((1, 64, 12),),
}
RUNS = {
    "lm": lambda lm: lm.open(2, 50).feed(prompts(30, 8)),
    "text_encoder": lambda encoder: encoder.states(torch.tensor(prompts(20))),
    "condition_encoder": lambda encoder, *given: encoder.encode(*given),
    "audio_detokenizer": lambda detokenizer: detokenizer.detokenize(torch.tensor([[5, 60_000]])),
    "dit": lambda dit, x, context, words: dit(x, 0.5, context, dit.prepare(words)),
    "vae": lambda codec, latents: codec.decode(latents),
}


@pytest.mark.parametrize("role", RUNS)
def test_bf16_weights_compute_in_bf16(pair, randn, gap, monkeypatch, role) -> None:
    """Neither rotary tables nor timesteps nor masks may widen what flows through the layers."""
    seen: set[mx.Dtype] = set()

    def watched(plain):
        def call(self, x, *rest):
            result = plain(self, x, *rest)
            seen.add(result.dtype)
            return result

        return call

    for layer in (nn.Linear, nn.RMSNorm, nn.Conv1d, nn.ConvTranspose1d):
        monkeypatch.setattr(layer, "__call__", watched(layer.__call__))
    given = [randn(*shape) for shape in GIVEN.get(role, ())]
    oracle, _ = pair(role)
    _, half = pair(role, torch.bfloat16)
    assert gap(RUNS[role](half, *given), RUNS[role](oracle, *given)) <= 0.05
    codebook = {mx.float32} if role == "audio_detokenizer" else set()
    assert seen == {mx.bfloat16} | codebook


def test_the_cache_of_a_bf16_model_is_bf16(pair) -> None:
    _, lm = pair("lm", torch.bfloat16)
    mx.clear_cache()  # a larger buffer that was free would count in full
    before = mx.get_active_memory()
    session = lm.open(2, 1000)
    session.feed(prompts(30, 8))
    session.feed([[1], [2]])
    assert mx.get_active_memory() - before == lm.cache_bytes(2, 1000)
    assert lm.cache_bytes(2, 1000) == 2 * 2 * 2 * 1001 * 8 * 2
    del session


def test_lyrics_beyond_half_precision_stay_finite(stored, saved, twins, gap, randn) -> None:
    tensors, config = stored("condition_encoder")
    table = dict(tensors)
    name = "lyric_encoder.layers.1.mlp.down_proj.weight"
    table[name] = table[name] * 1.2e5
    tensors = saved("condition_encoder", table)
    given = randn(1, 5, 16), randn(1, 13, 16), randn(1, 750, 64)
    in_torch, in_mlx = twins
    exact = in_torch("condition_encoder", config, tensors, torch.float32).encode(*given)
    half = in_mlx("condition_encoder", config, tensors, torch.float16).encode(*given)
    assert half.isfinite().all()
    assert gap(half, exact) <= 0.02
