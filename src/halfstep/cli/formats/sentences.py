"""The text of `halfstep why`: one or two sentences for each step from a number to the stored value.

`reasons` has those of every rounding mode; they begin with `words`, those of rounding to nearest.
"""

from __future__ import annotations

from fractions import Fraction

from halfstep.cli.formats import number_text
from halfstep.cli.formats.rules import DoubleRounding, ends_around, nearest, rule
from halfstep.cli.formats.text import bits, distance
from halfstep.cli.formats.values import Encoded, Stored, finite, overflow_threshold, overflows, special_text
from halfstep.cli.terminal import Terminal
from halfstep.numerics.formats.exact import Neighbours, Number, neighbours
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


def _where_words(found: Encoded, around: Neighbours) -> str:
    """The sentence on the distances to both neighbours."""
    low, high = ends_around(found, around)
    below, above = (distance(abs(Fraction(found.number) - end) / (high - low)) for end in (low, high))
    return f"The number is {below} ulp above {text(low, found.format)} and {above} ulp below {text(high, found.format)}."


def _rule_words(found: Encoded, around: Neighbours, decided: str, screen: Terminal) -> list[str]:
    """The sentence on the decision and its reason."""
    format = found.format
    low, high = ends_around(found, around)
    if decided == "nearer":
        words = [_where_words(found, around), f"The nearer one is taken: {text(nearest(found).value, format)}."]
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
    if found.stored.sort == "zero" and found.number != found.number:
        return f"Zero is stored: {found.stored.hex}."
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


# ----------------------------------------------------------------------------------------------- every rounding mode

_TAKES = {
    "toward_zero": "Rounding toward zero takes the one nearer to zero",
    "up": "Rounding up takes the upper one",
    "down": "Rounding down takes the lower one",
}


def _obstacle(number: Fraction, format: Format) -> list[str]:
    """Why a finite number between two numbers of the format is none itself; empty where its size is the reason."""
    denominator = number.denominator
    if format.kind == "scale" or (format.kind == "integer" and denominator == 1):
        return []
    if format.kind == "integer":
        return [f"The number is not an integer, and {format.name} has integers only."]
    if denominator & (denominator - 1):
        shown = str(number) if denominator.bit_length() < 80 and number.numerator.bit_length() < 80 else ""
        terms = f"The number is {shown} in lowest terms, and {denominator} is not a power of two"
        if not 0 < len(shown) <= 24:
            terms = "In lowest terms its denominator is not a power of two"
        return [f"{terms}: no binary format has it exactly."]
    numerator = abs(number.numerator)
    significant = (numerator // (numerator & -numerator)).bit_length()
    if significant <= format.precision:
        return []
    return [f"The number has {significant} significant bits, and {format.name} has {format.precision}."]


def _halfway_words(found: Encoded, around: Neighbours, overflowing: bool) -> list[str]:
    """The explanation of a tie under ``"nearest_away"``."""
    format = found.format
    if overflowing:
        threshold = text((-1 if found.number < 0 else 1) * overflow_threshold(format, found.number < 0), format)
        where = f"The number is exactly halfway to the number after the last one, {threshold}."
        return [_step_words(found, around), where, "Ties go away from zero, so it overflows.", _instead(found)]
    low, high = (text(end, format) for end in ends_around(found, around))
    taken = "" if found.stored is None else text(found.stored.value, format)
    where = f"The number is exactly halfway between {low} and {high}."
    return [_step_words(found, around), where, f"Ties go away from zero: {taken}."]


def _beyond_words(found: Encoded, rounding: str, inward: bool) -> list[str]:
    """The explanation of a directed rounding of a number beyond the last one of the format."""
    format, negative = found.format, found.number < 0
    name, end = ("lowest", format.lowest) if negative else ("largest", format.max)
    where = f"The {name} number of {format.name} is {text(Fraction(end), format)}, and the number lies beyond it."
    if not inward:
        return [where, f"Rounding {rounding} leads away from zero, so it overflows.", _instead(found)]
    mode = {"odd": "to odd", "toward_zero": "toward zero"}.get(rounding, rounding)
    stored = nearest(found) if found.stored is None else found.stored
    return [where, f"Rounding {mode} does not overflow here: {text(stored.value, format)} is stored, {stored.hex}."]


def reasons(found: Encoded, rounding: str, screen: Terminal) -> list[str]:
    """The explanation of a number rounded in any mode but ``"stochastic"``, as a list of one or two sentences each.

    Args:
        found: the number rounded in this mode, subnormal results kept.
        rounding: the mode.
        screen: the terminal.
    """
    format, number = found.format, found.number
    around = neighbours(number, format) if finite(number) else None
    decided = rule(found, around)
    if around is None or decided in ("exact", "sign", "least"):
        return words(found, around, decided, screen)
    exact, negative = Fraction(number), number < 0
    obstacle = [] if decided == "overflow" else _obstacle(exact, format)
    low, high = ends_around(found, around)
    inner, outer = (high, low) if negative else (low, high)
    last = abs(Fraction(format.lowest if negative else format.max))
    if rounding in ("nearest", "nearest_away"):
        if rounding == "nearest" or decided not in ("tie", "tie_up"):
            return [*obstacle, *words(found, around, decided, screen)]
        return [*obstacle, *_halfway_words(found, around, abs(outer) > last)]
    inward = rounding in ("toward_zero", "odd", "up" if negative else "down")
    if abs(inner) > last or (abs(outer) > last and not inward):
        return [*obstacle, *_beyond_words(found, rounding, inward)]
    stored = nearest(found) if found.stored is None else found.stored
    value = text(stored.value, format)
    if rounding != "odd":
        taken = f"{_TAKES[rounding]}: {value}."
    elif format.mantissa == 0 and abs(exact) >= Fraction(format.min_normal):
        taken = f"With one significant bit, rounding to odd is rounding toward zero: {value}."
    else:
        taken = f"Rounding to odd takes the one whose last bit is 1, {bits(stored, screen)}: {value}."
    return [*obstacle, _step_words(found, around), _where_words(found, around), taken]
