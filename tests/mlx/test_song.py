"""The whole path through the engine on either backend: the same seed is the same song."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
import torch
from safetensors.torch import save_file

from acestep_engine.backends import torch_eager
from acestep_engine.config import Qwen3Config
from acestep_engine.engine import Engine
from acestep_engine.host import LocalHost
from acestep_engine.lm.metadata import stated
from acestep_engine.runtime import Wish
from acestep_engine.types import (
    AnswerOptions,
    Audio,
    Codes,
    ComposeOptions,
    DiTSampling,
    Latents,
    LMSampling,
    ModelSpec,
    Plan,
    PlanOptions,
    Request,
)
from acestep_engine.weights.parts import ROLES
from acestep_engine.weights.sources import TEXT_ROWS

SAMPLING = LMSampling(seed=11)
# Random weights leave thousands of candidates alike: among so many, another rounding of the sums
# chooses a neighbour now and then. Among fifty it does not.
FEW = replace(SAMPLING, top_k=50)
REQUEST = Request(caption="calm piano and rain", lyrics="[Verse]\nwalking home", duration=6)
PLAN = Plan("calm piano", "la la", stated(REQUEST), 6.0)
CODES = Codes((tuple(range(100, 63_000, 2_100)),))
ANSWER = AnswerOptions(sampling=FEW, max_tokens=300)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """One for both backends, which must not take each other's weights."""
    return Engine(LocalHost(show=False))


@pytest.fixture
def both(engine, tiny_model):
    """What a function of engine and model gives in torch and in MLX, both in fp32."""

    def both(work, **changes):
        wishes = (Wish("cpu", "fp32"), Wish("mlx", "fp32"))
        return [work(engine, replace(tiny_model, wish=wish, **changes)) for wish in wishes]

    return both


def in_mlx(model: ModelSpec, precision) -> ModelSpec:
    return replace(model, wish=Wish("mlx", precision))


def test_the_same_seed_plans_the_same(both) -> None:
    open_request = Request(caption="surprise me")
    for request in (REQUEST, open_request):
        plan, mlx_plan = both(
            lambda engine, model, request=request: engine.plan(
                model, request, PlanOptions(sampling=SAMPLING)
            )
        )
        assert mlx_plan == plan


@pytest.mark.parametrize("cfg_scale", [1.0, 2.0])
def test_the_same_seed_composes_the_same(both, cfg_scale) -> None:
    options = ComposeOptions(2, sampling=replace(FEW, cfg_scale=cfg_scale))
    codes, mlx_codes = both(lambda engine, model: engine.compose(model, PLAN, options))
    assert mlx_codes == codes
    assert [len(item) for item in codes.items] == [30, 30]


@pytest.mark.parametrize("codes", [CODES, None], ids=["codes", "words alone"])
@pytest.mark.parametrize("family", ["turbo", "base"])
def test_the_same_seed_renders_and_sounds_the_same(both, gap, family, codes) -> None:
    options = DiTSampling(seed=3, steps=8)
    latents, mlx_latents = both(
        lambda engine, model: engine.render(model, PLAN, codes, options), family=family
    )
    assert latents.values.shape == (1, 150, 64)
    assert gap(mlx_latents.values, latents.values) <= 1e-4
    assert mlx_latents.record == latents.record
    audio, mlx_audio = both(lambda engine, model: engine.decode(model, latents, tile=64))
    assert gap(mlx_audio.waveform, audio.waveform) <= 1e-5
    whole, mlx_whole = both(lambda engine, model: engine.decode(model, mlx_latents))
    assert gap(mlx_whole.waveform, whole.waveform) <= 1e-5


def test_a_song_becomes_the_same_latents_codes_and_words(both, gap, randn) -> None:
    audio = Audio(randn(1, 1, 44_100 * 3) / 8, 44_100)
    latents, mlx_latents = both(lambda engine, model: engine.encode(model, audio, tile=30))
    assert gap(mlx_latents.values, latents.values) <= 1e-5
    codes, mlx_codes = both(lambda engine, model: engine.tokenize(model, latents))
    assert mlx_codes == codes
    heard, mlx_heard = both(lambda engine, model: engine.understand(model, codes, ANSWER))
    assert mlx_heard == heard


def test_codes_carry_a_plan_as_well(both) -> None:
    (score,), (mlx_score,) = both(lambda engine, model: engine.score(model, CODES, PLAN))
    assert mlx_score.metadata == pytest.approx(score.metadata, abs=1e-4)
    assert mlx_score.reward == pytest.approx(score.reward, abs=1e-4)
    assert mlx_score.caption == pytest.approx(score.caption, abs=1e-4)
    assert mlx_score.lyrics == pytest.approx(score.lyrics, abs=1e-4)


