"""``halfstep why``: explain how a number is rounded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from halfstep.cli.formats import arguments, implementations, number_line, number_text
from halfstep.cli.formats.arguments import Answer, Given, UsageError
from halfstep.cli.formats.rules import chances, double_roundings, ends_around, nearest, rule
from halfstep.cli.formats.sentences import double_rounding_words, text, words
from halfstep.cli.formats.text import bits, implementation_lines, outcome, ulps
from halfstep.cli.formats.values import Encoded, Stored, code_text, encoded, finite, number_dict, overflows
from halfstep.cli.terminal import Terminal, fitted
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS, Neighbours, encode_exact, neighbours


def _parser() -> arguments.LookupParser:
    parser = arguments.LookupParser(
        "why",
        "Explain how a number is rounded: its neighbours, the point halfway between them, and the rule that decides.",
        "example: halfstep why 1.0001 fp16",
    )
    parser.add_argument(
        "number", type=arguments.number("the number comes first"), metavar="NUMBER", help="as in halfstep encode"
    )
    parser.add_argument("named", nargs="*", type=arguments.format_named, metavar="FORMAT", help="one or more formats")
    arguments.add_formats(parser, "the same, as in halfstep encode")
    arguments.add_overflow(parser)
    return parser


def _picture(found: Encoded, around: Neighbours, given: Given, screen: Terminal) -> list[str]:
    """The number line, if the number is between two numbers of the format or beyond the largest one."""
    format, exact = found.format, Fraction(found.number)
    low, high = ends_around(found, around)
    inner = low if exact > 0 else high
    if around.exact or (format.kind == "scale" and exact < 0) or overflows(inner, format):
        return []

    def end(value: Fraction) -> tuple[str, str]:
        if overflows(value, format) or (value == 0 and not format.has_zero):
            return text(value, format), f"not in {format.name}"
        code = encode_exact(value if value or exact > 0 else -0.0, format)
        return text(value, format), code_text(code, format)

    position = (exact - low) / (high - low)
    stored = nearest(found).value
    chosen = int(stored == high) if finite(stored) and stored in (low, high) else None
    number = given.text if len(given.text) <= 24 else text(found.number, format)
    return number_line.draw(screen, (end(low), end(high)), text((low + high) / 2, format), number, position, chosen)


def _roundings(found: Encoded, overflow: str, screen: Terminal) -> list[str]:
    """The value that each rounding mode stores."""
    rows = []
    for rounding in ENCODE_ROUNDINGS[:-1]:
        one = encoded(found.number, found.format, rounding, overflow)
        if one.stored is not None:
            rows.append(
                (rounding, one.stored.hex, text(one.stored.value, found.format), ulps(one), outcome(one, screen))
            )
    for number, (share, one) in enumerate(chances(found.number, found.format, overflow)):
        code, value = ("", "no NaN") if one.stored is None else (one.stored.hex, text(one.stored.value, found.format))
        error = Encoded(found.number, found.format, one.stored)
        chance = f"with {number_text.rounded(share * 100, 6)} %"
        rows.append(("" if number else "stochastic", code, value, ulps(error), chance))
    head = ("rounding", "code", "stored", "ulps", "outcome")
    lines = fitted(head, rows, (False, False, False, True, False), screen.width)
    return [screen.paint(lines[0], "faint"), *lines[1:]]


def _screen_lines(given: Given, found: Encoded, overflow: str, screen: Terminal) -> list[str]:
    around = neighbours(found.number, found.format) if finite(found.number) else None
    decided = rule(found, around)
    stored = found.stored
    what = "nothing" if stored is None else f"{text(stored.value, found.format)}, {stored.hex} = {bits(stored, screen)}"
    error = f", {ulps(found)} ulp" if found.error else ""
    lines = screen.wrap(
        f"{screen.paint(given.text, 'strong')} in {found.format.name} is {what}: {outcome(found, screen)}{error}", "  "
    )
    if around is not None:
        picture = _picture(found, around, given, screen)
        lines += ["", *picture, ""] if picture else [""]
    for sentence in words(found, around, decided, screen):
        lines += screen.wrap(sentence, "  ")
    if around is not None and not around.exact and decided not in ("sign", "least"):
        lines += ["", *_roundings(found, overflow, screen)]
    for one in double_roundings(found.number, found.format):
        lines += ["", *screen.wrap(screen.paint("note", "note") + " " + double_rounding_words(one, found), "  ")]
    others = implementation_lines(given, [found], screen) if overflow == "inf" else []
    return [*lines, *([""] if others else []), *others]


def _as_dict(given: Given, found: Encoded, overflow: str) -> dict[str, Any]:
    around = neighbours(found.number, found.format) if finite(found.number) else None
    decided, plain = rule(found, around), Terminal()

    def side(code: int | None) -> dict[str, Any] | None:
        return None if code is None else Stored(code, found.format).as_dict()

    made: dict[str, Any] = {
        "input": given.as_dict(),
        **found.as_dict(),
        "rule": decided,
        "explanation": words(found, around, decided, plain),
        "below": None if around is None else side(around.code_below),
        "above": None if around is None else side(around.code_above),
        "midpoint": None if around is None or around.midpoint is None else number_dict(around.midpoint),
        "ulp": None if around is None else number_dict(around.ulp),
    }
    made["roundings"] = {
        rounding: (None if one.stored is None else one.stored.hex)
        for rounding in ENCODE_ROUNDINGS[:-1]
        for one in [encoded(found.number, found.format, rounding, overflow)]
    }
    made["stochastic"] = [
        {"code": None if one.stored is None else one.stored.hex, "probability": str(share)}
        for share, one in chances(found.number, found.format, overflow)
    ]
    made["rounded_twice"] = [
        {"via": [format.name for format in one.via], **one.found.as_dict()}
        for one in double_roundings(found.number, found.format)
    ]
    others = implementations.conversions(found.number, found.format) if overflow == "inf" else []
    made["elsewhere"] = [conversion.as_dict() for conversion in others]
    return made


def _answer(options: argparse.Namespace, screen: Terminal) -> Answer:
    if not options.named + options.formats:
        raise UsageError("argument FORMAT: none is named; name one or more, as in: halfstep why 1.0001 fp16")
    chosen, given = arguments.distinct(options.named + options.formats), options.number
    found = [encoded(given.number, format, overflow=options.overflow) for format in chosen]

    def lines() -> list[str]:
        made: list[str] = []
        for one in found:
            made += [*(["", ""] if made else []), *_screen_lines(given, one, options.overflow, screen)]
        return made

    about = {"number": given.text, "formats": [format.name for format in chosen], "overflow": options.overflow}
    return Answer(about, lambda: [_as_dict(given, one, options.overflow) for one in found], lines)


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep why`` with these arguments. Returns the exit status."""
    return arguments.main(_parser(), argv, _answer)
