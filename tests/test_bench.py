"""Benchmarks run and end in one line of JSON with the promised keys; no figure is asserted."""

from __future__ import annotations

import json
import math

import pytest
import torch

from acestep_engine.bench import dit, gpu, lm, quality, vae
from acestep_engine.bench.measure import bandwidth, interleave, random_model, report
from acestep_engine.cli.main import main
from acestep_engine.config import VAEConfig
from acestep_engine.errors import UnsupportedRuntime
from acestep_engine.models_torch.oobleck import Oobleck


def test_turns_alternate_and_the_first_does_not_count() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = interleave(2, calls)
    assert order == ["a", "b"] * 3
    assert [len(times) for times in seconds.values()] == [2, 2]


def test_the_last_line_of_a_report_is_json() -> None:
    text = report([{"context": 5, "tok_s": 1.25}], {"tok_s": 1.25})
    assert json.loads(text.splitlines()[-1]) == {"tok_s": 1.25}
    assert text.splitlines()[0].split() == ["context", "tok_s"]


def test_random_models_are_whole_and_repeatable() -> None:
    config = VAEConfig(4, 2, channel_multiples=(1,) * 5)
    first, second = (random_model(lambda: Oobleck(config), torch.float32) for _ in range(2))
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert not mine.is_meta
        assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_the_language_model_is_measured_against_its_peer() -> None:
    result = json.loads(lm.run("tiny", "fp32", (20,), 2, peer=True).splitlines()[-1])
    assert set(result) == {
        *("size", "precision", "tok_s", "peer", "peer_tok_s", "ratio", "bandwidth_gb_s"),
        *("bound_tok_s", "bound_share", "growth_3000_over_100", "sampling_share", "batch4_ratio"),
    }
    numbers = [value for value in result.values() if not isinstance(value, str)]
    assert all(math.isfinite(number) and number > 0 for number in numbers)


def test_the_quality_of_equal_scores_is_perfect_and_of_others_by_the_formula() -> None:
    exact = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    assert quality.compare(exact, exact + 5) == (1.0, pytest.approx(0.0, abs=1e-6))
    other = torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 0.0]])
    p, q = exact[1].softmax(0), other[1].softmax(0)
    divergence = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert quality.compare(exact, other) == (0.5, pytest.approx(divergence / 2, rel=1e-5))


def test_the_quality_of_each_precision_is_measured_on_each_prompt() -> None:
    result = json.loads(quality.run("tiny", 1.0).splitlines()[-1])
    assert {(row["precision"], row["prompt"]) for row in result["rows"]} == {
        (precision, prompt) for precision in ("bf16", "int8") for prompt in ("random", "structured")
    }
    for row in result["rows"]:
        assert 0.5 < row["top1"] <= 1
        assert 0 <= row["kl"] < 0.01


@pytest.mark.slow
def test_the_diffusion_transformer_is_measured_against_its_peer() -> None:
    result = json.loads(dit.run("tiny", "fp32", 1.0, 8, 2, peer=True).splitlines()[-1])
    assert set(result) == {
        *("seconds", "steps", "precision", "s_per_render", "peer", "peer_s_per_render", "ratio"),
        *("peak_rss_mb", "peer_peak_rss_mb"),
    }
    numbers = [value for value in result.values() if not isinstance(value, str)]
    assert all(math.isfinite(number) and number > 0 for number in numbers)


def test_steps_can_be_left_out_and_the_peer_too(capsys: pytest.CaptureFixture[str]) -> None:
    command = "bench dit --size tiny --seconds 1 --steps 2 --turns 1 --precision fp32 --no-peer"
    assert main(command.split()) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["steps"], result["peer_s_per_render"]) == (2, None)


def test_the_bandwidth_is_that_of_a_computer() -> None:
    assert 1e8 < bandwidth(1 << 24, 2) < 1e13


def test_a_peak_counts_what_is_allocated_and_freed() -> None:
    assert 60 < vae.peak_of(lambda: torch.ones(16 << 20)) < 200


@pytest.mark.slow
def test_the_check_of_a_gpu_runs_through_on_a_cpu_at_tiny_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the processes; tiny work gains by no more
    assert main(["bench", "gpu", "--device", "cpu", "--size", "tiny"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result) == {*gpu.PARTS, "failed", "seconds"}
    assert result["failed"] == []
    assert result["parity"]["fp32"]["same"]
    assert result["parity"]["states_gap_fp32"] == 0
    for size in ("0.6B", "1.7B"):
        rates = result[f"lm_{size}"]
        for mode in ("eager", "graph"):
            assert rates[f"{mode}_tok_s"] / rates["bound_tok_s"] == pytest.approx(
                rates[f"{mode}_share"]
            )
    assert result["dit_2B"]["s_per_render"] > 0
    assert {"tile_256", "tile_512", "one_shot"} < set(result["vae"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device nothing fails")
def test_a_part_that_fails_is_reported_in_its_own_words() -> None:
    result = gpu.apart("parity", "cuda", "tiny")
    assert set(result) == {"error"}
    assert "cuda" in result["error"].lower()
    with pytest.raises(UnsupportedRuntime, match="--device cpu --size tiny"):
        gpu.run("cuda", "full")


def test_a_part_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIMIT", 0.01)
    assert gpu.apart("machine", "cpu", "tiny") == {"error": "not done after 0.01 s"}
