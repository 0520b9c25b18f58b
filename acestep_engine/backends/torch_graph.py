"""The language model with its step on a CUDA graph: one launch a token in place of a thousand.

The step runs over buffers that never move: ids and numbers are copied in, the positions stand in a
tensor, and attention sees the whole cache under a mask. The same step runs on any device, only that
elsewhere nothing is captured. Dimension key: as in `base`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from .base import Choose, Step
from .torch_base import work
from .torch_lm import TorchLanguageModel, TorchSession

logger = logging.getLogger(__name__)

WARM_UPS = 2  # runs before the capture, in which libraries choose kernels and take memory

Body = Callable[[], Tensor]


def capture(body: Body, device: torch.device) -> Body:
    """`body` as something that can be repeated without Python: its result is the same tensor."""
    if device.type != "cuda":
        out = body()
        return lambda: out.copy_(body())
    here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            body()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads of the process may go on using the device.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = body()
    except RuntimeError:
        torch.cuda.set_stream(here)  # a broken capture leaves torch on the stream of its own
        raise

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


class GraphSession(TorchSession):
    """A session whose recorded step is replayed; where it cannot be, it goes on eagerly."""

    @torch.inference_mode()
    def record(self, choose: Choose) -> Step:
        eager = super().record(choose)
        tape: tuple[Tensor, Tensor, Body] | None = None
        failed = False

        @torch.inference_mode()
        def step(ids_B1: Tensor, uniform_N1: Tensor) -> Tensor:
            nonlocal tape, failed
            if tape is None and not failed:
                tape = self._tape(choose, ids_B1, uniform_N1)
                failed = tape is None
            if tape is None:
                return eager(ids_B1, uniform_N1)
            ids, uniform, replay = tape
            ids.copy_(ids_B1)
            uniform.copy_(uniform_N1)
            self._cache.check(max(self._cache.lengths) + 1)
            drawn_N = replay().clone()
            self._cache.advance()
            return drawn_N

        return step

    def _tape(
        self, choose: Choose, ids_B1: Tensor, uniform_N1: Tensor
    ) -> tuple[Tensor, Tensor, Body] | None:
        """Buffers of the inputs and the captured step over them, or None where that fails.

        Warming up writes the next position of the cache again and again, with the same values.
        """
        ids, uniform = ids_B1.clone(), uniform_N1.clone()

        def body() -> Tensor:
            embeds_BLD = self._module.embed_tokens(ids).to(self._dtype)
            states_BLD = self._module.steady(embeds_BLD, self._cache)
            return choose(states_BLD[:, -1].float(), uniform)

        try:
            return ids, uniform, capture(body, self.device)
        except RuntimeError as error:
            logger.warning(
                "ACE-Step: capturing the step as a CUDA graph failed, so it runs eagerly, which is "
                "slower: %s. Mode 'eager' avoids the attempt.",
                error,
            )
            return None


class GraphLanguageModel(TorchLanguageModel):
    @work
    def open(self, rows: int, capacity: int) -> GraphSession:
        return GraphSession(self.module, self._cache(rows, capacity), self.stream)
