"""``halfstep explore``: the file, the browser, and what is refused."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest
from lookup_run import complaint, said

from halfstep.cli.pages.explorer.page import explorer_page


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The addresses that a browser was asked to open. The commands run in a folder of their own."""
    addresses: list[str] = []

    def browser(address: str) -> bool:
        addresses.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", browser)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.chdir(tmp_path)
    return addresses


def test_it_writes_the_page_and_opens_it(opened: list[str], tmp_path: Path) -> None:
    address = (tmp_path / "halfstep_explorer.html").resolve().as_uri()
    status, out, errors = said("explore")
    assert (status, errors) == (0, "")
    assert out == f"wrote halfstep_explorer.html, opened in the browser: {address}\n"
    assert opened == [address]
    start = {"f": "bf16", "g": "fp16", "r": "nearest", "o": "inf"}
    assert (tmp_path / "halfstep_explorer.html").read_text(encoding="utf-8") == explorer_page(start)


def test_it_begins_with_what_was_asked_for(opened: list[str], tmp_path: Path) -> None:
    words = ["--number", "-1/3", "-f", "half", "--format", "e5m7", "--rounding", "up", "--overflow", "saturate"]
    status, out, _ = said("explore", "--out", "a page.html", "--no-open", *words)
    address = (tmp_path / "a page.html").resolve().as_uri()
    assert (status, out) == (0, f"wrote a page.html: open {address} in a browser\n")
    assert opened == []
    page = (tmp_path / "a page.html").read_text(encoding="utf-8")
    assert '\nconst start = {"x": "-1/3", "f": "fp16", "g": "e5m7", "r": "up", "o": "saturate"};\n' in page


@pytest.mark.parametrize(("formats", "expected"), [((), ("bf16", "fp16")), (("fp16",), ("fp16", "bf16"))])
def test_the_other_format_is_another(
    opened: list[str], tmp_path: Path, formats: tuple[str, ...], expected: tuple[str, str]
) -> None:
    assert said("explore", *(word for name in formats for word in ("-f", name)))[0] == 0
    page = (tmp_path / "halfstep_explorer.html").read_text(encoding="utf-8")
    assert f'"f": "{expected[0]}", "g": "{expected[1]}"' in page


def test_without_a_browser_it_says_what_to_open(
    opened: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = "wrote halfstep_explorer.html; no browser was found here: open file://"
    with monkeypatch.context() as patch:
        patch.setattr(webbrowser, "open", lambda address: False)
        assert said("explore")[1].startswith(expected)
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert said("explore")[1].startswith(expected)  # without a screen, none in the terminal is started
    assert opened == []
    assert said("explore", BROWSER="firefox")[0] == 0
    assert len(opened) == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--number", "2.5x"), "argument --number: '2.5x' is not a number: 'x' is not understood. Write decimals"),
        (("--number", "fp16"), "; fp16 is a format, and formats come after -f"),
        (("-f", "fp61"), "argument -f/--format: unknown format 'fp61'; did you mean 'fp64'? Choose"),
        (("-f", "fp8"), "argument -f/--format: format 'fp8' is ambiguous: choose 'e4m3fn', 'e5m2',"),
        (
            ("-f", "fp16", "-f", "bf16", "-f", "e5m2"),
            "argument -f/--format: expected at most two formats, the second to compare with, but got fp16, bf16, e5m2; "
            "leave out 1",
        ),
        (("--rounding", "stochastic"), "unknown rounding 'stochastic'; choose from nearest, nearest_away, toward_zero"),
        (("--overflow", "wrap"), "unknown overflow 'wrap'; choose from inf, saturate, nan"),
        (
            ("--out", "no/x.html"),
            "argument --out: 'no/x.html' cannot be written: No such file or directory; pass a file",
        ),
        (("--out", ""), "argument --out: expected a path, but got ''"),
        (("--no-opn",), "unknown option --no-opn; did you mean --no-open? see halfstep explore --help"),
        (("0.1",), "unexpected argument '0.1'; halfstep explore takes options only: see halfstep explore --help"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, tuple) else "",
)
def test_what_is_refused(opened: list[str], tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    found = complaint("explore", *words)
    assert found.startswith("halfstep explore: error: ") and text in found, found
    assert opened == [] == list(tmp_path.iterdir())


def test_texts_do_not_end_the_script() -> None:
    """A number or a name cannot close the script element, or open another."""
    page = explorer_page({"x": "</script><script>alert(1)</script><!--"})
    assert page.count("<script") == page.count("</script") == explorer_page().count("<script") == 2
    assert "<!--" not in page
