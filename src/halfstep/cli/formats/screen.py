"""What the lookup shows on a screen: tables, colours of bits and outcomes, and the line between two neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from rich.text import Text

from halfstep.cli.formats import implementations, number_text, properties, sentences
from halfstep.cli.formats.arguments import Typed
from halfstep.cli.formats.number_text import among, number_dict
from halfstep.cli.formats.values import (
    Encoded,
    Stored,
    between,
    chances,
    double_roundings,
    encoded,
)
from halfstep.cli.terminal import Table, joined, styled, text, width
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS
from halfstep.numerics.formats.table import Format

Part = str | Text | Table
_OUTCOMES = {
    "exact": "good", "exact subnormal": "good", "subnormal": "note", "saturated": "note",
    "underflow": "bad", "overflow": "bad", "no NaN": "bad", "no sign": "bad",
}  # fmt: skip
_SORTS = {"subnormal": "note", "zero": "faint", "infinity": "bad", "nan": "bad"}


def _bits(stored: Stored) -> Text:
    """The bits of the fields, coloured and separated by spaces."""
    return joined(*(styled(digits, name) for name, digits in stored.fields), by=" ")


def outcome(result: Encoded) -> Text:
    """The outcome in its colour."""
    return styled(result.outcome_text, _OUTCOMES.get(result.outcome_text, ""))


def _fitting(*tables: Table) -> Table:
    """The first table that fits the screen; the last one if none does."""
    return next((table for table in tables if table.width <= width()), tables[-1])


def all_properties(chosen: Sequence[Format]) -> list[Part]:
    """All properties of one format."""
    (format,) = chosen
    rows = [*properties.names(format), *properties.figures(format)]
    cells = [(text(f"  {name}", "faint"), value) for name, value in rows]
    return [joined(text(format.name, "strong"), f": {format.title}"), Table((), cells, wraps=1)]


def limits(chosen: Sequence[Format]) -> list[Part]:
    """One row per format; with overflow, integers and the name in torch if they fit."""
    header = ("format", "s/e/m", "largest", "min normal", "least", "eps", "digits", "has")
    rows, wide = [], []
    for result in chosen:
        figures = map(number_text.short, (result.max, result.min_normal, result.min_subnormal, result.eps))
        digits = f"{result.digits10}-{result.max_digits10}"
        rows.append([result.name, properties.fields(result), *figures, digits, properties.special(result)])
        wide.append([*rows[-1], properties.overflow(result), properties.integers(result), result.torch or "-"])
    right = {2, 3, 4, 5, 6, 9}
    return [_fitting(Table((*header, "overflow", "integers to", "torch"), wide, right), Table(header, rows, right))]


def elsewhere(rows: Iterable[Encoded]) -> list[Part]:
    """The implementations that store another value."""
    cells = [
        (result.format.name if not index else "", conversion.text, conversion.who)
        for result in rows
        for index, conversion in enumerate(implementations.conversions(result.number, result.format))
    ]
    return [text("elsewhere, from the nearest float64", "faint"), Table((), cells)] if cells else []


def encodings(row: Sequence[Encoded]) -> list[Part]:
    """A table; on a narrow screen without hexadecimal floats, and with wide codes below it."""

    def cells(result: Encoded, narrow: bool) -> list[str | Text]:
        code: list[str | Text] = ["-", "", "", *([] if narrow else [""])]
        if stored := result.stored:
            below = narrow and result.format.bits > 16
            code = ["", ""] if below else [stored.hex, _bits(stored)]
            code += [stored.text(16)] if narrow else [stored.text(24), number_dict(stored.value)["hex"] or ""]
        return [result.format.name, *code, result.ulps_text, outcome(result)]

    header = ("format", "code", "bits", "stored", "hex float", "ulps", "outcome")
    wide = Table(header, [cells(result, False) for result in row], {5})
    if wide.width <= width():
        return [wide]
    codes = [result.stored for result in row if result.stored and result.format.bits > 16]
    below = [(stored.format.name, stored.hex, _bits(stored)) for stored in codes]
    narrow = Table((*header[:4], *header[5:]), [cells(result, True) for result in row], {4})
    return [narrow, Table((), below, wraps=2)] if below else [narrow]


def all_digits(result: Encoded) -> list[str]:
    """A line with all digits of a number that is not exact."""
    if result.stored is None or not result.error:
        return []
    exact = number_dict(result.stored.value)
    value = " = ".join(digits for digits in (exact["decimal"], exact["hex"]) if digits and len(digits) <= 60)
    relative = "" if result.relative is None else f", {number_text.rounded(result.relative * 100, 3)} %"
    error = number_text.fitting(result.error, 30, 6)
    return [f"{result.format.name}: {value}, shortest {result.stored.shortest}; error {error}{relative}"]


def decodings(row: Sequence[Stored]) -> Table:
    """The readings of a code."""

    def table(digits: int) -> Table:
        cells = []
        for stored in row:
            value = (stored.text(digits), number_dict(stored.value)["hex"] or "")
            cells.append((stored.format.name, _bits(stored), *value, text(stored.sort, _SORTS.get(stored.sort, ""))))
        return Table(("format", "bits", "value", "hex float", "class"), cells)

    return _fitting(*map(table, (44, 24, 16)))


def explanation(typed: Typed, result: Encoded, rounding: str, overflow: str) -> list[Part]:
    """The screen of `halfstep why` for one format."""
    title = joined(text(typed.text, "strong"), f" in {result.format.name} is ")
    if result.stored is None:
        title.append("nothing")
    else:
        title = joined(
            title, f"{among(result.stored.value, result.format)}, {result.stored.hex} = ", _bits(result.stored)
        )
    parts: list[Part] = [joined(title, ": ", outcome(result), f", {result.ulps_text} ulp" if result.error else ""), ""]
    if line := between(result):
        number = typed.text if len(typed.text) <= 24 else among(result.number, result.format)
        parts += [*number_line(width(), *line, number), ""]
    parts += sentences.reasons(result, rounding)
    if result.rule not in ("special", "exact", "sign", "least"):
        parts += ["", _roundings(result, overflow)]
    for twice in double_roundings(result.number, result.format) if rounding == "nearest" else []:
        parts += ["", joined(text("note", "note"), f" {sentences.double_rounding_words(twice, result)}")]
    others = elsewhere([result]) if (rounding, overflow) == ("nearest", "inf") else []
    return [*parts, *([""] if others else []), *others]


def _roundings(result: Encoded, overflow: str) -> Table:
    """The value that each rounding mode stores."""
    rows: list[tuple[str | Text, ...]] = []
    for rounding in ENCODE_ROUNDINGS[:-1]:
        other = encoded(result.number, result.format, rounding, overflow)
        if other.stored is not None:
            value = among(other.stored.value, result.format)
            rows.append((rounding, other.stored.hex, value, other.ulps_text, outcome(other)))
    for index, (share, end) in enumerate(chances(result.number, result.format, overflow)):
        code = ("", "no NaN") if end.stored is None else (end.stored.hex, among(end.stored.value, result.format))
        error, chance = Encoded(result.number, result.format, end.stored).ulps_text, number_text.rounded(share * 100, 6)
        rows.append(("" if index else "stochastic", *code, error, f"with {chance} %"))
    return Table(("rounding", "code", "stored", "ulps", "outcome"), rows, {3})


def example(result: Encoded) -> Text:
    """A stored value and its outcome."""
    return joined("-" if result.stored is None else result.stored.text(15), " ", outcome(result))


def comparison(chosen: Sequence[Format]) -> Table:
    """The properties of formats side by side, those that differ in bold."""
    rows = []
    for (name, value), *others in zip(*map(properties.figures, chosen), strict=True):
        values = [value, *(other for _, other in others)]
        if name != "codes":
            style = "strong" if len(set(values)) > 1 else ""
            rows.append([text(name, "faint"), *(text(value, style) for value in values)])
    return Table(("", *(format.name for format in chosen)), rows)


# ----------------------------------------------------------------------------------------------------- the number line


def _row(width: int, labels: Sequence[tuple[int, Text]]) -> Text:
    """Labels centred on columns, moved inward from the ends; one that would touch the label before it is left out."""
    line = Text("  ")
    for column, label in labels:
        start = 2 + min(max(column - label.cell_len // 2, 0), width - label.cell_len)
        if start >= line.cell_len + 2 or line.cell_len == 2:
            line.pad_right(start - line.cell_len)
            line.append_text(label)
    return line


def column_of(position: Fraction, width: int) -> int:
    """The column of a position between 0 and 1. Only 0, 1/2 and 1 are in the first, middle and last column."""
    last, middle, half = width - 1, (width - 1) // 2, Fraction(1, 2)
    if position <= 0 or position >= 1:
        return 0 if position <= 0 else last
    if position == half:
        return middle
    column = round(position * last)
    return min(max(column, 1), middle - 1) if position < half else min(max(column, middle + 1), last - 1)


def number_line(
    width: int, ends: Sequence[tuple[str, str]], middle: str, position: Fraction, stored: int | None, number: str
) -> list[Text]:
    """The lines of a picture of what `between` found, on a screen of so many columns; `number` is as it was written."""
    width = min(width, 80) - 4
    width -= 1 - width % 2  # an odd number of columns has a middle one
    half, last, column = width // 2, width - 1, column_of(position, width)
    low, high = (text(value, "good" if stored == end else "") for end, (value, _) in enumerate(ends))
    first, second = (text(code, "faint") for _, code in ends)
    marks = [styled("●", "good") if stored == end else Text(glyph) for end, glyph in enumerate("├┤")]
    return [
        _row(width, [(0, low), (last, high)]),
        _row(width, [(0, first), (half, text(f"halfway {middle}", "faint")), (last, second)]),
        joined("  ", marks[0], "─" * (half - 1) + "┼" + "─" * (last - half - 1), marks[1]),
        joined("  " + " " * column, styled("▲", "strong")),
        _row(width, [(column, text(number, "strong"))]),
    ]