def test_copies_in_other_forms_do_not_mix(engine, tiny_model) -> None:
    models = [in_mlx(tiny_model, precision) for precision in ("fp32", "bf16", "int8", "int4")]
    models.append(replace(tiny_model, wish=Wish("cpu", "fp32")))
    assert len({engine.store.key(model, "lm") for model in models}) == 5
    kinds = [type(engine.store.backend(model, "vae").module).__module__ for model in models]
    assert [kind.split(".")[-2] for kind in kinds] == ["models_mlx"] * 4 + ["models_torch"]


def test_bf16_runs_the_whole_path_in_bf16(tiny_model, monkeypatch) -> None:
    seen: set[mx.Dtype] = set()

    def watched(plain):
        def call(self, x, *rest):
            result = plain(self, x, *rest)
            seen.add(result.dtype)
            return result

        return call

    for layer in (nn.Linear, nn.RMSNorm, nn.Conv1d, nn.ConvTranspose1d):
        monkeypatch.setattr(layer, "__call__", watched(layer.__call__))
    engine, model = Engine(LocalHost(show=False)), in_mlx(tiny_model, "bf16")
    plan = engine.plan(model, replace(REQUEST, duration=2), PlanOptions(sampling=SAMPLING))
    codes = engine.compose(model, plan, ComposeOptions(sampling=SAMPLING))
    without_codes = engine.render(model, plan)
    assert seen == {mx.bfloat16}
    audio = engine.decode(model, without_codes)
    assert seen == {mx.bfloat16}
    assert audio.waveform.shape == (1, 2, 96_000)
    engine.render(model, plan, codes)
    assert seen == {mx.bfloat16, mx.float32}  # the code book alone is exact


def test_a_song_alone_is_the_song_in_a_batch(engine, tiny_model) -> None:
    model = in_mlx(tiny_model, "fp32")
    codes = engine.compose(model, PLAN, ComposeOptions(3, sampling=SAMPLING))
    latents = engine.render(model, PLAN, codes, DiTSampling(seed=20))
    for item in range(3):
        alone = replace(SAMPLING, seed=11 + item)
        own = engine.compose(model, PLAN, ComposeOptions(sampling=alone))
        assert own.items[0] == codes.items[item]
        values = engine.render(model, PLAN, own, DiTSampling(seed=20 + item)).values
        assert torch.equal(values[0], latents.values[item])


def test_release_gives_the_memory_back(tiny_model) -> None:
    engine, model = Engine(LocalHost(show=False)), in_mlx(tiny_model, "fp32")
    before = mx.get_active_memory()
    latents = Latents(torch.ones(1, 20, 64))
    expected = engine.decode(model, latents).waveform
    engine.compose(model, PLAN)
    loaded = sum(engine.describe(model)["loaded"].values())
    assert mx.get_active_memory() - before == pytest.approx(loaded, rel=0.01)  # and small tables
    engine.release(model)
    assert mx.get_active_memory() == before
    assert mx.get_cache_memory() == 0
    assert torch.equal(engine.decode(model, latents).waveform, expected)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory, tiny_model) -> ModelSpec:
    """Towers wide enough to be packed (groups of 64 weights)."""
    root, generator = tmp_path_factory.mktemp("wide"), torch.Generator().manual_seed(0)

    def write(name: str, rows: int) -> str:
        with torch.device("meta"):
            tower = torch_eager.BUILDERS["lm"][0](Qwen3Config(rows, 64, 128, 2, 4, 2, 32))
        table = {
            f"model.{name}": torch.randn(value.shape, generator=generator).to(torch.bfloat16)
            for name, value in tower.state_dict().items()
        }
        save_file(table, root / name)
        return str(root / name)

    lm = write("qwen_1.7b_ace15.safetensors", TEXT_ROWS + 64_000)
    return replace(tiny_model, lm=lm, text_encoder=write("qwen_0.6b_ace15.safetensors", TEXT_ROWS))


def test_the_asked_bits_reach_the_weights(wide_model) -> None:
    sizes = []
    for precision, bits in (("auto", 0), ("int8", 8), ("int4", 4)):
        engine, model = Engine(LocalHost(show=False)), in_mlx(wide_model, precision)
        lm = engine.store.backend(model, "lm")
        assert getattr(lm.module.layers[1].mlp.up_proj, "bits", 0) == bits
        assert engine.describe(model)["bits"] == bits
        assert lm.open(1, 4).feed([[1, 2]]).isfinite().all()
        sizes.append(engine.describe(model)["loaded"]["lm"])
    assert sizes == sorted(set(sizes), reverse=True)


def test_what_is_small_is_not_packed(engine, wide_model) -> None:
    module = engine.store.backend(in_mlx(wide_model, "int4"), "text_encoder").module
    assert isinstance(module.layers[1].mlp.up_proj, nn.Linear)
    assert not isinstance(module.layers[1].mlp.up_proj, nn.QuantizedLinear)
    for role in (role for role in ROLES if role not in ("lm", "dit")):
        plain, packed = (engine.store.key(in_mlx(wide_model, p), role) for p in ("fp32", "int4"))
        assert plain == packed
