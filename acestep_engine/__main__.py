"""Command line: song, plan, encode, decode, inspect, download. Prints to the user, keeps no state.

This is one of the two borders where any error becomes one readable message.
"""

from __future__ import annotations

import argparse
import atexit
import io
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import safetensors.torch

from . import audio as sound
from .bench import commands as benchmarks
from .engine import Engine, get_engine
from .errors import AceStepError, InvalidRequest
from .lm import metadata
from .runtime import DeviceWish, ModeWish, PrecisionWish, Wish
from .types import (
    Audio,
    ComposeOptions,
    DiTSampling,
    Latents,
    LMSampling,
    ModelSpec,
    Plan,
    PlanOptions,
    Request,
)
from .vae import level, memory
from .weights import presets, tiny
from .weights.layouts import discover

MODELS = Path("models/acestep")
REPORTS = (".json",)
LATENTS = (".safetensors",)
NOISE = (
    "No model files yet: a tiny random model plays, so the sound is noise. "
    "For music: python -m acestep_engine download turbo"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 on a readable error, 130 when stopped."""
    for stream in (sys.stdout, sys.stderr):  # a console may lack letters that a plan has
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    options = _parser().parse_args(arguments)
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


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "an unknown place"
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def _model(options: argparse.Namespace) -> ModelSpec:
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
    return replace(spec, family=options.family, wish=wish)


def _request(options: argparse.Namespace) -> Request:
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


def _lm_sampling(options: argparse.Namespace) -> LMSampling:
    return LMSampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        cfg_scale=options.cfg,
        negative=options.negative,
        seed=options.seed,
        temperature_last=options.temperature_last,
    )


def _plan(engine: Engine, spec: ModelSpec, options: argparse.Namespace) -> Plan:
    sampling = _lm_sampling(options)
    if options.plan_temperature is not None:
        sampling = replace(sampling, temperature=options.plan_temperature)
    choices = PlanOptions(
        think=not options.no_think,
        rewrite_caption=not options.keep_caption,
        detect_language=not options.keep_language,
        sampling=sampling,
    )
    plan = engine.plan(spec, _request(options), choices)
    print(f"Plan ({plan.duration:g} s, seed {plan.seed}):")
    print("\n".join(f"  {line}" for line in metadata.dump(plan.metadata).splitlines()))
    return plan


def run_plan(options: argparse.Namespace) -> None:
    if options.out:
        sound.check_target(options.out, REPORTS)
    plan = _plan(get_engine(), _model(options), options)
    if options.out:
        _write_json(Path(options.out), asdict(plan))
        print(f"Wrote {options.out}")


def run_song(options: argparse.Namespace) -> None:
    sound.check_target(options.out)
    report_path = Path(options.out).with_suffix(REPORTS[0])
    sound.check_target(report_path, REPORTS)
    compose = ComposeOptions(options.batch, options.prompt_layout, _lm_sampling(options))
    render = DiTSampling(
        steps=options.steps,
        shift=options.shift,
        guidance=options.guidance,
        timesteps=tuple(options.timesteps) if options.timesteps else None,
        seed=options.seed,
        batch=options.batch,
    )
    engine, spec, clock = get_engine(), _model(options), _Clock()
    model = engine.describe(spec)  # what is wrong with the files is said before any work
    plan = clock("plan", _plan, engine, spec, options)
    codes = None
    if spec.lm and not options.no_codes:
        codes = clock("compose", engine.compose, spec, plan, compose)
    latents = clock("render", engine.render, spec, plan, codes, render)
    audio = clock("decode", engine.decode, spec, latents, *_tile(options))
    files = _save_all(audio, options)
    report = {
        "files": [str(path) for path in files],
        "seconds": audio.seconds,
        "request": asdict(_request(options)),
        "plan": asdict(plan),
        "codes": asdict(codes) if codes else None,
        "render": dict(latents.record),
        "model": model,
        "vae": asdict(engine.windows["decode"]),
        "timings": clock.seconds,
    }
    _write_json(report_path, report)
    timings = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in clock.seconds.items())
    print(f"Timings: {timings}")
    print(
        f"Wrote {', '.join(map(str, files))} ({audio.seconds:g} s, 48 kHz stereo) and {report_path}"
    )


def _save_all(audio: Audio, options: argparse.Namespace) -> list[Path]:
    out = Path(options.out)
    if not options.keep_level:
        audio = Audio(level.normalise_peak(audio.waveform), audio.sample_rate)
    songs = audio.waveform.shape[0]
    names = [out if n == 0 else out.with_stem(f"{out.stem}-{n + 1}") for n in range(songs)]
    return [sound.save(audio, name, item) for item, name in enumerate(names)]


def _tile(options: argparse.Namespace) -> tuple[int, int]:
    return options.tile, memory.read_size(options.max_memory)


def run_encode(options: argparse.Namespace) -> None:
    sound.check_target(options.out, LATENTS)
    latents = get_engine().encode(_model(options), sound.load(options.sound), *_tile(options))
    _save_latents(latents, Path(options.out))
    print(f"Wrote {options.out}: latents {tuple(latents.values.shape)}")


def run_decode(options: argparse.Namespace) -> None:
    sound.check_target(options.out)
    latents = _load_latents(Path(options.latents))
    audio = get_engine().decode(_model(options), latents, *_tile(options))
    files = _save_all(audio, options)
    print(f"Wrote {', '.join(map(str, files))} ({audio.seconds:g} s)")


def run_inspect(options: argparse.Namespace) -> None:
    print(json.dumps(get_engine().describe(_model(options)), indent=2, ensure_ascii=False))


def run_download(options: argparse.Namespace) -> None:
    folder = presets.download(options.preset, Path(options.folder))
    print(f"All files of '{options.preset}' are in {folder}. Try: python -m acestep_engine song")


def _save_latents(latents: Latents, path: Path) -> None:
    with _whole(path) as temporary:
        safetensors.torch.save_file({"latents": latents.values.contiguous()}, temporary)


def _load_latents(path: Path) -> Latents:
    try:
        return Latents(safetensors.torch.load_file(path)["latents"])
    except (OSError, KeyError, safetensors.SafetensorError) as error:
        raise InvalidRequest(
            f"'{path}' holds no latents ({error}). Give a file that the encode command wrote."
        ) from error


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with _whole(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors="replace"))


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`, which then appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class _Clock:
    """Calls stages and remembers how long each took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, call: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments)
        self.seconds[stage] = round(time.perf_counter() - start, 3)
        return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="acestep_engine", description="Songs with ACE-Step 1.5.")
    parser.add_argument("--verbose", action="store_true", help="say what is chosen and why")
    parser.add_argument("--debug", action="store_true", help="full trace of an error")
    commands = parser.add_subparsers(required=True, metavar="command")

    song = commands.add_parser("song", help="a song from words")
    _add_model(song)
    _add_words(song)
    _add_render(song)
    song.add_argument("--out", default="song.flac", help="file to write: .wav, .flac or .mp3")
    song.set_defaults(run=run_song)

    plan = commands.add_parser("plan", help="only the plan: tempo, key, caption, length")
    _add_model(plan)
    _add_words(plan)
    plan.add_argument("--out", help="JSON file to write the plan to")
    plan.set_defaults(run=run_plan)

    encode = commands.add_parser("encode", help="sound file to latents")
    _add_model(encode)
    encode.add_argument("sound")
    encode.add_argument("out", help="safetensors file to write")
    _add_tile(encode)
    encode.set_defaults(run=run_encode)

    decode = commands.add_parser("decode", help="latents to a sound file")
    _add_model(decode)
    decode.add_argument("latents")
    decode.add_argument("out")
    _add_tile(decode)
    decode.add_argument("--keep-level", action="store_true", help="do not normalise the peak")
    decode.set_defaults(run=run_decode)

    inspect = commands.add_parser("inspect", help="what a model is made of and how it would run")
    _add_model(inspect)
    inspect.set_defaults(run=run_inspect)

    bench = commands.add_parser("bench", help="speed and memory against a peer, in one run")
    benchmarks.add_to(bench.add_subparsers(required=True, metavar="what"))
    bench.set_defaults(run=lambda options: print(options.measure(options)))

    download = commands.add_parser(
        "download", help="fetch the official files; continues if cut off"
    )
    download.add_argument("preset", choices=sorted(presets.PRESETS))
    download.add_argument("--folder", default=str(MODELS))
    download.set_defaults(run=run_download)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="auto",
        help=f"folder, file or preset ({', '.join(presets.PRESETS)}); "
        f"auto: {MODELS}, or a tiny random model",
    )
    parser.add_argument("--family", default="auto", choices=("auto", "turbo", "sft", "base"))
    parser.add_argument("--device", default="auto", choices=get_args(DeviceWish))
    parser.add_argument("--precision", default="auto", choices=get_args(PrecisionWish))
    parser.add_argument("--mode", default="auto", choices=get_args(ModeWish))


