"""Text, tables on narrow terminals, and the progress bar."""

import io
import re
import time

import pytest

from halfstep.cli.terminal import Progress, Table, joined, rendered, show, text

ROWS = [("a", "12", "several words here"), (), ("total", "3", "")]
HEADER = ("name", "n\n%", "note")


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("columns", "wraps", "expected"),
    [
        (80, None, ["        n", "name    %  note", "─" * 29, "a      12  several words here", "─" * 29, "total   3"]),
        (20, 2, ["        n", "name    %  note", "─" * 20, "a      12  several", "           words", "           here",
                 "─" * 20, "total   3"]),
        (24, None, ["        n", "name    %", "─" * 9, "a      12", "─" * 9, "total   3", "",
                    "name   note", "─" * 24, "a      several words", "       here", "─" * 24, "total"]),
    ],
)  # fmt: skip
def test_a_table_folds_or_continues_below(columns: int, wraps: int | None, expected: list[str]) -> None:
    assert rendered([Table(HEADER, ROWS, {1}, ruled=True, wraps=wraps)], columns) == expected


def test_a_table_without_rows_and_of_wide_characters() -> None:
    assert rendered([Table(("a", "b"), [])], 80) == ["a  b"]
    assert rendered([Table((), [("模型", "1"), ("ab", "2")])], 80) == ["模型  1", "ab    2"], "two columns each"


@pytest.mark.parametrize("colour", [False, True])
def test_only_our_colours_are_escape_codes(colour: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR" if colour else "NO_COLOR", "1")
    monkeypatch.delenv("NO_COLOR" if colour else "FORCE_COLOR", raising=False)
    stream = Screen()
    name = "a\x1b[2J\x1b]0;t\x07\x9b8m\x1b[8m\rb\u202e\n[red]:smile:\udc80"
    show(joined(text(name, "bad"), " ", text("ok", "strong")), Table((), [(name, "x")]), stream=stream)
    safe = r"a\x1b[2J\x1b]0;t\x07\x9b8m\x1b[8m\rb\u202e\n[red]:smile:\udc80"
    first = f"\x1b[31m{safe}\x1b[0m \x1b[1mok\x1b[0m" if colour else f"{safe} ok"
    assert stream.getvalue() == f"{first}\n{safe}  x\n"


def test_progress_is_one_line_that_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COLUMNS", "60"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    stream = Screen()
    with Progress(4, stream=stream) as progress:
        progress.show(1, "half \x1b[2J[red]of it")
        progress.show(3, "x" * 100)
    written = stream.getvalue()
    assert written.count("\n") <= 1 and written.endswith("\x1b[2K"), "the line is cleared"
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    assert re.search(r" 25% \S+ half \\x1b\[2J\[red\]of it", drawn) and "75%" in drawn
    assert "━" in drawn
    assert max(map(len, re.split(r"[\r\n]", drawn))) <= 60


def test_progress_appears_after_its_patience_and_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for stream, term in ((io.StringIO(), "xterm"), (Screen(), "dumb"), (Screen(), "xterm")):
        monkeypatch.setenv("TERM", term)
        with Progress(2, 2.0, stream) as progress:
            now += 1.9
            progress.show(1)
            assert stream.getvalue() == ""
            now += 0.2
            progress.show(1)
            assert ("50%" in stream.getvalue()) == (term == "xterm" and stream.isatty())
