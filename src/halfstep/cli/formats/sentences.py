"""The text of `halfstep why`: one or two sentences for each step from a number to the stored value."""

from __future__ import annotations

from fractions import Fraction

from halfstep.cli.formats import number_text
from halfstep.cli.formats.rules import DoubleRounding, ends_around, nearest, rule
from halfstep.cli.formats.text import distance
from halfstep.cli.formats.values import Encoded, Stored, finite, overflow_threshold, overflows, special_text
from halfstep.numerics.formats.exact import Neighbours, neighbours
from halfstep.numerics.formats.parse import Number
from halfstep.numerics.formats.table import Format

_DIRECTIONS = {"toward_zero": "toward zero", "odd": "to odd", "up": "up", "down": "down"}
_TAKEN = {"toward_zero": "the one nearer to zero", "up": "the upper one", "down": "the lower one"}


def text(number: Number, format: Format) -> str:
    """A number with all its digits, or with enough of them to distinguish it from its neighbours."""
    if isinstance(number, float):
        return special_text(number)
    whole = number_text.decimal(number)
    if whole is not None and len(whole) <= 24:
        return whole
    return f"≈{number_text.rounded(number, format.max_digits10 + 2)}"


def power(number: Fraction) -> str:
    """A number as a power of two and in decimal."""
    whole = number_text.decimal(number)
    digits = f"= {whole}" if whole is not None and len(whole) <= 24 else f"≈ {number_text.rounded(number, 4)}"
    return f"2^{number_text.power_of_two(number)} {digits}"


