"""The eager torch backend: each Protocol of `base` over a module, with casts at the border.

It knows neither files nor residency: a module already lives on `device`, or its layers bring their
weights there by themselves. Inputs go to the device and precision of the work, results come back as
float32 on the device. Dimension key: as in `base`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidRequest
from ..models_spec import codebook_size
from ..models_torch import cpu_conv, cpu_norm
from ..models_torch.dit import DiT, Prepared
from ..models_torch.encoders import ConditionEncoder
from ..models_torch.fsq import AudioDetokenizer, AudioTokenizer
from ..models_torch.oobleck import Oobleck
from ..models_torch.qwen3 import Qwen3Model
from ..runtime import Runtime
from .torch_base import Backend, work
from .torch_lm import TorchLanguageModel


class TorchTextEncoder(Backend[Qwen3Model]):
    @staticmethod
    def finish(module: Qwen3Model, dtype: torch.dtype) -> None:
        module.fuse()

    @work
    def states(self, ids_BL: Tensor) -> Tensor:
        return self.module(self._rows(ids_BL)).float()

    @work
    def embed(self, ids_BL: Tensor) -> Tensor:
        return self._rows(ids_BL).float()

    def _rows(self, ids_BL: Tensor) -> Tensor:
        return self._in(self.module.embed_tokens(ids_BL.to(self.device)))


class TorchConditionEncoder(Backend[ConditionEncoder]):
    @staticmethod
    def finish(module: ConditionEncoder, dtype: torch.dtype) -> None:
        if dtype is torch.float16:
            module.lyric_encoder.widen()

    @staticmethod
    def pack(module: ConditionEncoder, runtime: Runtime) -> None:
        if runtime.device == "cpu":
            cpu_norm.arrange(module)

    @work
    def encode(self, text_BLD: Tensor, lyric_BLD: Tensor, timbre_NTC: Tensor) -> Tensor:
        """Every token counts, and each item has the same number of timbre clips."""
        items, clips = text_BLD.shape[0], timbre_NTC.shape[0]
        order = [clip * items // clips for clip in range(clips)]
        sequence_BLD, _ = self.module(
            self._in(text_BLD), self._in(lyric_BLD), self._in(timbre_NTC), order
        )
        return sequence_BLD.float()

    @work
    def null(self) -> Tensor:
        return self.module.null_condition_emb.to(self.device, torch.float32)


class TorchAudioTokenizer(Backend[AudioTokenizer]):
    @staticmethod
    def finish(module: AudioTokenizer, dtype: torch.dtype) -> None:
        module.quantizer.float()

    @work
    def tokenize(self, latents_BTC: Tensor) -> Tensor:
        return self.module(self._in(latents_BTC))


class TorchAudioDetokenizer(Backend[AudioDetokenizer]):
    @staticmethod
    def finish(module: AudioDetokenizer, dtype: torch.dtype) -> None:
        module.quantizer.float()

    @work
    def detokenize(self, indices_BN: Tensor) -> Tensor:
        size = codebook_size(self.module.quantizer.levels)
        low, high = int(indices_BN.min()), int(indices_BN.max())
        if low < 0 or high >= size:
            raise InvalidRequest(
                f"Audio codes must lie between 0 and {size - 1}, but these reach from {low} to "
                f"{high}. Remove or correct the codes outside that range."
            )
        return self.module(indices_BN.to(self.device), self.dtype).float()


class TorchVelocity(Backend[DiT]):
    @staticmethod
    def pack(module: DiT, runtime: Runtime) -> None:
        if runtime.device == "cpu":
            cpu_norm.arrange(module)

    @work
    def prepare(self, encoder_BLD: Tensor) -> Prepared:
        return self.module.prepare(self._in(encoder_BLD))

    @work
    def __call__(self, x_BTC: Tensor, t: float, context_BTC: Tensor, cross: Prepared) -> Tensor:
        t_B = torch.full((1,), t, dtype=torch.float32, device=self.device)
        return self.module(self._in(x_BTC), t_B, self._in(context_BTC), cross).float()


class TorchCodec(Backend[Oobleck]):
    @staticmethod
    def pack(module: Oobleck, runtime: Runtime) -> None:
        if runtime.device == "cpu":
            cpu_conv.arrange(module)

    @work
    def encode(self, audio_BXS: Tensor) -> Tensor:
        return self.module.encode(self._in(audio_BXS)).float()

    @work
    def decode(self, latents_BCT: Tensor) -> Tensor:
        return self.module.decode(self._in(latents_BCT)).float()


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
