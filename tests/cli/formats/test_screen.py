"""What stands on the screen: widths, colours, characters, and what is told apart by them."""

from __future__ import annotations

import os
import re
from fractions import Fraction

import pytest
from lookup_run import lines, said

from halfstep.cli.formats.number_line import column_of
from halfstep.cli.formats.values import OUTCOMES
from halfstep.cli.terminal import Terminal, table, terminal, visible
from halfstep.numerics.formats.table import formats

COMMANDS = [
    ("format",),
    ("format", "fp16"),
    ("format", "e2m1"),
    ("encode", "2.5"),
    ("encode", "-300.7", "1e-400", "nan"),
    ("encode", "0.1", "-f", "fp16", "bf16", "e4m3"),
    ("encode", "500", "-inf", "-0"),
    ("decode", "0x4100"),
    ("decode", "0x0041", "0x41", "0x7fc00001", "0b0101"),
    ("decode", "0x3ff0000000000001"),
    ("why", "1.0001", "fp16"),
    ("why", "0.1", *formats),
    ("why", "1e9", *formats),
    ("why", "-2^-140", *formats),
    ("why", "nan", *formats),
    ("compare", "fp16", "bf16"),
    ("compare", *formats),
]
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3]))
@pytest.mark.parametrize("columns", [80, 160])
def test_nothing_is_wider_than_the_screen(words: tuple[str, ...], columns: int) -> None:
    long = [line for line in lines(*words, COLUMNS=str(columns)) if len(line) > columns]
    assert long == []


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3]))
def test_colours_are_all_that_a_terminal_adds(words: tuple[str, ...]) -> None:
    plain = lines(*words, COLUMNS="80")
    coloured = lines(*words, COLUMNS="80", terminal=True, TERM="xterm")
    assert not any("\x1b" in line for line in plain)
    assert any("\x1b" in line for line in coloured)
    assert [ESCAPE.sub("", line) for line in coloured] == plain
    for line in coloured:  # what is switched on is switched off on the same line
        assert [code == "\x1b[0m" for code in ESCAPE.findall(line)] == [False, True] * (len(ESCAPE.findall(line)) // 2)


@pytest.mark.parametrize(
    ("variables", "is_terminal", "coloured"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"CLICOLOR_FORCE": "1"}, False, True),
        ({"CLICOLOR_FORCE": "0"}, False, False),
        ({"CLICOLOR": "0"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_when_there_is_colour(variables: dict[str, str], is_terminal: bool, coloured: bool) -> None:
    found = lines("encode", "2.5", "-f", "fp16", terminal=is_terminal, **{"TERM": "xterm", **variables})
    assert any("\x1b" in line for line in found) == coloured


def test_json_has_no_colour() -> None:
    assert "\x1b" not in said("encode", "2.5", "--json", FORCE_COLOR="1", terminal=True, TERM="xterm")[1]


def test_sign_exponent_and_mantissa_have_colours_of_their_own() -> None:
    row = lines("encode", "2.5", "-f", "fp16", FORCE_COLOR="1")[2]
    assert "\x1b[31m0\x1b[0m \x1b[32m10000\x1b[0m \x1b[36m0100000000\x1b[0m" in row


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3]))
@pytest.mark.parametrize(
    ("encoding", "variables"), [("ascii", {}), ("utf-8", {"LC_ALL": "C"}), ("utf-8", {"LANG": "POSIX"})]
)
def test_ascii_where_nothing_else_is_shown(words: tuple[str, ...], encoding: str, variables: dict[str, str]) -> None:
    found = lines(*words, encoding=encoding, COLUMNS="80", **variables)
    assert all(line.isascii() and len(line) <= 80 for line in found)
    assert "\\" not in "\n".join(found)


def test_a_locale_in_utf8_keeps_its_lines() -> None:
    assert any("├" in line for line in lines("why", "1.7", "fp16", LC_ALL="C.UTF-8"))
    assert any("├" in line for line in lines("why", "1.7", "fp16", LC_ALL="", LANG="de_DE.UTF-8"))


