"""Numbers on command lines: argparse types, whose errors name the allowed values."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def number(convert: Callable[[str], float], fine: Callable[[float], bool], allowed: str) -> Callable[[str], Any]:
    """An argparse type: a finite number that `convert` returns and `fine` accepts; `allowed` describes these."""

    def parse(text: str) -> float:
        try:
            value = convert(text)
            if math.isfinite(value) and fine(value):
                return value
        except (ValueError, OverflowError):
            pass
        raise argparse.ArgumentTypeError(f"expected {allowed}, but got {text.strip()!r}")

    return parse


def whole(low: int, high: int = 2**63 - 1, note: str = "") -> Callable[[str], Any]:
    """An argparse type: an integer from `low` to `high`. The error ends with `note`."""
    span = f"of at least {low}" if high == 2**63 - 1 else f"from {low} to {high}"
    return number(int, lambda value: low <= value <= high, f"an integer {span}{note}")


above_zero = number(float, lambda value: value > 0, "a number above 0")


def _count(text: str) -> int:
    """A positive integer, such as 7e9, 7B, 1.5B or 7_000_000. Raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e\+?[0-9]+)?)([kmbgt]?)", text.strip().lower())
    value = Fraction(match[1].replace("_", "")) * _SUFFIXES.get(match[2], 1) if match else Fraction(0)
    if value < 1 or value.denominator != 1:
        raise ValueError(text)
    return int(value)


def count(example: str = "") -> Callable[[str], int]:
    """An argparse type: an integer of at least 1, also written as 7e9, 7B or 350M. The error ends with `example`."""
    return number(_count, lambda value: True, "an integer of at least 1" + example)
