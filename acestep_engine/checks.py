"""Checks of values that come from outside: what is wrong, with the value, and what to do now.

They know names and ranges, not what a value is for.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, get_args

from torch import Tensor

from .errors import InvalidRequest


def check_range(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, Real):
        raise InvalidRequest(f"{name} is {value!r}, which is no number. Give a number.")
    if not (low <= value <= high):  # also catches NaN
        raise InvalidRequest(
            f"{name} is {value}, but must lie between {low} and {high}. Set it inside that range."
        )


def check_whole(name: str, value: int, low: int, high: int) -> None:
    check_range(name, value, low, high)
    if not isinstance(value, Integral):
        raise InvalidRequest(f"{name} is {value}, but only whole numbers count. Round it.")


def check_text(name: str, value: str) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(
            f"{name} is {value!r}, which is no text. Give a text; an empty one means none."
        )


def check_choice(name: str, value: str, choices: Any) -> None:
    """`value` is one of the words of the Literal `choices`."""
    if value not in get_args(choices):
        raise InvalidRequest(f"{name} is {value!r}. Choose one of {', '.join(get_args(choices))}.")


def check_tensor(name: str, value: Tensor, shape: tuple[int | str, ...]) -> None:
    """`value` holds floats in the given `shape`, where a word stands for any size."""
    if not isinstance(value, Tensor):
        raise InvalidRequest(f"{name} are a {type(value).__name__}. Give a torch tensor.")
    fits = value.ndim == len(shape) and all(
        isinstance(wanted, str) or size == wanted
        for size, wanted in zip(value.shape, shape, strict=True)
    )
    if not fits or value.shape[0] == 0:
        wanted = ", ".join(map(str, shape))
        raise InvalidRequest(
            f"{name} have the shape {tuple(value.shape)}, but must be ({wanted}), with one song or "
            "more. Reshape them."
        )
    if not value.is_floating_point():
        raise InvalidRequest(
            f"{name} are of type {value.dtype}, but must be floating point. Convert them; "
            "integer samples are divided by their range (32768 for 16 bits)."
        )
