"""The pack inside a real ComfyUI server, on tiny models: COMFYUI_DIR says where ComfyUI lies.

COMFYUI_PYTHON names the interpreter that has ComfyUI's own requirements, if it is not this one.
"""

from __future__ import annotations

import asyncio
import copy
import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from acestep_engine.audio import save
from acestep_engine.types import Audio
from acestep_engine.weights.tiny import write_tiny

COMFYUI = os.environ.get("COMFYUI_DIR", "")
PYTHON = os.environ.get("COMFYUI_PYTHON", sys.executable)
pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.slow,
    pytest.mark.skipif(not COMFYUI, reason="COMFYUI_DIR names no ComfyUI folder"),
]

ROOT = Path(__file__).resolve().parents[2]
NAME = "acestep-engine"  # folder name of the pack inside custom_nodes
LOAD, PLAN, CODES, DIT, DECODE = "1", "2", "4", "5", "6"  # nodes of the workflow
NODES = (
    *("Load", "CoTPlanner", "AudioCodeSampler", "DiTSampler", "VAEDecodeTiled", "VAEEncodeTiled"),
    *("SongWriter", "LyricFormatter", "Understand", "Score", "PlanEdit", "CodesText"),
    *("ToConditioning", "FromConditioning", "LatentNoiseMask"),
    *("Cover", "Repaint", "Extract", "Lego", "Complete", "SpliceAudio"),
    *("LoRA", "CodesEdit", "CodesFromAudio"),
)
WORKFLOWS = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
LM_WIDTH = 256  # wide enough that its memory shows (222 MB) and a token takes a while
MIB = 1 << 20


@dataclass
class Run:
    """What one prompt did: how it ended, and the nodes that ran."""

    status: str = ""
    error: dict[str, Any] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    stop_seconds: float | None = None  # from the interrupt to its event


