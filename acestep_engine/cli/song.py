"""The commands `song` and `plan`: from words, and with a task from a sound, to files.

They know the order of the stages and say what was done; what a stage does is the engine's business.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .. import audio as sound
from ..engine import Engine, get_engine
from ..errors import InvalidRequest
from ..lm import metadata, revise
from ..rendering import check_task
from ..types import (
    CODE_RATE,
    Audio,
    Codes,
    ComposeOptions,
    LMSampling,
    ModelSpec,
    Plan,
    PlanOptions,
)
from . import arguments, files, sampler, tasks


def add_to(commands: Any) -> None:
    song = commands.add_parser("song", help="a song from words, or from a sound by a task")
    arguments.add_model(song)
    _add_plan(song)
    add = song.add_argument
    add(
        "--plan",
        metavar="FILE",
        help="a plan that was written before, or the report of a song; words given here replace "
        "its own",
    )
    tasks.add_to(song)
    _add_composing(song)
    _add_sound(song)
    add("--out", default="song.flac", help="file to write: .wav, .flac or .mp3")
    song.set_defaults(run=run_song)

    plan = commands.add_parser("plan", help="only the plan: tempo, key, caption, length")
    arguments.add_model(plan)
    _add_plan(plan)
    arguments.add_json(plan, "the plan", "--out")
    plan.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> None:
    arguments.check_json(options)
    plan = make_plan(get_engine(), arguments.model_of(options), options)
    _show(plan)
    if options.json:
        files.write_plans((plan,), options.json)
        print(f"Wrote {options.json}")


def run_song(options: argparse.Namespace) -> None:
    jobs = _checked(tasks.jobs_of(options), options)
    given = files.read_codes(options.codes) if options.codes else None
    reference = sound.load(options.timbre) if options.timbre else None
    composing = ComposeOptions(options.batch, options.prompt_layout, composing_of(options))
    rendering, tile = sampler.sampling_of(options), arguments.tile_of(options)
    engine, spec, clock = get_engine(), arguments.model_of(options), _Clock()
    model = engine.describe(spec)  # what is wrong with the files is said before any work
    for job in jobs:
        if job.task:
            check_task(job.task, model["family"], given)
    plan = clock("plan", _plan_of, engine, spec, options, jobs[0], given)
    _show(plan)
    codes = given
    if spec.lm and not (jobs[0].task or given or options.no_codes):
        codes = clock("compose", engine.compose, spec, plan, composing)
    timbre = clock("timbre", engine.encode, spec, reference, *tile) if reference else None
    for job in jobs:
        latents = clock("render", engine.render, spec, plan, codes, rendering, timbre, job.task)
        audio = clock("decode", engine.decode, spec, latents, *tile)
        report = {
            "request": asdict(arguments.request_of(options)),
            "plan": asdict(plan),
            "codes": asdict(codes) if codes else None,
            "task": tasks.told(job.task, options.source) if job.task else None,
            "timbre": options.timbre,
            "render": dict(latents.record),
            "model": model,
            "vae": asdict(engine.windows["decode"]),
            "timings": clock.seconds,
        }
        _write(job, tasks.finished(job, audio, options), report)


def make_plan(
    engine: Engine,
    spec: ModelSpec,
    options: argparse.Namespace,
    seconds: float | None = None,
    think: bool = True,
) -> Plan:
    """The plan that the words ask for; `seconds` long where they say nothing of the length."""
    sampling = arguments.sampling_of(options)
    if options.plan_temperature is not None:
        sampling = replace(sampling, temperature=options.plan_temperature)
    choices = PlanOptions(
        think=think and not options.no_think,
        rewrite_caption=not options.keep_caption,
        detect_language=not options.keep_language,
        sampling=sampling,
    )
    request = arguments.request_of(options)
    return engine.plan(spec, replace(request, duration=request.duration or seconds), choices)


def composing_of(options: argparse.Namespace) -> LMSampling:
    """How audio codes are drawn."""
    sampling = arguments.sampling_of(options)
    return replace(sampling, cfg_scale=options.cfg, negative=options.negative)


def _plan_of(
    engine: Engine,
    spec: ModelSpec,
    options: argparse.Namespace,
    job: tasks.Job,
    codes: Codes | None,
) -> Plan:
    """The plan of a song: that of a file, or a new one as long as its source or its codes.

    For a task no language model is asked: it does not know the source, and would contradict it.
    """
    if not options.plan:
        seconds = len(codes.items[0]) / CODE_RATE if codes else None
        return make_plan(engine, spec, options, job.seconds or seconds, think=job.task is None)
    request = arguments.request_of(options)
    change = replace(request, duration=request.duration or job.seconds)
    return revise.revise(files.read_plan(options.plan), change)


def _show(plan: Plan) -> None:
    print(f"Plan ({plan.duration:g} s, seed {plan.seed}):")
    print("\n".join(f"  {line}" for line in metadata.dump(plan.metadata).splitlines()))


def _checked(jobs: tuple[tasks.Job, ...], options: argparse.Namespace) -> tuple[tasks.Job, ...]:
    """`jobs`, whose files can all be written, and none over one that is read."""
    given = (options.source, options.timbre, options.plan, options.codes)
    read = {Path(path).resolve() for path in given if path}
    for job in jobs:
        sound.check_target(job.out)
        sound.check_target(_report_of(job), files.REPORTS)
        for path in (*files.numbered(job.out, options.batch), _report_of(job)):
            if path.resolve() in read:
                raise InvalidRequest(
                    f"'{path}' would be written over, but the song is made from it. Choose another "
                    "name with --out."
                )
    return jobs


def _write(job: tasks.Job, audio: Audio, report: dict[str, Any]) -> None:
    written = [str(path) for path in files.save_songs(audio, job.out)]
    files.write_json(_report_of(job), {"files": written, "seconds": audio.seconds, **report})
    timings = ", ".join(f"{stage} {took:.1f} s" for stage, took in report["timings"].items())
    print(f"Timings: {timings}")
    kind = f"{audio.seconds:g} s, {audio.sample_rate / 1000:g} kHz stereo"
    print(f"Wrote {', '.join(written)} ({kind}) and {_report_of(job)}")


def _report_of(job: tasks.Job) -> Path:
    return job.out.with_suffix(files.REPORTS[0])


class _Clock:
    """Calls stages and remembers how long each took, the last time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, call: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments)
        self.seconds[stage] = round(time.perf_counter() - start, 3)
        return result


