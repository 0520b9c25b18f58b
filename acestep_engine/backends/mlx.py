"""The MLX backend: each Protocol of `base` over a module of `models_mlx`.

Torch tensors on the CPU come in and go out; between them everything is MLX. Each call evaluates
what it made before it returns, because a lazy array can be evaluated only in the thread that made
it. It knows neither files nor loops. Dimension key: as in `base`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidRequest, OutOfMemory, lacks_memory
from ..models_mlx.dit import DiT, Prepared
from ..models_mlx.encoders import ConditionEncoder
from ..models_mlx.fsq import AudioDetokenizer, AudioTokenizer
from ..models_mlx.layers import rotary_from
from ..models_mlx.oobleck import Oobleck
from ..models_mlx.qwen3 import KVCache, Qwen3Model, Span
from ..models_spec import codebook_size
from .base import Choose, Rows, Step
from .torch_lm import SHARED_PREFIX, common_prefix

Model = TypeVar("Model", bound=nn.Module)

DTYPES = {torch.float32: mx.float32, torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}

CACHE_LIMIT = 1 << 30  # bytes of freed memory that MLX may keep while the VAE works
WINDOWS = 4  # of the VAE, after which it gives back even those


@contextmanager
def memory_errors() -> Iterator[None]:
    """MLX's ways to say that memory ran out, as OutOfMemory."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        mx.clear_cache()
        raise OutOfMemory(
            "MLX ran out of memory. Close other programs, choose precision int8 or int4, or ask "
            f"for a shorter song. ({error})"
        ) from error


def _array(x: Tensor) -> mx.array:
    return mx.array(x.cpu())


def _tensor(x: mx.array) -> Tensor:
    """Evaluated, float32 unless it holds integers, in memory of its own."""
    if mx.issubdtype(x.dtype, mx.floating):
        x = x.astype(mx.float32)
    return torch.from_numpy(np.array(x))


class _Backend(Generic[Model]):
    @staticmethod
    def finish(module: Any, dtype: torch.dtype) -> None:
        """Prepare a module whose weights have just been loaded; parts may become wider."""

    def __init__(self, module: Model, device: torch.device | str, dtype: torch.dtype) -> None:
        """`device`: where the tensors outside are; MLX itself uses the one it chose."""
        self.module = module
        self.device = torch.device(device)
        self.dtype = DTYPES[dtype]

    def _in(self, x: Tensor) -> mx.array:
        return _array(x).astype(self.dtype)


