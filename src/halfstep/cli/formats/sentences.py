"""The text of `halfstep why`: one or two sentences for each step from a number to the stored value."""

from __future__ import annotations

from fractions import Fraction

from halfstep.cli.formats.number_text import among, power, whole
from halfstep.cli.formats.values import DoubleRounding, Encoded, Stored, distance, overflow_threshold, overflows
from halfstep.numerics.formats.exact import Irrational, encode_exact, next_down_exact, next_up_exact, power_of_two

_DIRECTIONS = {"toward_zero": "toward zero", "odd": "to odd", "up": "up", "down": "down"}
_TAKEN = {"toward_zero": "the one nearer to zero", "up": "the upper one", "down": "the lower one"}


def reasons(result: Encoded, rounding: str = "nearest") -> list[str]:
    """The explanation of a number rounded in any mode but ``"stochastic"``, as a list of one or two sentences each.

    Args:
        one: the number rounded in this mode, subnormal results kept.
        rounding: the mode.
    """
    format, number, rule = result.format, result.number, result.rule
    if rule == "special":
        return ["An infinity is not rounded." if number == number else "NaN is not rounded.", _instead(result)]
    if rule == "exact":
        below, above = (among(near(number, format), format) for near in (next_down_exact, next_up_exact))
        nothing = f"It is a number of {format.name}: nothing is rounded."
        return [nothing, f"The next ones are {below} below and {above} above."]
    if rule == "sign":
        stands = "nothing" if result.stored is None else among(result.stored.value, format)
        return [f"{format.name} has no sign, and {stands} stands for negative numbers."]
    if rule == "least":
        return [f"{format.name} has no zero: everything below its least number, 2^{format.emin}, becomes that."]

    negative = number < 0
    inner, outer = map(abs, reversed(result.ends) if negative else result.ends)
    last = abs(Fraction(format.lowest if negative else format.max))
    away = rounding == "nearest_away" and rule in ("tie", "tie_up")
    if rule == "overflow" and rounding in ("nearest", "nearest_away"):
        return _nearest_beyond(result)
    why = _obstacle(result) if rule != "overflow" else []
    if rounding in ("nearest", "nearest_away"):
        return [*why, _step(result), *(_tie_away(result, outer > last) if away else _nearest(result, rule))]
    inward = rounding in ("toward_zero", "odd", "up" if negative else "down")
    if inner > last or (outer > last and not inward):
        return [*why, *_directed_beyond(result, rounding, inward)]
    stored = result.stored or _nearest_code(result)
    value = among(stored.value, format)
    if rounding != "odd":
        taken = f"Rounding {_DIRECTIONS[rounding]} takes {_TAKEN[rounding]}: {value}."
    elif format.mantissa == 0 and abs(Fraction(number)) >= format.min_normal:
        taken = f"With one significant bit, rounding to odd is rounding toward zero: {value}."
    else:
        taken = f"Rounding to odd takes the one whose last bit is 1, {stored.bits}: {value}."
    return [*why, _step(result), _where(result), taken]


def double_rounding_words(twice: DoubleRounding, result: Encoded) -> str:
    """What comes of rounding to wider formats first."""
    stored, middle = twice.result.stored, twice.result.number
    if stored is None:
        return ""
    way, once = " and ".join(format.name for format in twice.via), among(_nearest_code(result).value, result.format)
    becomes = f"and that becomes {among(stored.value, result.format)} instead of {once}."
    return f"Rounded twice: first to {way}, the number is {whole(middle)}, {becomes}"


def _nearest_code(result: Encoded) -> Stored:
    """What rounding to nearest stores."""
    return Stored(encode_exact(result.number, result.format), result.format)


def _obstacle(result: Encoded) -> list[str]:
    """Why a finite number between two numbers of the format is none itself; empty where its size is the reason."""
    format, number = result.format, Fraction(result.number)
    denominator, numerator = number.denominator, abs(number.numerator)
    if format.kind == "scale" or (format.kind == "integer" and denominator == 1):
        return []
    if format.kind == "integer":
        return [f"The number is not an integer, and {format.name} has integers only."]
    if isinstance(result.number, Irrational):
        return ["The digits of the number never end: no format has it exactly."]
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


def _step(result: Encoded) -> str:
    """The distance between the numbers."""
    format, exact, step = result.format, abs(Fraction(result.number)), result.ends[1] - result.ends[0]
    if format.kind == "integer":
        return f"The numbers of {format.name} are 1 apart: 1 ulp."
    if format.kind == "scale":
        return f"The numbers of {format.name} are powers of two."
    low = power_of_two(exact)
    if low >= format.emin:
        return f"From 2^{low} to 2^{low + 1} the numbers of {format.name} are {power(step)} apart: 1 ulp."
    words = f"Below 2^{format.emin} the numbers of {format.name} are subnormal, all {power(step)} apart: 1 ulp."
    left = low - power_of_two(step) + 1
    if left < 1:
        return words + " This one is smaller than the least of them."
    return words + f" Of the {format.precision} bits of precision {left} {'is' if left == 1 else 'are'} left."