class Server:
    """One headless ComfyUI with a folder of its own."""

    def __init__(self, base: Path) -> None:
        import psutil

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base, self.url = base, f"http://127.0.0.1:{port}"
        self.log = base / "server.log"
        command = [PYTHON, "-u", "main.py", "--cpu", "--port", str(port), "--disable-auto-launch"]
        command += ["--base-directory", str(base), "--database-url", "sqlite:///:memory:"]
        command += ["--disable-api-nodes"]
        quiet = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=COMFYUI, stdout=log, stderr=log, env={**os.environ, **quiet}
            )
        self._memory = psutil.Process(self.process.pid).memory_info

    def wait(self, seconds: float = 180.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/system_stats")
                return
            except OSError:
                time.sleep(0.2)
        pytest.fail(f"the server did not start:\n{self.log.read_text(errors='replace')[-3000:]}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def memory(self) -> float:
        """Resident memory in MiB."""
        return self._memory().rss / MIB

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read()

    def json(self, path: str) -> Any:
        return json.loads(self.get(path))

    def post(self, path: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def run(self, prompt: dict[str, Any], stop_in: str | None = None) -> Run:
        """Run `prompt` to its end; with `stop_in`, interrupt at that node's first progress."""
        return asyncio.run(asyncio.wait_for(self._run(prompt, stop_in), 300))

    async def _run(self, prompt: dict[str, Any], stop_in: str | None) -> Run:
        import aiohttp

        run, stopped = Run(), None
        client = f"test-{time.monotonic_ns()}"
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{self.url}/ws?clientId={client}", max_msg_size=0) as stream,
        ):
            body = {"prompt": prompt, "client_id": client}
            number = (await asyncio.to_thread(self.post, "/prompt", body))["prompt_id"]
            async for message in stream:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    continue
                event = message.json()
                kind, data = event["type"], event.get("data") or {}
                if data.get("prompt_id") != number:
                    continue
                if kind == "progress" and data["node"] == stop_in and stopped is None:
                    stopped = time.monotonic()
                    await asyncio.to_thread(self.post, "/interrupt", {"prompt_id": number})
                if kind == "execution_interrupted" and stopped is not None:
                    run.stop_seconds = time.monotonic() - stopped
                if _note(run, kind, data):
                    return run
        raise AssertionError("the server closed the connection")


def _note(run: Run, kind: str, data: dict[str, Any]) -> bool:
    """Write an event down; whether it was the last one."""
    if kind == "execution_cached":
        run.cached = list(data["nodes"])
    elif kind == "executing":
        if data["node"] is None:
            return True
        run.ran.append(data["node"])
    elif kind == "executed":
        run.outputs[data["node"]] = data["output"] or {}  # None of one that was cached
    elif kind in ("execution_success", "execution_error", "execution_interrupted"):
        run.status, run.error = kind.removeprefix("execution_"), data
    return False


def widen_lm(path: Path) -> None:
    """Replace the tiny language model by a random one of LM_WIDTH."""
    generator = torch.Generator().manual_seed(0)
    wide = {}
    for name, tensor in load_file(path).items():
        kind = name.split(".")[-2]
        shape = list(tensor.shape)
        if kind.endswith("layernorm") or name.endswith("model.norm.weight"):
            shape = [LM_WIDTH]
        elif kind in ("o_proj", "down_proj"):
            shape[0] = LM_WIDTH
        elif tensor.ndim == 2:
            shape[1] = LM_WIDTH
        norm = tensor.ndim == 1
        wide[name] = torch.ones(shape) if norm else torch.randn(shape, generator=generator) * 0.05
    path.unlink()
    save_file(wide, path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("comfyui")
    write_tiny(base / "models", "comfy_split")
    widen_lm(base / "models" / "text_encoders" / "qwen_1.7b_ace15.safetensors")
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / NAME).symlink_to(ROOT, target_is_directory=True)
    server = Server(base)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def twin_of(workflow: str) -> dict[str, Any]:
    """A shared workflow in API format, with answers in words kept short."""
    twin = Path(__file__).with_name(f"{workflow}_api.json")
    prompt = json.loads(twin.read_text(encoding="utf-8"))
    for node in prompt.values():
        if "max_tokens" in node["inputs"]:
            node["inputs"]["max_tokens"] = 700
    return prompt


@pytest.fixture
def prompt() -> dict[str, Any]:
    """The first workflow, six seconds long."""
    prompt = twin_of("text_to_song")
    prompt[PLAN]["inputs"]["duration"] = 6.0
    return prompt


def without_lm(prompt: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The workflow without plan and codes, so that the stages behind them come at once."""
    prompt = copy.deepcopy(prompt)
    prompt[PLAN]["inputs"].update(think=False, duration=seconds)
    del prompt[DIT]["inputs"]["codes"], prompt[CODES]
    prompt[DIT]["inputs"]["steps"] = 2
    return prompt


def free(server: Server) -> None:
    server.post("/free", {"unload_models": True, "free_memory": True})


def test_every_node_is_listed(server: Server) -> None:
    for name in NODES:
        info = server.json(f"/object_info/ACEStep{name}")[f"ACEStep{name}"]
        assert info["python_module"] == f"custom_nodes.{NAME}"
        assert info["category"].startswith("ACE-Step/")


def test_template_and_help_are_served(server: Server) -> None:
    assert sorted(server.json("/api/workflow_templates")[NAME]) == WORKFLOWS
    for name in WORKFLOWS:
        assert server.json(f"/api/workflow_templates/{NAME}/{name}.json")["nodes"]
    for name in NODES:
        page = server.get(f"/extensions/{NAME}/docs/ACEStep{name}.md")
        assert page.startswith(b"# ")


def samples_of(server: Server, run: Run) -> int:
    """Samples of the FLAC file that a run saved, checked to be stereo at 48 kHz."""
    import av

    ((saved,),) = [output["audio"] for output in run.outputs.values() if "audio" in output]
    query = "&".join(f"{key}={saved[key]}" for key in ("filename", "subfolder", "type"))
    with av.open(io.BytesIO(server.get(f"/view?{query}"))) as container:
        stream = container.streams.audio[0]
        assert (stream.codec_context.name, stream.rate, stream.channels) == ("flac", 48_000, 2)
        return sum(frame.samples for frame in container.decode(stream))


def test_the_workflow_makes_a_flac_of_the_asked_length(
    server: Server, prompt: dict[str, Any]
) -> None:
    run = server.run(prompt)
    assert run.status == "success", run.error
    assert samples_of(server, run) == 6 * 48_000
    assert run.outputs["3"]["text"][0].startswith("bpm:")


def test_an_idea_becomes_a_song(server: Server) -> None:
    prompt = twin_of("write_plan_song")
    (edit,) = (node for node in prompt.values() if node["class_type"] == "ACEStepPlanEdit")
    edit["inputs"]["duration"] = 6.0
    run = server.run(prompt)
    assert run.status == "success", run.error
    assert samples_of(server, run) == 6 * 48_000
    texts = [output["text"][0] for output in run.outputs.values() if "text" in output]
    assert len(texts) == 2
    assert all(texts)


def test_a_song_is_understood_and_made_anew(server: Server) -> None:
    generator = torch.Generator().manual_seed(1)
    noise = Audio(torch.rand(1, 2, 5 * 48_000, generator=generator) - 0.5)
    save(noise, server.base / "input" / "song.flac")
    run = server.run(twin_of("understand_song"))
    assert run.status == "success", run.error
    assert samples_of(server, run) == 5 * 48_000
    texts = [output["text"][0] for output in run.outputs.values() if "text" in output]
    assert len(texts) == 2
    assert all(texts)


@pytest.mark.parametrize(
    ("workflow", "seconds", "files"),
    [
        ("cover_song", 6, 1),
        ("repaint_song", 6, 1),
        ("extract_stems", 6, 4),
        ("lego_track", 6, 1),
        ("complete_track", 6, 1),
        ("remix_two_songs", 6, 1),
    ],
)
def test_a_recording_becomes_a_song_by_each_task(
    server: Server, workflow: str, seconds: int, files: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    noise = Audio(torch.rand(1, 2, seconds * 48_000, generator=generator) - 0.5)
    save(noise, server.base / "input" / "song.flac")
    prompt = twin_of(workflow)
    for node in prompt.values():
        if node["class_type"] == "ACEStepLoad":
            node["inputs"]["dit"] = "acestep_v1.5_turbo.safetensors"  # tiny; family says base
        if node["class_type"] == "ACEStepDiTSampler":
            node["inputs"]["steps"] = 2
    run = server.run(prompt)
    assert run.status == "success", run.error
    (saved,) = [output["audio"] for output in run.outputs.values() if "audio" in output]
    assert len(saved) == files
    if files == 1:
        assert samples_of(server, run) == seconds * 48_000


def test_values_of_a_written_song_go_into_the_lists_of_other_nodes(
    server: Server, prompt: dict[str, Any]
) -> None:
    written = twin_of("write_plan_song")
    (number,) = (n for n, node in written.items() if node["class_type"] == "ACEStepSongWriter")
    prompt["30"] = written[number]
    outputs = ("caption", "lyrics", "bpm", "keyscale", "duration", "language", "timesignature")
    links = {name: ["30", place] for place, name in enumerate(outputs, 1) if name != "duration"}
    prompt[PLAN]["inputs"].update(links)
    run = server.run(prompt)
    assert run.status == "success", run.error


def test_a_new_dit_seed_runs_nothing_before_the_dit(server: Server, prompt: dict[str, Any]) -> None:
    assert server.run(prompt).status == "success"
    prompt[DIT]["inputs"]["seed"] += 1
    run = server.run(prompt)
    assert run.status == "success"
    assert run.ran == [DIT, DECODE, "7"]
    assert {LOAD, PLAN, CODES} <= set(run.cached)


def test_a_sound_can_lend_its_timbre(server: Server, prompt: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    save(Audio(torch.rand(1, 2, 44_100, generator=generator) - 0.5), server.base / "input/t.flac")
    prompt["20"] = {"class_type": "LoadAudio", "inputs": {"audio": "t.flac"}}
    links = {"model": [LOAD, 0], "audio": ["20", 0], "tile": 0.0}
    prompt["21"] = {"class_type": "ACEStepVAEEncodeTiled", "inputs": links}
    prompt[DIT]["inputs"]["timbre"] = ["21", 0]
    assert server.run(prompt).status == "success"


@pytest.mark.parametrize("node", [PLAN, CODES, DIT, DECODE])
def test_the_stop_button_acts_within_half_a_second(
    server: Server, prompt: dict[str, Any], node: str
) -> None:
    prompt[PLAN]["inputs"]["seed"] = 7  # not cached, and long enough to be met at work
    prompt[PLAN]["inputs"]["duration"] = 120.0
    if node in (DIT, DECODE):
        prompt = without_lm(prompt, 240.0)
    run = server.run(prompt, stop_in=node)
    assert run.status == "interrupted"
    assert run.error["node_id"] == node
    assert run.stop_seconds is not None
    assert run.stop_seconds < 0.5


def test_the_stop_button_acts_while_words_are_written(server: Server) -> None:
    prompt = twin_of("write_plan_song")
    (number,) = (n for n, node in prompt.items() if node["class_type"] == "ACEStepSongWriter")
    prompt[number]["inputs"].update(seed=7, max_tokens=3500)
    run = server.run(prompt, stop_in=number)
    assert (run.status, run.error["node_id"]) == ("interrupted", number)
    assert run.stop_seconds is not None
    assert run.stop_seconds < 0.5


def test_a_missing_file_is_explained_on_the_node(server: Server, prompt: dict[str, Any]) -> None:
    prompt[LOAD]["inputs"]["vae"] = "gone.safetensors"
    run = server.run(prompt)
    assert run.status == "error"
    assert run.error["node_id"] == LOAD
    message = run.error["exception_message"]
    for words in ("VAE", "gone.safetensors", "models/vae", "Hugging Face"):
        assert words in message
    assert run.error["exception_type"] == "RuntimeError"


def test_free_brings_the_memory_back_and_the_next_run_works(
    server: Server, prompt: dict[str, Any]
) -> None:
    weights = 217_204 * LM_WIDTH * 4 / MIB
    prompt[LOAD]["inputs"]["precision"] = "fp32"
    assert server.run(prompt).status == "success"
    loaded = server.memory()
    free(server)
    end = time.monotonic() + 20
    while time.monotonic() < end and server.memory() > loaded - 0.9 * weights:
        time.sleep(0.2)
    assert server.memory() <= loaded - 0.9 * weights
    run = server.run(prompt)
    assert run.status == "success"
    assert {LOAD, PLAN, CODES, DIT, DECODE} <= set(run.ran)
    assert server.memory() <= loaded + 0.5 * weights
