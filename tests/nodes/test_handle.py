"""The life of a model handle decides the life of the weights."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def handle(pack: Any) -> Any:
    return pack("nodes.handle")


@pytest.fixture
def released(handle: Any) -> Iterator[list[Any]]:
    """The models that were released, in order; the engine's own release is put back afterwards."""
    gc.collect()  # handles that other tests left behind
    calls: list[Any] = []
    before = list(handle._releases)
    handle.on_last(lambda spec, live: calls.append(spec))
    yield calls
    handle._releases[:] = before


@pytest.fixture
def spec(pack: Any) -> Any:
    return pack("acestep_engine.types").ModelSpec(dit="a.safetensors")


def test_a_model_is_released_with_its_last_handle(
    handle: Any, released: list[Any], spec: Any
) -> None:
    first, second = handle.ModelHandle(spec), handle.ModelHandle(spec)
    del first
    gc.collect()
    assert released == []
    del second
    gc.collect()
    assert released == [spec]


def test_a_pickled_handle_comes_back_and_counts(
    handle: Any, released: list[Any], spec: Any
) -> None:
    original = handle.ModelHandle(spec)
    twins = [pickle.loads(pickle.dumps(original)), copy.deepcopy(original)]
    assert [twin.spec for twin in twins] == [spec, spec]
    del original
    gc.collect()
    assert released == []
    twins.clear()
    gc.collect()
    assert released == [spec]


def test_a_release_waits_for_the_running_node(handle: Any, released: list[Any], spec: Any) -> None:
    model = handle.ModelHandle(spec)
    with handle.running():
        del model
        gc.collect()
        assert released == []
    assert released == [spec]


def test_a_model_that_comes_back_meanwhile_is_kept(
    handle: Any, released: list[Any], spec: Any
) -> None:
    model = handle.ModelHandle(spec)
    with handle.running():
        del model
        gc.collect()
        again = handle.ModelHandle(spec)
    assert released == []
    assert again.spec == spec


def test_the_release_is_told_which_models_live_on(handle: Any, pack: Any, spec: Any) -> None:
    other = handle.ModelHandle(pack("acestep_engine.types").ModelSpec(dit="b.safetensors"))
    told: list[Any] = []
    before = list(handle._releases)
    handle.on_last(lambda spec, live: told.append((spec, live)))
    try:
        model = handle.ModelHandle(spec)
        del model
        gc.collect()
    finally:
        handle._releases[:] = before
    assert told[0][0] == spec
    assert other.spec in told[0][1]
