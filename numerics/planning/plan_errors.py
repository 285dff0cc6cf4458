"""The planner's checks of what it is given: each message names the argument, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from halfstep.numerics.wording import instead


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise ValueError, with the nearest name, unless `value` is one of `allowed`."""
    names = list(allowed)
    if value not in names:
        raise ValueError(f"{name} is {value!r}; {instead(str(value), names)}")


def whole(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int; ValueError unless it is a whole number from `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value < least:
        raise ValueError(f"{name} is {value!r}; allowed are whole numbers from {least}")
    if value in (float("inf"),) or int(value) != value:
        raise ValueError(f"{name} is {value!r}; allowed are whole numbers from {least}")
    return int(value)


def divides(name: str, value: int, of_name: str, of: int, remedy: str) -> None:
    """Raise ValueError unless `value` divides `of`."""
    if of % value:
        raise ValueError(f"{name} is {value} and does not divide {of_name}, which is {of}; {remedy}")
