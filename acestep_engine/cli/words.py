"""The commands `write` and `rewrite`: songs on paper, from an idea or from a draft.

What they write, `song --plan` plays. They know neither prompts nor grammar.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..engine import Engine, get_engine
from ..lm import metadata
from ..types import AnswerOptions, ModelSpec, PlanOptions, Request
from . import arguments, files


def add_to(commands: Any) -> None:
    write = commands.add_parser("write", help="a song on paper from an idea")
    write.add_argument("idea", nargs="?", default="", help="a few words; without: a surprise")
    write.add_argument("--instrumental", action="store_true", help="without lyrics")
    write.add_argument("--language", help="of the lyrics, such as en")
    write.set_defaults(run=run_write)

    rewrite = commands.add_parser(
        "rewrite", help="caption and lyrics in the form that the models know best"
    )
    arguments.add_words(rewrite)
    rewrite.set_defaults(run=run_rewrite)
    for command in (write, rewrite):
        arguments.add_model(command)
        arguments.add_draws(command)
        add_answer(command)


def add_answer(parser: argparse.ArgumentParser) -> None:
    length = AnswerOptions().max_tokens
    parser.add_argument(
        "--max-tokens", type=int, default=length, help=f"end of the lyrics; default: {length}"
    )
    arguments.add_json(parser, "the plan")


def answer_options_of(options: argparse.Namespace) -> AnswerOptions:
    """How `add_draws` and `add_answer` want a song written."""
    return AnswerOptions(options.max_tokens, arguments.sampling_of(options))


def run_write(options: argparse.Namespace) -> None:
    arguments.check_json(options)
    engine, spec, answer = get_engine(), arguments.model_of(options), answer_options_of(options)
    request = engine.write(spec, options.idea, options.instrumental, options.language, answer)
    tell(engine, spec, (request,), options)


def run_rewrite(options: argparse.Namespace) -> None:
    arguments.check_json(options)
    engine, spec, answer = get_engine(), arguments.model_of(options), answer_options_of(options)
    request = engine.rewrite(spec, arguments.request_of(options), answer)
    tell(engine, spec, (request,), options)


def tell(
    engine: Engine, spec: ModelSpec, songs: Sequence[Request], options: argparse.Namespace
) -> None:
    """Print each of `songs`, and write it as a plan where that was asked for."""
    as_written = PlanOptions(think=False, sampling=arguments.sampling_of(options))
    plans = tuple(engine.plan(spec, song, as_written) for song in songs)
    for number, plan in enumerate(plans, 1):
        if len(plans) > 1:
            print(f"# Song {number}")
        print(metadata.dump(replace(plan.metadata, caption=plan.dit_caption)))
        print(f"\n{plan.lyrics}\n")
    if options.json:
        print(f"Wrote {', '.join(map(str, files.write_plans(plans, options.json)))}")
