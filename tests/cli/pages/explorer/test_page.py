"""The explorer's page in a headless Chromium: what it shows, and what clicks, keys and addresses do."""

from __future__ import annotations

import html
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, chromium

from halfstep.cli.formats import number_text
from halfstep.cli.pages.explorer.page import explorer_page
from halfstep.numerics.formats.table import formats

# What a visitor does. `done` collects what the page then shows.
VISIT = """
const $ = (id) => document.getElementById(id);
const done = [];
const shown = () => ({
  answer: $("answer").textContent, error: $("error").textContent, hidden: [$("results").hidden, $("one").hidden],
  why: [...$("why").children].map((each) => each.textContent), line: $("line").hidden ? null : $("line").textContent,
  code: $("c").value, number: $("x").value, overflow: $("o").value,
  bits: [...$("bits").querySelectorAll("button")].map((b) => b.textContent).join(""),
  all: [...$("all").rows].map((row) => [...row.cells].map((cell) => cell.textContent)),
  modes: [...$("modes").rows].map((row) => [...row.cells].map((cell) => cell.textContent)),
  pair: $("pair").hidden ? null : $("pair-title").textContent, pairError: $("pair-error").textContent,
  around: [...$("around").rows].map((row) => [...row.cells].map((cell) => cell.textContent)),
  focus: document.activeElement.ariaLabel ?? document.activeElement.id, theme: document.documentElement.dataset.theme,
});
const type = (id, text) => {
  $(id).focus();
  $(id).value = text;
  $(id).dispatchEvent(new Event("input", { bubbles: true }));
};
const key = (name) => document.activeElement.dispatchEvent(
  new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
const bit = (i) => $("bits").querySelectorAll("button")[i].click();
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const address = (text) => { location.hash = text; return pause(60); };
"""


