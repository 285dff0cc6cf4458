"""The properties of formats as text, and what one format holds that another does not.

Shared values are counted per binade, since fp64 has 2^64 values: between 2^e and 2^(e+1) the values of a format are the
multiples of one step, and so are the shared values of two: those of the larger step.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from halfstep.cli.formats import values
from halfstep.numerics.formats.exact import parse_number, power_of_two, unit_exponent
from halfstep.numerics.formats.table import FORMAT_KINDS, Format

_EXAMPLES = ("0.1", "1.0001", "1e-7")


def fields(format: Format) -> str:
    return f"{int(format.signed)}/{format.exponent}/{format.mantissa}"


def specials(format: Format) -> str:
    return " ".join(["inf"] * format.has_infinity + ["nan"] * format.has_nan) or "neither"


def count_text(count: int, text: str = "") -> str:
    """A count as `text`, by default its digits, or as a power of two above a million."""
    return f"2^{count.bit_length() - 1}" if count > 10**6 and not count & (count - 1) else text or str(count)


def figures(format: Format) -> list[tuple[str, str]]:
    named = (("inf", format.infinity_code), ("nan", format.nan_code), ("max", format.largest_code))
    codes = (f"{name} {values.code_text(code, format)}" for name, code in named if code is not None)
    size = f"{format.bits} bits" + (f" in {format.container}" if format.container else "")
    threshold = values.overflow_threshold(format)
    powers = (format.min_normal, format.min_subnormal, format.eps)
    least_normal, smallest, eps = (f"2^{power_of_two(Fraction(value))} = {values.short(value)}" for value in powers)
    return [
        ("sign/exponent/mantissa", f"{fields(format)}, {size}"),
        ("bias", str(format.bias)),
        ("largest", values.short(format.max)),
        ("lowest", values.short(format.lowest)),
        ("overflow", f"{'from' if values.overflows(threshold, format) else 'beyond'} {values.short(threshold)}"),
        ("least normal", least_normal),
        ("least above 0", smallest),
        ("eps, 1 to next", eps),
        ("integers, all to", count_text(format.integer_range)),
        ("digits kept", str(format.digits10)),
        ("digits to tell apart", str(format.max_digits10)),
        ("p log10 2", f"{format.decimal_digits:.2f}"),
        ("values", f"{format.values:,}"),
        ("inf, nan", specials(format)),
        ("negative zero", "yes" if format.has_negative_zero else "no"),
        ("codes", ", ".join(codes)),
    ]


def names(format: Format) -> list[tuple[str, str]]:
    packages = ("torch", "numpy", "ml_dtypes")
    dtypes = [f"{package}.{getattr(format, package)}" for package in packages if getattr(format, package)]
    rows = (("also called", format.aliases), ("dtypes", dtypes), ("multiplied by", format.hardware))
    return [("kind", FORMAT_KINDS[format.kind]), *((name, ", ".join(listed) or "-") for name, listed in rows)]


def format_dict(format: Format) -> dict[str, Any]:
    """`Format.as_dict` with numbers in the form of all JSON of the lookup, and codes in hexadecimal."""
    row = format.as_dict()
    for name in ("max", "lowest", "min_normal", "min_subnormal", "eps"):
        row[name] = values.number_dict(Fraction(row[name]))
    row["overflow"] = values.number_dict(values.overflow_threshold(format))
    for name in ("infinity_code", "nan_code", "largest_code"):
        row[name] = None if row[name] is None else values.code_text(row[name], format)
    return row


def lowest_exponent(format: Format) -> int:
    """The exponent e of the smallest positive value, 2^e."""
    return format.emin - format.mantissa if format.has_subnormals else format.emin


def shared_in(exponent: int, *formats: Format, top: float | None = None) -> int:
    """Number of values in [2^exponent, 2^(exponent + 1)) up to `top`, by default the largest, that all formats have."""
    if any(exponent < lowest_exponent(format) for format in formats):
        return 0
    top = min(format.max for format in formats) if top is None else top
    step = max(unit_exponent(Fraction(2) ** exponent, format) for format in formats)
    in_binade = 1 << (exponent - step)
    return max(0, min(in_binade, int(Fraction(top) / Fraction(2) ** step) - in_binade + 1))


def shared_values(first: Format, second: Format) -> int:
    """Number of values that both formats have. Infinities count, NaNs do not, and both zeros count as one."""
    exponents = range(max(lowest_exponent(first), lowest_exponent(second)), min(first.emax, second.emax) + 2)
    tops = [min(first.max, second.max)]
    if first.signed and second.signed:
        tops.append(min(-first.lowest, -second.lowest))
    numbers = sum(shared_in(exponent, first, second, top=top) for top in tops for exponent in exponents)
    return numbers + (first.has_zero and second.has_zero) + 2 * (first.has_infinity and second.has_infinity)


def examples(chosen: Sequence[Format]) -> list[str]:
    """Numbers that show how the formats differ: some usual ones, and each format's overflow, smallest number and first
    integer lost."""
    numbers = list(_EXAMPLES)
    for format in chosen:
        smallest = f"2^{power_of_two(Fraction(format.min_subnormal))}"
        numbers += [values.decimal(values.overflow_threshold(format)) or "", smallest, str(format.integer_range + 1)]

    def differs(text: str) -> bool:
        results = [values.encoded(parse_number(text), format) for format in chosen]
        return len({(result.outcome, result.stored and str(result.stored.value)) for result in results}) > 1

    return [text for text in dict.fromkeys(numbers) if text in _EXAMPLES or (len(text) <= 12 and differs(text))]


def pair_words(first: Format, second: Format) -> list[str]:
    shared, words = shared_values(first, second), []
    down = lowest_exponent(second) - lowest_exponent(first)
    for direction, powers in (("up", first.emax - second.emax), ("down", down)):
        if powers:
            reaching = (first if powers > 0 else second).name
            words.append(f"{reaching} reaches 2^{abs(powers)} times further {direction}.")
    coarser = unit_exponent(Fraction(1), second) - unit_exponent(Fraction(1), first)
    if coarser and all(format.min_subnormal <= 1 <= format.max for format in (first, second)):
        closer = (first if coarser > 0 else second).name
        words.append(f"Near 1 {closer}'s numbers are 2^{abs(coarser)} times closer together.")
    if shared == first.values == second.values:
        return [*words, f"Both have the same {shared:,} values."]
    if shared in (first.values, second.values):
        inner, outer = (first, second) if shared == first.values else (second, first)
        return [*words, f"{outer.name} holds every value of {inner.name}: casting there and back loses nothing."]
    parts = [(form, values.rounded(Fraction(100 * shared, form.values), 3)) for form in (first, second)]
    shares = " and ".join(f"{percent} % of {form.name}'s {form.values:,}" for form, percent in parts)
    return [*words, f"They share {shared:,} values: {shares}."]


def pair_dict(first: Format, second: Format) -> dict[str, Any]:
    def ratio(name: str) -> dict[str, str | None]:
        return values.number_dict(Fraction(getattr(first, name)) / Fraction(getattr(second, name)))

    ratios = {"eps_ratio": ratio("eps"), "max_ratio": ratio("max"), "min_ratio": ratio("min_subnormal")}
    shared = shared_values(first, second)
    only = {format.name: format.values - shared for format in (first, second)}
    words = pair_words(first, second)
    return {"formats": [first.name, second.name], "shared_values": shared, "only_in": only, **ratios, "words": words}
