"""The adapters to native types inside a real ComfyUI server, with ComfyUI's own model classes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from acestep_engine.dit import conditions
from acestep_engine.engine import Engine
from acestep_engine.lm.tokenizer import load_tokenizer
from acestep_engine.runtime import Wish
from acestep_engine.types import Metadata, ModelSpec, Plan
from acestep_engine.weights.tiny import write_tiny
from tests.nodes.test_comfyui import COMFYUI, NAME, ROOT, Server, samples_of, twin_of

pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.slow,
    pytest.mark.skipif(not COMFYUI, reason="COMFYUI_DIR names no ComfyUI folder"),
]

Prompt = dict[str, Any]
TINY = Path(__file__).with_name("tiny_native.py")
LOADERS = {"UNETLoader": "TinyUNETLoader", "DualCLIPLoader": "TinyDualCLIPLoader"}
HEAD_DIM = 128  # of every Qwen3 in ComfyUI's ACE-Step 1.5
SECONDS = 6.0


def reshaped(path: Path, where: str, sizes: dict[str, tuple[int, ...]]) -> None:
    """Random tensors of other sizes for the layers of `path` whose name contains `where`."""
    generator = torch.Generator().manual_seed(5)
    table = load_file(path)
    for name in table:
        shape = sizes.get(name.removesuffix(".weight").rpartition(".")[2])
        if shape and where in name:
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            table[name] = 1 + values * 0.1 if len(shape) == 1 else values
    path.unlink()
    save_file(table, path)


def write_models(folder: Path) -> ModelSpec:
    """A tiny model in the sizes that ComfyUI's classes do not let anybody choose."""
    spec = write_tiny(folder, "comfy_split")
    attention = {"q_proj": (128, 32), "k_proj": (64, 32), "v_proj": (64, 32), "o_proj": (32, 128)}
    mlp = {"gate_proj": (96, 32), "up_proj": (96, 32), "down_proj": (32, 96)}
    reshaped(Path(spec.dit), "tokenizer.", {**attention, **mlp})  # and the detokenizer
    for path in (spec.text_encoder, spec.lm):
        wide, narrow = (2 * HEAD_DIM, 16), (HEAD_DIM, 16)
        sizes = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow, "o_proj": (16, 2 * HEAD_DIM)}
        reshaped(Path(path), "", {**sizes, "q_norm": (HEAD_DIM,), "k_norm": (HEAD_DIM,)})
    return spec


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("comfyui_native")


@pytest.fixture(scope="module")
def spec(base: Path) -> ModelSpec:
    return write_models(base / "models")


@pytest.fixture(scope="module")
def server(base: Path, spec: ModelSpec) -> Iterator[Server]:
    nodes = base / "custom_nodes"
    nodes.mkdir()
    (nodes / NAME).symlink_to(ROOT, target_is_directory=True)
    (nodes / TINY.name).symlink_to(TINY)
    server = Server(base)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def tiny_twin(workflow: str) -> Prompt:
    """A shared workflow, six seconds long, with the tiny loaders in the place of ComfyUI's."""
    prompt = twin_of(workflow)
    for node in prompt.values():
        node["class_type"] = LOADERS.get(node["class_type"], node["class_type"])
        values = node["inputs"]
        for name in ("duration", "value"):
            if isinstance(values.get(name), int | float):
                values[name] = SECONDS
    return prompt


def only(prompt: Prompt, kind: str) -> str:
    (number,) = (number for number, node in prompt.items() if node["class_type"] == kind)
    return number


def saved_latent(prompt: Prompt, source: list[Any], name: str) -> Prompt:
    """`prompt` with nothing behind the latent of `source` but a file of it."""
    prompt = {n: node for n, node in prompt.items() if node["class_type"] != "SaveAudio"}
    inputs = {"samples": source, "filename_prefix": name}
    return {**prompt, "90": {"class_type": "SaveLatent", "inputs": inputs}}


def run_latent(server: Server, prompt: Prompt, source: list[Any], name: str) -> torch.Tensor:
    run = server.run(saved_latent(prompt, source, name))
    assert run.status == "success", run.error
    (path,) = (server.base / "output").glob(f"{name}*.latent")
    return load_file(path)["latent_tensor"]


@pytest.fixture
def prompt() -> Prompt:
    return tiny_twin("plan_codes_native_sampler")


def test_our_plan_and_codes_lead_the_native_sampler(server: Server, prompt: Prompt) -> None:
    run = server.run(prompt)
    assert run.status == "success", run.error
    assert samples_of(server, run) == SECONDS * 48_000


def test_native_codes_are_played_by_our_sampler(server: Server) -> None:
    prompt = tiny_twin("native_codes_our_sampler")
    prompt["91"] = {
        "class_type": "ACEStepCodesText",
        "inputs": {
            "text": "",
            "notation": "numbers",
            "codes": [only(prompt, "ACEStepFromConditioning"), 0],
        },
    }
    prompt["92"] = {"class_type": "PreviewAny", "inputs": {"source": ["91", 1]}}
    run = server.run(prompt)
    assert run.status == "success", run.error
    assert samples_of(server, run) == SECONDS * 48_000
    codes = json.loads(f"[{run.outputs['92']['text'][0]}]")
    assert len(codes) == 30
    assert len(set(codes)) > 5
    assert all(0 <= code < 64_000 for code in codes)