def _obstacle(number: Fraction, format: Format) -> list[str]:
    """Why a finite number between two numbers of the format is none itself; empty where its size is the reason."""
    denominator, numerator = number.denominator, abs(number.numerator)
    if format.kind == "scale" or (format.kind == "integer" and denominator == 1):
        return []
    if format.kind == "integer":
        return [f"The number is not an integer, and {format.name} has integers only."]
    if denominator & (denominator - 1):
        shown = str(number) if max(denominator, numerator).bit_length() < 80 else ""
        terms = f"The number is {shown} in lowest terms, and {denominator} is not a power of two"
        if not 0 < len(shown) <= 24:
            terms = "In lowest terms its denominator is not a power of two"
        return [f"{terms}: no binary format has it exactly."]
    significant = (numerator // (numerator & -numerator)).bit_length()
    if significant <= format.precision:
        return []
    return [f"The number has {significant} significant bits, and {format.name} has {format.precision}."]


def _step(found: Encoded, around: Neighbours) -> str:
    """The distance between the numbers."""
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


def _where(found: Encoded, around: Neighbours) -> str:
    """The distances to both neighbours."""
    low, high = ends_around(found, around)
    below, above = (distance(abs(Fraction(found.number) - end) / (high - low)) for end in (low, high))
    return (
        f"The number is {below} ulp above {text(low, found.format)} and {above} ulp below {text(high, found.format)}."
    )


def _halfway(found: Encoded, around: Neighbours) -> str:
    low, high = (text(end, found.format) for end in ends_around(found, around))
    return f"The number is exactly halfway between {low} and {high}."


def _nearest(found: Encoded, around: Neighbours, decided: str) -> list[str]:
    """The decision of rounding to nearest, and its reason."""
    format = found.format
    if decided == "nearer":
        words = [_where(found, around), f"The nearer one is taken: {text(nearest(found).value, format)}."]
    elif decided == "tie":
        sides = (around.code_below, around.code_above)
        odd = [Stored(code, format).bits for code in sides if code not in (None, around.code_nearest)]
        even = f"Ties go to even: {Stored(around.code_nearest, format).bits} ends in 0 and is taken"
        words = [_halfway(found, around), f"{even}{''.join(f', {one} ends in 1' for one in odd)}."]
    else:
        reason = "with one significant bit none of them is even (IEEE 754-2019, 4.3.1)"
        words = [_halfway(found, around), f"Ties go away from zero: {reason}."]
    if found.outcome == "underflow":
        half = power(Fraction(format.min_subnormal) / 2)
        words.append(f"Whatever is no larger than {half}, half the least number, becomes zero.")
    return words


def _nearest_beyond(found: Encoded) -> list[str]:
    """The reason why rounding to nearest overflows."""
    format, negative = found.format, found.number < 0
    sign = -1 if negative else 1
    threshold = overflow_threshold(format, negative)
    largest = abs(Fraction(format.lowest)) if negative and format.kind == "integer" else Fraction(format.max)
    if format.mantissa == 0:
        even = "exactly halfway rounds away too: with one significant bit there is no even number"
    elif overflows(sign * threshold, format):
        even = "exactly halfway rounds away too: the largest number's last bit is 1"
    else:
        even = "exactly halfway still rounds to the largest number, whose last bit is 0"
    end, after, halfway = (text(sign * value, format) for value in (largest, 2 * threshold - largest, threshold))
    where = "at" if abs(Fraction(found.number)) == threshold else "beyond"
    return [
        f"The {'lowest' if negative else 'largest'} number of {format.name} is {end}. If the numbers went on, {after} "
        f"would come next; halfway lies {halfway}.",
        f"The number lies {where} it, so it overflows ({even}).",
        _instead(found),
    ]


def _directed_beyond(found: Encoded, rounding: str, inward: bool) -> list[str]:
    """What a directed rounding makes of a number beyond the last one of the format."""
    format, negative = found.format, found.number < 0
    name, end = ("lowest", format.lowest) if negative else ("largest", format.max)
    where = f"The {name} number of {format.name} is {text(Fraction(end), format)}, and the number lies beyond it."
    if not inward:
        return [where, f"Rounding {rounding} leads away from zero, so it overflows.", _instead(found)]
    stored = found.stored or nearest(found)
    kept = f"{text(stored.value, format)} is stored, {stored.hex}"
    return [where, f"Rounding {_DIRECTIONS[rounding]} does not overflow here: {kept}."]


def _instead(found: Encoded) -> str:
    """What represents an overflow, an infinity or a NaN."""
    format, stored = found.format, found.stored
    if stored is None:
        return f"{format.name} has no NaN, so that nothing can stand for it."
    if stored.sort == "zero":
        return f"Zero is stored: {stored.hex}."
    if stored.sort == "infinity":
        return f"Infinity is stored: {stored.hex}."
    if stored.sort == "nan":
        return f"{'' if format.has_infinity else f'{format.name} has no infinity: '}NaN is stored: {stored.hex}."
    neither = "" if format.has_infinity or format.has_nan else f"{format.name} has neither infinity nor NaN: "
    return f"{neither}the largest number is stored: {text(stored.value, format)}, {stored.hex}."


def reasons(found: Encoded, rounding: str = "nearest") -> list[str]:
    """The explanation of a number rounded in any mode but ``"stochastic"``, as a list of one or two sentences each.

    Args:
        found: the number rounded in this mode, subnormal results kept.
        rounding: the mode.
    """
    format, number = found.format, found.number
    around = neighbours(number, format) if finite(number) else None
    decided = rule(found, around)
    if around is None:
        return ["An infinity is not rounded." if number == number else "NaN is not rounded.", _instead(found)]
    if decided == "exact":
        near = f"{text(around.previous, format)} below and {text(around.next, format)} above"
        return [f"It is a number of {format.name}: nothing is rounded.", f"The next ones are {near}."]
    if decided == "sign":
        special = "nothing" if found.stored is None else text(found.stored.value, format)
        return [f"{format.name} has no sign, and {special} stands for negative numbers."]
    if decided == "least":
        return [f"{format.name} has no zero: everything below its least number, 2^{format.emin}, becomes that."]

    exact, negative = Fraction(number), number < 0
    obstacle = [] if decided == "overflow" else _obstacle(exact, format)
    low, high = ends_around(found, around)
    inner, outer = (high, low) if negative else (low, high)
    last = abs(Fraction(format.lowest if negative else format.max))
    stored = found.stored or nearest(found)
    if rounding == "nearest_away" and decided in ("tie", "tie_up"):
        if abs(outer) > last:
            threshold = text((-1 if negative else 1) * overflow_threshold(format, negative), format)
            where = f"The number is exactly halfway to the number after the last one, {threshold}."
            taken = ["Ties go away from zero, so it overflows.", _instead(found)]
        else:
            where, taken = _halfway(found, around), [f"Ties go away from zero: {text(stored.value, format)}."]
        return [*obstacle, _step(found, around), where, *taken]
    if rounding in ("nearest", "nearest_away"):
        beyond = decided == "overflow"
        return (
            _nearest_beyond(found) if beyond else [*obstacle, _step(found, around), *_nearest(found, around, decided)]
        )
    inward = rounding in ("toward_zero", "odd", "up" if negative else "down")
    if abs(inner) > last or (abs(outer) > last and not inward):
        return [*obstacle, *_directed_beyond(found, rounding, inward)]
    value = text(stored.value, format)
    if rounding != "odd":
        taken = [f"Rounding {_DIRECTIONS[rounding]} takes {_TAKEN[rounding]}: {value}."]
    elif format.mantissa == 0 and abs(exact) >= Fraction(format.min_normal):
        taken = [f"With one significant bit, rounding to odd is rounding toward zero: {value}."]
    else:
        taken = [f"Rounding to odd takes the one whose last bit is 1, {stored.bits}: {value}."]
    return [*obstacle, _step(found, around), _where(found, around), *taken]


def double_rounding_words(one: DoubleRounding, found: Encoded) -> str:
    """What comes of rounding to wider formats first."""
    stored, middle = one.found.stored, one.found.number
    if stored is None:
        return ""
    way = " and ".join(format.name for format in one.via)
    shown = number_text.decimal(middle) if isinstance(middle, Fraction) else special_text(middle)
    return (
        f"Rounded twice: first to {way}, the number is {shown}, and that becomes {text(stored.value, found.format)} "
        f"instead of {text(nearest(found).value, found.format)}."
    )
