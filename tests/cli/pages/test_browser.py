"""The pages in a headless Chromium: served by halfstep, as a file, and as pages of the site with and without Python."""

import functools
import html as markup
import http.server
import importlib.util
import json
import random
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from browser import CHROMIUM, chromium
from plan_settings import settings

from halfstep.cli.pages import server as serving
from halfstep.cli.pages.answers import EXAMPLES, answer
from halfstep.cli.pages.html import html
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS, NANS, OVERFLOWS
from halfstep.numerics.formats.table import formats

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

# What a visitor does, after the page. `done` collects what is then shown.
VISIT = """
const done = [];
const BAD = `<img src=x onerror="document.title='pwned'">`; // as a link may have it
const texts = (id) => [...$(id).querySelectorAll("tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
const shown = () => ({
  page: document.title, title: $("title")?.textContent, error: $("error").textContent, status: $("status").textContent,
  command: $("command").textContent, focus: document.activeElement.ariaLabel ?? document.activeElement.id,
  theme: document.documentElement.dataset.theme, hash: location.hash, images: document.images.length,
});
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const settle = async () => { await pause(250); await asked; await pause(250); };
const type = async (id, text) => {
  $(id).focus();
  $(id).value = text;
  $(id).dispatchEvent(new Event("input", { bubbles: true }));
  await settle();
};
const key = async (name) => {
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
  await settle();
};
const click = async (node) => { node.click(); await settle(); };
const point = (name, node, x) => node.dispatchEvent(
  new PointerEvent(name, { bubbles: true, cancelable: true, clientX: x, clientY: node.getBoundingClientRect().y + 9 }));
const sweep = async (from, to) => { // as a mouse does, and the click after it
  from.scrollIntoView();
  const [start, end] = [from, to].map((node) => node.getBoundingClientRect().x + 9);
  point("pointerdown", from, start);
  for (let part = 1; part <= 3; part += 1) point("pointermove", from, start + ((end - start) * part) / 3);
  point("pointerup", from, end);
  (from === to ? from : from.parentElement).click();
  await settle();
};
"""


def visited(page: str, steps: str) -> str:
    """The page with a visitor, whose steps are part of its script."""
    out = "document.body.append(element('pre', { id: 'out' }, JSON.stringify(done)));"
    return page.replace("run(draw);\n", f"run(draw);\n{VISIT}\nawait asked;\n{steps}\n{out}")


def seen(address: str, folder: Path, out: str = "out") -> str:
    """The text of an element when nothing more happens."""
    dom = chromium("--virtual-time-budget=30000", "--dump-dom", address, folder=folder)
    found = re.search(rf'<(\w+) id="{out}"[^>]*>(.*?)</\1>', dom, re.DOTALL)
    assert found, dom[-3000:]
    return markup.unescape(found[2])


