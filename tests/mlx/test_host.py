"""Hosts leave a module of MLX where it is, also beside modules of torch that they move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import torch

from acestep_engine.host import LocalHost


@dataclass(eq=False)
class Part:
    name: str
    module: Any
    nbytes: int


def test_a_module_of_mlx_is_left_in_place(monkeypatch) -> None:
    host, cpu, card = LocalHost(show=False), torch.device("cpu"), torch.device("meta")
    monkeypatch.setattr(host, "free_memory", lambda device: 0)  # so that others have to leave
    stays = Part("vae", nn.Linear(2, 3), 36)
    moves = Part("lm", torch.nn.Linear(2, 3), 36)
    assert host.place(stays, cpu, 100) == cpu
    assert host.place(moves, card, 100) == card
    assert moves.module.weight.device.type == "meta"
    assert stays.module.weight.shape == (3, 2)
    host.release(stays)
