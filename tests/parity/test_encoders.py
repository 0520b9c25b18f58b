"""The condition encoder against diffusers: lyrics, timbre clips, packing, half precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers.pipelines.ace_step.modeling_ace_step import AceStepConditionEncoder

from acestep_engine.backends.torch_eager import TorchConditionEncoder
from acestep_engine.config import ConditionConfig, EncoderConfig
from acestep_engine.models_torch.encoders import ConditionEncoder, pack, unpack_timbre

TOWER = EncoderConfig(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    sliding_window=6,
)
CONFIG = ConditionConfig(
    lyric=TOWER,
    timbre=replace(TOWER, num_hidden_layers=2),
    text_hidden_dim=20,
    timbre_hidden_dim=8,
    timbre_fix_frame=30,
)


@pytest.fixture(scope="module")
def model(build):
    return build(ConditionEncoder, CONFIG)


def oracle_of(weights, timbre_channels: int = 8) -> AceStepConditionEncoder:
    theirs = AceStepConditionEncoder(
        hidden_size=48,
        intermediate_size=80,
        text_hidden_dim=20,
        timbre_hidden_dim=timbre_channels,
        num_lyric_encoder_hidden_layers=3,
        num_timbre_encoder_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        sliding_window=6,
    ).eval()
    theirs.load_state_dict(weights | {"silence_latent": theirs.silence_latent})
    return theirs


def mask(*counts: int) -> torch.Tensor:
    return torch.arange(max(counts)) < torch.tensor(counts)[:, None]


@torch.inference_mode()
def test_a_ragged_batch_equals_diffusers(model, to_diffusers, randn, gap) -> None:
    text, lyric, timbre = randn(2, 9, 20), randn(2, 25, 20), randn(3, 30, 8)
    text_keep, lyric_keep, order = mask(9, 4), mask(12, 25), [0, 1, 1]
    expected, expected_keep = oracle_of(to_diffusers(model))(
        text, text_keep.long(), lyric, lyric_keep.long(), timbre, torch.tensor(order)
    )
    ours, keep = model(text, lyric, timbre, order, text_keep, lyric_keep)
    assert torch.equal(keep, expected_keep)
    assert keep.sum(1).tolist() == [12 + 1 + 9, 25 + 2 + 4]
    assert gap(ours[keep], expected[keep]) <= 1e-5


@torch.inference_mode()
def test_without_masks_the_order_is_lyric_timbre_text(model, randn, gap) -> None:
    backend = TorchConditionEncoder(model, "cpu", torch.float32)
    text, lyric, timbre = randn(2, 5, 20), randn(2, 13, 20), randn(2, 30, 8)
    sequence = backend.encode(text, lyric, timbre)
    assert gap(sequence[:, :13], model.lyric_encoder(lyric)) <= 1e-6
    assert gap(sequence[:, 13], model.timbre_encoder(timbre)) <= 1e-6
    assert gap(sequence[:, 14:], model.text_projector(text)) <= 1e-6
    assert torch.equal(backend.null(), model.null_condition_emb)


@torch.inference_mode()
def test_padded_items_equal_their_single_runs(model, randn, gap) -> None:
    text, lyric, timbre = randn(2, 9, 20), randn(2, 25, 20), randn(2, 30, 8)
    ours, keep = model(text, lyric, timbre, [0, 1], mask(9, 4), mask(12, 25))
    for item, (texts, lyrics) in enumerate(((9, 12), (4, 25))):
        one = slice(item, item + 1)
        alone, _ = model(text[one, :texts], lyric[one, :lyrics], timbre[one], [0])
        assert gap(ours[one][:, keep[item]], alone) <= 2e-6


@torch.inference_mode()
def test_what_stands_in_padding_has_no_influence(model, randn) -> None:
    text, lyric, timbre = randn(2, 9, 20), randn(2, 25, 20), randn(2, 30, 8)
    masks = mask(9, 4), mask(12, 25)
    ours, keep = model(text, lyric, timbre, [0, 1], *masks)
    lyric[0, 12:], text[1, 4:] = 100.0, -50.0
    again, _ = model(text, lyric, timbre, [0, 1], *masks)
    assert torch.equal(ours[keep], again[keep])


@torch.inference_mode()
def test_an_item_without_lyrics_works(model, randn, gap) -> None:
    text, lyric, timbre = randn(2, 3, 20), randn(2, 6, 20), randn(2, 30, 8)
    ours, keep = model(text, lyric, timbre, [0, 1], None, mask(6, 0))
    assert keep.sum(1).tolist() == [10, 4]
    assert torch.isfinite(ours).all()
    alone, _ = model(text[1:], lyric[1:, :0], timbre[1:], [0])
    assert gap(ours[1:, :4], alone) <= 1e-6


@torch.inference_mode()
def test_the_first_token_speaks_for_an_xl_clip(build, to_diffusers, randn, gap) -> None:
    """The oracle has no such token, but an input channel that embeds to it does the same."""
    model = build(ConditionEncoder, replace(CONFIG, timbre_cls=True), seed=3)
    weights = to_diffusers(model)
    clips = model.timbre_encoder
    column = (clips.special_token[0, 0] - clips.embed_tokens.bias)[:, None]
    widened = torch.cat((clips.embed_tokens.weight, column), dim=1)
    oracle = oracle_of(weights | {"timbre_encoder.embed_tokens.weight": widened}, 9)
    timbre = randn(2, 30, 8)
    marked = torch.cat((torch.zeros(2, 30, 1), torch.ones(2, 1, 1)), dim=1)
    frames = torch.cat((torch.zeros(2, 1, 8), timbre), dim=1)
    with_token = torch.cat((frames, marked.flip(1)), dim=2)
    expected, _ = oracle.timbre_encoder(with_token, torch.tensor([0, 1]))
    assert gap(clips(timbre), expected[:, 0]) <= 1e-5
    plain = build(ConditionEncoder, CONFIG, seed=3).timbre_encoder(timbre)
    assert gap(plain, expected[:, 0]) > 1e-2


def test_packing_is_stable_and_keeps_the_counts(randn) -> None:
    first, second = randn(2, 4, 3), randn(2, 3, 3)
    first_keep = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]]).bool()
    second_keep = torch.tensor([[1, 0, 1], [1, 1, 0]]).bool()
    packed, keep = pack(first, first_keep, second, second_keep)
    assert keep.tolist() == [[True] * 4 + [False] * 3, [True] * 2 + [False] * 5]
    expected = torch.cat((first[0, [0, 2]], second[0, [0, 2]]))
    assert torch.equal(packed[0, :4], expected)
    assert torch.equal(packed[1, :2], second[1, :2])
    assert torch.equal(packed[0, 4:], torch.stack((first[0, 1], first[0, 3], second[0, 1])))


def test_clips_go_to_their_items(randn) -> None:
    clips = randn(4, 3)
    unpacked, keep = unpack_timbre(clips, [0, 1, 1, 2], 3)
    assert keep.tolist() == [[True, False], [True, True], [True, False]]
    assert torch.equal(unpacked[1], clips[1:3])
    assert torch.equal(unpacked[2], torch.stack((clips[3], torch.zeros(3))))


@torch.inference_mode()
def test_lyrics_beyond_half_precision_stay_finite_and_right(build, randn, gap) -> None:
    model = build(ConditionEncoder, CONFIG)
    model.lyric_encoder.layers[-1].mlp.down_proj.weight.mul_(4e5)
    text, lyric, timbre = randn(1, 5, 20), randn(1, 13, 20), randn(1, 30, 8)
    exact = TorchConditionEncoder(model, "cpu", torch.float32).encode(text, lyric, timbre)
    half = build(ConditionEncoder, CONFIG)
    wide = model.lyric_encoder.layers[-1].mlp.down_proj.weight
    half.half().lyric_encoder.layers[-1].mlp.down_proj.weight = torch.nn.Parameter(
        wide, requires_grad=False
    )
    TorchConditionEncoder.finish(half, torch.float16)
    ours = TorchConditionEncoder(half, "cpu", torch.float16).encode(text, lyric, timbre)
    assert torch.isfinite(ours).all()
    assert gap(ours, exact) <= 0.02
