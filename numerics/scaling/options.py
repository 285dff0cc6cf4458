"""The numbers of a loss scaler: which values its options, and the entries of its state, may have."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch

# 1 / scale must be finite too. Above 2^126 it is subnormal, which some devices flush to 0, so no scale grows beyond
# that.
SMALLEST_SCALE, USUAL_MAX_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126, torch.finfo(torch.float32).max


class Option(NamedTuple):
    """The values that an option of a scaler, or a number in its state, may have."""

    allowed: str
    fits: Callable[[Any], bool]
    convert: Callable[[Any], Any] = float

    def checked(self, name: str, value: Any) -> Any:
        """The number as a float or an int of Python. Raises a ValueError if it is no number, or out of range."""
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not self.fits(value):
            raise ValueError(f"Expected {name} to be {self.allowed}, but got {value!r}")
        return self.convert(value)


def scale_between(low: float, high: float, allowed: str = "a number from min_scale {} to max_scale {}") -> Option:
    return Option(allowed.format(low, high), lambda x: low <= x <= high)


GROWTH_FACTOR = Option("a finite number above 1", lambda x: x > 1)
BACKOFF_FACTOR = Option("a number between 0 and 1, both excluded", lambda x: 0 < x < 1)
COUNT = Option("an integer of at least 1", lambda x: x >= 1 and x == int(x), int)
TRACKER = Option(f"an integer from 0 to {2**31 - 1}", lambda x: 0 <= x < 2**31 and x == int(x), int)
MAX_NORM = Option("a finite number above 0", lambda x: x > 0)
ANY_SCALE = scale_between(SMALLEST_SCALE, LARGEST_SCALE, "a number from {} to {}")
# The entries of a state: torch's five, and one of ours.
SAVED = {
    "scale": ANY_SCALE._replace(allowed=f"{ANY_SCALE.allowed} (start with a fresh scaler instead)"),
    "growth_factor": GROWTH_FACTOR,
    "backoff_factor": BACKOFF_FACTOR,
    "growth_interval": COUNT,
    "_growth_tracker": TRACKER,
    "_hysteresis_tracker": TRACKER,
}
