"""The planner's page: what `halfstep plan --page` writes, and what it shows in a headless Chromium."""

from __future__ import annotations

import html
import re
import subprocess
import webbrowser
from pathlib import Path

import pytest
from browser import NODE, chromium
from plan_settings import Settings, answer, settings, words

from halfstep.__main__ import main as halfstep_main
from halfstep.cli import plan as command
from halfstep.cli.command_line import UsageError
from halfstep.cli.pages.html import DOCUMENTATION, text
from halfstep.cli.pages.planner import planner
from halfstep.cli.plan_picture import MEMORY_KINDS

PACKAGE = "halfstep.cli.pages.planner"
HOSTED = {"params": "70B", "gpus": "64", "strategy": "hsdp", "shard": "8", "offload": "", "card": "h200"}


def initial(written: str) -> str:
    """The settings with which a page begins, as JSON."""
    return re.findall(r"^const initial = (.*);$", written, flags=re.MULTILINE)[0]


def test_the_page_is_one_file_with_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    arguments = ["--params", "7e9", "--gpus", "8", "--reserve", "12.5%", "--offload", "--strategy", "zero2"]
    assert halfstep_main(["plan", *arguments]) == 0
    printed = capsys.readouterr().out
    assert halfstep_main(["plan", *arguments, "--page", str(path)]) == 0
    assert capsys.readouterr().out == f"{printed}wrote {path}: open {path.as_uri()} in a browser\n"
    written = path.read_text(encoding="utf-8")
    assert initial(written) == (
        '{"params": "7000000000", "gpus": "8", "strategy": "zero2", "offload": "", "reserve": "12.5%"}'
    )
    assert "{{" not in written.partition("<script type")[0]
    assert not re.search(r'src="|<link|import |url\(|fetch\(', written)
    assert re.findall(r'href="(.*?)"', written) == [DOCUMENTATION]


def test_several_numbers_of_gpus_reach_the_page(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    several = ["--gpus", "8,64", "--strategy", "ddp,fsdp", "--compare", "strategies"]
    assert halfstep_main(["plan", "--params", "7e9", *several, "--page", str(path)]) == 0
    assert '"gpus": "8,64", "strategy": "ddp,fsdp", "compare": "strategies"' in initial(
        path.read_text(encoding="utf-8")
    )


def test_without_settings_the_page_begins_with_an_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    assert halfstep_main(["plan", "--page", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}: open {path.as_uri()} in a browser\n"
    assert '"model": "llama-3-8b"' in initial(path.read_text(encoding="utf-8"))
    assert "json" in answer(planner.EXAMPLE)


def test_settings_that_are_refused_write_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert halfstep_main(["plan", "--gpus", "8", "--page", str(tmp_path / "plan.html")]) == 2
    assert "expected a model, but got none" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert halfstep_main(["plan", "--page", str(tmp_path / "no" / "plan.html")]) == 2
    assert "plan.html' cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--json"], []])