class MLXSession:
    """Rows of tokens over one static cache; a row may be longer than another."""

    def __init__(self, module: Qwen3Model, cache: KVCache, dtype: mx.Dtype) -> None:
        self._module, self._cache, self._dtype = module, cache, dtype

    @memory_errors()
    def feed(self, ids: Sequence[Sequence[int]] | Tensor) -> Tensor:
        if isinstance(ids, Tensor):
            states_BD = self._run(_array(ids), self._cache, None)[:, -1]
        elif max(self._cache.lengths) == 0:
            states_BD = self._start(ids)
        else:
            states_BD = self._append(ids, self._cache)
        mx.eval(states_BD, self._cache.keys, self._cache.values)
        return _tensor(states_BD)

    @memory_errors()
    def read(self, ids_BL: Tensor) -> Tensor:
        states_BLD = self._run(_array(ids_BL), self._cache, None)
        mx.eval(states_BLD, self._cache.keys, self._cache.values)
        return _tensor(states_BLD)

    def record(self, choose: Choose) -> Step:
        return lambda ids_B1, uniform_N1: choose(self.feed(ids_B1), uniform_N1)

    def _start(self, ids: Sequence[Sequence[int]]) -> mx.array:
        """Fill an empty cache: equal prompts once, and the beginning common to all of them once."""
        prompts = list(dict.fromkeys(tuple(row) for row in ids))
        part = self._small(len(prompts), max(map(len, prompts)))
        shared = common_prefix(prompts)
        if len(prompts) > 1 and shared >= SHARED_PREFIX:
            single = self._small(1, shared)
            self._append([prompts[0][:shared]], single)
            part.spread(single, [0] * len(prompts))
            states_BD = self._append([prompt[shared:] for prompt in prompts], part)
        else:
            states_BD = self._append(prompts, part)
        index = [prompts.index(tuple(row)) for row in ids]
        self._cache.spread(part, index)
        return states_BD[mx.array(index)]

    def _small(self, rows: int, capacity: int) -> KVCache:
        return KVCache(self._cache.config, rows, capacity, self._dtype)

    def _append(self, ids: Sequence[Sequence[int]], cache: KVCache) -> mx.array:
        """Feed ragged rows; the state after the last token of each, (B, D)."""
        counts = [len(row) for row in ids]
        ids_BL = np.zeros((len(ids), max(counts)), dtype=np.int32)
        for row, tokens in zip(ids_BL, ids, strict=True):
            row[: len(tokens)] = tokens
        states_BLD = self._run(mx.array(ids_BL), cache, counts)
        return states_BLD[mx.arange(len(ids)), mx.array(counts) - 1]

    def _run(self, ids_BL: mx.array, cache: KVCache, counts: list[int] | None) -> mx.array:
        embeds_BLD = self._module.embed_tokens(ids_BL).astype(self._dtype)
        return self._module(embeds_BLD, cache, counts)


class MLXLanguageModel(_Backend[Qwen3Model]):
    @memory_errors()
    def open(self, rows: int, capacity: int) -> MLXSession:
        cache = KVCache(self.module.config, rows, capacity, self.dtype)
        mx.eval(cache.keys, cache.values)
        return MLXSession(self.module, cache, self.dtype)

    @memory_errors()
    def logits(self, hidden_BD: Tensor, rows: Rows) -> Tensor:
        """The product runs in the precision of the work, its result is float32.

        A slice of rows is a view of the head; a vector of ids copies them at every call.
        """
        return _tensor(self._scores(self._in(hidden_BD), rows))

    def _scores(self, hidden_BD: mx.array, rows: Rows) -> mx.array:
        head_VD = self.module.embed_tokens.weight[rows if isinstance(rows, slice) else _array(rows)]
        return hidden_BD @ head_VD.T

    def cache_bytes(self, rows: int, capacity: int) -> int:
        return KVCache.nbytes(self.module.config, rows, capacity, self.dtype)

    @memory_errors()
    def rows_agree(self, rows: int, unit: int, head: slice) -> bool:
        """Tried out on the first layer and `head`: a kernel may depend on the number of rows."""
        config = self.module.config
        values = np.random.default_rng(0).standard_normal((rows, 1, config.hidden_size))
        x_BLD = mx.array(values).astype(self.dtype)
        span = Span(rotary_from(0, config), causal=True)

        def work(x_BLD: mx.array) -> tuple[mx.array, mx.array]:
            states_BLD = self.module.layers[0](x_BLD, span, None)
            return states_BLD, self._scores(x_BLD[:, 0], head)

        pairs = [work(x_BLD[row : row + unit]) for row in range(0, rows, unit)]
        alone = (mx.concatenate(list(parts)) for parts in zip(*pairs, strict=True))
        return all(bool(mx.array_equal(*both)) for both in zip(work(x_BLD), alone, strict=True))


class MLXTextEncoder(_Backend[Qwen3Model]):
    @memory_errors()
    def states(self, ids_BL: Tensor) -> Tensor:
        return _tensor(self.module(self._rows(ids_BL)))

    @memory_errors()
    def embed(self, ids_BL: Tensor) -> Tensor:
        return _tensor(self._rows(ids_BL))

    def _rows(self, ids_BL: Tensor) -> mx.array:
        return self.module.embed_tokens(_array(ids_BL)).astype(self.dtype)


