"""What every node tells ComfyUI about itself."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = "STRING,COMBO"  # goes into texts and into lists
SONG = ["ACESTEP_PLAN", "STRING", "STRING", "INT", TEXT, "FLOAT", TEXT, TEXT]
OUTPUTS = {
    "ACEStepLoad": ["ACESTEP_MODEL"],
    "ACEStepLoRA": ["ACESTEP_MODEL", "STRING"],
    "ACEStepSongWriter": SONG,
    "ACEStepLyricFormatter": SONG,
    "ACEStepUnderstand": SONG,
    "ACEStepPlanEdit": SONG,
    "ACEStepScore": ["ACESTEP_CODES", "FLOAT", "STRING"],
    "ACEStepCodesText": ["ACESTEP_CODES", "STRING", "FLOAT"],
    "ACEStepCodesEdit": ["ACESTEP_CODES", "FLOAT"],
    "ACEStepCodesFromAudio": ["ACESTEP_CODES", "FLOAT"],
    "ACEStepSpliceAudio": ["AUDIO"],
    "ACEStepCover": ["ACESTEP_TASK"],
    "ACEStepRepaint": ["ACESTEP_TASK"],
    "ACEStepExtract": ["ACESTEP_TASK", "STRING"],
    "ACEStepLego": ["ACESTEP_TASK"],
    "ACEStepComplete": ["ACESTEP_TASK"],
    "ACEStepCoTPlanner": ["ACESTEP_PLAN", "STRING", "INT", "STRING", "FLOAT"],
    "ACEStepAudioCodeSampler": ["ACESTEP_CODES"],
    "ACEStepDiTSampler": ["LATENT"],
    "ACEStepVAEDecodeTiled": ["AUDIO"],
    "ACEStepVAEEncodeTiled": ["LATENT"],
    "ACEStepToConditioning": ["CONDITIONING", "LATENT"],
    "ACEStepFromConditioning": ["ACESTEP_CODES", "FLOAT"],
    "ACEStepLatentNoiseMask": ["LATENT"],
}


@pytest.fixture
def classes(pack: Any) -> dict[str, Any]:
    extension = asyncio.run(pack.root.comfy_entrypoint())
    nodes = asyncio.run(extension.get_node_list())
    return {node.define_schema().node_id: node for node in nodes}


def test_every_node_is_there_with_its_outputs(classes: dict[str, Any]) -> None:
    found = {
        name: [output.get_io_type() for output in node.define_schema().outputs]
        for name, node in classes.items()
    }
    assert found == OUTPUTS


@pytest.mark.parametrize("name", OUTPUTS)
class TestEveryNode:
    def test_it_explains_itself(self, classes: dict[str, Any], name: str) -> None:
        schema = classes[name].define_schema()
        assert "ACE-Step" in schema.display_name
        assert schema.category.startswith("ACE-Step/")
        assert schema.description
        assert schema.search_aliases
        for entry in (*schema.inputs, *schema.outputs):
            assert entry.tooltip, f"{entry.id} has no tooltip"
        for output in schema.outputs:
            assert output.display_name

    def test_defaults_lie_inside_their_limits(self, classes: dict[str, Any], name: str) -> None:
        for entry in classes[name].define_schema().inputs:
            low, high = getattr(entry, "min", None), getattr(entry, "max", None)
            if low is not None and high is not None:
                assert low <= entry.default <= high, entry.id
            if options := getattr(entry, "options", None):
                assert entry.default in options, entry.id

    def test_required_inputs_come_before_optional_ones(
        self, classes: dict[str, Any], name: str
    ) -> None:
        flags = [bool(entry.optional) for entry in classes[name].define_schema().inputs]
        assert flags == sorted(flags)

    def test_execute_is_short(self, classes: dict[str, Any], name: str) -> None:
        lines = inspect.getsource(inspect.unwrap(classes[name].execute.__func__)).splitlines()
        body = lines[next(i for i, line in enumerate(lines) if line.rstrip().endswith(":")) + 1 :]
        assert len(body) <= 15

    def test_it_has_a_help_page(self, classes: dict[str, Any], name: str) -> None:
        page = ROOT / "nodes" / "web" / "docs" / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        assert text.startswith("# ")
        for entry in classes[name].define_schema().inputs:
            rare = getattr(entry, "advanced", None)
            assert rare or entry.id in ("model", "plan", "latent", "audio") or entry.id in text


def test_no_help_page_is_left_over() -> None:
    pages = {page.stem for page in (ROOT / "nodes" / "web" / "docs").glob("*.md")}
    assert pages == set(OUTPUTS)


def test_the_order_of_the_filters_is_a_widget_that_old_workflows_lack(
    pack: Any, classes: dict[str, Any]
) -> None:
    widgets = pack("nodes.lm_widgets")
    values = {entry.id: entry.default for entry in widgets.sampling_inputs()} | {"seed": 3}
    assert not widgets.sampling_of(values).temperature_last
    assert widgets.sampling_of({**values, "temperature_last": True}).temperature_last
    for node in classes.values():
        names = [entry.id for entry in node.define_schema().inputs]
        assert ("temperature" in names) == (names[-1] == "temperature_last")


def test_the_way_from_noise_to_sound_is_told_by_widgets_that_old_workflows_lack(
    pack: Any, classes: dict[str, Any]
) -> None:
    widgets, types = pack("nodes.solver_widgets"), pack("acestep_engine.types")
    names = [entry.id for entry in widgets.solver_inputs()]
    schema = classes["ACEStepDiTSampler"].define_schema()
    assert [entry.id for entry in schema.inputs][-len(names) :] == names
    values = {entry.id: entry.default for entry in widgets.solver_inputs()}
    assert types.DiTSampling(**widgets.solver_fields({})) == types.DiTSampling()
    assert types.DiTSampling(**widgets.solver_fields(values)) == types.DiTSampling()
    wishes = {"solver": "heun", "guidance_mode": "adg", "retake": 0.2, "retake_seed": 9}
    wavelet = {"dcw": "double", "dcw_scaler": 0.1, "dcw_high": 0.3}
    found = types.DiTSampling(**widgets.solver_fields({**values, **wishes, **wavelet}))
    assert found == types.DiTSampling(**wishes, dcw=types.Wavelet("double", 0.1, 0.3))


def test_every_key_on_offer_is_known_to_the_models(pack: Any) -> None:
    keys = pack("nodes.song_widgets").KEYS
    assert len(keys) == 34
    assert set(keys) <= {key.replace("♯", "#") for key in pack("acestep_engine.lm.metadata").KEYS}


def test_a_module_that_fails_does_not_hide_the_others(
    pack: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    extension = pack("nodes.extension")
    broken = {**extension.NODES, "not_there": ("Ghost",), "plan": ("Missing",)}
    monkeypatch.setattr(extension, "NODES", broken)
    nodes = asyncio.run(extension.AceStepExtension().get_node_list())
    assert len(nodes) == len(OUTPUTS) - 1
    assert len(caplog.records) == 1
    assert "Ghost" in caplog.text
    assert "Missing" in caplog.text