def _add_plan(parser: argparse.ArgumentParser) -> None:
    arguments.add_words(parser)
    arguments.add_draws(parser)
    add = parser.add_argument_group("plan").add_argument
    add("--no-think", action="store_true", help="use the given metadata only, no plan by the model")
    add("--keep-caption", action="store_true", help="do not let the model rewrite the caption")
    add("--keep-language", action="store_true", help="do not let the model name the language")
    add("--plan-temperature", type=float, help="of the plan alone; default: --temperature")


def _add_composing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("audio codes")
    either, add = group.add_mutually_exclusive_group().add_argument, group.add_argument
    either("--no-codes", action="store_true", help="render without audio codes")
    either(
        "--codes",
        metavar="FILE",
        help="play these: text of audio codes, or the report of a song; a cover follows them in "
        "place of those of its source",
    )
    add("--cfg", type=float, default=2.0, help="guidance of the audio codes")
    add("--negative", default="", help="what the codes should move away from")
    add("--prompt-layout", default="aligned", choices=("aligned", "legacy"))


def _add_sound(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--timbre", metavar="FILE", help="a recording whose sound the song takes on")
    sampler.add_to(parser)
    arguments.add_tile(parser)
    add(
        "--keep-level",
        action="store_true",
        help="do not normalise the peak; a repaint keeps its source's level in any case",
    )