class MLXConditionEncoder(_Backend[ConditionEncoder]):
    @staticmethod
    def finish(module: ConditionEncoder, dtype: torch.dtype) -> None:
        if dtype is torch.float16:
            module.lyric_encoder.widen()

    @memory_errors()
    def encode(self, text_BLD: Tensor, lyric_BLD: Tensor, timbre_NTC: Tensor) -> Tensor:
        """Every token counts, and each item has the same number of timbre clips."""
        return _tensor(self.module(self._in(text_BLD), self._in(lyric_BLD), self._in(timbre_NTC)))

    @memory_errors()
    def null(self) -> Tensor:
        return _tensor(self.module.null_condition_emb)


class MLXAudioTokenizer(_Backend[AudioTokenizer]):
    @staticmethod
    def finish(module: AudioTokenizer, dtype: torch.dtype) -> None:
        module.quantizer.set_dtype(mx.float32)

    @memory_errors()
    def tokenize(self, latents_BTC: Tensor) -> Tensor:
        return _tensor(self.module(self._in(latents_BTC)))


class MLXAudioDetokenizer(_Backend[AudioDetokenizer]):
    @staticmethod
    def finish(module: AudioDetokenizer, dtype: torch.dtype) -> None:
        module.quantizer.set_dtype(mx.float32)

    @memory_errors()
    def detokenize(self, indices_BN: Tensor) -> Tensor:
        size = codebook_size(self.module.quantizer.levels)
        low, high = int(indices_BN.min()), int(indices_BN.max())
        if low < 0 or high >= size:
            raise InvalidRequest(
                f"Audio codes must lie between 0 and {size - 1}, but these reach from {low} to "
                f"{high}. Remove or correct the codes outside that range."
            )
        return _tensor(self.module(_array(indices_BN), self.dtype))


class MLXVelocity(_Backend[DiT]):
    @memory_errors()
    def prepare(self, encoder_BLD: Tensor) -> Prepared:
        prepared = self.module.prepare(self._in(encoder_BLD))
        mx.eval(prepared)
        return prepared

    @memory_errors()
    def __call__(self, x_BTC: Tensor, t: float, context_BTC: Tensor, cross: Prepared) -> Tensor:
        return _tensor(self.module(self._in(x_BTC), mx.array([t]), self._in(context_BTC), cross))


class MLXCodec(_Backend[Oobleck]):
    """Made for one song or batch: it counts its windows to know when to give memory back."""

    _done = 0

    @memory_errors()
    def encode(self, audio_BXS: Tensor) -> Tensor:
        return self._window(self.module.encode, audio_BXS)

    @memory_errors()
    def decode(self, latents_BCT: Tensor) -> Tensor:
        return self._window(self.module.decode, latents_BCT)

    def _window(self, work: Callable[[mx.array], mx.array], x_BCL: Tensor) -> Tensor:
        """Channels are last in MLX. Every array of the window is gone when this returns."""
        before = mx.set_cache_limit(CACHE_LIMIT)
        try:
            return _tensor(work(self._in(x_BCL).swapaxes(1, 2)).swapaxes(1, 2))
        finally:
            mx.set_cache_limit(before)
            self._done += 1
            if self._done % WINDOWS == 0:
                mx.clear_cache()


BUILDERS: dict[str, tuple[type, type]] = {
    "lm": (Qwen3Model, MLXLanguageModel),
    "text_encoder": (Qwen3Model, MLXTextEncoder),
    "condition_encoder": (ConditionEncoder, MLXConditionEncoder),
    "audio_tokenizer": (AudioTokenizer, MLXAudioTokenizer),
    "audio_detokenizer": (AudioDetokenizer, MLXAudioDetokenizer),
    "dit": (DiT, MLXVelocity),
    "vae": (Oobleck, MLXCodec),
}
"""Role to model class and backend class."""
