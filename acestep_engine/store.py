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
from typing import Any, NamedTuple, cast

import torch

from .backends import mlx_device
from .backends.torch_eager import BUILDERS
from .backends.torch_graph import GraphLanguageModel
from .errors import UnsupportedRuntime
from .host import Host
from .models_torch import packed
from .runtime import Runtime, choose
from .types import LoRA, ModelSpec
from .weights import adapters
from .weights.adapter_files import Adapter, open_adapter, stamps
from .weights.files import Stamp, stamp
from .weights.layouts import Role, Source, locate
from .weights.load import Tensors, fill, read
from .weights.parts import PARTS
from .weights.shapes import config_of

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

PACKED_ROLES: dict[str, tuple[Role, ...]] = {"cpu": ("lm",), "mlx": ("lm", "dit")}
"""The parts whose weights are packed on each kind of device: those whose size is felt."""


class Key(NamedTuple):
    """What a component is made of; `files` and `adapters` as they are now on the disk."""

    role: Role
    prefix: str  # inside the files
    files: tuple[Stamp, ...]
    config: str
    adapters: tuple[tuple[Stamp, float], ...]  # each file with its strength, as they act
    form: str


@dataclass(eq=False)
class Component:
    """A loaded model part; satisfies `host.Resident`."""

    name: Role
    key: Key
    module: Any  # of torch, or of MLX
    nbytes: int
    loras: tuple[LoRA, ...] = ()  # in the order in which they acted


class Store:
    """Loaded components by key; one model may share parts with another."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._components: dict[Key, Component] = {}
        self._runtimes: dict[ModelSpec, Runtime] = {}
        self._adapters: dict[str, Adapter] = {}
        """What each adapter holds, by its path, as it was last read."""

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
        used = {lora.path for other in self._runtimes for lora in other.loras}
        self._adapters = {path: held for path, held in self._adapters.items() if path in used}
        if runtime and runtime.device == "mlx":
            mlx_device.clear_cache()

    def key(self, spec: ModelSpec, role: Role) -> Key:
        """What `role` of `spec` is made of: another value means other weights."""
        return self._key(spec, role, locate(spec, role))

    def loaded(self) -> list[Component]:
        return list(self._components.values())

    def _key(self, spec: ModelSpec, role: Role, source: Source) -> Key:
        for lora in spec.loras:
            known = self._adapters.get(lora.path)
            if lora.strength and (known is None or known.stamps != stamps(lora.path)):
                self._adapters[lora.path] = open_adapter(lora.path)
        worn = self._worn(spec, role)
        files = [(file, w.strength) for w in worn for file in self._adapters[w.path].stamps]
        config = json.dumps(source.config, sort_keys=True)
        form = _form(role, self.runtime(spec))
        return Key(role, source.prefix, tuple(map(stamp, source.files)), config, tuple(files), form)

    def _worn(self, spec: ModelSpec, role: Role) -> tuple[LoRA, ...]:
        """The adapters that change this part of `spec`, as far as they were read."""
        read_ones = ((lora, self._adapters.get(lora.path)) for lora in spec.loras)
        return adapters.acting([(lora, held) for lora, held in read_ones if held], role)

    def _component(self, spec: ModelSpec, role: Role, runtime: Runtime) -> Component:
        source = locate(spec, role)
        key = self._key(spec, role, source)
        component = self._components.get(key)
        if component is None:
            self._make_way(spec, key)
            worn = self._worn(spec, role)
            tensors = self._tensors(spec, source, worn)
            module, nbytes = self._load(role, tensors, runtime)
            component = self._components[key] = Component(role, key, module, nbytes, worn)
        return component

    def _make_way(self, spec: ModelSpec, key: Key) -> None:
        """Drop what `key` replaces: the part as its files were before, or in another form.

        Another form, or other adapters, stay where a model in use needs them. A model of the same
        files as `spec` does not count: it is `spec` under an earlier wish.
        """
        others = [other for other in self._runtimes if _paths(other) != _paths(spec)]
        for component in self.loaded():
            made = component.key
            if made.role != key.role or not _names(made) & _names(key):
                continue
            if _is_stale(made, key) or not any(self._uses(other, component) for other in others):
                self._drop(component)

    def _uses(self, spec: ModelSpec, component: Component) -> bool:
        """Whether `spec` means `component`: by its path for the part, its adapters and its form."""
        path = _path(spec, component.name)
        if not path or not any(_inside(name, path) for name in _names(component.key)):
            return False
        if self._worn(spec, component.name) != component.loras:
            return False
        try:
            return _form(component.name, self.runtime(spec)) == component.key.form
        except UnsupportedRuntime:  # it never ran
            return False

    def _drop(self, component: Component) -> None:
        self.host.release(component)
        del self._components[component.key]

    def _tensors(self, spec: ModelSpec, source: Source, worn: tuple[LoRA, ...]) -> Tensors:
        """The weights of a part with its adapters; tells where one of them fits in part only."""
        tensors = read(source)
        if not worn:
            return tensors
        matches = [adapters.fit(spec, lora, self._adapters[lora.path]) for lora in worn]
        for match in matches:
            first, *_ = match.adapter.roles
            logger.log(
                logging.WARNING if match.unmatched and first == source.role else logging.INFO,
                "ACE-Step: adapter %s",
                match.text,
            )
        return adapters.Merged(tensors, matches)

    def _load(self, role: Role, tensors: Tensors, runtime: Runtime) -> tuple[Any, int]:
        start, source = time.perf_counter(), tensors.source
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
        bits = cast(mlx_load.Bits, _bits(role, runtime)) or None
        module = mlx_load.build(role, config, tensors, DTYPES[runtime.precision], bits)
        return module, mlx_load.nbytes(module)


def _backend_class(role: Role, runtime: Runtime) -> type:
    if runtime.device == "mlx":
        from .backends import mlx

        return mlx.BUILDERS[role][1]
    recorded = role == "lm" and runtime.mode == "graph"
    return GraphLanguageModel if recorded else BUILDERS[role][1]


def _form(role: Role, runtime: Runtime) -> str:
    """How weights are kept: forms do not serve each other."""
    return f"{runtime.device} {runtime.precision} {_bits(role, runtime)}"


def _bits(role: Role, runtime: Runtime) -> int:
    """Of packed weights; 0 where those of this part stay as they are."""
    return runtime.bits if role in PACKED_ROLES.get(runtime.device, ()) else 0


def _names(key: Key) -> set[str]:
    return {name for name, _, _ in key.files}


def _is_stale(made: Key, key: Key) -> bool:
    """Whether files of `made` are no longer as they were, by those of `key`."""
    now = {file[0]: file for file, _ in key.adapters}
    return made[1:4] != key[1:4] or any(now.get(file[0], file) != file for file, _ in made.adapters)


def _paths(spec: ModelSpec) -> tuple[object, ...]:
    return spec.dit, spec.text_encoder, spec.lm, spec.vae, spec.loras


def _path(spec: ModelSpec, role: Role) -> str:
    """Where `spec` has the part, as `locate` spells it."""
    path = getattr(spec, PARTS[role].field)
    return str(Path(path).expanduser()) if path else ""


def _inside(name: str, path: str) -> bool:
    return name == path or name.startswith(path.rstrip("/\\") + os.sep)
