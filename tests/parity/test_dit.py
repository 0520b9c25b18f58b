"""The diffusion transformer against diffusers, and what must not change its answer."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace

import pytest
import torch
from diffusers import AceStepTransformer1DModel

from acestep_engine.backends.torch_eager import TorchVelocity
from acestep_engine.config import DiTConfig
from acestep_engine.models_torch.dit import DiT, sinusoid
from acestep_engine.models_torch.layers import rotary_table

SAME = DiTConfig(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    encoder_hidden_size=48,
    in_channels=24,
    audio_acoustic_hidden_dim=8,
)
WIDE = replace(SAME, hidden_size=40, num_attention_heads=8, encoder_hidden_size=48)


@pytest.fixture(scope="module")
def inputs(randn):
    """Noisy latents, context and condition of `songs` songs."""
    return lambda frames, tokens=11, songs=1: (
        randn(songs, frames, 8),
        randn(songs, frames, 16),
        randn(songs, tokens, 48),
    )


@pytest.fixture(scope="module")
def model(build):
    return build(DiT, replace(SAME, sliding_window=5))


def oracle_of(module: DiT, to_diffusers):
    theirs = AceStepTransformer1DModel(**asdict(module.config)).eval()
    theirs.load_state_dict(to_diffusers(module))

    def velocity(x, t, context, encoder):
        return theirs(x, t, t, encoder, context, return_dict=False)[0]

    return velocity


@torch.inference_mode()
@pytest.mark.parametrize("config", [SAME, WIDE], ids=["2B-like", "XL-like"])
@pytest.mark.parametrize(
    ("frames", "window"), [(10, 128), (62, 5), (61, 5), (1, 5), (300, 128), (601, 128), (801, 128)]
)
def test_velocity_equals_diffusers(
    config, frames, window, build, to_diffusers, inputs, gap
) -> None:
    model = build(DiT, replace(config, sliding_window=window), seed=frames)
    x, context, encoder = inputs(frames, songs=2)
    t = torch.tensor([0.83, 0.1])
    expected = oracle_of(model, to_diffusers)(x, t, context, encoder)
    assert gap(model(x, t, context, model.prepare(encoder)), expected) <= 1e-5


@torch.inference_mode()
def test_one_condition_and_one_noise_level_serve_all_songs(model, inputs, gap) -> None:
    x, context, encoder = inputs(30, songs=3)
    velocity = TorchVelocity(model, "cpu", torch.float32)
    shared = velocity(x, 0.5, context[:1], velocity.prepare(encoder[:1]))
    repeated = model.prepare(encoder[:1].expand(3, -1, -1))
    expected = model(x, torch.full((3,), 0.5), context[:1].expand(3, -1, -1), repeated)
    assert gap(shared, expected) <= 1e-6
    assert shared.dtype is torch.float32


@torch.inference_mode()
def test_songs_can_be_permuted_and_run_alone(model, inputs, gap) -> None:
    x, context, encoder = inputs(40, songs=3)
    t = torch.tensor([0.9, 0.5, 0.2])
    together = model(x, t, context, model.prepare(encoder))
    order = [2, 0, 1]
    permuted = model(x[order], t[order], context[order], model.prepare(encoder[order]))
    assert gap(permuted, together[order]) <= 1e-6
    for song in range(3):
        one = slice(song, song + 1)
        alone = model(x[one], t[one], context[one], model.prepare(encoder[one]))
        assert gap(together[one], alone) <= 2e-6


@torch.inference_mode()
def test_an_odd_length_is_the_padded_run_cropped(model, inputs) -> None:
    x, context, encoder = inputs(37)
    t, prepared = torch.tensor([0.4]), model.prepare(encoder)
    zero_x, zero_context = torch.zeros(1, 1, 8), torch.zeros(1, 1, 16)
    padded = model(torch.cat((x, zero_x), 1), t, torch.cat((context, zero_context), 1), prepared)
    assert torch.equal(model(x, t, context, prepared), padded[:, :37])


@torch.inference_mode()
def test_prepared_keys_can_be_used_again(model, inputs) -> None:
    x, context, encoder = inputs(20)
    prepared = model.prepare(encoder)
    for t in (0.9, 0.3):
        again = model(x, torch.tensor([t]), context, prepared)
        assert torch.equal(again, model(x, torch.tensor([t]), context, model.prepare(encoder)))


@torch.inference_mode()
def test_the_second_time_embedding_is_a_constant(model, inputs) -> None:
    still = model.prepare(inputs(2)[2]).still
    for t in (0.0, 0.31, 1.0):
        now = torch.tensor([t])
        for ours, expected in zip(still, model.time_embed_r(now - now, now.dtype), strict=True):
            assert torch.equal(ours, expected)


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [7, 300])
def test_the_null_condition_may_be_one_token_long(tokens, model, inputs, gap) -> None:
    exact = copy.deepcopy(model).double()  # in float32 a sum of 300 terms rounds by more
    x, context, encoder = (value.double() for value in inputs(20, tokens=1))
    t = torch.tensor([0.6])
    short = exact(x, t, context, exact.prepare(encoder))
    long = exact(x, t, context, exact.prepare(encoder.expand(-1, tokens, -1)))
    assert gap(short, long) <= 1e-12


@torch.inference_mode()
def test_with_gates_at_zero_a_layer_adds_cross_attention_only(model, inputs, randn) -> None:
    layer = model.layers[0]
    x, encoder = randn(1, 12, 48), inputs(2)[2]
    cross = model.prepare(encoder).cross[0]
    rotary = rotary_table(torch.arange(12), model.config, x.dtype)
    six = -layer.scale_shift_table
    expected = x + layer._look_at(cross, layer.cross_attn_norm(x))
    assert torch.equal(layer(x, six, rotary, cross), expected)


def test_the_timestep_sinusoid_has_the_known_values() -> None:
    half, zero = sinusoid(torch.tensor([0.5, 0.0]))
    known = {0: -0.883849, 1: 0.945943, 2: 0.848515, 64: 0.283662, 127: 0.998557}
    known |= {128: -0.467772, 129: 0.324334, 192: -0.958924, 255: 0.053705}
    for place, value in known.items():
        assert abs(float(half[place]) - value) < 5e-5, place
    assert torch.equal(zero, torch.cat((torch.ones(128), torch.zeros(128))))


@torch.inference_mode()
def test_bf16_stays_near_fp32(build, inputs, gap) -> None:
    model = build(DiT, SAME)
    x, context, encoder = inputs(50)
    exact = TorchVelocity(model, "cpu", torch.float32)
    expected = exact(x, 0.7, context, exact.prepare(encoder))
    rough = TorchVelocity(model.bfloat16(), "cpu", torch.bfloat16)
    result = rough(x, 0.7, context, rough.prepare(encoder))
    assert result.dtype is torch.float32
    assert gap(result, expected) <= 0.05
