"""The eager torch backend: each Protocol of `base` over a module, with casts at the border.

It knows neither files nor residency: a module already lives on `device`, or its layers bring their
weights there by themselves. Inputs go to the device and precision of the work, results come back as
float32 on the device. Dimension key: as in `base`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidRequest, OutOfMemory
from ..models_spec import codebook_size
from ..models_torch.dit import DiT, Prepared
from ..models_torch.encoders import ConditionEncoder
from ..models_torch.fsq import AudioDetokenizer, AudioTokenizer
from ..models_torch.layers import rotary_table
from ..models_torch.oobleck import Oobleck
from ..models_torch.qwen3 import KVCache, Qwen3Model, Span
from .base import Rows

Model = TypeVar("Model", bound=nn.Module)

SHARED_PREFIX = 16  # tokens from which a common beginning of prompts is worth a pass of its own


class _Backend(Generic[Model]):
    @staticmethod
    def finish(module: Any, dtype: torch.dtype) -> None:
        """Prepare a module whose weights have just been loaded; parts may become wider."""

    def __init__(self, module: Model, device: torch.device | str, dtype: torch.dtype) -> None:
        self.module = module
        self.device = torch.device(device)
        self.dtype = dtype

    def _in(self, x: Tensor) -> Tensor:
        return x.to(self.device, self.dtype)


class TorchSession:
    """Rows of tokens over one static cache; a row may be longer than another."""

    def __init__(self, module: Qwen3Model, cache: KVCache, dtype: torch.dtype) -> None:
        self._module, self._cache, self._dtype = module, cache, dtype

    @torch.inference_mode()
    def feed(self, ids: Sequence[Sequence[int]] | Tensor) -> Tensor:
        if isinstance(ids, Tensor):
            return self._run(ids, self._cache, None)[:, -1].float()
        fresh = max(self._cache.lengths) == 0
        states_BD = self._start(ids) if fresh else self._append(ids, self._cache)
        return states_BD.float()

    def _start(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Fill an empty cache: equal prompts once, and the beginning common to all of them once."""
        prompts = list(dict.fromkeys(tuple(row) for row in ids))
        part = self._cache.first(len(prompts))
        shared = _common_prefix(prompts)
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


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all prompts begin with, leaving each at least one of its own."""
    limit = min(len(prompt) for prompt in prompts) - 1
    for place, column in zip(range(limit), zip(*prompts, strict=False), strict=False):
        if len(set(column)) > 1:
            return place
    return limit


class TorchLanguageModel(_Backend[Qwen3Model]):
    @staticmethod
    def finish(module: Qwen3Model, dtype: torch.dtype) -> None:
        module.fuse()

    def open(self, rows: int, capacity: int) -> TorchSession:
        cache = KVCache(self.module.config, rows, capacity, self.device, self.dtype)
        return TorchSession(self.module, cache, self.dtype)

    @torch.inference_mode()
    def logits(self, hidden_BD: Tensor, rows: Rows) -> Tensor:
        """The product runs in the precision of the work, its result is float32.

        A slice of rows is a view of the head; a vector of ids copies them at every call.
        """
        head = self.module.embed_tokens.weight
        head_VD = head[rows if isinstance(rows, slice) else rows.to(head.device)]
        return F.linear(self._in(hidden_BD), self._in(head_VD)).float()

    def cache_bytes(self, rows: int, capacity: int) -> int:
        return KVCache.nbytes(self.module.config, rows, capacity, self.dtype)

    @torch.inference_mode()
    def rows_agree(self, rows: int, unit: int) -> bool:
        """Tried out on the first layer and the head: a kernel may depend on the number of rows."""
        config = self.module.config
        generator = torch.Generator().manual_seed(0)
        x_BLD = self._in(torch.randn(rows, 1, config.hidden_size, generator=generator))
        start = torch.zeros(1, device=self.device)
        span = Span(rotary_table(start, config, self.dtype), causal=True)

        def work(x_BLD: Tensor) -> tuple[Tensor, Tensor]:
            states_BLD = self.module.layers[0](x_BLD, span, None)
            return states_BLD, self.logits(x_BLD[:, 0], slice(0, config.vocab_size))

        alone = [torch.cat(parts) for parts in zip(*map(work, x_BLD.split(unit)), strict=True)]
        return all(map(torch.equal, work(x_BLD), alone))


class TorchTextEncoder(_Backend[Qwen3Model]):
    @staticmethod
    def finish(module: Qwen3Model, dtype: torch.dtype) -> None:
        module.fuse()

    @torch.inference_mode()
    def states(self, ids_BL: Tensor) -> Tensor:
        return self.module(self._rows(ids_BL)).float()

    @torch.inference_mode()
    def embed(self, ids_BL: Tensor) -> Tensor:
        return self._rows(ids_BL).float()

    def _rows(self, ids_BL: Tensor) -> Tensor:
        return self._in(self.module.embed_tokens(ids_BL.to(self.device)))


class TorchConditionEncoder(_Backend[ConditionEncoder]):
    @staticmethod
    def finish(module: ConditionEncoder, dtype: torch.dtype) -> None:
        if dtype is torch.float16:
            module.lyric_encoder.widen()

    @torch.inference_mode()
    def encode(self, text_BLD: Tensor, lyric_BLD: Tensor, timbre_NTC: Tensor) -> Tensor:
        """Every token counts, and each item has the same number of timbre clips."""
        items, clips = text_BLD.shape[0], timbre_NTC.shape[0]
        order = [clip * items // clips for clip in range(clips)]
        sequence_BLD, _ = self.module(
            self._in(text_BLD), self._in(lyric_BLD), self._in(timbre_NTC), order
        )
        return sequence_BLD.float()

    @torch.inference_mode()
    def null(self) -> Tensor:
        return self.module.null_condition_emb.to(self.device, torch.float32)


class TorchAudioTokenizer(_Backend[AudioTokenizer]):
    @staticmethod
    def finish(module: AudioTokenizer, dtype: torch.dtype) -> None:
        module.quantizer.float()

    @torch.inference_mode()
    def tokenize(self, latents_BTC: Tensor) -> Tensor:
        return self.module(self._in(latents_BTC))


class TorchAudioDetokenizer(_Backend[AudioDetokenizer]):
    @staticmethod
    def finish(module: AudioDetokenizer, dtype: torch.dtype) -> None:
        module.quantizer.float()

    @torch.inference_mode()
    def detokenize(self, indices_BN: Tensor) -> Tensor:
        size = codebook_size(self.module.quantizer.levels)
        low, high = int(indices_BN.min()), int(indices_BN.max())
        if low < 0 or high >= size:
            raise InvalidRequest(
                f"Audio codes must lie between 0 and {size - 1}, but these reach from {low} to "
                f"{high}. Remove or correct the codes outside that range."
            )
        return self.module(indices_BN.to(self.device), self.dtype).float()


class TorchVelocity(_Backend[DiT]):
    @torch.inference_mode()
    def prepare(self, encoder_BLD: Tensor) -> Prepared:
        return self.module.prepare(self._in(encoder_BLD))

    @torch.inference_mode()
    def __call__(self, x_BTC: Tensor, t: float, context_BTC: Tensor, cross: Prepared) -> Tensor:
        t_B = torch.full((1,), t, dtype=torch.float32, device=self.device)
        return self.module(self._in(x_BTC), t_B, self._in(context_BTC), cross).float()


class TorchCodec(_Backend[Oobleck]):
    @torch.inference_mode()
    def encode(self, audio_BXS: Tensor) -> Tensor:
        with _memory_errors(self.device):
            return self.module.encode(self._in(audio_BXS)).float()

    @torch.inference_mode()
    def decode(self, latents_BCT: Tensor) -> Tensor:
        with _memory_errors(self.device):
            return self.module.decode(self._in(latents_BCT)).float()


MEMORY_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "Output channels > 65536",  # a limit of Metal on the length, which a smaller tile keeps
)


@contextmanager
def _memory_errors(device: torch.device) -> Iterator[None]:
    """Every device's way to say that memory ran out, as OutOfMemory."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        text = str(error)
        if not any(sign in text for sign in MEMORY_SIGNS):
            raise
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfMemory(f"The device {device} ran out of memory: {text}") from error


BUILDERS: dict[str, tuple[type, type]] = {
    "lm": (Qwen3Model, TorchLanguageModel),
    "text_encoder": (Qwen3Model, TorchTextEncoder),
    "condition_encoder": (ConditionEncoder, TorchConditionEncoder),
    "audio_tokenizer": (AudioTokenizer, TorchAudioTokenizer),
    "audio_detokenizer": (AudioDetokenizer, TorchAudioDetokenizer),
    "dit": (DiT, TorchVelocity),
    "vae": (Oobleck, TorchCodec),
}
"""Role to model class and backend class."""