@pytest.fixture
def visit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What a visitor of a page that halfstep serves collects in ``done``."""

    def made(page: str, steps: str, state: dict[str, str] | None = None) -> Any:
        monkeypatch.setattr(serving, "html", lambda *arguments: visited(html(*arguments), steps))
        server, address = serving.server(page, state or EXAMPLES[page])
        with server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            found = json.loads(seen(address, tmp_path))
            server.shutdown()
        return found

    return made


def test_a_visit_of_the_explorer(visit: Any) -> None:
    at = visit(
        "explorer",
        """
        done.push({ ...shown(), all: texts("all"), modes: texts("modes"), line: $("line").textContent });
        await click([...$("bits").querySelectorAll("button")].at(-1)); done.push(shown());  // 1: the last bit flipped
        await key("ArrowLeft"); await key("Home"); await key("ArrowRight"); done.push(shown()); // 2: the second bit
        await key("ArrowUp"); done.push({ ...shown(), number: $("x").value });               // 3: the next number
        await type("x", "nonsense"); done.push({ ...shown(), hidden: $("chosen").hidden });     // 4: no number
        await type("x", "464"); await type("f", "e4m3"); done.push(shown());                 // 5
        await type("c", "0x7e"); await click($("all").querySelector("button")); done.push(shown()); // 6: fp64
        await type("g", "bogus"); done.push($("pair-error").textContent);                    // 7
        await click($("theme")); done.push(shown());                                         // 8
        location.hash = "c=0x7fc1&f=bf16&g=fp16&o=zzz&theme=light"; await settle();
        done.push({ ...shown(), overflow: $("o").value });                                   // 9
        location.hash = "x=1.125&f=bf16&g="; await settle();
        const mantissa = [...$("bits").querySelectorAll(".mantissa button")];
        await sweep(mantissa[1], mantissa[5]); done.push({ ...shown(), value: $("value").textContent }); // 10
        await sweep(mantissa[6], mantissa[6]); await key("ArrowLeft"); done.push(shown());       // 11
        const field = $("bits").querySelector("[data-field=exponent]");
        field.focus(); field.value = "0b1"; field.dispatchEvent(new Event("input", { bubbles: true })); await settle();
        field.value = "256"; field.dispatchEvent(new Event("input", { bubbles: true })); await settle();
        done.push({ ...shown(), typed: field.value, digits: $("digits").hidden });           // 12
        field.blur(); await settle();
        done.push({ typed: field.value, marks: $("range").querySelectorAll("rect").length }); // 13
        location.hash = new URLSearchParams({ f: "bf16", x: BAD }); await settle(); done.push(shown());
        await type("b", "1 -6 nan"); const bad = $("block-words").textContent;
        await type("b", "1 -6.5"); await type("k", "mxfp4_ceil");
        const marked = (id) => $(id).querySelector("[aria-current]").textContent;
        const words = $("block-words").textContent;
        done.push({ bad, words, number: marked("elements"), rule: marked("rules") });        // 15
        await type("k", "nvfp4"); const { hidden } = $("rules-part"); await type("b", "x");
        done.push([$("block-error").textContent, hidden]);                                   // 16
        """,
    )
    assert at[15]["bad"] == "The block has nan: its scale is nan, 0xff."
    assert at[15]["words"].startswith("The largest magnitude, 6.5, decides the scale.")
    assert at[15]["number"].startswith("-6.5-3.25") and at[15]["rule"].startswith("ceil0x80")
    assert at[16][0].startswith("'x' is not a number") and at[16][1]
    assert at[0]["title"] == "0.1 in bf16 is 0.10009765625: rounded, +0.2 ulp"
    line = "0.099609375\n0x3dcc0.10009765625\n0x3dcd0.1 lies 80 % of the way; halfway is 0.099853515625"
    assert at[0]["line"] == line
    assert at[0]["modes"][-1] == ["stochastic", "0.10009765625", "0x3dcd", "+0.2", "with 80 %"]
    expected = answer({"page": "explorer", "state": EXAMPLES["explorer"]})["all"]["rows"]
    assert at[0]["all"][1:] == expected
    assert (at[1]["title"], at[1]["focus"]) == ("0x3dcc in bf16 is 0.099609375: exact", "mantissa bit 0: 0")
    assert "c=0x3dcc" in at[1]["hash"] and "x=" not in at[1]["hash"]
    assert at[2]["focus"] == "exponent bit 14: 0"
    assert at[3]["title"] == "0x3dcd in bf16 is 0.10009765625: exact"
    assert (at[3]["number"], at[3]["focus"]) == ("0.10009765625", at[2]["focus"])
    assert at[4]["error"].startswith("'nonsense' is not a number") and at[4]["hidden"]
    assert (at[5]["title"], at[5]["error"]) == ("464 in e4m3fn is 448: rounded, -0.5 ulp", "")
    assert at[6]["title"] == "448 in fp64 is 448: exact"
    assert at[7].startswith("unknown format 'bogus'")
    assert {at[8]["theme"], at[9]["theme"]} == {"dark", "light"} and "theme=dark" in at[8]["hash"]
    assert (at[9]["title"], at[9]["overflow"]) == ("0x7fc1 in bf16 is nan: exact", "inf")
    assert (at[10]["title"], at[10]["value"]) == ("0x3fbe in bf16 is 1.484375: exact", "1.484375")
    assert at[10]["focus"] == "mantissa bit 1: 1"  # where the drag ended
    assert "c=0x3fbf" in at[11]["hash"] and at[11]["focus"] == "mantissa bit 1: 1"
    assert "c=0x00bf" in at[12]["hash"] and at[12]["error"].endswith("from 0 to 255, but got 256")
    assert at[12]["typed"] == "256" and not at[12]["digits"]
    assert at[13] == {"typed": "1", "marks": 4 * len(formats)}
    assert at[14]["images"] == 0 and at[14]["page"].startswith("Number")
    assert "'<img" in at[14]["error"] and " '<img" in at[14]["command"]


def test_a_visit_of_the_planner(visit: Any) -> None:
    at = visit(
        "planner",
        """
        done.push({ verdict: $("verdict").textContent, parts: texts("parts").length,
                    marks: $("bar").querySelectorAll("b").length, comparison: texts("comparison") });
        await type("o-gpus", "64"); done.push({ ...shown(), verdict: $("verdict").textContent });
        await type("o-strategy", "hsdp"); done.push([$("error").textContent, $("o-shard").closest("label").hidden]);
        await type("o-shard", "8");
        await click($("comparison").querySelector("button")); done.push(shown());              // 3: the row of ddp
        await type("compare", "layouts"); done.push(texts("comparison").length);
        await type("o-gpus", "x"); done.push({ ...shown(), hidden: $("peak").hidden });
        location.hash = new URLSearchParams({ [BAD]: "", model: BAD }); await settle(); done.push(shown()); // 6
        location.hash = "model=llama-3-8b&card=24GiB"; await settle();
        await click($("ways").querySelector("a")); done.push([shown().hash, $("verdict").textContent]); // 7
        """,
    )
    ours = answer({"page": "planner", "state": EXAMPLES["planner"]})
    assert (at[0]["verdict"], at[0]["parts"]) == (ours["plan"]["verdict"], 1 + len(ours["plan"]["parts"]))
    assert at[0]["marks"] == 2
    assert [row[2:] for row in at[0]["comparison"][1:]] == [row["cells"][2:] for row in ours["comparison"]["rows"]]
    assert at[1]["verdict"] != at[0]["verdict"] and "gpus=64" in at[1]["hash"] and at[1]["focus"] == "o-gpus"
    assert "Expected shard to be the GPUs of one group" in at[2][0] and not at[2][1]
    assert "--strategy ddp" in at[3]["command"] and "shard" not in at[3]["command"]
    assert at[4] > 10
    assert at[5]["hidden"] and "expected an integer of at least 1" in at[5]["error"]
    assert at[6]["images"] == 0 and at[6]["page"].startswith("Planner")
    assert at[6]["error"].startswith("unknown option --<img")
    # without the name that is no option
    assert re.fullmatch(r"halfstep plan --model '<img src=x [^ ]*'", at[6]["command"])
    assert at[7][1].startswith("Fits 24 GiB: ") and "offload=" in at[7][0]


def test_the_policy_lets_the_page_work(tmp_path: Path) -> None:
    """With the headers of the server, which the visits above change by their script."""
    server, address = serving.server("explorer", {"x": "0.3"})
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = seen(f"{address}#x=1%2F3&f=fp16", tmp_path, "title")
        server.shutdown()
    assert shown == "1/3 in fp16 is 0.333251953125: rounded, -0.3333 ulp"


def test_a_file_says_how_to_ask_more(tmp_path: Path) -> None:
    steps = 'await type("x", "0.5"); done.push(shown());'
    (tmp_path / "page.html").write_text(visited(html("explorer", "file", {"x": "0.3"}), steps), encoding="utf-8")
    (at,) = json.loads(seen((tmp_path / "page.html").as_uri(), tmp_path))
    assert at["title"] == "0.3 in bf16 is 0.30078125: rounded, +0.4 ulp"
    assert at["status"] == f"This file has one answer. For others: {at['command']}"
    assert at["command"].startswith("halfstep explore --number 0.3 --format bf16")


# --------------------------------------------------------------------------------------------------------------- site


def site_pages() -> Any:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder and the address of the built pages, without Python for the browser."""
    folder = tmp_path_factory.mktemp("site")
    site_pages().write(folder)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            if self.path == "/hold":  # Chromium's virtual time stands still meanwhile, and does not overtake the worker
                time.sleep(0.25)
            super().do_GET()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def test_common_answers_need_no_python(site: tuple[Path, str], tmp_path: Path) -> None:
    state = {**EXAMPLES["planner"], "card": "b200"}
    shown = seen(f"{site[1]}planner.html#{urlencode(state)}", tmp_path, "verdict")
    assert shown == answer({"page": "planner", "state": state})["plan"]["verdict"] and shown.startswith("Fits b200 ")
    assert all((site[0] / f"{page}_answers.json.gz").stat().st_size < 80_000 for page in EXAMPLES)


