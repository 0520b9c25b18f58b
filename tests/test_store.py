"""Which copies of the weights stay in memory, and which go."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from acestep_engine.errors import BadCheckpoint, Cancelled
from acestep_engine.host import LocalHost
from acestep_engine.runtime import PrecisionWish, Wish
from acestep_engine.store import Store
from acestep_engine.types import ModelSpec
from acestep_engine.weights.layouts import ROLES


@pytest.fixture
def store() -> Store:
    return Store(LocalHost(show=False))


@pytest.fixture
def model(tiny_model: ModelSpec, tmp_path: Path) -> ModelSpec:
    """A model whose text encoder may be changed on the disk."""
    folder = shutil.copytree(tiny_model.text_encoder, tmp_path / "Qwen3-Embedding-0.6B")
    return replace(tiny_model, text_encoder=str(folder))


def at(model: ModelSpec, precision: PrecisionWish) -> ModelSpec:
    return replace(model, wish=Wish(device="cpu", precision=precision))


def precisions(store: Store) -> list[str]:
    return [component.key[-1] for component in store.loaded()]


def test_another_precision_takes_the_place_of_the_first(
    store: Store, tiny_model: ModelSpec
) -> None:
    for precision in ("fp32", "bf16", "fp32"):
        store.backend(at(tiny_model, precision), "vae")
        assert len(store.loaded()) == 1
    assert precisions(store) == ["cpu fp32 0"]


def test_a_precision_that_another_model_uses_stays(store: Store, tiny_model: ModelSpec) -> None:
    other = replace(at(tiny_model, "fp32"), lm="")
    store.backend(other, "vae")
    store.backend(at(tiny_model, "bf16"), "vae")
    assert precisions(store) == ["cpu fp32 0", "cpu bf16 0"]
    store.release(other, keep=(at(tiny_model, "bf16"),))
    assert precisions(store) == ["cpu bf16 0"]


def test_release_drops_the_precision_that_no_kept_model_uses(
    store: Store, tiny_model: ModelSpec
) -> None:
    before, now = at(tiny_model, "fp32"), at(tiny_model, "bf16")
    store.backend(before, "vae")
    store.release(before, keep=(now,))
    assert store.loaded() == []


def test_a_changed_file_leaves_no_old_copy(store: Store, model: ModelSpec) -> None:
    store.backend(model, "text_encoder")
    (old,) = store.loaded()
    file = Path(model.text_encoder) / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.weight"] *= 2
    save_file(tensors, file)
    store.backend(replace(model, lm=""), "text_encoder")
    (new,) = store.loaded()
    assert new is not old
    assert (new.module.norm.weight == old.module.norm.weight * 2).all()  # type: ignore[union-attr]


def test_a_changed_config_loads_the_part_again(store: Store, model: ModelSpec) -> None:
    store.backend(model, "text_encoder")
    file = Path(model.text_encoder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 77.0}))
    store.backend(model, "text_encoder")
    (component,) = store.loaded()
    assert component.module.config.rope_theta == 77.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", "tiny"),
        ("rms_norm_eps", 0),
        ("rope_theta", [1e6]),
        ("rope_theta", float("nan")),
        ("rope_theta", True),
        ("sliding_window", 12.5),
        ("max_position_embeddings", -1),
        pytest.param("max_position_embeddings", 10**400, id="huge"),
        ("pool_window_size", "5"),
        ("timbre_fix_frame", {}),
        ("fsq_input_levels", 8),
        ("fsq_input_levels", [8, "8"]),
        ("fsq_input_levels", [8, 5]),
    ],
)
def test_a_config_value_of_another_kind_is_named(
    store: Store, tiny_model: ModelSpec, tmp_path: Path, field: str, value: object
) -> None:
    folder = shutil.copytree(tiny_model.dit, tmp_path / "acestep-v15-turbo")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {field: value}))
    with pytest.raises(BadCheckpoint) as caught:
        store.backend(replace(tiny_model, dit=str(folder)), "audio_tokenizer")
    assert str(file) in str(caught.value)
    assert f"'{field}'" in str(caught.value)


def test_a_config_may_leave_a_value_open(store: Store, model: ModelSpec) -> None:
    file = Path(model.text_encoder) / "config.json"
    values = {"sliding_window": None, "rope_parameters": None, "rms_norm_eps": 1e-6}
    file.write_text(json.dumps(values))
    store.backend(model, "text_encoder")


class Impatient(LocalHost):
    """Its user presses stop while the third layer is read."""

    asked = 0

    def check_interrupt(self) -> None:
        self.asked += 1
        if self.asked == 3:
            self.cancel()
        super().check_interrupt()


def test_a_stop_request_ends_the_loading_and_nothing_half_loaded_stays(
    tiny_model: ModelSpec,
) -> None:
    store = Store(Impatient(show=False))
    with pytest.raises(Cancelled):
        store.backend(tiny_model, "dit")
    assert store.loaded() == []
    store.backend(tiny_model, "dit")
    (component,) = store.loaded()
    assert not any(value.is_meta for value in component.module.parameters())


class LateLinear(nn.Linear):
    """A layer that has no weight until it is loaded, as some hosts make them."""

    def __init__(self, inside: int, outside: int, bias: bool = True) -> None:
        nn.Module.__init__(self)
        self.weight = self.bias = None  # pyright: ignore

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
        self.weight = nn.Parameter(state_dict[f"{prefix}weight"], False)
        if (bias := state_dict.get(f"{prefix}bias")) is not None:
            self.bias = nn.Parameter(bias, False)


class LateLayers:
    Linear = LateLinear

    def __getattr__(self, name: str) -> object:
        return getattr(nn, name)


def test_layers_that_a_host_makes_as_they_load_get_the_same_weights(
    store: Store, tiny_model: ModelSpec
) -> None:
    host = LocalHost(show=False)
    host.ops = LateLayers()  # type: ignore[assignment]
    late = Store(host)
    for role in ROLES:
        store.backend(tiny_model, role)
        late.backend(tiny_model, role)
    for plain, made in zip(store.loaded(), late.loaded(), strict=True):
        expected, found = plain.module.state_dict(), made.module.state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(value, found[name]) for name, value in expected.items()), made.name
