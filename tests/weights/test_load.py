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


UP_PROJ = "decoder.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "change",
    [
        {f"{UP_PROJ}.scale_weight": torch.ones(1)},  # of a weight that is not in 8 bits
        {f"{UP_PROJ}.comfy_quant": torch.zeros(4, dtype=torch.uint8)},
        {f"{UP_PROJ}.weight": torch.zeros(48, 32, dtype=torch.int8)},
        {  # a scale for each block
            f"{UP_PROJ}.weight": torch.zeros(48, 32).to(torch.float8_e4m3fn),
            f"{UP_PROJ}.weight_scale": torch.zeros(48, 1, dtype=torch.uint8),
        },
        {
            f"{UP_PROJ}.weight": torch.zeros(48, 32).to(torch.float8_e4m3fn),
            f"{UP_PROJ}.weight_scale": torch.ones(48, 2),
        },
    ],
)
def test_packed_weights_are_refused_part_by_part(
    tiny_model: ModelSpec, tmp_path: Path, change: dict[str, Tensor]
) -> None:
    spec = altered(tiny_model, tmp_path / "packed.safetensors", change)
    with pytest.raises(BadCheckpoint, match=r"packed.*quantised.*bf16"):
        tensors_of(spec)
    assert len(tensors_of(spec, "condition_encoder"))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("naming", ["scale_weight", "weight_scale", "none"])
@pytest.mark.parametrize("shape", [(), (1,), (48,), (48, 1)])
def test_scaled_8_bit_floats_are_multiplied_out(
    tiny_model: ModelSpec, tmp_path: Path, kind: torch.dtype, naming: str, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(1)
    scale = torch.rand(shape, generator=generator) / 100 + 0.01
    stored = torch.randn(48, 32, generator=generator).to(kind)
    change: dict[str, Tensor | None] = {f"{UP_PROJ}.weight": stored}
    expected = stored.double()
    if naming == "none":
        change["decoder.norm_out.weight"] = torch.ones(32)
    else:
        change[f"{UP_PROJ}.{naming}"] = scale
        expected *= scale.double().reshape(-1, 1)
        old = naming == "scale_weight"
        change[f"{UP_PROJ}.{'scale_input' if old else 'input_scale'}"] = torch.ones(())
        change["scaled_fp8" if old else f"{UP_PROJ}.comfy_quant"] = (
            torch.zeros(0, dtype=kind) if old else torch.zeros(9, dtype=torch.uint8)
        )
    spec = altered(tiny_model, tmp_path / "fp8.safetensors", change)
    tensors = tensors_of(spec)
    plain = tensors_of(tiny_model)
    assert tensors.shapes == plain.shapes
    name = "layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(tensors[name].double(), expected, rtol=1e-6, atol=0)
    assert fill(tree(tensors.shapes), tensors, torch.bfloat16).fits


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
