"""``halfstep format, why, compare`` of formats of blocks: which number decides the scale, and what each loses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from halfstep.cli.formats import values
from halfstep.cli.formats.values import Encoded, Stored
from halfstep.cli.terminal import Table, joined, text
from halfstep.kernels.formats import SCALE_RULES
from halfstep.numerics.formats import blocks
from halfstep.numerics.formats.exact import Number, power_of_two
from halfstep.numerics.formats.table import BlockFormat, formats

ELEMENT_COLUMNS = ("number", "over scale", "code", "stored", "error", "outcome")
RULE_COLUMNS = ("rule", "code", "scale", "rms error")
_RULES = {
    "floor": "takes the power of two at or below it",
    "ceil": "takes the power of two at or above it",
    "even": "rounds it to as many bits as an element and takes the power of two at or below that",
    "rceil": "takes the least scale with which nothing saturates",
}


def figures(form: BlockFormat) -> list[tuple[str, str]]:
    rule = "the largest magnitude of a block over that of an element and a global scale of fp32, rounded"
    return [
        ("elements", f"{form.element.name}, {form.size} in a block"), ("bits", f"{form.bits:g} per number"),
        ("scale", f"{form.scale.name}: {rule if form.has_global_scale else f'powers of two by the rule {form.rule}'}"),
        ("also called", ", ".join(form.aliases) or "-"),
    ]  # fmt: skip


class CodedBlock(NamedTuple):
    """Numbers as one block."""

    form: BlockFormat
    numbers: list[Number]
    decides: int  # the index of the number that decides the scale: of NaN, or of the first of the largest magnitude
    global_scale: Fraction
    scale: Stored
    elements: list[Encoded]  # the numbers over the scale; NaN where that is NaN or 0
    stored: list[Number]  # the values of the numbers

    @property
    def rms(self) -> float | None:
        """The root mean square of the errors over that of the numbers; None if not all are finite, or all are 0."""
        if not all(map(values.finite, (*self.numbers, *self.stored))):
            return None
        pairs = [(Fraction(number), Fraction(value)) for number, value in zip(self.numbers, self.stored, strict=True)]
        total = sum(number**2 for number, _ in pairs)
        return math.sqrt(sum((value - number) ** 2 for number, value in pairs) / total) if total else None

    def as_dict(self, names: Sequence[str]) -> dict[str, Any]:
        rows = []
        for name, number, element, value in zip(names, self.numbers, self.elements, self.stored, strict=True):
            typed = {"text": name, **values.number_dict(number)}
            rows.append({"input": typed, **element.as_dict(), "stored": values.number_dict(value)})
        shared = {"scale": self.scale.as_dict(), "global_scale": values.number_dict(self.global_scale)}
        words = {"decides": self.decides, "explanation": reasons(self), "rms": self.rms}
        return {"format": self.form.as_dict(), **shared, **words, "elements": rows}


def coded(numbers: list[Number], form: BlockFormat, rounding: str, overflow: str) -> CodedBlock:
    finite = [abs(Fraction(number)) for number in numbers if values.finite(number)]
    g = blocks.global_scale(max(finite, default=Fraction(0)), form) if form.has_global_scale else Fraction(1)
    codes, code = blocks.encode_block(numbers, form, rounding, overflow=overflow, global_scale=g)
    scale, elements, stored = Stored(code, form.scale), [], blocks.decode_block(codes, code, form, g)
    for number, element in zip(numbers, codes, strict=True):
        part: Number = math.nan
        if number == number and scale.value == scale.value and scale.value != 0:
            part = blocks.quotient(blocks.rounded_first(number, form), Fraction(scale.value), form, g)
        elements.append(Encoded(part, form.element, Stored(element, form.element)))
    decides = max(range(len(numbers)), key=lambda at: (numbers[at] != numbers[at], abs(numbers[at])))
    return CodedBlock(form, numbers, decides, g, scale, elements, stored)


def element_rows(names: Sequence[str], block: CodedBlock) -> list[list[str]]:
    """The cells of a table of `ELEMENT_COLUMNS`: what becomes of each number."""
    rows = []
    for name, number, element, value in zip(names, block.numbers, block.elements, block.stored, strict=True):
        over, code = values.fitting(element.number, 12, 5), element.stored.hex if element.stored else ""
        error, outcome = "", element.outcome_text if value == value else "nan"
        if number and values.finite(number) and values.finite(value):
            error = f"{values.rounded(100 * (Fraction(value) / Fraction(number) - 1), 3)} %"
        rows.append([name, over, code, values.fitting(value, 16, 6), error, outcome])
    return rows


def rule_rows(block: CodedBlock, rounding: str, overflow: str) -> list[list[str]]:
    """The cells of a table of `RULE_COLUMNS`; none if the format has one rule only."""
    form, rows = block.form, []
    for rule in () if form.has_global_scale else SCALE_RULES:
        other = coded(block.numbers, formats[f"{form.name.removesuffix(f'_{form.rule}')}_{rule}"], rounding, overflow)
        rms = "-" if other.rms is None else f"{100 * other.rms:.3g} %"
        rows.append([rule, other.scale.hex, values.among(other.scale.value, form.scale), rms])
    return rows


def explanation(names: Sequence[str], block: CodedBlock, rounding: str, overflow: str) -> list[Any]:
    """The screen of ``halfstep why`` for a block."""
    form, rules = block.form, rule_rows(block, rounding, overflow)
    title = f": {form.title}, {form.size} in a block with a scale of {form.scale.name}"
    table = Table(ELEMENT_COLUMNS, element_rows(names, block), {4})
    parts: list[Any] = [joined(text(form.name, "strong"), title), "", *reasons(block), "", table]
    return [*parts, "", Table(RULE_COLUMNS, rules, {3})] if rules else parts


def reasons(block: CodedBlock) -> list[str]:
    """Why the block has its scale, in sentences."""
    form, element, scale = block.form, block.form.element, block.scale
    number, unit = block.numbers[block.decides], scale.value
    last = f"{element.max:g}, the largest number of {element.name}"
    if number == 0 or not values.finite(number):
        name = "only zeros" if number == 0 else values.special(float(number))
        return [f"The block has {name}: its scale is {values.among(unit, form.scale)}, {scale.hex}."]
    decides = f"The largest magnitude, {values.fitting(abs(Fraction(number)), 24, 6)}, decides the scale."
    if form.has_global_scale:
        first = f"The global scale is {values.fitting(block.global_scale, 24, 6)}, that over {form.largest:g} in fp32."
        second = f"Over {last}, and over the global scale, it rounds to {values.among(unit, form.scale)}, {scale.hex}."
        return [decides, first, second]
    low, top, e = power_of_two(Fraction(number)), element.emax, scale.code + form.scale.emin
    where = f"It is from 2^{low} to 2^{low + 1}, and {last}, from 2^{top} to 2^{top + 1}."
    words = f"The rule {form.rule} {_RULES[form.rule]}: the scale is 2^{e + top} / 2^{top} ="
    if unit != unit or e in (form.scale.emin, form.scale.emax):
        end = form.scale.emin if e == form.scale.emin else form.scale.emax
        words = f"{form.scale.name} ends at 2^{end}: the scale is"
    return [decides, where, f"{words} {'NaN' if unit != unit else values.power(Fraction(unit))}, {scale.hex}."]


def errors(chosen: Sequence[Any], array: Any) -> tuple[list[dict[str, Any]], Table]:
    """The errors of numbers in formats, as JSON and as a table."""
    from halfstep.numerics.formats.codec import rounding_errors

    found = [{"format": form.name, "bits": form.bits, **rounding_errors(array, form)._asdict()} for form in chosen]
    header = ("format", "bits", "rms error", "in dB", "largest error", "became 0", "not finite")
    rows = []
    for row in found:
        decibels = f"{-20 * math.log10(row['relative']):.1f}" if row["relative"] else "-"
        relative, counts = f"{100 * row['relative']:.3g} %", (f"{row['zeros']:,}", f"{row['not_finite']:,}")
        rows.append([row["format"], f"{row['bits']:g}", relative, decibels, f"{row['largest']:.3g}", *counts])
    return found, Table(header, rows, range(1, 7))
