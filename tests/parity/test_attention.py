"""What single layers must do: reach of the window, rotary positions, head order, casting layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acestep_engine.config import EncoderConfig
from acestep_engine.models_spec import rope_frequencies
from acestep_engine.models_torch import layers
from acestep_engine.models_torch.layers import (
    Attention,
    EncoderLayer,
    Tower,
    attend,
    rotary_table,
    rotate,
)


def sizes(window: int = 4, **changes: int) -> EncoderConfig:
    return EncoderConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": window,
        }
        | changes
    )


def layer_of(build, index: int, config: EncoderConfig) -> EncoderLayer:
    return build(lambda c, ops=nn: EncoderLayer(c, index, ops), config)


def by_hand(q, k, v, allowed_LL):
    """Attention written out with repeated heads."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~allowed_LL, -torch.inf).softmax(-1) @ v


def run(layer: EncoderLayer, x, config: EncoderConfig):
    return layer(x, rotary_table(torch.arange(x.shape[1]), config, x.dtype))


@pytest.mark.parametrize("length", [1, 4, 5, 6, 9, 16, 17, 32])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)])
def test_the_window_reaches_exactly_its_width(length, heads, randn, gap) -> None:
    q, k, v = (
        randn(2, heads[0], length, 8),
        randn(2, heads[1], length, 8),
        randn(2, heads[1], length, 8),
    )
    near = (torch.arange(length)[:, None] - torch.arange(length)).abs() <= 4
    assert gap(attend(q, k, v, window=4), by_hand(q, k, v, near)) <= 1e-5
    assert gap(attend(q, k, v), by_hand(q, k, v, near | True)) <= 1e-5


@pytest.mark.parametrize("window", [None, 4, 9])
def test_masked_keys_are_not_seen_and_nothing_turns_nan(window, randn, gap) -> None:
    q, k, v = randn(3, 4, 23, 8), randn(3, 2, 23, 8), randn(3, 2, 23, 8)
    places = torch.arange(23)
    keep = places < torch.tensor([23, 11, 0])[:, None]
    near = (places[:, None] - places).abs() <= (window or 23)
    out = attend(q, k, v, window, keep)
    assert torch.isfinite(out).all()
    for item, count in ((0, 23), (1, 11)):
        q1, k1, v1 = (x[item : item + 1, :, :count] for x in (q, k, v))
        expected = by_hand(q1, k1, v1, near[:count, :count])
        assert gap(out[item : item + 1, :, :count], expected) <= 1e-5


def test_a_changed_token_acts_inside_the_window_only(build, randn) -> None:
    config = sizes(window=4)
    x = randn(1, 32, 32)
    changed = x.clone()
    changed[0, 13] += 1
    reach = torch.arange(32).sub(13).abs()
    sliding, full = layer_of(build, 0, config), layer_of(build, 1, config)
    moved = (run(sliding, changed, config) - run(sliding, x, config)).abs().amax((0, 2))
    assert (moved[reach > 4] == 0).all()
    assert (moved[reach <= 4] > 0).all()
    moved = (run(full, changed, config) - run(full, x, config)).abs().amax((0, 2))
    assert (moved > 0).all()


def test_the_real_window_equals_full_attention_up_to_129_tokens(build, randn, gap) -> None:
    config = sizes(window=128)
    sliding, full = layer_of(build, 0, config), layer_of(build, 1, config)
    x = randn(1, 129, 32)
    assert torch.equal(run(sliding, x, config), run(full, x, config))
    x = randn(1, 131, 32)
    assert gap(run(sliding, x, config), run(full, x, config)) > 1e-4
    changed = x.clone()
    changed[0, 130] += 1
    moved = (run(sliding, changed, config) - run(sliding, x, config)).abs().amax((0, 2))
    assert (moved[:2] == 0).all()
    assert moved[2] > 0


