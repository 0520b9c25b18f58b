"""ComfyUI as a host: layers, device, and which errors pass the border."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture
def host(pack: Any) -> Any:
    return pack("nodes.host")


def failing(host: Any, error: BaseException) -> Callable[[], None]:
    def execute() -> None:
        raise error

    return host.bordered(execute)


def test_a_readable_error_reaches_the_node_word_for_word(host: Any, pack: Any) -> None:
    error = pack("acestep_engine.errors").InvalidRequest("bpm is 5, but must be 30 to 300.")
    with pytest.raises(RuntimeError) as caught:
        failing(host, error)()
    assert type(caught.value) is RuntimeError
    assert str(caught.value) == "bpm is 5, but must be 30 to 300."
    assert caught.value.__cause__ is error


def test_the_stop_request_passes_untouched(host: Any) -> None:
    import comfy.model_management as management  # pyright: ignore[reportMissingImports]

    with pytest.raises(management.InterruptProcessingException):
        failing(host, management.InterruptProcessingException())()


def test_the_out_of_memory_error_of_torch_passes_untouched(host: Any) -> None:
    error = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        failing(host, error)()
    assert caught.value is error


def test_our_own_out_of_memory_error_makes_room(
    host: Any, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.model_management as management  # pyright: ignore[reportMissingImports]

    calls: list[str] = []
    monkeypatch.setattr(management, "unload_all_models", lambda: calls.append("unload"))
    with pytest.raises(RuntimeError, match="needs 5 GiB"):
        failing(host, pack("acestep_engine.errors").OutOfMemory("It needs 5 GiB."))()
    assert calls == ["unload"]


def test_progress_and_checks_raise_the_stop_request(host: Any) -> None:
    import comfy.model_management as management  # pyright: ignore[reportMissingImports]

    comfy_host = host.ComfyHost()
    bar = comfy_host.progress("Render", 8)
    bar.update(1)
    for act in (comfy_host.check_interrupt, lambda: bar.update(2)):
        management.interrupt_current_processing(True)
        with pytest.raises(management.InterruptProcessingException):
            act()
    management.interrupt_current_processing(False)
    bar.update(8)
    bar.close()


def test_layers_come_from_comfyui_and_a_missing_one_from_torch(host: Any) -> None:
    import comfy.ops  # pyright: ignore[reportMissingImports]

    ops = host.ComfyHost().ops
    assert isinstance(ops.Linear(2, 3), comfy.ops.disable_weight_init.Linear)
    assert isinstance(ops.RMSNorm(4), torch.nn.RMSNorm)


def test_a_token_table_answers_where_the_ids_are(host: Any) -> None:
    table = host.ComfyHost().ops.Embedding(5, 2)
    ids = torch.tensor([[4, 0]])
    table.weight.data = torch.arange(10.0).reshape(5, 2)
    assert table(ids).tolist() == [[[8.0, 9.0], [0.0, 1.0]]]
    assert not hasattr(table, "comfy_cast_weights")


def test_the_device_is_the_one_comfyui_runs_on(host: Any) -> None:
    import comfy.model_management as management  # pyright: ignore[reportMissingImports]

    info = host.ComfyHost().device_info()
    assert info.kind == management.get_torch_device().type
    assert info.kind in info.available
    assert "cpu" in info.available
