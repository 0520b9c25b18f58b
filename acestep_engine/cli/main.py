"""The border of the command line: all commands behind one parser, any error as one readable line.

It knows no options of a command and no stage of the flow.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ..bench import commands as benchmarks
from ..errors import AceStepError
from . import listen, song, tools, words
from .arguments import rejoined


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 on a readable error, 130 when stopped."""
    for stream in (sys.stdout, sys.stderr):  # a console may lack letters that a plan has
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    options = parser().parse_args(rejoined(sys.argv[1:] if arguments is None else arguments))
    loudness = (
        logging.DEBUG if options.debug else logging.INFO if options.verbose else logging.WARNING
    )
    logging.basicConfig(level=loudness, format="%(levelname)s: %(message)s")
    try:
        options.run(options)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except Exception as error:
        if options.debug:
            raise
        kind = (
            ""
            if isinstance(error, AceStepError)
            else f"{type(error).__name__} at {_where(error)}: "
        )
        print(f"Error: {kind}{error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Every command with its options; `run` is what does it."""
    whole = argparse.ArgumentParser(prog="acestep_engine", description="Songs with ACE-Step 1.5.")
    whole.add_argument("--verbose", action="store_true", help="say what is chosen and why")
    whole.add_argument("--debug", action="store_true", help="full trace of an error")
    commands = whole.add_subparsers(required=True, metavar="command")
    for group in (song, words, listen, tools):
        group.add_to(commands)
    bench = commands.add_parser("bench", help="speed and memory against a peer, in one run")
    benchmarks.add_to(bench.add_subparsers(required=True, metavar="what"))
    bench.set_defaults(run=lambda options: print(options.measure(options)))
    return whole


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "an unknown place"
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
