"""Names, counts and shares in as few characters as a table has room for."""

from __future__ import annotations


def shortened(name: str, room: int) -> str:
    """A dotted name that fits: parts become their first letter, from the left, as long as that is needed.

    ``"encoder.layers.0.self_attn.in_proj_weight"`` becomes ``"e.l.0.s.in_proj_weight"``. Of what is still too long the
    middle is left out.
    """
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= room:
            break
        parts[place] = part if part.isdigit() else part[:1]
    short = ".".join(parts)
    if len(short) <= room:
        return short
    front = (room - 1) // 2
    return f"{short[:front]}…{short[len(short) - (room - 1 - front) :]}"


def percent(share: float) -> str:
    """A share in percent, in at most five characters, that says 0 and 100 of exactly 0 and 1 only."""
    value = 100 * share
    if value in (0, 100):
        return f"{value:.0f}"
    if value < 0.005:
        return "<0.01"
    return ">99.9" if value > 99.94 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def count(number: int) -> str:
    """A count in at most six characters: ``"999"``, ``"12.3k"``, ``"1.2G"``."""
    value = float(number)
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5 or unit == "T":
            break
        value /= 1000
    return f"{value:.0f}" if unit == "" else f"{value:.3g}{unit}"