def test_what_the_user_wrote_is_shown_in_any_encoding() -> None:
    assert lines("encode", "\N{MINUS SIGN}2.5", "-f", "fp16")[0] == "\N{MINUS SIGN}2.5 = -2.5 = -0x1.4p+1 = -5/2"
    assert (
        lines("encode", "\N{MINUS SIGN}2.5", "-f", "fp16", encoding="latin-1")[0]
        == "\\u22122.5 = -2.5 = -0x1.4p+1 = -5/2"
    )


def test_every_digit_of_wide_formats_is_shown_at_80_columns() -> None:
    found = lines("encode", "0.1", COLUMNS="80")
    place = next(number for number, line in enumerate(found) if line.startswith("fp64"))
    assert "0x3fb999999999999a" in found[place]
    assert found[place + 1].strip() == "0 01111111011 1001100110011001100110011001100110011001100110011010"
    assert len(found) <= 20  # one screen


def test_wide_screens_show_hexadecimal_floats() -> None:
    assert "hex float" in lines("encode", "0.1", COLUMNS="160")[1]
    assert "hex float" not in lines("encode", "0.1", COLUMNS="80")[1]


def test_pipes_are_as_wide_as_they_need() -> None:
    assert "hex float" in said("encode", "0.1", COLUMNS="")[1]


@pytest.mark.parametrize(
    ("number", "format", "shown"),
    [
        ("1.0001", "fp16", "rounded"),
        ("1", "fp16", "exact"),
        ("2^-24", "fp16", "exact subnormal"),
        ("6e-8", "fp16", "subnormal"),
        ("1e-9", "fp16", "underflow"),
        ("1e9", "fp16", "overflow"),
        ("1e9", "e2m1", "saturated"),
        ("nan", "e2m1", "no NaN"),
        ("-1", "e8m0", "no sign"),
    ],
)
def test_outcomes_as_they_are_shown(number: str, format: str, shown: str) -> None:
    row = lines("encode", number, "-f", format)[2]
    assert re.search(rf"(?:^|  | ){shown}$", row), row
    assert shown in OUTCOMES or shown in ("exact subnormal", "subnormal", "no NaN", "no sign")


def test_a_number_hardly_off_halfway_does_not_look_like_a_tie() -> None:
    found = lines("encode", "1+2^-11+2^-40", "-f", "fp16")[2]
    assert "+0.499999999" in found
    assert "+0.5 " in lines("encode", "1+3*2^-11", "-f", "fp16")[2]


def test_the_number_line() -> None:
    assert lines("why", "1.0001", "fp16", COLUMNS="80")[2:7] == [
        "  1                                                              1.0009765625",
        "  0x3c00                     halfway 1.00048828125                     0x3c01",
        "  ●────────────────────────────────────┼────────────────────────────────────┤",
        "          ▲",
        "       1.0001",
    ]


def test_only_halfway_stands_in_the_middle() -> None:
    for width in (15, 35, 75):
        last = width - 1
        assert [column_of(Fraction(place, 2), width) for place in (0, 1, 2)] == [0, last // 2, last]
        tiny = Fraction(1, 10**9)
        near = [column_of(place, width) for place in (tiny, Fraction(1, 2) - tiny, Fraction(1, 2) + tiny, 1 - tiny)]
        assert near == [1, last // 2 - 1, last // 2 + 1, last - 1]
        assert (column_of(Fraction(-1), width), column_of(Fraction(2), width)) == (0, last)


def test_tables_count_columns_without_escapes() -> None:
    screen = Terminal(colour=True)
    found = table(("a", "b"), [(screen.paint("long", "bad"), "1"), ("x", screen.paint("22", "good"))], (False, True))
    assert [visible(line) for line in found] == [8, 8, 8]


def test_wrapping_counts_columns_without_escapes() -> None:
    screen = Terminal(width=10, colour=True)
    words = " ".join(screen.paint(word, "bad") for word in ("one", "two", "three"))
    assert [ESCAPE.sub("", line) for line in screen.wrap(words, "  ")] == ["one two", "  three"]


def test_the_width_is_the_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream, os.fdopen(master):
        import fcntl
        import struct
        import termios

        fcntl.ioctl(stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, 97, 0, 0))
        assert terminal(stream).width == 97
        monkeypatch.setenv("COLUMNS", "120")
        assert terminal(stream).width == 120
