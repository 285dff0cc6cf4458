"""Tables on narrow screens, and the progress line."""

from __future__ import annotations

import io

import pytest

from halfstep.cli.terminal import RULE, Progress, Terminal, fitted, ruled, table

ROWS = [("a", "12", "several words here"), RULE, ("total", "3\nmore", "")]


def test_cells_with_several_lines_and_rules() -> None:
    assert table(("name", "n\n%", "note"), ROWS, (False, True, False)) == [
        "name      n  note",
        "          %",
        "a        12  several words here",
        "───────────────────────────────",
        "total     3",
        "       more",
    ]


def test_the_last_column_folds_where_the_screen_ends() -> None:
    lines = fitted(("name", "n", "note"), ROWS, (False, True, False), 22, folds=True)
    assert lines == [
        "name      n  note",
        "a        12  several",
        "             words",
        "             here",
        "────────────────────",
        "total     3",
        "       more",
    ]


def test_columns_that_do_not_fit_go_below() -> None:
    lines = fitted(("name", "n", "note"), ROWS, (False, True, False), 22)
    assert lines == [
        *("name      n", "a        12", "───────────", "total     3", "       more", ""),
        *("name   note", "a      several words here", "─────────────────────────", "total"),
    ]


def test_a_ruled_table_has_a_bold_header() -> None:
    lines = ruled(("x\n%", "y"), [("1", "2")], (True, True), Terminal(80, colour=True))
    assert lines == ["\x1b[1mx\x1b[0m  \x1b[1my\x1b[0m", "\x1b[1m%\x1b[0m", "────", "1  2"]


@pytest.mark.parametrize("colour", [False, True])
def test_only_the_colours_of_tables_are_escape_codes(colour: bool) -> None:
    screen, stream = Terminal(80, colour=colour), Screen()
    name = "a\x1b[2J\x1b]0;t\x07\x9b8m\x1b[8m\rb\u202e\n\udc80"
    screen.show([f"{screen.paint(name, 'bad')} {screen.paint('ok', 'strong')}"], stream)
    safe = r"a\x1b[2J\x1b]0;t\x07\x9b8m\x1b[8m\rb\u202e"
    expected = "\x1b[31m{}\x1b[0m\\n\x1b[31m{}\x1b[0m \x1b[1mok\x1b[0m\n" if colour else "{}\\n{} ok\n"
    assert stream.getvalue() == expected.format(safe, r"\udc80")
    stream = Screen()
    Terminal(80, colour=False).show(["\x1b[31mred"], stream)
    assert stream.getvalue() == "\\x1b[31mred\n"


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_that_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Screen()
    with Progress(4, stream=stream) as progress:
        progress.show(1, "half of it")
        progress.show(text="x" * 100)
    lines = stream.getvalue().replace("\x1b[K", "").split("\r")
    assert lines[1].startswith("." * 20 + "   0%")
    assert lines[2].startswith("#" * 5 + "." * 15 + "  25%  half of it")
    assert max(map(len, lines)) < 40 and lines[-1] == ""


def test_progress_waits_and_is_for_terminals_only() -> None:
    for stream, patience in ((Screen(), 60.0), (io.StringIO(), 0.0)):
        with Progress(2, patience, stream) as progress:
            progress.show(1, "x")
        assert stream.getvalue() == ""
