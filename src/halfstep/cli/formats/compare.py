"""What one format holds that another does not."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from halfstep.cli.formats import number_text
from halfstep.cli.formats.shared_values import lowest_exponent, shared_values, step_exponent
from halfstep.cli.formats.values import encoded, number_dict, overflow_threshold
from halfstep.numerics.formats.parse import parse_number
from halfstep.numerics.formats.table import Format

_EXAMPLES = ("0.1", "1.0001", "1e-7")


def examples(chosen: Sequence[Format]) -> list[str]:
    """Numbers that show how the formats differ: some usual ones, and each format's overflow, least number and first
    integer lost."""
    numbers = list(_EXAMPLES)
    for format in chosen:
        numbers += [
            number_text.decimal(overflow_threshold(format)) or "",
            f"2^{number_text.power_of_two(Fraction(format.min_subnormal))}",
            str(format.integer_range + 1),
        ]
    short = [text for text in dict.fromkeys(numbers) if len(text) <= 12]
    return [text for text in short if text in _EXAMPLES or _differs(text, chosen)]


def _differs(text: str, chosen: Sequence[Format]) -> bool:
    """Whether the formats store different values, or with different outcomes."""
    results = [encoded(parse_number(text), format) for format in chosen]
    return len({(one.outcome, None if one.stored is None else str(one.stored.value)) for one in results}) > 1


def _percent(part: int, whole: int) -> str:
    """A share in percent, which shows 0 and 100 only if they are exact."""
    if part in (0, whole):
        return "none" if part == 0 else "all"
    return f"{number_text.rounded(Fraction(100 * part, whole), 3)} %"


def _range_words(one: Format, other: Format) -> list[str]:
    """Which format reaches further up, and which further down."""
    further: dict[str, list[str]] = {}
    for what, first, second in (
        ("up", one.emax, other.emax),
        ("down", -lowest_exponent(one), -lowest_exponent(other)),
    ):
        if first != second:
            name = one.name if first > second else other.name
            further.setdefault(name, []).append(f"2^{abs(first - second)} times further {what}")
    reaches = [f"{name} reaches {' and '.join(ways)}" for name, ways in further.items()]
    return [", ".join(reaches) + "."] if reaches else []


def _precision_words(one: Format, other: Format) -> list[str]:
    """Which format has the smaller distance between numbers, at 1 if both have normal numbers there."""
    fine, coarse = (one, other) if step_exponent(one, 0) <= step_exponent(other, 0) else (other, one)
    ratio = step_exponent(coarse, 0) - step_exponent(fine, 0)
    if ratio == 0 or not fine.min_subnormal <= 1 <= fine.max or not coarse.min_subnormal <= 1 <= coarse.max:
        return []
    times = str(1 << ratio) if ratio <= 16 else f"2^{ratio}"
    return [f"Near 1 {fine.name}'s numbers are {times} times closer together."]


def pair_words(one: Format, other: Format) -> list[str]:
    """The comparison of two formats in sentences."""
    shared = shared_values(one, other)
    words = [*_range_words(one, other), *_precision_words(one, other)]
    if shared == one.values == other.values:
        return [*words, f"Both have the same {shared:,} values."]
    if shared in (one.values, other.values):
        inner, outer = (one, other) if shared == one.values else (other, one)
        return [*words, f"{outer.name} holds every value of {inner.name}: casting there and back loses nothing."]
    return [
        *words,
        f"They share {shared:,} values: {_percent(shared, one.values)} of {one.name}'s {one.values:,} are exact in "
        f"{other.name}, {_percent(shared, other.values)} of {other.name}'s {other.values:,} in {one.name}.",
    ]


def pair_dict(one: Format, other: Format) -> dict[str, Any]:
    shared = shared_values(one, other)
    ratios = {
        f"{name.split('_')[0]}_ratio": number_dict(Fraction(getattr(one, name)) / Fraction(getattr(other, name)))
        for name in ("eps", "max", "min_subnormal")
    }
    return {
        "formats": [one.name, other.name],
        "shared_values": shared,
        "only_in": {one.name: one.values - shared, other.name: other.values - shared},
        **ratios,
        "words": pair_words(one, other),
    }
