"""The benchmarks as commands: their arguments, and the text that each of them gives."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

from ..runtime import PrecisionWish, Wish, choose, probe
from . import dit, gpu, lm, quality, vae


def add_to(kinds: Any) -> None:
    """Add each benchmark to the sub-parsers `kinds`, with the function that measures it."""
    one = kinds.add_parser("lm", help="codes a second of the language model")
    one.add_argument("--size", default="0.6B", choices=tuple(lm.SIZES))
    one.add_argument("--context", type=int, nargs="+", default=[500, 1000], help="tokens")
    _add_common(one, run_lm)
    one = kinds.add_parser("quality", help="what a precision changes in the language model")
    one.add_argument("--size", default="0.6B", choices=tuple(lm.SIZES))
    one.add_argument("--scale", type=float, default=1.0, help="of the token table: peaked scores")
    one.set_defaults(measure=lambda options: quality.run(options.size, options.scale))
    one = kinds.add_parser("dit", help="a render by the diffusion transformer")
    one.add_argument("--size", default="2B", choices=tuple(dit.SIZES))
    one.add_argument("--seconds", type=float, default=10.0, help="length of the song")
    one.add_argument("--steps", type=int, default=8, choices=range(1, 9), help="of the eight")
    _add_common(one, run_dit)
    one = kinds.add_parser("vae", help="the tiled VAE")
    one.add_argument("--op", default="decode", choices=("decode", "encode"))
    one.add_argument("--one-shot", action="store_true", help="also without tiles")
    one.add_argument("--seconds", type=float, default=30.0, help="length of the song")
    one.add_argument("--tile", type=int, default=0, help="latent frames, 0: automatic")
    _add_common(one, run_vae)
    one = kinds.add_parser("mlx-memory", help="what a decode in MLX takes, by the size of tiles")
    one.add_argument("--frames", type=int, default=2048, help="length of the latents")
    one.add_argument("--width", type=int, default=1, help="channels of the VAE, 128 are real")
    one.add_argument("--precision", default="auto", choices=get_args(PrecisionWish))
    one.set_defaults(measure=run_mlx)
    one = kinds.add_parser("gpu", help="parity, speed and memory on a CUDA device, without a peer")
    one.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    one.add_argument("--size", default="full", choices=("full", "tiny"))
    one.add_argument("--part", choices=tuple(gpu.PARTS), help="this one only, as it stands")
    one.set_defaults(measure=run_gpu)


def _add_common(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], str]) -> None:
    parser.add_argument("--precision", default="auto", choices=get_args(PrecisionWish))
    parser.add_argument("--turns", type=int, default=9, help="timed rounds of each")
    parser.add_argument("--no-peer", action="store_true", help="measure this engine alone")
    parser.set_defaults(measure=run)


def run_lm(options: argparse.Namespace) -> str:
    contexts = tuple(options.context)
    return lm.run(options.size, options.precision, contexts, options.turns, not options.no_peer)


def run_dit(options: argparse.Namespace) -> str:
    length = options.seconds, options.steps
    return dit.run(options.size, options.precision, *length, options.turns, not options.no_peer)


def run_vae(options: argparse.Namespace) -> str:
    song = vae.Song(options.op, options.seconds, options.precision, options.tile)
    return vae.run(song, options.turns, not options.no_peer, options.one_shot)


def run_mlx(options: argparse.Namespace) -> str:
    choose(probe(), Wish("mlx"))  # says what is missing before MLX is imported
    from . import mlx

    return mlx.run(options.frames, options.width, options.precision)


def run_gpu(options: argparse.Namespace) -> str:
    if options.part:
        return gpu.run_part(options.part, options.device, options.size)
    return gpu.run(options.device, options.size)