@pytest.mark.parametrize(
    ("python", "limit", "expected"),
    [
        ("", "", "Python was not loaded or failed: pyodide.asm.wasm: HTTP 404. In a terminal: halfstep explore"),
        ("{ unpackArchive() {}, runPython: () => () => JSON.stringify({ refused: 'a stub' }) }", "", "a stub"),
        pytest.param("new Promise(() => {})", "LOADING = 180_000",
                     "Loading Python takes more than 0.3 seconds. In a terminal", marks=pytest.mark.exhaustive),
        pytest.param("{ unpackArchive() {}, runPython: () => () => { throw new Error('no memory') } }", "",
                     "failed: no memory. In a terminal", marks=pytest.mark.exhaustive),
        pytest.param("{ unpackArchive() {}, runPython: () => () => { for (;;); } }", "ANSWERING = 20_000",
                     "The answer takes more than 0.3 seconds", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_missing_or_failing_python_is_reported(
    site: tuple[Path, str], python: str, limit: str, expected: str, tmp_path: Path
) -> None:
    """With a stub of Pyodide, or without one."""
    folder, address = site
    shutil.rmtree(folder / "pyodide", ignore_errors=True)
    if python:
        (folder / "pyodide").mkdir()
        (folder / "pyodide" / "pyodide.asm.wasm").touch()
        (folder / "pyodide" / "pyodide.mjs").write_text(f"export const loadPyodide = async () => ({python});")
    page = (folder / "explorer.html").read_text(encoding="utf-8")
    page = page.replace(limit, f"{limit.split(' ')[0]} = 300") if limit else page
    steps = """
    let over = false;
    change(() => ({ state: { x: "0.123" } })).then(() => { over = true; });
    for (let i = 0; i < 40 && !over; i += 1) { await fetch("hold"); await pause(50); }
    done.push($("status").textContent, $("title").textContent);
    """
    (folder / "stub.html").write_text(visited(page, steps), encoding="utf-8")
    status, title = json.loads(seen(f"{address}stub.html", tmp_path))
    assert expected in status and title.startswith("0.1 in bf16")


@pytest.mark.exhaustive
def test_pyodide_answers_as_this_python(tmp_path: Path) -> None:
    """Random requests, and the page of the site with Pyodide, where npm and node are there to fetch it."""
    module = site_pages()
    pyodide = module.fetch(ROOT / "out" / "pyodide")
    if pyodide is None:
        pytest.skip("npm, node or Pyodide is not to be had")
    draw, numbers = random.Random(1), ["0.1", "1/3", "-0", "nan", "-inf", "65520", "1e400", "zz", "2^-25", "1e19000"]
    choices = {"x": numbers, "f": [*module.formats, "e5m7"], "g": list(module.formats), "r": ENCODE_ROUNDINGS[:-1]}
    choices |= {"o": OVERFLOWS, "n": NANS, "s": "01"}
    requests = module.sample()
    for seed in range(300):
        state = {key: draw.choice(values) for key, values in choices.items()}
        requests.append({"page": "explorer", "state": state, "move": draw.choice([{}, {"step": 1}, {"flip": 2}])})
        requests.append({"page": "planner", "state": settings(seed)})
    module.write(tmp_path)
    theirs = module.add_python(tmp_path, pyodide, requests, tmp_path)
    for request, reply in zip(requests, theirs, strict=True):
        assert reply == json.loads(json.dumps(answer(request))), request