def fixed(prompt: Prompt, songs: list[list[int]]) -> Prompt:
    """The first workflow without a language model: a plan as written, and `songs` as codes."""
    prompt = copy.deepcopy(prompt)
    plan, codes = (only(prompt, f"ACEStep{kind}") for kind in ("CoTPlanner", "AudioCodeSampler"))
    prompt[plan]["inputs"].update(think=False, caption="calm piano", lyrics="la la la", bpm=90)
    text = "\n\n".join(",".join(map(str, song)) for song in songs)
    prompt[codes] = {
        "class_type": "ACEStepCodesText",
        "inputs": {"text": text, "notation": "numbers"},
    }
    return prompt


SONG = [(7919 * number) % 64_000 for number in range(30)]


def test_the_native_model_understands_what_our_condition_encoder_understands(
    server: Server, prompt: Prompt, spec: ModelSpec, engine: Engine
) -> None:
    prompt[only(prompt, "ACEStepLoad")]["inputs"]["precision"] = "fp32"
    run = server.run(fixed(prompt, [SONG]))
    assert run.status == "success", run.error
    seen = load_file(server.base / "output" / "conditions.safetensors")

    song = Plan("calm piano", "la la la", Metadata(bpm=90, language="en"), SECONDS)
    spec, backend = replace(spec, wish=Wish(precision="fp32")), engine.store.backend
    reader = backend(spec, "text_encoder")
    words = conditions.read(reader, load_tokenizer().encode, song, "cover")
    quiet_NC = torch.zeros(750, 64)
    canvas = conditions.paint(backend(spec, "audio_detokenizer"), SONG, None, quiet_NC)
    ours = conditions.build(backend(spec, "condition_encoder"), words, canvas, quiet_NC)

    lyrics = words.lyric_BLD.shape[1]  # then the timbre, whose silence each side makes by itself
    native, known = seen["encoder_hidden_states"], ours.encoder_BLD
    assert native.shape == known.shape
    torch.testing.assert_close(native[:, :lyrics], known[:, :lyrics], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        native[:, lyrics + 1 :], known[:, lyrics + 1 :], rtol=1e-4, atol=1e-4
    )
    hints = seen["context_latents"]
    torch.testing.assert_close(hints, ours.context_BTC[:, : hints.shape[1]], rtol=1e-4, atol=1e-4)


def test_songs_of_a_batch_follow_codes_of_their_own(server: Server, prompt: Prompt) -> None:
    for songs in ([SONG, SONG[::-1]], [SONG], [SONG[::-1]]):
        assert server.run(fixed(prompt, songs)).status == "success"
        seen = load_file(server.base / "output" / "conditions.safetensors")["context_latents"]
        if len(songs) == 2:
            both = seen
        else:
            alone = both[:1] if songs[0] == SONG else both[1:]
            torch.testing.assert_close(seen, alone, rtol=1e-5, atol=1e-5)
    assert not torch.equal(both[0], both[1])


def test_a_timbre_reaches_the_native_model_in_place_of_codes(
    server: Server, prompt: Prompt
) -> None:
    prompt = fixed(prompt, [SONG])
    links = prompt[only(prompt, "ACEStepToConditioning")]["inputs"]
    silence = {"duration": 2.0, "sample_rate": 48_000, "channels": 2}
    prompt["20"] = {"class_type": "EmptyAudio", "inputs": silence}
    encode = {"model": links["model"], "audio": ["20", 0], "tile": 0.0}
    prompt["21"] = {"class_type": "ACEStepVAEEncodeTiled", "inputs": encode}
    del links["codes"]
    seen = []
    for timbre in ({}, {"timbre": ["21", 0]}):
        links.update(timbre)
        run = server.run(prompt)
        assert run.status == "success", run.error
        seen.append(load_file(server.base / "output" / "conditions.safetensors"))
    free, led = (each["context_latents"] for each in seen)
    assert not torch.equal(free, led)


def test_outside_the_mask_the_native_sampler_keeps_the_latent(
    server: Server, prompt: Prompt
) -> None:
    prompt = fixed(prompt, [SONG])
    sampler = only(prompt, "KSampler")
    before = run_latent(server, prompt, [sampler, 0], "before")
    prompt["30"] = {
        "class_type": "ACEStepLatentNoiseMask",
        "inputs": {"latent": [sampler, 0], "regions": "2-4", "soft_edge": 0.2},
    }
    prompt["31"] = copy.deepcopy(prompt[sampler])
    prompt["31"]["inputs"].update(latent_image=["30", 0], seed=7, cfg=2.0)
    after = run_latent(server, prompt, ["31", 0], "after")
    assert after.shape == before.shape == (1, 64, 150)
    change = (after - before).abs()[0].amax(dim=0)
    assert change[:50].max() < 1e-6  # rounding of the last Euler step
    assert change[100:].max() < 1e-6
    assert change[55:95].min() > 0.1
    assert 0 < change[50] < change[55]