def test_the_browser_is_opened(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def browser(address: str) -> bool:
        opened.append(address)
        return len(opened) == 1

    monkeypatch.setattr(webbrowser, "open", browser)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.chdir(tmp_path)
    assert halfstep_main(["plan", "--params", "5", *words]) == 0
    printed = capsys.readouterr().out
    address = (tmp_path / "halfstep_plan.html").resolve().as_uri()
    for said in (f"wrote halfstep_plan.html, opened in the browser: {address}\n", "; no browser was found here: open "):
        assert halfstep_main(["plan", "--params", "5", "--open", *words]) == 0
        out, errors = capsys.readouterr()
        assert out.startswith(printed) and said in (errors if words else out.removeprefix(printed))
        assert not words or out == printed  # the output is JSON alone
    assert opened == [address, address]
    assert initial((tmp_path / "halfstep_plan.html").read_text(encoding="utf-8")) == '{"params": "5"}'


def test_settings_of_the_page_are_those_of_the_command() -> None:
    parser = command.parser()
    checked = 0
    for seed in range(600):
        try:
            given = parser.parse(words(settings(seed)))
        except UsageError:
            continue
        assert parser.parse(words(planner.settings(given))) == given
        checked += 1
    assert checked > 500
    for reserve in ("33.333%", "0%", "1.5GiB", "7MB"):
        given = parser.parse(["--reserve", reserve])
        assert parser.parse(words(planner.settings(given))) == given


@pytest.mark.parametrize("words", [["plan", "--params", "5", "--page"], ["explore", "--no-open", "--out"]])
def test_the_name_of_a_page_cannot_steer_the_terminal(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert halfstep_main([*words, str(tmp_path / "\x1b[2J.html")]) == 0
    printed = capsys.readouterr().out
    assert f"wrote {tmp_path}/\\x1b[2J.html: open " in printed and "\x1b" not in printed


def test_texts_of_settings_cannot_end_the_script() -> None:
    written = planner.planner_page({"model": "</script><b>"})
    assert written.count("</script>") == 2 and '"\\u003c/script>\\u003cb>"' in written


def test_every_option_and_kind_of_memory_has_its_place_in_the_page() -> None:
    script = text(PACKAGE, "planner.mjs")
    fields = set(re.findall(r'"([a-z-]+)"', script[script.index("const FIELDS") : script.index("const LABELS")]))
    own = {"fit", "compare"}  # "Largest" and "Side by side" are always there
    assert fields == {option["names"][0][2:] for option in planner.facts()["options"]} - own
    labels = re.findall(
        r'(?:"([a-z-]+)"|\b([a-z]+)): "', script[script.index("const LABELS") : script.index("const WIDE")]
    )
    assert {first or second for first, second in labels} == fields
    dark = re.findall(r"#[0-9a-f]{6}", re.findall(r"const DARK = (\[.*?\])", script)[0])
    assert len(set(dark)) == len(dark) == len(MEMORY_KINDS)


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_script_of_the_page_can_be_parsed(tmp_path: Path) -> None:
    script = tmp_path / "script.mjs"
    script.write_text(re.findall(r'<script type="module">(.*)</script>', planner.planner_page({}), flags=re.DOTALL)[0])
    subprocess.run([NODE, "--check", script], check=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", [planner.EXAMPLE, HOSTED, {"model": "gpt2", "gpus": "8,64", "compare": "strategies"}])
@pytest.mark.parametrize("address", [True, False])
def test_what_the_page_shows(given: Settings, address: bool, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    written = planner.planner_page({"params": "3"} if address else given)
    path.write_text(written.replace('<details id="data">', '<details id="data" open>'), encoding="utf-8")
    hashed = "#" + "&".join(f"{name}={value}" for name, value in given.items()) if address else ""
    shown = chromium("--dump-dom", path.as_uri() + hashed, folder=tmp_path)
    ours = answer(given)
    content = html.unescape(re.findall(r'<pre id="json"[^>]*>(.*?)</pre>', shown, flags=re.DOTALL)[0])
    assert content == ours["json"]
    single = answer({name: value.split(",")[0] for name, value in given.items() if name != "compare"})
    said = re.findall(r"<li>(.*?)</li>", shown)
    assert [html.unescape(one) for one in said] == single["said"]
    line = html.unescape(re.findall(r'<pre id="command"[^>]*>(.*?)</pre>', shown)[0])
    assert command.parser().parse(line.split()[2:]) == command.parser().parse(words(given))


@pytest.mark.exhaustive
def test_the_page_shows_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(planner.planner_page({}), encoding="utf-8")
    shown = chromium("--dump-dom", path.as_uri() + "#model=gpt2&gpus=8&strategy=fsdpp", folder=tmp_path)
    refused = answer({"model": "gpt2", "gpus": "8", "strategy": "fsdpp"})["refused"]
    assert html.unescape(re.findall(r'<p id="error"[^>]*>(.*?)</p>', shown)[0]) == refused
    assert re.search(r'<div id="results" hidden', shown)
