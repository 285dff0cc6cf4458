"""What one format holds that another does not.

Shared values are counted per binade, since fp64 has 2^64 values: between 2^e and 2^(e+1) the values of a format are the
multiples of one step, and so are the shared values of two: those of the larger step.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from halfstep.cli.formats import number_text
from halfstep.cli.formats.number_text import number_dict
from halfstep.cli.formats.values import encoded, overflow_threshold
from halfstep.numerics.formats.exact import parse_number, power_of_two
from halfstep.numerics.formats.table import Format

_EXAMPLES = ("0.1", "1.0001", "1e-7")


def lowest_exponent(format: Format) -> int:
    """The exponent e of the smallest positive value, 2^e."""
    return format.emin - format.mantissa if format.has_subnormals else format.emin


def step_exponent(format: Format, exponent: int) -> int:
    """The s for which the values in [2^exponent, 2^(exponent + 1)) are the multiples of 2^s."""
    return 0 if format.kind == "integer" else max(exponent, format.emin) - format.mantissa


def shared_in(exponent: int, *formats: Format, top: Fraction | None = None) -> int:
    """Number of values in [2^exponent, 2^(exponent + 1)) up to `top`, by default the largest, that all formats have."""
    if any(exponent < lowest_exponent(format) for format in formats):
        return 0
    top = Fraction(min(format.max for format in formats)) if top is None else top
    step = max(step_exponent(format, exponent) for format in formats)
    whole = 1 << (exponent - step)
    if top >= Fraction(2) ** (exponent + 1):
        return whole
    return max(0, min(whole, int(top / Fraction(2) ** step) - whole + 1))


def shared_values(first: Format, second: Format) -> int:
    """Number of values that both formats have. Infinities count, NaNs do not, and both zeros count as one."""
    exponents = range(max(lowest_exponent(first), lowest_exponent(second)), min(first.emax, second.emax) + 2)
    tops = [Fraction(min(first.max, second.max))]
    if first.signed and second.signed:
        tops.append(Fraction(min(-first.lowest, -second.lowest)))
    finite = sum(shared_in(exponent, first, second, top=top) for top in tops for exponent in exponents)
    return finite + (first.has_zero and second.has_zero) + 2 * (first.has_infinity and second.has_infinity)


def examples(chosen: Sequence[Format]) -> list[str]:
    """Numbers that show how the formats differ: some usual ones, and each format's overflow, least number and first
    integer lost."""
    numbers = list(_EXAMPLES)
    for format in chosen:
        least = f"2^{power_of_two(Fraction(format.min_subnormal))}"
        numbers += [number_text.decimal(overflow_threshold(format)) or "", least, str(format.integer_range + 1)]
    short = [text for text in dict.fromkeys(numbers) if len(text) <= 12]
    return [text for text in short if text in _EXAMPLES or _differs(text, chosen)]


def _differs(text: str, chosen: Sequence[Format]) -> bool:
    """Whether the formats store different values, or with different outcomes."""
    results = [encoded(parse_number(text), format) for format in chosen]
    return len({(each.outcome, None if each.stored is None else str(each.stored.value)) for each in results}) > 1


def _percent(part: int, whole: int) -> str:
    """A share in percent, which shows 0 and 100 only if they are exact."""
    if part in (0, whole):
        return "none" if part == 0 else "all"
    return f"{number_text.rounded(Fraction(100 * part, whole), 3)} %"


def _range_words(first: Format, second: Format) -> list[str]:
    """Which format reaches further up, and which further down."""
    further: dict[str, list[str]] = {}
    down = lowest_exponent(second) - lowest_exponent(first)
    for what, by in (("up", first.emax - second.emax), ("down", down)):
        if by:
            further.setdefault((first if by > 0 else second).name, []).append(f"2^{abs(by)} times further {what}")
    reaches = [f"{name} reaches {' and '.join(ways)}" for name, ways in further.items()]
    return [", ".join(reaches) + "."] if reaches else []


def _precision_words(first: Format, second: Format) -> list[str]:
    """Which format has the smaller distance between numbers, at 1 if both have normal numbers there."""
    coarser = step_exponent(second, 0) - step_exponent(first, 0)
    if coarser == 0 or any(not format.min_subnormal <= 1 <= format.max for format in (first, second)):
        return []
    times = str(1 << abs(coarser)) if abs(coarser) <= 16 else f"2^{abs(coarser)}"
    return [f"Near 1 {(first if coarser > 0 else second).name}'s numbers are {times} times closer together."]


def pair_words(first: Format, second: Format) -> list[str]:
    """The comparison of two formats in sentences."""
    shared = shared_values(first, second)
    words = [*_range_words(first, second), *_precision_words(first, second)]
    if shared == first.values == second.values:
        return [*words, f"Both have the same {shared:,} values."]
    if shared in (first.values, second.values):
        inner, outer = (first, second) if shared == first.values else (second, first)
        return [*words, f"{outer.name} holds every value of {inner.name}: casting there and back loses nothing."]
    return [
        *words,
        f"They share {shared:,} values: {_percent(shared, first.values)} of {first.name}'s {first.values:,} are exact "
        f"in {second.name}, {_percent(shared, second.values)} of {second.name}'s {second.values:,} in {first.name}.",
    ]


def pair_dict(first: Format, second: Format) -> dict[str, Any]:
    shared = shared_values(first, second)
    ratios = {
        f"{name.split('_')[0]}_ratio": number_dict(Fraction(getattr(first, name)) / Fraction(getattr(second, name)))
        for name in ("eps", "max", "min_subnormal")
    }
    return {
        "formats": [first.name, second.name],
        "shared_values": shared,
        "only_in": {first.name: first.values - shared, second.name: second.values - shared},
        **ratios,
        "words": pair_words(first, second),
    }
