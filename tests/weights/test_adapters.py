"""Adapters of every kind change the weights that they mean, by the published algebra, and go again.

The oracle is that algebra in float64, written out here; files are made by hand.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from acestep_engine.engine import Engine
from acestep_engine.errors import BadCheckpoint, InvalidRequest, ModelNotFound
from acestep_engine.host import LocalHost
from acestep_engine.lm.metadata import stated
from acestep_engine.runtime import Wish
from acestep_engine.store import Store
from acestep_engine.types import Codes, DiTSampling, LoRA, ModelSpec, Plan, Request
from acestep_engine.weights import adapters
from acestep_engine.weights.parts import Role
from acestep_engine.weights.tiny import write_tiny

NAME = "layers.0.self_attn.q_proj"
FLAT = NAME.replace(".", "_")
DIFFUSERS = "layers.0.self_attn.to_q"
RANK, ALPHA = 4, 6.0
PEFT = "base_model.model."
PLAN = Plan("calm piano", "la la", stated(Request(caption="calm piano", duration=6)), 6.0)


def draw(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4


UP, DOWN = draw(32, RANK, seed=1), draw(RANK, 32, seed=2)
CHANGE = ALPHA / RANK * (UP.double() @ DOWN.double())


def peft(prefix: str = PEFT, named: str = "", up: Tensor = UP, down: Tensor = DOWN) -> Any:
    return {f"{prefix}.lora_A{named}.weight": down, f"{prefix}.lora_B{named}.weight": up}


def save(table: Mapping[str, Tensor], path: Path, **metadata: str) -> None:
    own = {name: value.clone() for name, value in table.items()}  # files share no memory
    save_file(own, path, metadata={"format": "pt", **metadata})


def folder(root: Path, table: Mapping[str, Tensor], **config: Any) -> Path:
    """A PEFT folder."""
    path = root / "adapter"
    path.mkdir(exist_ok=True)
    save(table, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, **config}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def single(root: Path, table: Mapping[str, Tensor], **metadata: str) -> Path:
    path = root / "adapter.safetensors"
    save(table, path, **metadata)
    return path


def beside(root: Path, table: Mapping[str, Tensor]) -> Path:
    (root / "adapter_config.json").write_text(json.dumps({"lora_alpha": ALPHA, "r": RANK}))
    return single(root, table)


def kohya(prefix: str) -> dict[str, Tensor]:
    return {
        f"{prefix}.lora_up.weight": UP,
        f"{prefix}.lora_down.weight": DOWN,
        f"{prefix}.alpha": torch.tensor(ALPHA),
    }


def lokr(prefix: str, *, alpha: bool = True) -> dict[str, Tensor]:
    """The same change: the Kronecker product with [[1]] is the other factor."""
    table = {
        f"{prefix}.lokr_w1": torch.ones(1, 1),
        f"{prefix}.lokr_w2_a": UP,
        f"{prefix}.lokr_w2_b": DOWN,
    }
    return table | ({f"{prefix}.alpha": torch.tensor(ALPHA)} if alpha else {})


DIFFUSERS_METADATA = json.dumps({"transformer.r": RANK, "transformer.lora_alpha": ALPHA})
FORMS: dict[str, Callable[[Path], Path]] = {
    "PEFT folder": lambda root: folder(root, peft(PEFT + NAME)),
    "PEFT folder, named adapter": lambda root: folder(root, peft(PEFT + NAME, ".default")),
    "PEFT folder, whole model": lambda root: folder(root, peft(f"{PEFT}decoder.{NAME}")),
    "PEFT folder, rslora": lambda root: folder(
        root, peft(PEFT + NAME), use_rslora=True, lora_alpha=ALPHA / math.sqrt(RANK)
    ),
    "PEFT folder, patterns": lambda root: folder(
        root,
        peft(PEFT + NAME),
        r=64,
        lora_alpha=1,
        rank_pattern={"q_proj": RANK},
        alpha_pattern={"k_proj": 2.0, r"layers\.0\.self_attn\.q_proj": ALPHA},
    ),
    "PEFT file, metadata": lambda root: single(root, peft(PEFT + NAME), lora_alpha=str(ALPHA)),
    "PEFT file, configuration beside it": lambda root: beside(root, peft(PEFT + NAME)),
    "ComfyUI": lambda root: single(root, kohya(f"diffusion_model.decoder.{NAME}")),
    "ComfyUI, A and B": lambda root: single(
        root,
        peft(f"diffusion_model.decoder.{NAME}")
        | {f"diffusion_model.decoder.{NAME}.alpha": torch.tensor([int(ALPHA)])},
    ),
    "kohya": lambda root: single(root, kohya(f"lora_unet_{FLAT}")),
    "LyCORIS": lambda root: single(root, kohya(f"lycoris_{FLAT}")),
    "LyCORIS, whole model": lambda root: single(root, kohya(f"lycoris_decoder_{FLAT}")),
    "LyCORIS, scalar": lambda root: single(
        root,
        {**kohya(f"lycoris_{FLAT}"), f"lycoris_{FLAT}.lora_up.weight": UP / 2}
        | {f"lycoris_{FLAT}.scalar": torch.tensor(2.0)},
    ),
    "diffusers": lambda root: single(
        root, peft(f"transformer.{DIFFUSERS}"), lora_adapter_metadata=DIFFUSERS_METADATA
    ),
    "LoKr": lambda root: single(root, lokr(f"lycoris_{FLAT}")),
    "LoKr, metadata": lambda root: single(
        root,
        lokr(f"lycoris_{FLAT}", alpha=False),
        algo="lokr",
        lokr_config=json.dumps({"linear_dim": RANK, "linear_alpha": ALPHA}),
    ),
    "LoKr, dotted names": lambda root: single(root, lokr(f"diffusion_model.decoder.{NAME}")),
    "LoKr, full": lambda root: single(
        root,
        {
            f"lycoris_{FLAT}.lokr_w1": torch.full((1, 1), ALPHA / RANK),
            f"lycoris_{FLAT}.lokr_w2": UP @ DOWN,
            f"lycoris_{FLAT}.alpha": torch.tensor(64.0),
        },
    ),
}


@pytest.fixture
def store() -> Store:
    return Store(LocalHost(show=False))


def at(model: ModelSpec, *loras: LoRA, precision: Any = "fp32") -> ModelSpec:
    return replace(model, wish=Wish("cpu", precision), loras=loras)


def weights(store: Store, model: ModelSpec, role: Role = "dit") -> dict[str, Tensor]:
    return dict(store.backend(model, role).module.state_dict())


def same(ours: Mapping[str, Tensor], others: Mapping[str, Tensor], *but: str) -> bool:
    return all(torch.equal(ours[name], others[name]) for name in others if name not in but)


@pytest.mark.parametrize("strength", [1.0, -0.5])
@pytest.mark.parametrize("form", FORMS)
def test_one_change_is_the_same_from_every_form(
    store: Store, tiny_model: ModelSpec, tmp_path: Path, form: str, strength: float
) -> None:
    plain = weights(store, at(tiny_model))
    lora = LoRA(str(FORMS[form](tmp_path)), strength)
    changed = weights(store, at(tiny_model, lora))
    difference = changed[f"{NAME}.weight"].double() - plain[f"{NAME}.weight"].double()
    assert (difference - strength * CHANGE).abs().max() <= 1e-5
    assert same(changed, plain, f"{NAME}.weight")


@pytest.mark.parametrize(("decomposed", "left"), [(True, False), (False, False), (True, True)])
def test_lokr_is_a_kronecker_product(
    store: Store, tiny_model: ModelSpec, tmp_path: Path, decomposed: bool, left: bool
) -> None:
    w1_a, w1_b = draw(4, 2, seed=7), draw(2, 8, seed=8)
    w2_a, w2_b = draw(12, 2, seed=9), draw(2, 4, seed=10)
    w1, w2 = w1_a @ w1_b, w2_a @ w2_b
    table = {"w1_a": w1_a, "w1_b": w1_b} if left else {"w1": w1}
    table |= {"w2_a": w2_a, "w2_b": w2_b} if decomposed else {"w2": w2}
    path = "lycoris_layers_1_mlp_gate_proj"
    named = {f"{path}.lokr_{name}": value for name, value in table.items()}
    file = single(tmp_path, {**named, f"{path}.alpha": torch.tensor(5.0)})
    changed = weights(store, at(tiny_model, LoRA(str(file), 2.0)))
    plain = weights(store, at(tiny_model))
    name = "layers.1.mlp.gate_proj.weight"
    scale = 5 / 2 if decomposed or left else 1
    expected = plain[name].double() + 2 * scale * torch.kron(w1.double(), w2.double())
    assert (changed[name] - expected).abs().max() <= 1e-5


def test_a_convolution_is_changed_as_well(
    store: Store, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    up, down = draw(32, 3, 1, seed=3), draw(3, 192, 2, seed=4)
    table = peft("transformer.proj_in_conv", up=up, down=down)
    changed = weights(store, at(tiny_model, LoRA(str(single(tmp_path, table, alpha="6")))))
    plain = weights(store, at(tiny_model))
    change = torch.einsum("or,rik->oik", up[..., 0].double(), down.double()) * 2
    difference = changed["proj_in.1.weight"].double() - plain["proj_in.1.weight"].double()
    assert (difference - change).abs().max() <= 1e-5


def lengths(weight: Tensor, axis: int) -> Tensor:
    """Of the rows (axis 1) or columns (axis 0), kept as a matrix."""
    return weight.double().pow(2).sum(axis, keepdim=True).sqrt()


@pytest.mark.parametrize("strength", [1.0, 0.3])
@pytest.mark.parametrize("form", ["PEFT", "rows", "columns"])
def test_dora_sets_the_lengths_of_the_changed_weight(
    store: Store, tiny_model: ModelSpec, tmp_path: Path, form: str, strength: float
) -> None:
    name = f"{NAME}.weight"
    plain = weights(store, at(tiny_model))[name].double()
    given = draw(32, seed=6).abs() + 0.5
    axis = 0 if form == "columns" else 1
    shaped = given[None] if form == "columns" else given[:, None]
    if form == "PEFT":
        path = folder(tmp_path, peft(PEFT + NAME) | {f"{PEFT}{NAME}.lora_magnitude_vector": given})
    else:
        path = single(tmp_path, kohya(f"lycoris_{FLAT}") | {f"lycoris_{FLAT}.dora_scale": shaped})
    changed = weights(store, at(tiny_model, LoRA(str(path), strength)))[name].double()
    whole = plain + CHANGE
    whole = whole * shaped.double() / lengths(whole, axis)
    assert (changed - (plain + strength * (whole - plain))).abs().max() <= 1e-5


def test_dora_without_a_change_is_the_identity(
    store: Store, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    plain = weights(store, at(tiny_model))
    rows = lengths(plain[f"{NAME}.weight"], 1).float()
    table = kohya(f"lycoris_{FLAT}") | {f"lycoris_{FLAT}.dora_scale": rows}
    table[f"lycoris_{FLAT}.lora_up.weight"] = torch.zeros_like(UP)
    changed = weights(store, at(tiny_model, LoRA(str(single(tmp_path, table)))))
    torch.testing.assert_close(changed, plain, rtol=0, atol=1e-6)


def test_the_encoder_and_the_shared_layer_of_the_tokenizers_are_reached(
    store: Store, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    lyric = "encoder.lyric_encoder.layers.1.self_attn.q_proj"
    table = kohya(f"diffusion_model.{lyric}")
    up, down = draw(32, 2, seed=3), draw(2, 6, seed=4)
    table |= peft("lycoris_tokenizer_quantizer_project_out", up=up, down=down)
    model, plain = at(tiny_model, LoRA(str(single(tmp_path, table)))), at(tiny_model)
    name = lyric.removeprefix("encoder.") + ".weight"
    read, base = (weights(store, m, "condition_encoder") for m in (model, plain))
    assert (read[name] - base[name] - CHANGE).abs().max() <= 1e-5
    for role in ("audio_tokenizer", "audio_detokenizer"):
        read, base = weights(store, model, role), weights(store, plain, role)
        difference = read["quantizer.project_out.weight"] - base["quantizer.project_out.weight"]
        assert (difference - up @ down).abs().max() <= 1e-5
    assert store.key(model, "dit") == store.key(plain, "dit")
    (match,) = adapters.inspect(model)
    assert match.text.startswith("adapter.safetensors: matched 2 of 2 weights")


def test_parts_that_no_adapter_changes_are_shared(
    store: Store, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    model = at(tiny_model, LoRA(str(FORMS["ComfyUI"](tmp_path))))
    for role in ("text_encoder", "condition_encoder", "audio_detokenizer", "vae"):
        assert store.key(model, role) == store.key(at(tiny_model), role)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_base_in_16_bits_is_changed_in_32_and_rounded_once(
    store: Store, tmp_path: Path, precision: str
) -> None:
    model = write_tiny(tmp_path, "comfy_split", lm=False, dtype=torch.bfloat16)
    stored = load_file(model.dit)[f"decoder.{NAME}.weight"]
    lora = LoRA(str(FORMS["PEFT folder"](tmp_path)))
    changed = weights(store, at(model, lora, precision=precision))[f"{NAME}.weight"]
    expected = stored.double() + CHANGE
    if precision == "fp32":
        assert (changed - expected).abs().max() <= 1e-5
    else:
        ulp = 2.0 ** (expected.abs().log2().floor() - 7)
        assert ((changed.double() - expected).abs() <= 0.5001 * ulp).all()


def test_a_scaled_fp8_base_is_multiplied_out_before_it_is_changed(
    store: Store, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    table = load_file(Path(tiny_model.dit) / "model.safetensors")
    layer = f"decoder.{NAME}"
    scale = table[f"{layer}.weight"].abs().max() / 448
    table[f"{layer}.weight"] = (table[f"{layer}.weight"] / scale).to(torch.float8_e4m3fn)
    table[f"{layer}.weight_scale"] = scale
    save_file(table, tmp_path / "fp8.safetensors")
    lora = LoRA(str(FORMS["PEFT folder"](tmp_path)))
    model = at(replace(tiny_model, dit=str(tmp_path / "fp8.safetensors")), lora)
    expected = table[f"{layer}.weight"].double() * scale.double() + CHANGE
    assert (weights(store, model)[f"{NAME}.weight"] - expected).abs().max() <= 1e-5


def test_strength_0_is_no_adapter(store: Store, tiny_model: ModelSpec, tmp_path: Path) -> None:
    model = at(tiny_model, LoRA(str(FORMS["PEFT folder"](tmp_path)), 0.0))
    changed = store.backend(model, "dit").module
    assert store.backend(at(tiny_model), "dit").module is changed
    assert len(store.loaded()) == 1


def three(root: Path) -> list[LoRA]:
    loras = []
    for seed in (11, 12, 13):
        (root / str(seed)).mkdir()
        table = peft(PEFT + NAME, up=draw(32, 4, seed=seed), down=draw(4, 32, seed=seed + 9))
        loras.append(LoRA(str(single(root / str(seed), table)), 0.7))
    return loras


def test_adapters_add_up_in_any_order(store: Store, tiny_model: ModelSpec, tmp_path: Path) -> None:
    one, two, three_ = three(tmp_path)
    orders = ((one, two, three_), (three_, two, one), (two, three_, one))
    modules = [store.backend(at(tiny_model, *order), "dit").module for order in orders]
    assert modules[0] is modules[1] is modules[2]
    plain = weights(store, at(tiny_model))[f"{NAME}.weight"].double()
    sums = sum(
        0.7 * draw(32, 4, seed=s).double() @ draw(4, 32, seed=s + 9).double() for s in (11, 12, 13)
    )
    changed = dict(modules[0].state_dict())[f"{NAME}.weight"]
    assert (changed - (plain + sums)).abs().max() <= 1e-5


def test_dora_acts_where_it_stands(store: Store, tiny_model: ModelSpec, tmp_path: Path) -> None:
    name = f"{NAME}.weight"
    plain = weights(store, at(tiny_model))[name].double()
    (tmp_path / "plain").mkdir()
    added = LoRA(str(single(tmp_path / "plain", kohya(f"lora_unet_{FLAT}"))))
    given = torch.full((32, 1), 0.8)
    table = kohya(f"lycoris_{FLAT}") | {f"lycoris_{FLAT}.dora_scale": given}
    dora = LoRA(str(single(tmp_path, table)))
    last = weights(store, at(tiny_model, added, dora))[name].double()
    first = weights(store, at(tiny_model, dora, added))[name].double()
    twice = plain + 2 * CHANGE
    assert (last - twice * 0.8 / lengths(twice, 1)).abs().max() <= 1e-5
    once = plain + CHANGE
    assert (first - (once * 0.8 / lengths(once, 1) + CHANGE)).abs().max() <= 1e-5


@pytest.mark.slow
def test_a_hundred_rounds_leave_the_weights_as_they_were(
    store: Store, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    path = str(FORMS["PEFT folder"](tmp_path))
    base = at(tiny_model)
    before = {name: value.clone() for name, value in weights(store, base).items()}
    store.release(base)
    for number in range(100):
        model = at(tiny_model, LoRA(path, 0.02 * (number + 1)))
        assert not same(weights(store, model), before)
        store.release(model, keep=(base,) * (number % 2))
        assert same(weights(store, base), before)
        assert len(store.loaded()) == 1
        if number % 3 == 0:
            store.release(base)
    store.release(base)
    assert store.loaded() == []
    assert store._adapters == {}


def test_models_with_and_without_live_together_until_each_is_released(
    store: Store, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    base, model = at(tiny_model), at(tiny_model, LoRA(str(FORMS["ComfyUI"](tmp_path))))
    plain, changed = (store.backend(m, "dit").module for m in (base, model))
    for _ in range(2):
        assert store.backend(base, "dit").module is plain
        assert store.backend(model, "dit").module is changed
    store.release(model, keep=(base,))
    assert [component.module for component in store.loaded()] == [plain]
    changed = store.backend(model, "dit").module
    store.release(base, keep=(model,))
    assert [component.module for component in store.loaded()] == [changed]


def test_another_precision_takes_the_place_of_the_first(
    store: Store, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    lora = LoRA(str(FORMS["ComfyUI"](tmp_path)))
    for precision in ("fp32", "bf16"):
        store.backend(at(tiny_model, lora, precision=precision), "dit")
    assert [component.key.form for component in store.loaded()] == ["cpu bf16 0"]


def test_a_changed_adapter_file_is_read_again_and_leaves_no_old_copy(
    store: Store, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    path = FORMS["PEFT folder"](tmp_path)
    model, name = at(tiny_model, LoRA(str(path))), f"{NAME}.weight"
    plain = weights(store, at(tiny_model))[name]
    once = weights(store, model)[name] - plain
    config = path / "adapter_config.json"
    config.write_text(json.dumps({"lora_alpha": 20 * ALPHA, "r": RANK}))
    again = weights(store, model)[name] - plain
    torch.testing.assert_close(again, 20 * once, rtol=1e-4, atol=1e-5)
    assert len(store.loaded()) == 2


def test_a_song_changes_with_the_adapter_and_comes_back_without(
    engine: Engine, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    base, options = at(tiny_model), DiTSampling(seed=3, steps=2)
    codes = Codes((tuple(range(30)),))
    table = peft(PEFT + NAME, up=8 * UP)
    for name in ("cross_attn.v_proj", "self_attn.v_proj"):
        table |= peft(f"{PEFT}layers.1.{name}", up=8 * UP[:16])
    model = at(tiny_model, LoRA(str(folder(tmp_path, table)), 2.0))

    def song(spec: ModelSpec) -> Tensor:
        return engine.render(spec, PLAN, codes, options).values

    before, changed = song(base), song(model)
    assert (changed - before).abs().max() > 0.05
    assert torch.equal(song(base), before)
    engine.release(model, keep=(base,))
    assert torch.equal(song(base), before)
    engine.release(base)
    assert torch.equal(song(model), changed)
    assert torch.equal(song(base), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_adapters_may_be_stored_in_fewer_bits(
    store: Store, tiny_model: ModelSpec, tmp_path: Path, dtype: torch.dtype
) -> None:
    up, down = UP.to(dtype), DOWN.to(dtype)
    path = single(tmp_path, peft(PEFT + NAME, up=up, down=down), alpha="4")
    name = f"{NAME}.weight"
    changed = weights(store, at(tiny_model, LoRA(str(path))))[name].double()
    difference = changed - weights(store, at(tiny_model))[name].double()
    assert (difference - up.double() @ down.double()).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("PEFT folder", "matched 1 of 1 weights, LoRA, rank 4, alpha 6 (from adapter_config.json)"),
        ("PEFT file, metadata", "alpha 6 (from its metadata), scale 1.5, strength 0.5"),
        ("kohya", "LoRA, rank 4, alpha 6 (of each weight), scale 1.5, strength 0.5"),
        ("LoKr", "LoKr, rank 4, alpha 6 (of each weight), scale 1.5"),
        ("LoKr, full", "LoKr, full rank, alpha 64 (of each weight), scale 1,"),
    ],
)
def test_the_report_says_what_was_found(
    tiny_model: ModelSpec, tmp_path: Path, form: str, words: str
) -> None:
    model = at(tiny_model, LoRA(str(FORMS[form](tmp_path)), 0.5))
    (match,) = adapters.inspect(model)
    assert words in match.text


def test_an_unknown_alpha_is_said(tiny_model: ModelSpec, tmp_path: Path) -> None:
    path = single(tmp_path, peft(PEFT + NAME))
    (match,) = adapters.inspect(at(tiny_model, LoRA(str(path))))
    assert "no alpha anywhere, so alpha/rank is taken for 1, scale 1" in match.text


def test_a_partial_match_warns_with_counts_and_names(
    store: Store, tiny_model: ModelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = peft(PEFT + NAME) | peft(f"{PEFT}layers.9.self_attn.q_proj")
    table |= {f"{PEFT}norm_out.bias": torch.zeros(32)}
    table |= {f"{PEFT}layers.1.mlp.up_proj.lora_A.weight": DOWN}  # without its other half
    with caplog.at_level(logging.WARNING):
        store.backend(at(tiny_model, LoRA(str(folder(tmp_path, table)))), "dit")
    (record,) = caplog.records
    text = record.getMessage()
    assert "matched 1 of 4 weights" in text
    assert "layers.9.self_attn.q_proj.lora_A.weight" in text
    assert "norm_out.bias" in text
    assert "layers.1.mlp.up_proj.lora_A.weight" in text


@pytest.mark.parametrize(
    "table",
    [
        kohya("lora_unet_down_blocks_0_attentions_0_to_q"),
        peft("base_model.model.model.layers.0.self_attn.q_proj"),  # of a language model
        kohya("lora_te_text_model_encoder_layers_0_q_proj"),
        {"lycoris_layers_0_self_attn_q_proj.hada_w1_a": UP},
    ],
)
def test_an_adapter_of_nothing_here_is_refused_by_its_first_keys(
    store: Store, tiny_model: ModelSpec, tmp_path: Path, table: dict[str, Tensor]
) -> None:
    model = at(tiny_model, LoRA(str(single(tmp_path, table))))
    with pytest.raises(BadCheckpoint, match="fits nothing"):
        adapters.inspect(model)
    with pytest.raises(BadCheckpoint, match="fits nothing") as caught:
        store.backend(model, "dit")
    assert any(key in str(caught.value) for key in table)


def test_an_adapter_of_an_xl_model_is_refused_with_both_shapes(
    store: Store, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    table = peft(PEFT + NAME, up=draw(48, 4), down=draw(4, 40))
    model = at(tiny_model, LoRA(str(folder(tmp_path, table))))
    with pytest.raises(BadCheckpoint, match=r"\[48, 40\].*\[32, 32\].*XL and 2B") as caught:
        store.backend(model, "dit")
    assert NAME in str(caught.value)
    assert store.loaded() == []
    xl = write_tiny(tmp_path, "official", xl=True, lm=False)
    assert "matched 1 of 1" in adapters.inspect(replace(model, dit=xl.dit))[0].text


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (peft(NAME, up=draw(32, 3)), r"\[32, 3\] and \[4, 32\] have no rank in common"),
        (kohya(NAME) | {f"{NAME}.dora_scale": torch.ones(31, 1)}, r"\[31, 1\].*\[32, 32\]"),
        (kohya(NAME) | {f"{NAME}.dora_scale": torch.ones(32, 32)}, r"\[32, 32\] for a weight"),
        (peft(NAME, up=draw(32, 0), down=draw(0, 32)), "is empty"),
        (lokr(NAME) | {f"{NAME}.lokr_w1": torch.ones(1)}, "no matrix"),
    ],
)
def test_pieces_that_do_not_fit_together_are_refused(
    tiny_model: ModelSpec, tmp_path: Path, table: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(BadCheckpoint, match=words):
        adapters.inspect(at(tiny_model, LoRA(str(single(tmp_path, table)))))


def test_an_adapter_with_nan_is_refused(
    store: Store, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    table = peft(NAME, up=UP * torch.nan)
    with pytest.raises(BadCheckpoint, match=rf"{NAME}\.lora_B\.weight.*NaN"):
        store.backend(at(tiny_model, LoRA(str(single(tmp_path, table)))), "dit")
    assert store.loaded() == []


def test_pickles_are_refused_unopened(tiny_model: ModelSpec, tmp_path: Path) -> None:
    file = tmp_path / "adapter.pt"
    torch.save(peft(NAME), file)
    with pytest.raises(BadCheckpoint, match=r"pickle.*only safetensors"):
        adapters.inspect(at(tiny_model, LoRA(str(file))))
    place = tmp_path / "peft"
    place.mkdir()
    file.rename(place / "adapter_model.bin")
    with pytest.raises(BadCheckpoint, match=r"adapter_model\.bin.*only safetensors"):
        adapters.inspect(at(tiny_model, LoRA(str(place))))


def test_places_without_an_adapter_are_named(tiny_model: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"gone.*models/loras"):
        adapters.inspect(at(tiny_model, LoRA(str(tmp_path / "gone"))))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(BadCheckpoint, match=r"no adapter.*notes\.txt"):
        adapters.inspect(at(tiny_model, LoRA(str(tmp_path))))


def test_other_kinds_of_peft_are_refused(tiny_model: ModelSpec, tmp_path: Path) -> None:
    path = folder(tmp_path, lokr(PEFT + NAME, alpha=False), peft_type="LOKR")
    with pytest.raises(BadCheckpoint, match="'LOKR'"):
        adapters.inspect(at(tiny_model, LoRA(str(path))))


@pytest.mark.parametrize(
    ("text", "path", "strength"),
    [
        ("style.safetensors", "style.safetensors", 1.0),
        ("loras/style.safetensors:0.8", "loras/style.safetensors", 0.8),
        (r"C:\loras\style.safetensors", r"C:\loras\style.safetensors", 1.0),
        (r"C:\loras\style.safetensors:-1", r"C:\loras\style.safetensors", -1.0),
    ],
)
def test_the_command_line_gives_path_and_strength(text: str, path: str, strength: float) -> None:
    assert adapters.parse(text) == LoRA(path, strength)


def test_a_strength_beyond_its_range_is_refused() -> None:
    for text in ("a:4", "a:nan"):
        with pytest.raises(InvalidRequest, match="strength"):
            adapters.parse(text)
