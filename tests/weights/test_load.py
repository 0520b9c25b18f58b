"""A model is filled exactly, lazily and strictly, or told what does not fit."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from acestep_engine.backends.torch_eager import BUILDERS
from acestep_engine.errors import BadCheckpoint
from acestep_engine.types import ModelSpec
from acestep_engine.weights.layouts import ROLES, Role, locate
from acestep_engine.weights.load import Tensors, compare, fill, read
from acestep_engine.weights.shapes import config_of
from acestep_engine.weights.tiny import write_tiny


def tree(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """A module on the meta device with parameters of these names and shapes."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta")))
    return root


def tensors_of(spec: ModelSpec, role: Role = "dit") -> Tensors:
    return read(locate(spec, role))


def altered(spec: ModelSpec, path: Path, change: Mapping[str, Tensor | None]) -> ModelSpec:
    """A copy of the DiT file at `path` with tensors changed, added or (None) left out."""
    table: dict[str, Tensor | None] = dict(load_file(Path(spec.dit) / "model.safetensors"))
    table |= change
    save_file({name: value for name, value in table.items() if value is not None}, path)
    return ModelSpec(dit=str(path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("role", ["dit", "condition_encoder", "vae"])
def test_every_tensor_arrives_in_its_place(
    tiny_model: ModelSpec, role: Role, dtype: torch.dtype
) -> None:
    tensors = tensors_of(tiny_model, role)
    module = tree(tensors.shapes)
    report = fill(module, tensors, dtype)
    assert report.fits
    assert report.expected == len(tensors)
    for name, value in module.state_dict().items():
        assert torch.equal(value, tensors[name].to(dtype)), name


@pytest.mark.parametrize("xl", [False, True])
@pytest.mark.parametrize("role", ROLES)
def test_the_models_of_this_package_fit_the_checkpoints(
    tmp_path: Path, role: Role, xl: bool
) -> None:
    source = locate(write_tiny(tmp_path, "comfy_aio", xl=xl), role)
    tensors = read(source)
    with torch.device("meta"):
        module = BUILDERS[role][0](config_of(role, tensors.shapes, source.config))
    assert fill(module, tensors, torch.float32).fits
    assert not [name for name, value in module.named_parameters() if value.is_meta]


def test_layers_with_a_loader_of_their_own_are_asked(tiny_model: ModelSpec) -> None:
    class Late(nn.Linear):
        """A layer that has no weight until it is loaded, as some hosts make them."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.weight = self.bias = None  # pyright: ignore

        def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *_: object):
            self.weight = nn.Parameter(state_dict[f"{prefix}weight"], False)

    tensors = tensors_of(tiny_model, "condition_encoder")
    module = tree({n: s for n, s in tensors.shapes.items() if not n.startswith("text_projector")})
    module.add_module("text_projector", Late())
    fill(module, tensors, torch.float32, expected=tensors.shapes)
    assert torch.equal(module.text_projector.weight, tensors["text_projector.weight"])  # pyright: ignore


def test_the_report_names_file_and_tensors_and_the_cure(
    tiny_model: ModelSpec, tmp_path: Path
) -> None:
    shapes = tensors_of(tiny_model).shapes
    spec = altered(
        tiny_model,
        tmp_path / "odd_turbo.safetensors",
        {
            "decoder.layers.0.mlp.gate_proj.weight": None,
            "decoder.layers.1.mlp.gate_proj.weight": None,
            "decoder.surprise.weight": torch.ones(2),
            "stray": torch.ones(2),
            "decoder.norm_out.weight": torch.ones(31),
        },
    )
    with pytest.raises(BadCheckpoint) as caught:
        fill(tree(shapes), tensors_of(spec), torch.float32)
    text = str(caught.value)
    assert "odd_turbo.safetensors does not fit the diffusion transformer (DiT)" in text
    assert f"which has {len(shapes)} tensors" in text
    assert "2 missing (layers.0.mlp.gate_proj.weight, layers.1.mlp.gate_proj.weight)" in text
    assert "2 unexpected" in text
    assert "surprise.weight" in text
    assert "stray" in text
    assert "1 misshapen (norm_out.weight is [31] instead of [32])" in text
    assert "acestep-v15-turbo/ from ACE-Step/Ace-Step1.5" in text
    assert "models/diffusion_models" in text


def test_only_the_first_names_of_many_are_shown(tiny_model: ModelSpec) -> None:
    tensors = tensors_of(tiny_model)
    report = compare(tensors, {f"other.{i}": (1,) for i in range(9)})
    assert "9 missing (other.0, other.1, other.2, ...)" in report.text()


def test_a_report_reads_no_tensor_and_leaves_the_model_alone(tiny_model: ModelSpec) -> None:
    tensors = tensors_of(tiny_model)
    module = tree({**tensors.shapes, "extra.weight": (1,)})
    with pytest.raises(BadCheckpoint, match=r"1 missing \(extra\.weight\)"):
        fill(module, tensors, torch.float32)
    assert all(value.is_meta for value in module.parameters())


@pytest.mark.parametrize(
    ("value", "words"),
    [(torch.zeros(32), "norm_out.weight is all zeros"), (torch.full((32,), torch.nan), "has NaN")],
)
def test_values_that_no_training_leaves_are_refused(
    tiny_model: ModelSpec, tmp_path: Path, value: Tensor, words: str
) -> None:
    change = {"decoder.norm_out.weight": value}
    tensors = tensors_of(altered(tiny_model, tmp_path / "x.safetensors", change))
    with pytest.raises(BadCheckpoint, match=rf"1 unsound \(norm_out\.weight .*{words[-6:]}"):
        fill(tree(tensors.shapes), tensors, torch.float32)


def test_quantised_files_are_refused_part_by_part(tiny_model: ModelSpec, tmp_path: Path) -> None:
    path = tmp_path / "fp8_scaled.safetensors"
    change = {"decoder.layers.0.mlp.up_proj.scale_weight": torch.ones(1)}
    spec = altered(tiny_model, path, change)
    with pytest.raises(BadCheckpoint, match=r"fp8_scaled.*quantised.*bf16"):
        tensors_of(spec)
    assert len(tensors_of(spec, "condition_encoder"))


def test_buffers_that_no_file_fills_are_a_fault_of_ours(tiny_model: ModelSpec) -> None:
    tensors = tensors_of(tiny_model)
    module = tree(tensors.shapes)
    module.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(AssertionError, match="table"):
        fill(module, tensors, torch.float32)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_one_role_of_a_large_file_costs_only_its_own_tensors(
    tiny_models: dict[str, ModelSpec], tmp_path: Path
) -> None:
    import resource

    source = Path(tiny_models["comfy_aio"].vae).read_bytes()
    length = struct.unpack("<Q", source[:8])[0]
    header, data = json.loads(source[8 : 8 + length]), source[8 + length :]
    huge = 4 << 30  # bytes of a DiT tensor that is a hole in the file
    name = "model.diffusion_model.decoder.huge"
    header[name] = {"dtype": "U8", "shape": [huge], "data_offsets": [len(data), len(data) + huge]}
    raw = json.dumps(header).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw + data)
        stream.truncate(8 + len(raw) + len(data) + huge)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensors = tensors_of(ModelSpec(vae=str(path)), "vae")
    module = tree(tensors.shapes)
    fill(module, tensors, torch.float32)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 * 1024  # KiB
