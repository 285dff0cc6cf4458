"""The text of `halfstep why`: one or two sentences for each step from a number to the stored value."""

from __future__ import annotations

from fractions import Fraction

from halfstep.cli.formats import number_text
from halfstep.cli.formats.rules import DoubleRounding, ends_around, nearest
from halfstep.cli.formats.text import bits, distance
from halfstep.cli.formats.values import Encoded, Stored, overflow_threshold, overflows, special_text
from halfstep.cli.terminal import Terminal
from halfstep.numerics.formats.exact import Neighbours, Number
from halfstep.numerics.formats.table import Format


def text(number: Number, format: Format) -> str:
    """A number with all its digits, or with enough of them to distinguish it from its neighbours."""
    if isinstance(number, float):
        return special_text(number)
    whole = number_text.decimal(number)
    return (
        whole if whole is not None and len(whole) <= 24 else f"≈{number_text.rounded(number, format.max_digits10 + 2)}"
    )


def power(number: Fraction) -> str:
    """A number as a power of two and in decimal."""
    whole = number_text.decimal(number)
    digits = f"= {whole}" if whole is not None and len(whole) <= 24 else f"≈ {number_text.rounded(number, 4)}"
    return f"2^{number_text.power_of_two(number)} {digits}"


def _step_words(found: Encoded, around: Neighbours) -> str:
    """The sentence on the distance between the numbers."""
    format, exact, step = found.format, abs(Fraction(found.number)), Fraction(around.ulp)
    apart = f"{power(step)} apart: 1 ulp"
    if format.kind == "integer":
        return f"The numbers of {format.name} are 1 apart: 1 ulp."
    if format.kind == "scale":
        return f"The numbers of {format.name} are powers of two."
    if exact >= Fraction(format.min_normal):
        low = number_text.power_of_two(exact)
        return f"From 2^{low} to 2^{low + 1} the numbers of {format.name} are {apart}."
    words = f"Below 2^{format.emin} the numbers of {format.name} are subnormal, all {apart}."
    left = number_text.power_of_two(exact) - number_text.power_of_two(step) + 1
    if left < 1:
        return words + " This one is smaller than the least of them."
    return words + f" Of the {format.precision} bits of precision {left} {'is' if left == 1 else 'are'} left."


def _rule_words(found: Encoded, around: Neighbours, decided: str, screen: Terminal) -> list[str]:
    """The sentence on the decision and its reason."""
    format, exact = found.format, Fraction(found.number)
    low, high = ends_around(found, around)
    step = high - low
    below, above = distance((exact - low) / step), distance((high - exact) / step)
    where = f"The number is {below} ulp above {text(low, format)} and {above} ulp below {text(high, format)}."
    if decided == "nearer":
        words = [where, f"The nearer one is taken: {text(nearest(found).value, format)}."]
    elif decided == "tie":
        even, *odd = (bits(Stored(code, format), screen) for code in _tied(around))
        words = [
            f"The number is exactly halfway between {text(low, format)} and {text(high, format)}.",
            f"Ties go to even: {even} ends in 0 and is taken{''.join(f', {one} ends in 1' for one in odd)}.",
        ]
    else:
        words = [
            f"The number is exactly halfway between {text(low, format)} and {text(high, format)}.",
            "Ties go away from zero: with one significant bit none of them is even (IEEE 754-2019, 4.3.1).",
        ]
    if found.outcome == "underflow":
        half = Fraction(format.min_subnormal) / 2
        words.append(f"Whatever is no larger than {power(half)}, half the least number, becomes zero.")
    return words


def _tied(around: Neighbours) -> list[int]:
    """The codes of the even and the odd neighbour, where there is one."""
    codes = [code for code in (around.code_below, around.code_above) if code is not None]
    return [around.code_nearest, *(code for code in codes if code != around.code_nearest)]


def _overflow_words(found: Encoded) -> list[str]:
    format, negative = found.format, found.number < 0
    sign = -1 if negative else 1
    threshold = overflow_threshold(format, negative)
    largest = abs(Fraction(format.lowest)) if negative and format.kind == "integer" else Fraction(format.max)
    following = 2 * threshold - largest
    even = "exactly halfway rounds away too: the largest number's last bit is 1"
    if not overflows(sign * threshold, format):
        even = "exactly halfway still rounds to the largest number, whose last bit is 0"
    if format.mantissa == 0:
        even = "exactly halfway rounds away too: with one significant bit there is no even number"
    end, after, halfway = (text(sign * value, format) for value in (largest, following, threshold))
    where = "at" if abs(Fraction(found.number)) == threshold else "beyond"
    return [
        f"The {'lowest' if negative else 'largest'} number of {format.name} is {end}. If the numbers went on, {after} "
        f"would come next; halfway lies {halfway}.",
        f"The number lies {where} it, so it overflows ({even}).",
        _instead(found),
    ]


def _instead(found: Encoded) -> str:
    """The sentence on what represents an overflow or an infinity."""
    format = found.format
    if found.stored is None:
        return f"{format.name} has no NaN, so that nothing can stand for it."
    if found.stored.sort == "infinity":
        return f"Infinity is stored: {found.stored.hex}."
    if found.stored.sort == "nan":
        reason = "" if format.has_infinity else f"{format.name} has no infinity: "
        return f"{reason}NaN is stored: {found.stored.hex}."
    neither = "" if format.has_infinity or format.has_nan else f"{format.name} has neither infinity nor NaN: "
    return f"{neither}the largest number is stored: {text(found.stored.value, format)}, {found.stored.hex}."


def words(found: Encoded, around: Neighbours | None, decided: str, screen: Terminal) -> list[str]:
    """The explanation, as a list of one or two sentences each."""
    format = found.format
    if around is None:
        if found.number == found.number:
            return ["An infinity is not rounded.", _instead(found)]
        return ["NaN is not rounded.", _instead(found)]
    if decided == "exact":
        return [
            f"It is a number of {format.name}: nothing is rounded.",
            f"The next ones are {text(around.previous, format)} below and {text(around.next, format)} above.",
        ]
    if decided == "sign":
        special = "nothing" if found.stored is None else text(found.stored.value, format)
        return [f"{format.name} has no sign, and {special} stands for negative numbers."]
    if decided == "least":
        return [f"{format.name} has no zero: everything below its least number, 2^{format.emin}, becomes that."]
    if decided == "overflow":
        return _overflow_words(found)
    return [_step_words(found, around), *_rule_words(found, around, decided, screen)]


def double_rounding_words(one: DoubleRounding, found: Encoded) -> str:
    way = " and ".join(format.name for format in one.via)
    stored, direct = one.found.stored, nearest(found)
    if stored is None:
        return ""
    middle = one.found.number
    shown = number_text.decimal(middle) if isinstance(middle, Fraction) else special_text(middle)
    return (
        f"Rounded twice: first to {way}, the number is {shown}, and that becomes {text(stored.value, found.format)} "
        f"instead of {text(direct.value, found.format)}."
    )
