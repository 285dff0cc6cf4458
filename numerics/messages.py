"""Helpers for messages: percentages, counts, printable text, suggestions, checks that name the argument, presentation.

`halfstep.cli` makes the texts and pictures of results. This layer must not import it, so ``halfstep/__init__.py``
stores the name of the presenting module in `presenter`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

presenter = ""  # dotted name of the module that has the functions


def shown(function: str, *arguments: Any) -> Any:
    """The result of a function of the presenting module, which is imported at its first use."""
    return getattr(importlib.import_module(presenter), function)(*arguments)


def percent(share: float) -> str:
    """A share in percent, in at most five characters. Only exactly 0 and 1 give 0 and 100."""
    value = 100 * share
    if value in (0, 100):
        return f"{value:.0f}"
    if value < 0.005:
        return "<0.01"
    return ">99.9" if value > 99.94 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def count(number: float, unit: str = "") -> str:
    """A count in at most six characters, ``"12.3k"``, or with a unit, ``"12.3 kFLOP"``."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if number < 999.5 or prefix == "E":
            break
        number /= 1000
    return f"{number:.3g}{' ' if unit else ''}{prefix}{unit}"


def printable(text: str) -> str:
    """`text` in one line of printable characters. Others are escaped as in Python, such as ``\\x1b``."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def _meant(word: str, words: list[str], cutoff: float) -> str:
    """``"did you mean 'fp16'? "`` for the nearest of `words`; empty if none is near."""
    import difflib  # imported only for mistakes

    near = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return "" if not near else f"did you mean {near[0] if near[0].startswith('-') else repr(near[0])}? "


def instead(word: str, allowed: Iterable[str], listed: bool = True) -> str:
    """A remedy for an unknown word: ``"did you mean 'fp16'? Choose from fp16, bf16"``.

    Without `listed`, only the question, followed by a space.
    """
    words = list(allowed)
    meant = _meant(word, words, 0.55 if listed else 0.6)
    if any(", " in name for name in words):
        words = list(map(repr, words))
    return meant + f"{'C' if meant else 'c'}hoose from {', '.join(words)}" if listed else meant


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise ValueError, with the nearest name, unless `value` is one of `allowed`."""
    names = list(allowed)
    if value not in names:
        meant = _meant(str(value), names, 0.55).strip()
        expected = f"Expected {name} to be one of {', '.join(names)}, but got {value!r}"
        raise ValueError(f"{expected}: {meant}" if meant else expected)


def whole(name: str, value: Any, low: int = 1) -> int:
    """`value` as an int. Raises ValueError unless it is an integer of at least `low`."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not (integer or (isinstance(value, float) and value.is_integer())) or value < low:
        raise ValueError(f"Expected {name} to be an integer of at least {low}, but got {value!r}")
    return int(value)


def divides(name: str, value: int, of_name: str, of: int, remedy: str) -> None:
    """Raise ValueError unless `value` divides `of`."""
    if of % value:
        raise ValueError(f"Expected {name} to divide {of_name}, {of}, but got {value}: {remedy}")
