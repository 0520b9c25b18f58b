"""The widgets that say how the language model draws tokens, for every node that has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io

from ..acestep_engine.types import MAX_SEED, AnswerOptions, LMSampling

DEFAULT = LMSampling()


def seed_input(what: str) -> Any:
    """A seed with ComfyUI's control for the next run; `what` it decides goes into the tooltip."""
    return io.Int.Input(
        "seed",
        default=0,
        min=0,
        max=MAX_SEED,
        control_after_generate=True,
        tooltip=f"Decides {what}. The same seed and settings give the same result again.",
    )


def sampling_inputs(temperature: float = DEFAULT.temperature) -> list[Any]:
    """Temperature, with its default, and the limits on which tokens may be drawn."""
    return [
        io.Float.Input(
            "temperature",
            default=temperature,
            min=0.0,
            max=5.0,
            step=0.01,
            tooltip="How daring the choices are: 0 always takes the likeliest, above 1 gets wild.",
        ),
        io.Int.Input(
            "top_k",
            default=DEFAULT.top_k,
            min=0,
            max=100_000,
            advanced=True,
            tooltip="Choose among this many likeliest tokens only. 0: no such limit.",
        ),
        io.Float.Input(
            "top_p",
            default=DEFAULT.top_p,
            min=0.01,
            max=1.0,
            step=0.01,
            advanced=True,
            tooltip="Choose among the likeliest tokens that together are this probable. 1: off.",
        ),
        io.Float.Input(
            "min_p",
            default=DEFAULT.min_p,
            min=0.0,
            max=1.0,
            step=0.01,
            advanced=True,
            tooltip="Leave out tokens below this share of the likeliest one. 0: off.",
        ),
        io.Float.Input(
            "repetition_penalty",
            default=DEFAULT.repetition_penalty,
            min=0.1,
            max=10.0,
            step=0.01,
            advanced=True,
            tooltip="Above 1 makes tokens that already came less likely. 1: off.",
        ),
    ]


def order_input() -> Any:
    """Last and optional, because it came after workflows had been saved."""
    return io.Boolean.Input(
        "temperature_last",
        default=DEFAULT.temperature_last,
        optional=True,
        advanced=True,
        tooltip="Apply top_p and min_p before temperature, as ComfyUI's own nodes do. Off: after "
        "it, which keeps fewer tokens below temperature 1.",
    )


def length_input() -> Any:
    """How long an answer in words may get."""
    return io.Int.Input(
        "max_tokens",
        default=AnswerOptions().max_tokens,
        min=1,
        max=10_000,
        advanced=True,
        tooltip="Lyrics stop at this many tokens, about a word each, metadata included. A "
        "song rarely needs 1000; the limit catches a model that does not find its end.",
    )


def sampling_of(widgets: Mapping[str, Any], **more: Any) -> LMSampling:
    """The widgets of `sampling_inputs`, `seed_input` and `order_input`, and `more` fields."""
    return LMSampling(
        temperature=widgets["temperature"],
        top_k=widgets["top_k"],
        top_p=widgets["top_p"],
        min_p=widgets["min_p"],
        repetition_penalty=widgets["repetition_penalty"],
        seed=widgets["seed"],
        temperature_last=widgets.get("temperature_last", DEFAULT.temperature_last),
        **more,
    )


def answer_options_of(widgets: Mapping[str, Any]) -> AnswerOptions:
    """The widgets of `sampling_inputs`, `seed_input` and `length_input`."""
    return AnswerOptions(widgets["max_tokens"], sampling_of(widgets))
