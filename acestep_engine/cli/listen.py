"""The commands `understand`, `score` and `codes`: what is heard in a sound. They know no token."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import audio as sound
from ..engine import Engine, get_engine
from ..errors import InvalidRequest
from ..lm.modes import HEARING
from ..lm.notation import NOTATIONS, write_codes
from ..types import Codes, ModelSpec
from ..vae.level import audible
from . import arguments, files, words

CODES_FILE = "text of audio codes, or the report of a song"


def add_to(commands: Any) -> None:
    understand = commands.add_parser("understand", help="a sound, or audio codes, in words")
    understand.add_argument("sound", nargs="?", help="sound file")
    understand.add_argument("--codes", metavar="FILE", help=f"instead of a sound: {CODES_FILE}")
    arguments.add_model(understand)
    arguments.add_draws(understand, HEARING.sampling.temperature)
    words.add_answer(understand)
    arguments.add_tile(understand)
    understand.set_defaults(run=run_understand)

    score = commands.add_parser("score", help="how well audio codes carry a plan, 0 to 1")
    score.add_argument("codes", help=CODES_FILE)
    score.add_argument("plan", help="a plan, or the report of a song")
    arguments.add_model(score)
    arguments.add_json(score, "the scores")
    score.set_defaults(run=run_score)

    codes = commands.add_parser("codes", help="a sound as the text of its audio codes")
    codes.add_argument("sound")
    codes.add_argument("--notation", default=NOTATIONS[0], choices=NOTATIONS)
    arguments.add_model(codes)
    arguments.add_tile(codes)
    arguments.add_json(codes, "the codes")
    codes.set_defaults(run=run_codes)


def run_understand(options: argparse.Namespace) -> None:
    arguments.check_json(options)
    if bool(options.sound) == bool(options.codes):
        raise InvalidRequest("Give either a sound file or --codes with a file to understand.")
    given = files.read_codes(options.codes) if options.codes else None
    engine, spec = get_engine(), arguments.model_of(options)
    codes = given or _heard(engine, spec, options)
    songs = engine.understand(spec, codes, words.answer_options_of(options))
    words.tell(engine, spec, songs, options)


def run_score(options: argparse.Namespace) -> None:
    arguments.check_json(options)
    codes, plan = files.read_codes(options.codes), files.read_plan(options.plan)
    scores = get_engine().score(arguments.model_of(options), codes, plan)
    rewards = [one.reward for one in scores]
    best = rewards.index(max(rewards)) + 1
    for number, one in enumerate(scores, 1):
        parts = {"caption": one.caption, "lyrics": one.lyrics, **one.metadata}
        told = ", ".join(
            f"{name} {value:.2f}" for name, value in parts.items() if value is not None
        )
        print(f"song {number}: {one.reward:.3f} ({told})")
    if len(scores) > 1:
        print(f"best: song {best}")
    if options.json:
        report = {"best": best, "scores": [asdict(one) for one in scores]}
        files.write_json(Path(options.json), report)
        print(f"Wrote {options.json}")


def run_codes(options: argparse.Namespace) -> None:
    arguments.check_json(options)
    codes = _heard(get_engine(), arguments.model_of(options), options)
    print(write_codes(codes, options.notation))
    if options.json:  # the output is the codes alone, for a file or another program
        files.write_json(Path(options.json), asdict(codes))


def _heard(engine: Engine, spec: ModelSpec, options: argparse.Namespace) -> Codes:
    """Audio codes of a sound file."""
    latents = engine.encode(spec, sound.load(options.sound), *arguments.tile_of(options))
    return engine.tokenize(spec, audible(latents))
