"""``halfstep compare``: formats side by side, and what one holds that the other does not."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from halfstep.cli.formats import arguments, number_text
from halfstep.cli.formats.arguments import Answer, Given, UsageError
from halfstep.cli.formats.properties import figures, format_dict
from halfstep.cli.formats.shared_values import lowest_exponent, shared_values, step_exponent
from halfstep.cli.formats.text import outcome
from halfstep.cli.formats.values import Encoded, encoded, number_dict, overflow_threshold
from halfstep.cli.terminal import Terminal, table, visible
from halfstep.numerics.formats.exact import parse_number
from halfstep.numerics.formats.table import Format

_EXAMPLES = ("0.1", "1.0001", "1e-7")


def _parser() -> arguments.LookupParser:
    parser = arguments.LookupParser(
        "compare",
        "Compare the properties of formats, count the values that they share, and show numbers that differ.",
        "example: halfstep compare fp16 bf16",
    )
    parser.add_argument("named", nargs="+", type=arguments.format_named, metavar="FORMAT", help="two or more")
    return parser


def examples(chosen: Sequence[Format]) -> list[str]:
    """Numbers that show how the formats differ: some usual ones, and each format's overflow, least number and first
    integer lost."""
    made = list(_EXAMPLES)
    for format in chosen:
        least = Fraction(format.min_subnormal)
        made += [
            number_text.decimal(overflow_threshold(format)) or "",
            f"2^{number_text.power_of_two(least)}",
            str(format.integer_range + 1),
        ]
    short = [text for text in made if len(text) <= 12]
    outcomes = {text: {_outcome_and_value(encoded(parse_number(text), one)) for one in chosen} for text in short}
    return [text for text, different in outcomes.items() if len(different) > 1 or text in _EXAMPLES]


def _outcome_and_value(found: Encoded) -> tuple[str, object]:
    return found.outcome, None if found.stored is None else str(found.stored.value)


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
    if shared in (one.values, other.values):
        inner, outer = (one, other) if shared == one.values else (other, one)
        if shared == one.values == other.values:
            return [*words, f"Both have the same {shared:,} values."]
        return [*words, f"{outer.name} holds every value of {inner.name}: casting there and back loses nothing."]
    return [
        *words,
        f"They share {shared:,} values: {_percent(shared, one.values)} of {one.name}'s {one.values:,} are exact in "
        f"{other.name}, {_percent(shared, other.values)} of {other.name}'s {other.values:,} in {one.name}.",
    ]


def pair_dict(one: Format, other: Format) -> dict[str, Any]:
    shared = shared_values(one, other)
    return {
        "formats": [one.name, other.name],
        "shared_values": shared,
        "only_in": {one.name: one.values - shared, other.name: other.values - shared},
        "eps_ratio": number_dict(Fraction(one.eps) / Fraction(other.eps)),
        "max_ratio": number_dict(Fraction(one.max) / Fraction(other.max)),
        "min_ratio": number_dict(Fraction(one.min_subnormal) / Fraction(other.min_subnormal)),
        "words": pair_words(one, other),
    }


def _figures_lines(chosen: Sequence[Format], screen: Terminal) -> list[str]:
    """The properties, one format per column, in several tables if the screen is too narrow for one."""
    columns = [figures(format) for format in chosen]
    rows = [[name, *(column[row][1] for column in columns)] for row, (name, _) in enumerate(columns[0])]
    rows = [row for row in rows if row[0] != "codes"]
    marked = []
    for name, *values in rows:
        differ = len(set(values)) > 1
        marked.append([screen.paint(name, "faint"), *(screen.paint(v, "strong") if differ else v for v in values)])
    lines = table(["", *(format.name for format in chosen)], marked, [False] * (1 + len(chosen)))
    if max(map(visible, lines)) > screen.width and len(chosen) > 1:
        half = -(-len(chosen) // 2)
        return [*_figures_lines(chosen[:half], screen), "", *_figures_lines(chosen[half:], screen)]
    return lines


def _example_lines(chosen: Sequence[Format], screen: Terminal) -> list[str]:
    """The example numbers in each format."""
    rows = []
    for text in examples(chosen):
        row = [text]
        for format in chosen:
            found = encoded(parse_number(text), format)
            said = found.outcome
            value = "-" if found.stored is None else short_value(found)
            row.append(
                f"{value} {screen.paint(said, 'good')}" if said == "exact" else f"{value} {outcome(found, screen)}"
            )
        rows.append(row)
    lines = table(["number", *(format.name for format in chosen)], rows, [False] * (1 + len(chosen)))
    if max(map(visible, lines)) > screen.width and len(chosen) > 1:
        half = -(-len(chosen) // 2)
        return [*_example_lines(chosen[:half], screen), "", *_example_lines(chosen[half:], screen)]
    return [screen.paint(lines[0], "faint"), *lines[1:]]


def short_value(found: Encoded) -> str:
    """The stored value for a column of a table."""
    return "" if found.stored is None else found.stored.text(15)


def _answer(options: argparse.Namespace, screen: Terminal) -> Answer:
    chosen = arguments.distinct(options.named)
    if len(chosen) < 2:
        raise UsageError(
            f"argument FORMAT: {chosen[0].name} alone cannot be compared; name two or more, as in: halfstep compare "
            "fp16 bf16"
        )
    pairs = list(itertools.combinations(chosen, 2))

    def lines() -> list[str]:
        made = [*_figures_lines(chosen, screen), ""]
        for one, other in pairs:
            made += [
                *screen.wrap(
                    f"{screen.paint(f'{one.name}, {other.name}', 'strong')}: {' '.join(pair_words(one, other))}", "  "
                )
            ]
        return [*made, "", *_example_lines(chosen, screen)]

    def results() -> list[dict[str, Any]]:
        numbers = [Given(text, parse_number(text)) for text in examples(chosen)]
        return [
            {
                "formats": [format_dict(format) for format in chosen],
                "pairs": [pair_dict(one, other) for one, other in pairs],
                "examples": [
                    {"input": given.as_dict(), **encoded(given.number, format).as_dict()}
                    for given in numbers
                    for format in chosen
                ],
            }
        ]

    return Answer({"formats": [format.name for format in chosen]}, results, lines)


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep compare`` with these arguments. Returns the exit status."""
    return arguments.main(_parser(), argv, _answer)
