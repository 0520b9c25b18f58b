"""The store: every loaded component, by what it is made of. Nobody else owns weights.

It knows files and classes, but neither loops nor stages. A component is loaded when first asked
for, placed by the host at each use, and loaded again if it was released meanwhile. Where a file
changed, or its model is wanted in another form, the new component takes the place of the old.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from .backends import mlx_device
from .backends.torch_eager import BUILDERS
from .backends.torch_graph import GraphLanguageModel
from .errors import UnsupportedRuntime
from .host import Host
from .models_torch import packed
from .runtime import Runtime, choose
from .types import ModelSpec
from .weights.files import Stamp, stamp
from .weights.layouts import Role, Source, locate
from .weights.load import Tensors, fill, read
from .weights.parts import PARTS
from .weights.shapes import config_of

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

PACKED_ROLES: dict[str, tuple[Role, ...]] = {"cpu": ("lm",), "mlx": ("lm", "dit")}
"""The parts whose weights are packed on each kind of device: those whose size is felt."""

Key = tuple[Role, str, tuple[Stamp, ...], str, str]
"""Role, prefix inside the files, the files as they are now, config.json, form of the weights."""


@dataclass(eq=False)
class Component:
    """A loaded model part; satisfies `host.Resident`."""

    name: Role
    key: Key
    module: Any  # of torch, or of MLX
    nbytes: int


class Store:
    """Loaded components by key; one model may share parts with another."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._components: dict[Key, Component] = {}
        self._runtimes: dict[ModelSpec, Runtime] = {}

    def runtime(self, spec: ModelSpec) -> Runtime:
        """How `spec` runs on this machine; decided once and logged with its reasons."""
        if spec not in self._runtimes:
            runtime = choose(self.host.device_info(), spec.wish)
            for reason in runtime.reasons:
                logger.info("ACE-Step: %s", reason)
            self._runtimes[spec] = runtime
        return self._runtimes[spec]

    def backend(self, spec: ModelSpec, role: Role, memory_required: int = 0) -> Any:
        """The part `role` of `spec`, placed and ready to run (a Protocol of `backends.base`)."""
        runtime = self.runtime(spec)
        component = self._component(spec, role, runtime)
        outside = "cpu" if runtime.device == "mlx" else runtime.device  # of tensors between parts
        device = self.host.place(component, torch.device(outside), memory_required)
        backend_class = _backend_class(role, runtime)
        return backend_class(component.module, device, DTYPES[runtime.precision])

    def release(self, spec: ModelSpec, keep: tuple[ModelSpec, ...] = ()) -> None:
        """Drop the components of `spec` that no spec in `keep` uses."""
        gone = [
            component
            for component in self.loaded()
            if self._uses(spec, component)
            and not any(self._uses(other, component) for other in keep)
        ]
        while gone:
            self._drop(gone.pop())
        runtime = self._runtimes.pop(spec, None)
        if runtime and runtime.device == "mlx":
            mlx_device.clear_cache()

    def key(self, spec: ModelSpec, role: Role) -> Key:
        """What `role` of `spec` is made of: another value means other weights."""
        return _key(role, locate(spec, role), self.runtime(spec))

    def loaded(self) -> list[Component]:
        return list(self._components.values())

    def _component(self, spec: ModelSpec, role: Role, runtime: Runtime) -> Component:
        source = locate(spec, role)
        key = _key(role, source, runtime)
        component = self._components.get(key)
        if component is None:
            self._make_way(spec, key)
            module, nbytes = self._load(role, source, runtime)
            component = self._components[key] = Component(role, key, module, nbytes)
        return component

    def _make_way(self, spec: ModelSpec, key: Key) -> None:
        """Drop what `key` replaces: the part as its files were before, or in another form.

        Another form stays where a model in use needs it. A model of the same files as `spec`
        does not count: it is `spec` under an earlier wish.
        """
        others = [other for other in self._runtimes if _paths(other) != _paths(spec)]
        for component in self.loaded():
            made = component.key
            if made[0] != key[0] or not _names(made) & _names(key):
                continue
            if made[:-1] != key[:-1] or not any(self._uses(other, component) for other in others):
                self._drop(component)

    def _uses(self, spec: ModelSpec, component: Component) -> bool:
        """Whether `spec` means `component`, by its path for that part and by its form."""
        path = _path(spec, component.name)
        if not path or not any(_inside(name, path) for name in _names(component.key)):
            return False
        try:
            return _form(component.name, self.runtime(spec)) == component.key[-1]
        except UnsupportedRuntime:  # it never ran
            return False

    def _drop(self, component: Component) -> None:
        self.host.release(component)
        del self._components[component.key]

    def _load(self, role: Role, source: Source, runtime: Runtime) -> tuple[Any, int]:
        start = time.perf_counter()
        tensors = read(source)
        config = config_of(role, tensors.shapes, source.config)
        if runtime.device == "mlx":
            module, nbytes = self._load_mlx(role, config, tensors, runtime)
        else:
            module = self._load_torch(role, config, tensors, runtime)
            nbytes = packed.nbytes(module)
        logger.info(
            "ACE-Step: loaded %s from %s in %.1f s", role, source.label, time.perf_counter() - start
        )
        return module, nbytes

    def _load_torch(
        self, role: Role, config: Any, tensors: Tensors, runtime: Runtime
    ) -> torch.nn.Module:
        dtype = DTYPES[runtime.precision]
        model_class, backend_class = BUILDERS[role]
        with torch.device("meta"):
            plain = model_class(config)  # layers of a host may have no weights before the loading
            module = model_class(config, ops=self.host.ops)
        expected = {name: tuple(value.shape) for name, value in plain.state_dict().items()}
        fill(module, tensors, dtype, expected, self.host.check_interrupt)
        backend_class.finish(module, dtype)
        backend_class.pack(module, runtime)
        return module.eval().requires_grad_(False)

    def _load_mlx(
        self, role: Role, config: Any, tensors: Tensors, runtime: Runtime
    ) -> tuple[Any, int]:
        from .backends import mlx_load  # needs an optional package

        self.host.check_interrupt()
        bits = cast(mlx_load.Bits, runtime.bits) if runtime.bits else None
        module = mlx_load.build(role, config, tensors, DTYPES[runtime.precision], bits)
        return module, mlx_load.nbytes(module)


def _backend_class(role: Role, runtime: Runtime) -> type:
    if runtime.device == "mlx":
        from .backends import mlx

        return mlx.BUILDERS[role][1]
    recorded = role == "lm" and runtime.mode == "graph"
    return GraphLanguageModel if recorded else BUILDERS[role][1]


def _key(role: Role, source: Source, runtime: Runtime) -> Key:
    config = json.dumps(source.config, sort_keys=True)
    return role, source.prefix, tuple(map(stamp, source.files)), config, _form(role, runtime)


def _form(role: Role, runtime: Runtime) -> str:
    """How weights are kept: forms do not serve each other."""
    bits = runtime.bits if role in PACKED_ROLES.get(runtime.device, ()) else 0
    return f"{runtime.device} {runtime.precision} {bits}"


def _names(key: Key) -> set[str]:
    return {name for name, _, _ in key[2]}


def _paths(spec: ModelSpec) -> tuple[str, ...]:
    return spec.dit, spec.text_encoder, spec.lm, spec.vae


def _path(spec: ModelSpec, role: Role) -> str:
    """Where `spec` has the part, as `locate` spells it."""
    path = getattr(spec, PARTS[role].field)
    return str(Path(path).expanduser()) if path else ""


def _inside(name: str, path: str) -> bool:
    return name == path or name.startswith(path.rstrip("/\\") + os.sep)