def _where(result: Encoded) -> str:
    """The distances to both neighbours."""
    low, high = result.ends
    below, above = (distance(abs(Fraction(result.number) - end) / (high - low)) for end in result.ends)
    first, second = among(low, result.format), among(high, result.format)
    return f"The number is {below} ulp above {first} and {above} ulp below {second}."


def _halfway(result: Encoded) -> str:
    low, high = (among(end, result.format) for end in result.ends)
    return f"The number is exactly halfway between {low} and {high}."


def _nearest(result: Encoded, rule: str) -> list[str]:
    """The decision of rounding to nearest, and its reason."""
    format, taken = result.format, _nearest_code(result)
    if rule == "nearer":
        words = [_where(result), f"The nearer one is taken: {among(taken.value, format)}."]
    elif rule == "tie":
        sides = (Stored(encode_exact(result.number, format, mode), format) for mode in ("down", "up"))
        odd = [f", {side.bits} ends in 1" for side in sides if side.code != taken.code]
        words = [_halfway(result), f"Ties go to even: {taken.bits} ends in 0 and is taken{''.join(odd)}."]
    else:
        reason = "with one significant bit none of them is even (IEEE 754-2019, 4.3.1)"
        words = [_halfway(result), f"Ties go away from zero: {reason}."]
    if result.outcome == "underflow":
        half = power(Fraction(format.min_subnormal) / 2)
        words.append(f"Whatever is no larger than {half}, half the least number, becomes zero.")
    return words


def _tie_away(result: Encoded, overflow: bool) -> list[str]:
    """The decision of "nearest_away" in a tie."""
    if overflow:
        threshold = among(sum(result.ends) / Fraction(2), result.format)
        where = f"The number is exactly halfway to the number after the last one, {threshold}."
        return [where, "Ties go away from zero, so it overflows.", _instead(result)]
    return [
        _halfway(result),
        f"Ties go away from zero: {among((result.stored or _nearest_code(result)).value, result.format)}.",
    ]


def _nearest_beyond(result: Encoded) -> list[str]:
    """The reason why rounding to nearest overflows."""
    format, negative = result.format, result.number < 0
    sign = -1 if negative else 1
    threshold = overflow_threshold(format, negative)
    largest = abs(Fraction(format.lowest)) if negative and format.kind == "integer" else Fraction(format.max)
    if format.mantissa == 0:
        even = "exactly halfway rounds away too: with one significant bit there is no even number"
    elif overflows(sign * threshold, format):
        even = "exactly halfway rounds away too: the largest number's last bit is 1"
    else:
        even = "exactly halfway still rounds to the largest number, whose last bit is 0"
    end, after, halfway = (among(sign * value, format) for value in (largest, 2 * threshold - largest, threshold))
    where = "at" if abs(Fraction(result.number)) == threshold else "beyond"
    return [
        f"The {'lowest' if negative else 'largest'} number of {format.name} is {end}. If the numbers went on, {after} "
        f"would come next; halfway lies {halfway}.",
        f"The number lies {where} it, so it overflows ({even}).",
        _instead(result),
    ]


def _directed_beyond(result: Encoded, rounding: str, inward: bool) -> list[str]:
    """What a directed rounding makes of a number beyond the last one of the format."""
    format = result.format
    name, end = ("lowest", format.lowest) if result.number < 0 else ("largest", format.max)
    where = f"The {name} number of {format.name} is {among(Fraction(end), format)}, and the number lies beyond it."
    if not inward:
        return [where, f"Rounding {rounding} leads away from zero, so it overflows.", _instead(result)]
    stored = result.stored or _nearest_code(result)
    kept = f"{among(stored.value, format)} is stored, {stored.hex}"
    return [where, f"Rounding {_DIRECTIONS[rounding]} does not overflow here: {kept}."]


def _instead(result: Encoded) -> str:
    """What represents an overflow, an infinity or a NaN."""
    format, stored = result.format, result.stored
    if stored is None:
        return f"{format.name} has no NaN, so that nothing can stand for it."
    what = {"zero": "Zero", "infinity": "Infinity", "nan": "NaN"}.get(stored.sort)
    if what is None:
        neither = "" if format.has_infinity or format.has_nan else f"{format.name} has neither infinity nor NaN: "
        return f"{neither}the largest number is stored: {among(stored.value, format)}, {stored.hex}."
    lacks = f"{format.name} has no infinity: " if stored.sort == "nan" and not format.has_infinity else ""
    return f"{lacks}{what} is stored: {stored.hex}."
