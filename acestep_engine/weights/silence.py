"""The stored latents of digital silence, where a model brings them along.

Dimension key: N stored frames, C latent channels (64).
"""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import BadCheckpoint
from ..types import LATENT_CHANNELS, ModelSpec
from .files import read_header, weight_files
from .parts import PARTS

logger = logging.getLogger(__name__)

FILE = "silence_latent.pt"
BUFFER = "silence_latent"


def find_silence(spec: ModelSpec) -> Path | None:
    """The file at `spec.dit` that has a place for latents of silence; they may never have been set.

    Official folders keep them in silence_latent.pt as (1, 64, N), diffusers folders as a buffer of
    the condition encoder, (1, N, 64).
    """
    if not spec.dit:
        return None
    path = Path(spec.dit).expanduser()
    folder = path if path.is_dir() else path.parent
    if (pickled := folder / FILE).is_file():
        return pickled
    for file in weight_files(folder / PARTS["condition_encoder"].diffusers):
        if BUFFER in read_header(file):
            return file
    return None


def read_silence(spec: ModelSpec) -> Tensor | None:
    """Latents of silence (N, 64) as float32, or None where no file of `spec.dit` has them."""
    file = find_silence(spec)
    if file is None:
        return None
    return _from_pickle(file) if file.name == FILE else _from_buffer(file)


def _from_pickle(path: Path) -> Tensor:
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise BadCheckpoint(
            f"{path} cannot be read as a plain tensor: it is damaged, or holds program code, which "
            "is never run. Delete it (silence is then made by the VAE) or download it again."
        ) from error
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise BadCheckpoint(_not_silence(path, type(value).__name__))
    if value.dim() != 3 or value.shape[:2] != (1, LATENT_CHANNELS) or value.shape[2] == 0:
        raise BadCheckpoint(_not_silence(path, f"a tensor {list(value.shape)}"))
    return value[0].T.float().contiguous()


def _from_buffer(file: Path) -> Tensor | None:
    with safe_open(file, framework="pt", device="cpu") as stream:
        value: Tensor = stream.get_tensor(BUFFER)
    if value.dim() != 3 or (value.shape[0], value.shape[2]) != (1, LATENT_CHANNELS):
        raise BadCheckpoint(_not_silence(file, f"a buffer {list(value.shape)}"))
    if not value.any():  # the buffer begins as zeros, which are not what silence encodes to
        logger.info("%s: %s was never set; the VAE makes it", file, BUFFER)
        return None
    return value[0].float().contiguous()


def _not_silence(path: Path, found: str) -> str:
    return (
        f"{path} holds {found} where the latents of silence should be: a float tensor "
        f"[1, {LATENT_CHANNELS}, N]. Delete it (silence is then made by the VAE) or download it "
        "again."
    )
