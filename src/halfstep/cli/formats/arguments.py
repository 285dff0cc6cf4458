"""Arguments of the lookup: names of formats, exact numbers and codes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from halfstep.cli import command_line
from halfstep.cli.command_line import UsageError
from halfstep.cli.formats.number_text import fitting, number_dict
from halfstep.numerics.formats.exact import OVERFLOWS, Number, parse_number
from halfstep.numerics.formats.table import AMBIGUOUS, Format, formats

_CODE = re.compile(r"0x(?P<hexadecimal>[0-9a-f_]+)|0b(?P<binary>[01_]+)|(?P<decimal>[0-9][0-9_]*)", re.IGNORECASE)
WIDTHS = sorted({format.bits for format in formats.values()})


class Typed(NamedTuple):
    """A number, and the text it was parsed from."""

    text: str
    number: Number

    def as_dict(self) -> dict[str, str | None]:
        return {"text": self.text, **number_dict(self.number)}

    @property
    def notations(self) -> str:
        """The number in every notation that adds information."""
        exact = [words for words in number_dict(self.number).values() if words and len(words) <= 40]
        if isinstance(self.number, float):
            exact = exact[:1]
        return " = ".join(dict.fromkeys((self.text, *(exact or [fitting(self.number, 0, 17)])))).replace("= ≈", "≈ ")


class Code(NamedTuple):
    """A code, its text, and the number of bits that the text shows; 0 for decimal numbers, which show none."""

    text: str
    code: int
    shown: int

    @property
    def width(self) -> int:
        """The width a code is meant in: the first that has room for all its digits, of decimals for the number itself.

        A decimal says nothing of leading zeros, so it is taken for one of the common widths, from 8 bits up.

        Raises:
            UsageError: no format is as wide.
        """
        wide = [width for width in WIDTHS if width >= self.shown] if self.shown else [8, 16, 32, 64]
        if self.shown == 20:  # five hexadecimal digits: TF32, if its 19 bits suffice
            wide.insert(0, 19)
        fitting = [width for width in wide if self.code < 1 << width]
        if not fitting:
            raise UsageError(
                f"argument CODE: expected up to {WIDTHS[-1]} bits, but got {self.text}, which has "
                f"{max(self.shown, self.code.bit_length())}"
            )
        return fitting[0]


class LookupParser(command_line.Parser):
    """The shared parser with an option -f that takes several names."""

    def prepared(self, words: Sequence[str]) -> list[str]:
        """The words, with -f repeated before each name of a format that follows it."""
        many = {name for action in self._actions if action.dest == "formats" for name in action.option_strings}
        repeated: list[str] = []
        naming = False  # after -f and a name; not after --, where no word starts with "-"
        for word in super().prepared(words):
            if word.startswith("-"):
                naming = word in many
            elif command_line.is_number(word.strip()):
                naming = False
            elif naming and repeated[-1] not in many:
                repeated.append("-f")
            repeated.append(word)
        return repeated


def family(text: str) -> list[Format]:
    """An argparse type: a format by name, alias or fields; all formats of a name that several share, such as fp8."""
    try:
        return [formats[name] for name in AMBIGUOUS.get(text.strip().lower(), (text.strip(),))]
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def format_named(text: str) -> Format:
    """An argparse type: as `family`, but only the first."""
    return family(text)[0]


def small_format(text: str) -> Format:
    """An argparse type: a format whose codes fit a picture."""
    format = format_named(text)
    if format.bits > 8:
        raise argparse.ArgumentTypeError(
            f"expected a format of up to 8 bits, but got {format.name}, which has {format.codes:,} codes"
        )
    return format


def number(hint: str) -> Callable[[str], Typed]:
    """An argparse type: a number, exactly. `hint` says what to do with the name of a format."""

    def parse(text: str) -> Typed:
        text = text.strip()
        try:
            return Typed(text, parse_number(text))
        except ValueError as error:
            remedy = f"; {text} is a format, and {hint}" if text in formats else ""
            raise argparse.ArgumentTypeError(f"{error}{remedy}") from error

    return parse


def code(text: str) -> Code:
    """An argparse type: a code in hexadecimal, binary or decimal."""
    text = text.strip()
    match = _CODE.fullmatch(text) if len(text) <= 100 else None
    if match is None:
        raise argparse.ArgumentTypeError(
            "expected a hexadecimal (0x4100), binary (0b0100000100000000) or decimal (16640) code without a sign, but "
            f"got {text!r}: for numbers use halfstep encode"
        )
    digits = match[match.lastgroup or ""].replace("_", "")
    if not digits:
        raise argparse.ArgumentTypeError(f"expected a code such as 0x4100, but got {text!r}, which has no digits")
    base, bits = {"hexadecimal": (16, 4), "binary": (2, 1), "decimal": (10, 0)}[match.lastgroup or ""]
    return Code(text, int(digits, base), bits * len(digits))


Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """The arguments of add_argument."""
    return names, settings


def formats_option(help: str) -> Option:
    """The option -f, which takes several names and may be repeated."""
    how = {"action": "extend", "type": family, "metavar": "FORMAT", "default": [], "help": help}
    return option("-f", "--format", dest="formats", **how)


def rounding_option(modes: Sequence[str]) -> Option:
    """The option --rounding."""
    listed = f"{', '.join(modes)} (default: nearest, ties to even)"
    return option("--rounding", choices=modes, default="nearest", metavar="MODE", help=listed)


_BEYOND = "inf (NaN in a format without), saturate (the largest number) or nan (default: inf)"
OVERFLOW = option(
    "--overflow", choices=OVERFLOWS, default="inf", metavar="MODE", help=f"what overflow becomes: {_BEYOND}"
)


def distinct(named: Iterable[Iterable[Format]], chosen: Iterable[Format] = ()) -> list[Format]:
    """The formats of all names and of -f without repetitions; all formats if there are none."""
    return list({format.name: format for group in (*named, chosen) for format in group}.values()) or [*formats.values()]
