"""The value of an ACESTEP_MODEL wire: a light handle whose life decides the life of the weights.

ComfyUI's own cache keeps or drops the handle. When the last handle of a model is gone, the engine
is told to release what it loaded for it. Nothing here knows files, devices or ComfyUI.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..acestep_engine.types import ModelSpec

Release = Callable[[ModelSpec, tuple[ModelSpec, ...]], None]
"""Told of a model without handles, and of the models that still have some."""

_live: dict[int, weakref.ref[ModelHandle]] = {}
_dropped: deque[ModelSpec] = deque()  # models that lost a handle; finalizers only append
_running: list[None] = []  # one entry for each node at work
_releases: list[Release] = []


class ModelHandle:
    """A model as it travels between nodes. A copy or an unpickled one counts as its own handle."""

    __slots__ = ("__weakref__", "spec")

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        _live[id(self)] = weakref.ref(self)
        weakref.finalize(self, _drop, id(self), spec).atexit = False

    def __reduce__(self) -> tuple[type[ModelHandle], tuple[ModelSpec]]:
        return ModelHandle, (self.spec,)

    def __repr__(self) -> str:
        return f"ModelHandle({self.spec!r})"


def on_last(release: Release) -> None:
    """Call `release` for each model whose last handle is gone."""
    _releases[:] = [release]


@contextmanager
def running() -> Iterator[None]:
    """While a node works, releases wait: a finalizer may run in the middle of anything."""
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()
        _release_dropped()


def _drop(key: int, spec: ModelSpec) -> None:
    _live.pop(key, None)
    _dropped.append(spec)
    _release_dropped()


def _release_dropped() -> None:
    while not _running:
        try:
            spec = _dropped.popleft()
        except IndexError:  # empty, perhaps because another thread was faster
            return
        handles = [ref() for ref in list(_live.values())]
        live = tuple({handle.spec: None for handle in handles if handle is not None})
        if spec not in live:
            for release in _releases:
                release(spec, live)
