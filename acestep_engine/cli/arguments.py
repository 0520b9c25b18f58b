"""Options that several commands share, and what they say to the engine. It runs no stage."""

from __future__ import annotations

import argparse
import atexit
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import get_args

from ..audio import check_target
from ..remix import is_region
from ..runtime import DeviceWish, ModeWish, PrecisionWish, Wish
from ..types import LMSampling, ModelSpec, Request
from ..vae import memory
from ..weights import adapters, presets, tiny
from ..weights.layouts import discover
from .files import REPORTS

MODELS = Path("models/acestep")
NOISE = (
    "No model files yet: a tiny random model plays, so the sound is noise. "
    "For music: python -m acestep_engine download turbo"
)


def add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        default="auto",
        help=f"folder, file or preset ({', '.join(presets.PRESETS)}); "
        f"auto: {MODELS}, or a tiny random model",
    )
    add(
        "--lora",
        action="append",
        default=[],
        metavar="PATH[:STRENGTH]",
        help="adapter put on the model, such as rock.safetensors:0.8; may be given several times",
    )
    add("--family", default="auto", choices=("auto", "turbo", "sft", "base"))
    add("--device", default="auto", choices=get_args(DeviceWish))
    add("--precision", default="auto", choices=get_args(PrecisionWish))
    add("--mode", default="auto", choices=get_args(ModeWish))


def model_of(options: argparse.Namespace) -> ModelSpec:
    """The model that `add_model` asks for; a tiny one is written where there is none."""
    name = options.model
    if name == "auto" and not any(MODELS.glob("*")):
        print(NOISE, file=sys.stderr)
        name = "tiny"
    if name == "tiny":
        folder = tempfile.mkdtemp(prefix="acestep-tiny-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        spec = tiny.write_tiny(Path(folder), "official")
    elif name == "auto":
        spec = discover(MODELS)
    elif name in presets.PRESETS and not Path(name).exists():
        spec = presets.locate(name, MODELS)
    else:
        spec = discover(name)
    wish = Wish(options.device, options.precision, options.mode)
    loras = tuple(map(adapters.parse, options.lora))
    return replace(spec, family=options.family, wish=wish, loras=loras)


def add_words(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("words").add_argument
    add("--caption", default="", help="style, instruments, mood")
    add("--lyrics", default="", help="the words, with [Verse] and [Chorus] tags")
    add("--instrumental", action="store_true")
    add("--seconds", type=float, help="length; left out: the language model decides")
    add("--bpm", type=int)
    add("--key", help='such as "F# minor"')
    add("--meter", help="2, 3, 4 or 6")
    add("--language", help="of the lyrics, such as en")


def request_of(options: argparse.Namespace) -> Request:
    """What `add_words` says of the song."""
    return Request(
        caption=options.caption,
        lyrics=options.lyrics,
        duration=options.seconds,
        bpm=options.bpm,
        keyscale=options.key,
        timesignature=options.meter,
        language=options.language,
        instrumental=options.instrumental,
    )


def add_draws(parser: argparse.ArgumentParser, temperature: float = 0.85) -> None:
    add = parser.add_argument_group("draws of the language model").add_argument
    add("--seed", type=int, default=0)
    add("--temperature", type=float, default=temperature, help="0: always the likeliest")
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=0.9)
    add("--min-p", type=float, default=0.0)
    add("--repetition-penalty", type=float, default=1.0)
    add("--temperature-last", action="store_true", help="filter by top-p and min-p before it")


def sampling_of(options: argparse.Namespace) -> LMSampling:
    """How `add_draws` wants tokens drawn."""
    return LMSampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        temperature_last=options.temperature_last,
    )


def add_tile(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tile", type=int, default=0, help="VAE tile in latent frames, 0: automatic")
    add(
        "--max-memory",
        default="0",
        help="of the VAE's work, such as 900MiB or 1.5GiB; 0: what is free",
    )


def tile_of(options: argparse.Namespace) -> tuple[int, int]:
    """Tile in latent frames and memory in bytes, as `Engine.decode` takes them."""
    return options.tile, memory.read_size(options.max_memory)


def add_json(parser: argparse.ArgumentParser, what: str, *others: str) -> None:
    parser.add_argument(
        "--json", *others, dest="json", metavar="FILE", help=f"file to write {what} to, as JSON"
    )


def check_json(options: argparse.Namespace) -> None:
    """Raise InvalidRequest where `add_json` names a file that cannot be written."""
    if options.json:
        check_target(options.json, REPORTS)


def rejoined(arguments: Iterable[str]) -> list[str]:
    """`--region -3-0` as `--region=-3-0`, for argparse takes the place alone for an option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == "--region" and is_region(argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined
