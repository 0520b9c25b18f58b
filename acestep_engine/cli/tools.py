"""The commands `encode`, `decode`, `inspect` and `download`: one step each, from file to file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .. import audio as sound
from ..engine import get_engine
from ..types import Audio
from ..vae import level
from ..weights import presets
from . import arguments, files


def add_to(commands: Any) -> None:
    encode = commands.add_parser("encode", help="sound file to latents")
    arguments.add_model(encode)
    encode.add_argument("sound")
    encode.add_argument("out", help="safetensors file to write")
    arguments.add_tile(encode)
    encode.set_defaults(run=run_encode)

    decode = commands.add_parser("decode", help="latents to a sound file")
    arguments.add_model(decode)
    decode.add_argument("latents")
    decode.add_argument("out")
    arguments.add_tile(decode)
    decode.add_argument("--keep-level", action="store_true", help="do not normalise the peak")
    decode.set_defaults(run=run_decode)

    inspect = commands.add_parser("inspect", help="what a model is made of and how it would run")
    arguments.add_model(inspect)
    inspect.set_defaults(run=run_inspect)

    download = commands.add_parser(
        "download", help="fetch the official files; continues if cut off"
    )
    download.add_argument("preset", choices=sorted(presets.PRESETS))
    download.add_argument("--folder", default=str(arguments.MODELS))
    download.set_defaults(run=run_download)


def run_encode(options: argparse.Namespace) -> None:
    sound.check_target(options.out, files.LATENTS)
    spec, tile = arguments.model_of(options), arguments.tile_of(options)
    latents = get_engine().encode(spec, sound.load(options.sound), *tile)
    files.save_latents(latents, Path(options.out))
    print(f"Wrote {options.out}: latents {tuple(latents.values.shape)}")


def run_decode(options: argparse.Namespace) -> None:
    sound.check_target(options.out)
    latents = files.load_latents(Path(options.latents))
    spec, tile = arguments.model_of(options), arguments.tile_of(options)
    audio = get_engine().decode(spec, latents, *tile)
    if not options.keep_level:
        audio = Audio(level.normalise_peak(audio.waveform), audio.sample_rate)
    written = files.save_songs(audio, Path(options.out))
    print(f"Wrote {', '.join(map(str, written))} ({audio.seconds:g} s)")


def run_inspect(options: argparse.Namespace) -> None:
    described = get_engine().describe(arguments.model_of(options))
    print(json.dumps(described, indent=2, ensure_ascii=False))


def run_download(options: argparse.Namespace) -> None:
    folder = presets.download(options.preset, Path(options.folder))
    print(f"All files of '{options.preset}' are in {folder}. Try: python -m acestep_engine song")