def test_query_head_h_reads_key_head_h_div_group(build, randn, gap) -> None:
    config = sizes(num_attention_heads=6, num_key_value_heads=3)
    attention = build(lambda c, ops=nn: Attention(c, ops), config)
    x = randn(1, 7, 32)
    rotary = rotary_table(torch.arange(7), config, x.dtype)
    q, (k, v) = attention.queries(x, rotary), attention.keys_values(x, rotary)
    heads = []
    for head in range(6):
        scores = (q[:, :, head] @ k[:, :, head // 2].transpose(1, 2)) * 16**-0.5
        heads.append(scores.softmax(-1) @ v[:, :, head // 2])
    expected = attention.o_proj(torch.cat(heads, -1))
    assert gap(attention(x, rotary), expected) <= 1e-5


def test_rotary_frequencies_are_the_known_ones() -> None:
    frequencies = rope_frequencies(128, 1e6)
    assert frequencies[0] == 1
    assert abs(frequencies[1] - 0.8058421878) < 1e-10
    assert abs(frequencies[63] - 1.2409377608e-6) < 1e-15


def test_rotary_pairs_the_halves_and_is_relative(randn) -> None:
    config = sizes(head_dim=128)
    q, k = randn(1, 1, 1, 128), randn(1, 1, 1, 128)

    def at(x, position):
        return rotate(x, rotary_table(torch.tensor([position]), config, x.dtype))

    angle = torch.tensor(5.0 * rope_frequencies(128, 1e6)[3]).float()
    turned = at(q, 5)[0, 0, 0]
    a, b = q[0, 0, 0, 3], q[0, 0, 0, 67]
    torch.testing.assert_close(turned[3], a * angle.cos() - b * angle.sin())
    torch.testing.assert_close(turned[67], b * angle.cos() + a * angle.sin())
    scores = [(at(q, 3 + s) * at(k, 17 + s)).sum() for s in (0, 40, 900)]
    torch.testing.assert_close(scores[1], scores[0], atol=2e-3, rtol=0)
    torch.testing.assert_close(scores[2], scores[0], atol=2e-3, rtol=0)
    assert torch.equal(at(q, 0), q)


class CastLinear(nn.Linear):
    """Brings its weights to the input, as hosts do that keep them in another precision."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x)
        return F.linear(x, self.weight.to(x), bias)


class CastNorm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x), self.eps)


def test_layers_come_from_the_given_namespace(build, randn) -> None:
    casting = SimpleNamespace(Linear=CastLinear, RMSNorm=CastNorm)
    stored = build(lambda c, ops=casting: Tower(c, ops), sizes()).bfloat16()
    plain = build(lambda c, ops=nn: Tower(c, ops), sizes())
    plain.load_state_dict({k: v.float() for k, v in stored.state_dict().items()}, assign=True)
    x = randn(1, 12, 32)
    torch.testing.assert_close(stored.run(x), plain.run(x))


@torch.inference_mode()
@pytest.mark.parametrize("causal", [False, True])
def test_heads_repeated_by_hand_equal_the_native_groups(
    monkeypatch: pytest.MonkeyPatch, randn, causal: bool
) -> None:
    q, k, v = randn(2, 6, 9, 8), randn(2, 3, 9, 8), randn(2, 3, 9, 8)
    native = layers.grouped_attention(q, k, v, causal=causal)
    monkeypatch.setattr(layers, "_groups_are_native", lambda *_: False)
    assert (layers.grouped_attention(q, k, v, causal=causal) - native).abs().max() <= 1e-6


@pytest.mark.parametrize("depth", [1, 2, 3])  # the last layer has a window, or sees everything
@pytest.mark.parametrize("length", [1, 5, 17])
def test_a_tower_asked_for_its_first_state_alone_gives_the_same_one(
    build, randn, gap, depth, length
) -> None:
    config = sizes(num_hidden_layers=depth)
    tower = build(lambda c, ops=nn: Tower(c, ops), config)
    x = randn(2, length, 32)
    with torch.inference_mode():
        assert gap(tower.run_to_first(x), tower.run(x)[:, 0]) <= 1e-6
