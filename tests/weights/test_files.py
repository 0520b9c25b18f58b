"""Damaged, foreign and half-downloaded files are named with what is wrong and what to do."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from acestep_engine.errors import BadCheckpoint
from acestep_engine.weights.files import read_config, read_header, weight_files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}, path)
    return path


def raw_file(path: Path, table: object, data: bytes = b"") -> Path:
    header = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_header_tells_shape_and_type_of_every_tensor(file: Path) -> None:
    header = read_header(file)
    assert {key: (entry.shape, entry.dtype) for key, entry in header.items()} == {
        "a": ((3, 5), "F32"),
        "b": ((7,), "BF16"),
    }


def test_a_download_that_stopped_in_the_tensors_shows_how_far_it_came(file: Path) -> None:
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(BadCheckpoint, match=rf"cut short: {whole - 20} of {whole} bytes.*again"):
        read_header(file)


def test_a_download_that_stopped_in_the_header_is_named(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(BadCheckpoint, match=r"stops inside its header.*40 bytes"):
        read_header(file)


def test_bytes_after_the_last_tensor_are_damage(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"junk")
    with pytest.raises(BadCheckpoint, match="4 bytes after its last tensor"):
        read_header(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "only 0 bytes"),
        (b"GGUF\x03\x00\x00\x00" + bytes(80), "GGUF"),
        (b"<!DOCTYPE html><html>no</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "LFS pointer"),
        (b"\x80\x02}q\x00." + bytes(80), "pickle"),
        (bytes(200), "header is missing"),
    ],
)
def test_a_foreign_file_is_named_for_what_it_is(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_a_renamed_pickle_is_never_opened_as_one(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(BadCheckpoint, match="PyTorch pickle"):
        read_header(path)


@pytest.mark.parametrize(
    "table",
    [
        [1, 2],
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": ["x", "y"]}},
        {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}},
    ],
)
def test_a_header_of_another_form_is_an_error_of_ours(tmp_path: Path, table: object) -> None:
    with pytest.raises(BadCheckpoint, match=r"odd\.safetensors"):
        read_header(raw_file(tmp_path / "odd.safetensors", table, bytes(8)))


def test_a_tensor_that_does_not_fill_its_place_is_named(tmp_path: Path) -> None:
    table = {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}
    with pytest.raises(BadCheckpoint, match=r"'a' \[3\] F32 needs 12 bytes.* gives it 8"):
        read_header(raw_file(tmp_path / "odd.safetensors", table, bytes(8)))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.ones(1)}, tmp_path / names[0])
    with pytest.raises(BadCheckpoint, match=f"lacks 1 of 2 shards: {names[1]}"):
        weight_files(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}'])
def test_an_unreadable_shard_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(BadCheckpoint, match="shard index"):
        weight_files(tmp_path)


def test_a_shard_index_cannot_lead_outside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    index = {"weight_map": {"a": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match="outside its own folder"):
        weight_files(folder)


@pytest.mark.parametrize("content", ["{nope", "[1]"])
def test_a_damaged_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        read_config(tmp_path)