def _add_words(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--caption", default="", help="style, instruments, mood")
    add("--lyrics", default="", help="the words, with [Verse] and [Chorus] tags")
    add("--instrumental", action="store_true")
    add("--seconds", type=float, help="length; left out: the language model decides")
    add("--bpm", type=int)
    add("--key", help='such as "F# minor"')
    add("--meter", help="2, 3, 4 or 6")
    add("--language", help="of the lyrics, such as en")
    add("--no-think", action="store_true", help="use the given metadata only, no plan by the model")
    add("--keep-caption", action="store_true", help="do not let the model rewrite the caption")
    add("--keep-language", action="store_true", help="do not let the model name the language")
    add("--seed", type=int, default=0)
    add("--cfg", type=float, default=2.0, help="guidance of the audio codes")
    add("--temperature", type=float, default=0.85, help="of plan and codes")
    add("--plan-temperature", type=float, help="of the plan alone; default: --temperature")
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=0.9)
    add("--min-p", type=float, default=0.0)
    add("--repetition-penalty", type=float, default=1.0)
    add("--negative", default="", help="what the codes should move away from")
    add("--temperature-last", action="store_true", help="filter by top-p and min-p before it")


def _add_tile(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tile", type=int, default=0, help="VAE tile in latent frames, 0: automatic")
    add(
        "--max-memory",
        default="0",
        help="of the VAE's work, such as 900MiB or 1.5GiB; 0: what is free",
    )


def _add_render(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--no-codes", action="store_true", help="render without audio codes")
    add("--prompt-layout", default="aligned", choices=("aligned", "legacy"))
    add("--batch", type=int, default=1, help="songs with the seeds after --seed")
    add("--steps", type=int, help="default: of the checkpoint's family")
    add("--shift", type=float)
    add("--guidance", type=float)
    add("--timesteps", type=float, nargs="+", help="own noise levels, falling from 1")
    _add_tile(parser)
    add("--keep-level", action="store_true", help="do not normalise the peak")


if __name__ == "__main__":
    sys.exit(main())
