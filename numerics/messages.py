"""What messages have in common: shares, printable text, the nearest allowed word, and checks that name the argument."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def percent(share: float) -> str:
    """A share in percent, in at most five characters, that says 0 and 100 of exactly 0 and 1 only."""
    value = 100 * share
    if value in (0, 100):
        return f"{value:.0f}"
    if value < 0.005:
        return "<0.01"
    return ">99.9" if value > 99.94 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def printable(text: str) -> str:
    """`text` in one line that a terminal only shows: other characters are written as in Python, such as ``\\x1b``."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def instead(word: str, allowed: Iterable[str], listed: bool = True) -> str:
    """What to say after a word that is not allowed: ``"did you mean 'fp16'? Allowed are fp16, bf16"``.

    Args:
        word: as it was given.
        allowed: words.
        listed: say which are allowed; if not, only the question is left, with a space after it, or nothing.
    """
    import difflib  # only mistakes wait for it

    words = list(allowed)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.55 if listed else 0.6)
    meant = "" if not near else f"did you mean {near[0] if near[0].startswith('-') else repr(near[0])}? "
    return meant + f"{'A' if meant else 'a'}llowed are {', '.join(words)}" if listed else meant


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
