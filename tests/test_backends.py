"""Backends over real tiny models: what they do where the memory ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from acestep_engine.engine import Engine
from acestep_engine.errors import OutOfMemory
from acestep_engine.types import ModelSpec
from acestep_engine.weights.layouts import Role


def endless(value: float, width: int) -> Tensor:
    """(1, L, width) of more values than any memory holds, which takes none itself."""
    return torch.tensor(value).expand(1, 5 << 44, width)


IDS = torch.tensor(0).expand(1, 1 << 46)
FEW = torch.zeros(1, 2, 32)
CALLS: dict[str, tuple[Role, Callable[[Any], Tensor]]] = {
    "states": ("text_encoder", lambda part: part.states(IDS)),
    "embed": ("text_encoder", lambda part: part.embed(IDS)),
    "encode": ("condition_encoder", lambda part: part.encode(FEW, FEW, endless(0.1, 64))),
    "tokenize": ("audio_tokenizer", lambda part: part.tokenize(endless(0.1, 64))),
    "prepare": ("dit", lambda part: part.prepare(endless(0.1, 32))),
    "velocity": (
        "dit",
        lambda part: part(endless(0.1, 64), 0.5, endless(0.1, 128), part.prepare(FEW)),
    ),
    "decode": ("vae", lambda part: part.decode(torch.tensor(0.1).expand(1, 64, 1 << 46))),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_lack_of_memory_is_told_as_such(engine: Engine, tiny_model: ModelSpec, call: str) -> None:
    role, use = CALLS[call]
    with pytest.raises(OutOfMemory, match="device cpu ran out of memory"):
        use(engine.store.backend(tiny_model, role))
