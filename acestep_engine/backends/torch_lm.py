"""The language model in eager torch: sessions over a static cache, and scores of chosen rows.

It knows neither files nor residency, and neither grammar nor sampling. Dimension key: as in `base`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models_torch.layers import rotary_table
from ..models_torch.qwen3 import KVCache, Qwen3Model, Span
from ..runtime import Runtime
from .base import Choose, Rows, Step
from .torch_base import Backend, work

SHARED_PREFIX = 16  # tokens from which a common beginning of prompts is worth a pass of its own


class TorchSession:
    """Rows of tokens over one static cache; a row may be longer than another."""

    def __init__(self, module: Qwen3Model, cache: KVCache, dtype: torch.dtype) -> None:
        """`dtype`: of the states, which may be wider than the cache."""
        self._module, self._cache, self._dtype = module, cache, dtype
        self.device = cache.keys.device

    @work
    def feed(self, ids: Sequence[Sequence[int]] | Tensor) -> Tensor:
        if isinstance(ids, Tensor):
            return self.read(ids)[:, -1]
        fresh = max(self._cache.lengths) == 0
        states_BD = self._start(ids) if fresh else self._append(ids, self._cache)
        return states_BD.float()

    @work
    def read(self, ids_BL: Tensor) -> Tensor:
        return self._run(ids_BL, self._cache, None).float()

    def record(self, choose: Choose) -> Step:
        return lambda ids_B1, uniform_N1: choose(self.feed(ids_B1), uniform_N1)

    def _start(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Fill an empty cache: equal prompts once, and the beginning common to all of them once."""
        prompts = list(dict.fromkeys(tuple(row) for row in ids))
        part = self._cache.first(len(prompts))
        shared = common_prefix(prompts)
        if len(prompts) > 1 and shared >= SHARED_PREFIX:
            single = self._cache.first(1)
            self._append([prompts[0][:shared]], single)
            part.spread(single, [0] * len(prompts))
            states_BD = self._append([prompt[shared:] for prompt in prompts], part)
        else:
            states_BD = self._append(prompts, part)
        index = [prompts.index(tuple(row)) for row in ids]
        self._cache.spread(part, index)
        return states_BD[index]

    def _append(self, ids: Sequence[Sequence[int]], cache: KVCache) -> Tensor:
        """Feed ragged rows; the state after the last token of each, (B, D)."""
        counts = [len(row) for row in ids]
        ids_BL = torch.zeros(len(ids), max(counts), dtype=torch.int64)
        for row, tokens in zip(ids_BL, ids, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        states_BLD = self._run(ids_BL, cache, counts)
        return states_BLD[range(len(ids)), [count - 1 for count in counts]]

    def _run(self, ids_BL: Tensor, cache: KVCache, counts: list[int] | None) -> Tensor:
        embeds_BLD = self._module.embed_tokens(ids_BL.to(cache.keys.device))
        return self._module(embeds_BLD.to(self._dtype), cache, counts)


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all prompts begin with, leaving each at least one of its own."""
    limit = min(len(prompt) for prompt in prompts) - 1
    for place, column in zip(range(limit), zip(*prompts, strict=False), strict=False):
        if len(set(column)) > 1:
            return place
    return limit


class TorchLanguageModel(Backend[Qwen3Model]):
    @staticmethod
    def finish(module: Qwen3Model, dtype: torch.dtype) -> None:
        module.fuse()

    @staticmethod
    def pack(module: Qwen3Model, runtime: Runtime) -> None:
        if runtime.device == "cpu":
            module.pack(runtime.bits)

    @property
    def stream(self) -> torch.dtype:
        """Precision of the states between the layers."""
        return torch.float32 if self.module.bits else self.dtype

    @work
    def open(self, rows: int, capacity: int) -> TorchSession:
        return TorchSession(self.module, self._cache(rows, capacity), self.stream)

    def _cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache(self.module.config, rows, capacity, self.device, self.dtype, self.stream)

    @work
    def logits(self, hidden_BD: Tensor, rows: Rows) -> Tensor:
        """The product runs in the precision of the work, its result is float32.

        A slice of rows is a view of the head, packed once where that is faster; a vector of ids
        copies them at every call.
        """
        if isinstance(rows, slice) and (head := self.module.head(rows)):
            return head(hidden_BD.to(self.stream)).float()
        table = self.module.embed_tokens.weight
        head_VD = table[rows if isinstance(rows, slice) else rows.to(table.device)]
        return F.linear(self._in(hidden_BD), self._in(head_VD)).float()

    def cache_bytes(self, rows: int, capacity: int) -> int:
        return KVCache.nbytes(self.module.config, rows, capacity, self.dtype)

    @work
    def rows_agree(self, rows: int, unit: int, head: slice) -> bool:
        """Tried out on the first layer and `head`: a kernel may depend on the number of rows."""
        config = self.module.config
        generator = torch.Generator().manual_seed(0)
        x_BLD = torch.randn(rows, 1, config.hidden_size, generator=generator)
        x_BLD = x_BLD.to(self.device, self.stream)
        start = torch.zeros(1, device=self.device)
        span = Span(rotary_table(start, config, self.stream), causal=True)

        def tried(x_BLD: Tensor) -> tuple[Tensor, Tensor]:
            return self.module.layers[0](x_BLD, span, None), self.logits(x_BLD[:, 0], head)

        alone = [torch.cat(parts) for parts in zip(*map(tried, x_BLD.split(unit)), strict=True)]
        return all(map(torch.equal, tried(x_BLD), alone))
