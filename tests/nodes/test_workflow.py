"""The shared workflows, and the twin of each in API format that the host tests run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
WORKFLOWS = sorted((HERE.parents[1] / "workflows").glob("*.json"))
FILES = ("dit", "text_encoder", "lm", "vae")  # the twin names tiny files instead
NOTES = ("MarkdownNote",)
BUTTONS = ("AUDIO_UI", "AUDIOUPLOAD")  # players and buttons, which hold no value
CONTROL = ("fixed", "increment", "decrement", "randomize")


@pytest.fixture(scope="module", params=WORKFLOWS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def graph(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def twin(path: Path) -> dict[str, Any]:
    return json.loads((HERE / f"{path.stem}_api.json").read_text(encoding="utf-8"))


def widget_values(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each widget; a seed is followed by its control, which no run sees."""
    values = iter(node["widgets_values"])
    for entry in node["inputs"]:
        if "widget" in entry and entry["type"] not in BUTTONS:
            yield entry["widget"]["name"], next(values)
            if entry["name"] == "seed":
                assert next(values) in CONTROL


def as_prompt(graph: dict[str, Any]) -> dict[str, Any]:
    """The graph in API format."""
    sources = {link[0]: [str(link[1]), link[2]] for link in graph["links"]}
    prompt = {}
    for node in graph["nodes"]:
        if node["type"] not in NOTES:
            links = {e["name"]: sources[e["link"]] for e in node["inputs"] if e["link"] is not None}
            inputs = {**dict(widget_values(node)), **links}
            prompt[str(node["id"])] = {"inputs": inputs, "class_type": node["type"]}
    return prompt


def without_files(prompt: dict[str, Any]) -> dict[str, Any]:
    return {
        number: {
            "class_type": node["class_type"],
            "inputs": {k: v for k, v in node["inputs"].items() if k not in FILES},
        }
        for number, node in prompt.items()
    }


def test_workflow_and_twin_are_the_same_but_for_the_files(
    graph: dict[str, Any], twin: dict[str, Any]
) -> None:
    assert without_files(as_prompt(graph)) == without_files(twin)


def test_every_model_in_use_can_be_downloaded(graph: dict[str, Any]) -> None:
    loader = next(node for node in graph["nodes"] if node["type"] == "ACEStepLoad")
    models = loader["properties"]["models"]
    values = dict(widget_values(loader))
    assert {model["name"] for model in models} == {values[part] for part in FILES}
    for model in models:
        assert model["url"].startswith("https://huggingface.co/")
        assert model["url"].endswith("/" + model["name"])
    folders = {model["name"]: model["directory"] for model in models}
    assert folders[values["dit"]] == "diffusion_models"
    assert folders[values["lm"]] == folders[values["text_encoder"]] == "text_encoders"
    assert folders[values["vae"]] == "vae"


def test_the_song_ends_in_a_flac_file(graph: dict[str, Any]) -> None:
    ends = [node["type"] for node in graph["nodes"] if not node["outputs"]]
    assert sorted(ends) == ["MarkdownNote", "SaveAudio"]


def test_nodes_do_not_overlap(graph: dict[str, Any]) -> None:
    title = 30  # pixels of the title bar above a node
    boxes = [
        (x, y - title, x + width, y + height)
        for node in graph["nodes"]
        for (x, y), (width, height) in [(node["pos"], node["size"])]
    ]
    for number, a in enumerate(boxes):
        for b in boxes[number + 1 :]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_widgets_stand_in_the_order_of_the_schemas(pack: Any, graph: dict[str, Any]) -> None:
    extension = asyncio.run(pack.root.comfy_entrypoint())
    schemas = [node.define_schema() for node in asyncio.run(extension.get_node_list())]
    by_id = {schema.node_id: schema for schema in schemas}
    for node in graph["nodes"]:
        if schema := by_id.get(node["type"]):
            widgets = [entry.id for entry in schema.inputs if hasattr(entry, "socketless")]
            assert [name for name, _ in widget_values(node)] == widgets
            sockets = {e["name"] for e in node["inputs"] if "widget" not in e}
            assert sockets == {e.id for e in schema.inputs if not hasattr(e, "socketless")}
            assert [e["type"] for e in node["outputs"]] == [
                output.get_io_type() for output in schema.outputs
            ]