def visit(steps: str, folder: Path) -> Any:
    """What `steps` collect in ``done``."""
    script = f"{VISIT}\nawait pause(0);\n{steps}\nconst out = document.body.appendChild(document.createElement('pre'));"
    script += "out.id = 'out'; out.textContent = JSON.stringify(done);"
    page = folder / "page.html"
    errors = "addEventListener('error', (e) => document.documentElement.setAttribute('data-failed', e.message));"
    text = explorer_page().replace("<head>", f"<head><script>{errors}</script>")
    page.write_text(text.replace("</body>", f'<script type="module">{script}</script></body>'), encoding="utf-8")
    dom = chromium("--virtual-time-budget=20000", "--dump-dom", page.as_uri(), folder=folder)
    found = re.search(r'<pre id="out">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[:300]
    assert not re.search("<html[^>]* data-failed=", dom), dom[:300]
    return json.loads(html.unescape(found[1]))


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def test_a_visit(tmp_path: Path) -> None:
    steps = """
    done.push(shown());                                   // 0: the start
    bit(15);
    done.push(shown());                                   // 1: the last bit flipped
    key("ArrowLeft"); key("ArrowLeft"); key("Home"); key("ArrowRight");
    done.push(shown());                                   // 2: the second bit has the focus
    key("ArrowUp"); key("ArrowUp"); key("ArrowDown");
    done.push(shown());                                   // 3: one number up
    type("x", "nan"); type("f", "fp16"); bit(15);
    done.push(shown());                                   // 4: a NaN with a payload stays as it was clicked
    type("x", "464"); type("f", "e4m3");
    done.push(shown());                                   // 5: a tie at the end
    type("o", "nan"); type("f", "e2m1");
    done.push(shown());                                   // 6: overflow to a NaN that there is not
    type("o", "inf"); type("f", "int8"); type("x", "nan");
    done.push(shown());                                   // 7: a NaN that there is not
    type("n", "zero");
    done.push(shown());                                   // 8: as zero
    type("x", "1/0");
    done.push(shown());                                   // 9: no number
    type("x", "0.1"); type("f", "e99m1");
    done.push(shown());                                   // 10: no format
    type("f", "fp16"); type("g", "bogus");
    done.push(shown());                                   // 11: no format to compare with
    type("g", "half");
    done.push(shown());                                   // 12: the same format
    type("g", "");
    done.push(shown());                                   // 13: none
    type("c", "0x10000");
    done.push(shown());                                   // 14: no code
    document.querySelector("#all button").click();
    done.push(shown());                                   // 15: the row of fp64 chosen
    await address("x=1e-40&f=bf16&r=up&s=0&g=e5m7&o=zzz");
    done.push(shown());                                   // 16: an address
    await address("c=0x7fc1&f=bf16&g=fp16");
    done.push(shown());                                   // 17: an address with a code
    $("theme").click();
    done.push(shown());                                   // 18: the other theme
    await pause(300);
    done.push({ hash: location.hash });                   // 19: the address that was written
    type("x", "5e-324"); type("f", "fp64"); $("f").blur();
    const whole = () => document.querySelector("#facts details");
    whole().open = true;
    await pause(50);
    type("x", "1e-323");
    done.push([whole().open, whole().textContent]); // 20: what is unfolded stays so
    """
    at = visit(steps, tmp_path)

    assert at[0]["answer"] == "0.1 in bf16 is 0.10009765625: rounded, +0.2 ulp"
    assert at[0]["why"] == [
        "The number is 1/10 in lowest terms, and 10 is not a power of two: no binary format has it exactly.",
        "From 2^-4 to 2^-3 the numbers of bf16 are 2^-11 = 0.00048828125 apart: 1 ulp.",
        "The number is 0.8 ulp above 0.099609375 and 0.2 ulp below 0.10009765625.",
        "The nearer one is taken: 0.10009765625.",
    ]
    assert at[0]["line"] == ("0.0996093750x3dcc0.100097656250x3dcd0.1 lies 80 % of the way; halfway is 0.099853515625")
    assert [row[0] for row in at[0]["all"]] == list(formats)
    assert at[0]["modes"][2] == ["toward_zero", "0.099609375", "0x3dcc", "-0.8", "rounded"]
    assert at[0]["modes"][-2:] == [
        ["stochastic", "0.099609375", "0x3dcc", "-0.8", "with 20 %"],
        ["stochastic", "0.10009765625", "0x3dcd", "+0.2", "with 80 %"],
    ]
    assert at[0]["pair"] == "bf16 and fp16"
    assert ["0.1", "neither", "→ 0.10009765625", "→ 0.0999755859375"] in at[0]["around"]
    assert ["0.0999755859375", "only fp16", "-", "0x2e66"] in at[0]["around"]

    assert (at[1]["code"], at[1]["bits"], at[1]["number"]) == ("0x3dcc", "0011110111001100", "0.099609375")
    assert at[1]["focus"] == "mantissa bit 0: 0"
    assert at[1]["answer"] == "0x3dcc in bf16 is 0.099609375: exact"
    assert (at[2]["focus"], at[2]["code"]) == ("exponent bit 14: 0", "0x3dcc")
    assert (at[3]["code"], at[3]["focus"]) == ("0x3dcd", "exponent bit 14: 0")

    assert (at[4]["code"], at[4]["answer"]) == ("0x7e01", "0x7e01 in fp16 is nan: exact")
    assert at[5]["answer"] == "464 in e4m3fn is 448: rounded, -0.5 ulp"
    assert at[5]["why"][-2:] == [
        "The number is exactly halfway between 448 and 480.",
        "Ties go to even: 0 1111 110 ends in 0 and is taken, 0 1111 111 ends in 1.",
    ]
    assert at[5]["line"].startswith("4480x7e480not in e4m3fn464 lies 50 %")
    assert at[6]["hidden"] == [False, True] and at[6]["error"] == (
        "Expected overflow to be 'inf' or 'saturate' for e2m1fn, which has no NaN, but got 'nan'"
    )
    assert ["int8", at[7]["error"], "", "", "no NaN"] in at[7]["all"]  # the other formats stay in sight
    assert at[7]["hidden"] == [False, True] and at[7]["error"] == (
        "Expected values without NaN for int8, which has none, but got one: pass nan='zero', or replace it before"
    )
    assert (at[8]["code"], at[8]["why"]) == ("0x00", ["NaN is not rounded.", "Zero is stored: 0x00."])
    assert at[8]["hidden"] == [False, False]
    assert at[9]["hidden"][0] and at[9]["error"].startswith("'1/0' is not a number: it divides by zero")
    assert at[10]["error"].startswith("Expected exponent to be from 1 to 11 bits, so that float64 holds every value")
    assert not any(at[11]["hidden"]) and at[11]["pairError"].startswith(
        "unknown format 'bogus'; choose from fp64, fp32"
    )
    assert at[12]["pairError"] == "Both are fp16: choose another format under “Compare with”."
    assert at[13]["pair"] is None
    assert at[14]["error"] == "Expected a code of fp16 to be from 0 to 0xffff, but got 0x10000"
    assert (at[15]["answer"], at[15]["error"]) == ("0.1 in fp64 is ≈0.1: rounded, +0.4 ulp", "")
    assert at[16]["answer"] == "1e-40 in bf16 is 0: underflow, -1.089 ulp"
    assert at[16]["why"][-1] == "Subnormal results are flushed to zero: 0x0000 is stored."
    assert (at[16]["pair"], at[16]["overflow"]) == ("bf16 and e5m7", "inf")  # zzz is no choice
    assert (at[17]["code"], at[17]["number"], at[17]["answer"]) == ("0x7fc1", "nan", "0x7fc1 in bf16 is nan: exact")
    assert {at[17]["theme"], at[18]["theme"]} == {"light", "dark"}
    whole = str(number_text.decimal(Fraction(1, 2**1073)))
    assert at[20] == [True, f"{whole[:30]}…, {len(whole)} characters{whole}"]
    assert at[19]["hash"] == "#c=0x7fc1&f=bf16&g=fp16&r=nearest&o=inf&n=canonical&s=1"
