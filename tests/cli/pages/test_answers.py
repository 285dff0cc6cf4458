"""The pages' answers against the command line and the codec, and harmless answers to hostile addresses."""

import random
import shlex
import subprocess
import sys
from decimal import Decimal
from typing import Any

import pytest
from plan_settings import settings, words

from halfstep.cli import plan as command
from halfstep.cli.command_line import UsageError
from halfstep.cli.formats.values import Stored
from halfstep.cli.pages.answers import EXAMPLES, answer
from halfstep.cli.pages.planner import at_peak
from halfstep.cli.plan_options import settings as state_of
from halfstep.cli.plan_tables import digits, sentences
from halfstep.numerics.formats.blocks import encode_block
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS, NANS, OVERFLOWS, encode_exact, parse_number
from halfstep.numerics.formats.table import formats

FORMS = [*formats, "e5m7", "e3m2fnuz", "e4m0finite"]
NUMBERS = (
    "0.1 -0.1 1/3 -0 0 nan inf -inf 65504 65520 -65530 464 1e-8 2^-25 -(1+2^-11) 1e400 1e-400 3 -128.5 240".split()
)


def explored(move: dict[str, Any] | None = None, **state: str) -> dict[str, Any]:
    return answer({"page": "explorer", "state": state, "move": move or {}})


def code(form: str, state: dict[str, str], rounding: str) -> str:
    """The code of the state's number in a format, or why the codec refuses it."""
    options: Any = {"overflow": state["o"], "nan": state["n"], "subnormals": state["s"] == "1"}
    try:
        return Stored(encode_exact(parse_number(state["x"]), form, rounding, **options), formats[form]).hex
    except ValueError as error:
        return str(error)


def test_every_mode_and_format_shows_what_the_codec_encodes() -> None:
    draw = random.Random(3)
    choices = {"x": NUMBERS, "f": FORMS, "r": ENCODE_ROUNDINGS[:-1], "o": OVERFLOWS, "n": NANS, "s": "01"}
    for _ in range(80):
        state = {key: draw.choice(values) for key, values in choices.items()}
        shown = explored(**state)
        for name, value, stored, *_ in shown["all"]["rows"]:
            assert (stored or value) == code(name, state, state["r"]), (name, state)
        assert (shown["fields"]["c"] or shown["error"]) == code(state["f"], state, state["r"])
        assert (shown["chosen"] is None) == bool(shown["error"])
        for mode, _, stored, *_ in shown["chosen"]["modes"]["rows"][:6] if shown["chosen"] else ():
            assert stored == code(state["f"], state, mode)


def test_answers_for_nan_and_subnormals() -> None:
    zero = explored(x="nan", f="int8", n="zero")
    assert zero["chosen"]["why"] == ["NaN is not rounded.", "Zero is stored: 0x00."]
    refused = explored(x="nan", f="int8")
    assert refused["chosen"] is None and refused["error"].startswith("Expected values without NaN for int8")
    assert refused["all"]["rows"][-1] == ["int8", refused["error"], "", "", "no NaN"]  # the others stay in sight
    flushed = explored(x="1e-40", f="bf16", r="up", s="0")
    assert flushed["chosen"]["title"] == "1e-40 in bf16 is 0: underflow, -1.089 ulp"
    assert flushed["chosen"]["why"][-1] == "Subnormal results are flushed to zero: 0x0000 is stored."
    assert flushed["chosen"]["modes"]["rows"][-1] == ["stochastic", "0", "0x0000", "-1.089", "with 100 %"]
    assert "a code of fp16 to be from 0 to 0xffff, but got 0x10000" in explored(c="0x10000", f="fp16")["error"]


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2_even", "mxfp6_e2m3", "mxfp4_ceil"])
def test_a_block_shows_what_the_codec_encodes(name: str) -> None:
    numbers = "0.1 -1/3 0 -0 65504 464 1e-8 -128.5 240".split()
    for rounding in ENCODE_ROUNDINGS[:-1]:
        shown = explored(b=" ".join(numbers), k=name, r=rounding)["block"]
        codes, scale = encode_block(map(parse_number, numbers), name, rounding)
        assert [int(row[2], 16) for row in shown["elements"][1]] == codes
        marked = shown["rules"][1][shown["rules"][2]]
        assert (int(marked[1], 16) == scale and name.endswith(marked[0])) or marked[0] == "floor"
        assert shown["elements"][2] == numbers.index("65504")
    assert explored(b="1 2 3", k="no format")["state"]["k"] == EXAMPLES["explorer"]["k"]
    assert "1 to 16 numbers for a block of nvfp4, but got 17" in explored(b="1 " * 17, k="nvfp4")["block"]["error"]


@pytest.mark.parametrize(
    ("state", "move", "code"),
    [
        ({"x": "0.1", "f": "bf16"}, {"flip": 0}, "0x3dcc"),
        ({"c": "0", "f": "fp16"}, {"step": -1}, "0x8001"),
        ({"c": "0x7e00", "f": "fp16"}, {"step": 1}, "0x7e01"),  # among NaNs, which have no order, the next code
        ({"c": "0x7f", "f": "e4m3"}, {"flip": 7}, "0xff"),
        ({"x": "0.1", "f": "bf16"}, {"flip": 15, "to": 1}, "0xbdcd"),
        ({"x": "0.1", "f": "bf16"}, {"field": ["exponent", "0b1111100"]}, "0x3e4d"),
        ({"x": "-1", "f": "e4m3"}, {"field": ["mantissa", "7"]}, "0xbf"),
        ({"x": "-1", "f": "fp64"}, {"field": ["sign", ""]}, "0x3ff0000000000000"),
    ],
)
def test_a_move_leads_to_a_code(state: dict[str, str], move: dict[str, int], code: str) -> None:
    shown = explored(move, **state)
    assert shown["state"]["c"] == shown["fields"]["c"] == code and "x" not in shown["state"]


def test_a_field_that_cannot_be_typed_leaves_the_number() -> None:
    for typed, error in (("300", "exponent of bf16 to be from 0 to 255, but got 300"), ("x", "but got 'x'")):
        shown = explored({"field": ["exponent", typed]}, x="0.1", f="bf16")
        assert error in shown["error"] and shown["state"]["x"] == "0.1" and shown["fields"]["c"] == "0x3dcd"


def test_the_headline_has_all_digits_or_leads_to_them() -> None:
    assert explored(x="22/7", f="bf16")["chosen"]["value"] == ["3.140625", ""]
    short, digits = explored(x="0.1", f="fp64")["chosen"]["value"]
    assert short == "≈0.100000000000000005551115" and digits == str(Decimal.from_float(0.1))
    assert [explored(x=text)["chosen"]["value"][0] for text in ("nan", "-inf", "-0")] == ["nan", "-inf", "-0"]


@pytest.mark.parametrize("form", ["bf16", "fp64", "e5m7"])
def test_a_number_is_located_in_every_format(form: str) -> None:
    for text in ("1e-320", "-1e-8", "0.1", "65520", "1e200"):
        shown, magnitude = explored(x=text, f=form)["all"]["range"], abs(float(parse_number(text)))
        for name, *drawn, _ in shown["rows"]:
            row = formats[name]
            for limit, percent in zip((row.min_subnormal, row.min_normal, row.max), drawn, strict=True):
                assert (shown["at"] - percent) * (magnitude - limit) >= 0, (text, name)
    assert explored(x="nan")["all"]["range"]["at"] is None


@pytest.mark.parametrize(
    "move", [{"field": 5}, {"field": ["x", "1"]}, {"field": [1]}, {"flip": "a"}, {"step": [], "to": {}}]
)
def test_a_move_that_the_page_does_not_make_does_no_harm(move: dict[str, Any]) -> None:
    assert explored(move, x="0.1")["state"]["c"].startswith("0x3dc")


def test_two_formats_compared() -> None:
    pair = explored(x="0.1", f="bf16", g="half")["pair"]
    assert ["0.0999755859375", "only fp16", "-", "0x2e66"] in pair["around"]["rows"]
    assert ["0.1", "neither", "→ 0.10009765625", "→ 0.0999755859375"] in pair["around"]["rows"]
    counts = [0, 0, 0]
    for low, high, *numbers in pair["binades"]:
        binades = int(high.removeprefix("2^")) - int(low.removeprefix("2^"))
        counts = [sum + int(number.replace(",", "")) * binades for sum, number in zip(counts, numbers, strict=True)]
    assert counts == [(65281 - 3) // 2, (63489 - 3) // 2, (8705 - 3) // 2]  # without the infinities and 0
    assert explored(f="fp16", g="half")["pair"]["error"].startswith("Both are fp16")
    assert "unknown format 'bogus'" in explored(g="bogus")["pair"]["error"] and "pair" not in explored(g="")


# ------------------------------------------------------------------------------------------------------------ planner


def fields(answered: dict[str, Any]) -> dict[str, Any]:
    return {field["name"]: field for group in answered["form"] for field in group["fields"]}


def planned(state: dict[str, str]) -> dict[str, Any]:
    """The JSON of the command."""
    return command.planned(command.parser().parse(words(state)))


@pytest.mark.parametrize(
    "state", [EXAMPLES["planner"], {"params": "7e9"}, {"model": "gpt2", "card": "8GiB", "offload": ""}]
)
def test_a_plan_is_that_of_the_command(state: dict[str, str]) -> None:
    ours, content = answer({"page": "planner", "state": state})["plan"], planned(state)
    (plan,) = content["plans"]
    sizes = [part["bytes"] for part in at_peak(plan)]
    widths = [part[2] for part in ours["bar"]["parts"]]
    assert ours["words"] == sentences(content) and sum(sizes) == plan["totals"]["peak"] and sum(widths) < 100.1
    assert widths == pytest.approx([widths[0] * size / sizes[0] for size in sizes])


def test_settings_of_a_command_line_are_a_state() -> None:
    parser, checked = command.parser(), 0
    for seed in range(200):
        try:
            options = parser.parse(words(settings(seed)))
        except UsageError:
            continue
        assert parser.parse(words(state_of(options))) == options
        checked += 1
    assert checked > 150


def test_a_card_given_by_its_memory() -> None:
    answered = answer({"page": "planner", "state": {"model": "gpt2", "card": "24GiB"}})
    assert answered["plan"]["verdict"].startswith("Fits 24 GiB: ")
    assert ["24GiB", "24GiB"] in fields(answered)["card"]["choices"]
    bare = fields(answer({"page": "planner", "state": {"model": "gpt2", "checkpointing": ""}}))
    assert (bare["checkpointing"]["value"], bare["step-in-backward"]["value"]) == ("full", "")


@pytest.mark.parametrize("what", ["strategies", "layouts"])
def test_each_row_of_a_comparison_leads_to_its_plan(what: str) -> None:
    table = answer({"page": "planner", "state": {**EXAMPLES["planner"], "compare": what}})["comparison"]
    assert [row["here"] for row in table["rows"]].count(True) == (what == "strategies")
    for row in table["rows"]:
        state = {name: text for name, text in row["state"].items() if name != "compare"}
        (plan,) = planned(state)["plans"]
        assert digits(plan["totals"]["peak"] / 2**30) == row["cells"][table["head"].index("peak")], row


def test_every_option_has_a_field() -> None:
    others = {"compare", "json", "page", "no-open", "port"}
    options = {action.option_strings[-1][2:] for action in command.parser()._actions[1:]}
    assert set(fields(answer({"page": "planner", "state": {}}))) == options - others


# States as a link may have them, and the arguments of the command that is copied.
HOSTILE = [
    ({"model": "gpt2", "x;touch pwn": ""}, ["--model", "gpt2"]),
    ({"model": "gpt2", "$(touch pwn)": "1", "help": "", "page": "pwn"}, ["--model", "gpt2"]),
    ({"model": "gpt2\ntouch pwn"}, ["--model", "gpt2touch pwn"]),
    ({"model": "'; touch pwn; '"}, ["--model", "'; touch pwn; '"]),
    ({"model": "\\'; touch pwn #"}, ["--model", "\\'; touch pwn #"]),
    ({"model": "$(touch pwn)`touch pwn`!touch"}, ["--model", "$(touch pwn)`touch pwn`!touch"]),
    ({"model": "x\x1b[201~\x03\r\x9btouch pwn\x7f\u202e\u2028"}, ["--model", "x[201~touch pwn"]),
    ({"model": "--page=pwn", "card": "--out", "gpus": "-1"}, ["--model=--page=pwn", "--card=--out", "--gpus=-1"]),
    ({"model": "*", "card": "~", "gpus": "8,64"}, ["--model", "*", "--card", "~", "--gpus", "8,64"]),
]  # fmt: skip


def test_the_command_of_a_link_runs_halfstep_and_nothing_else(tmp_path: Any) -> None:
    for state, expected in HOSTILE:
        shown = answer({"page": "planner", "state": state})
        assert shown["error"] and shlex.split(shown["command"]) == ["halfstep", "plan", *expected]
        code = f"halfstep() {{ printf '%s\\n' \"$@\"; }}\n{shown['command']}"
        done = subprocess.run(["sh", "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert (done.stdout.splitlines(), done.stderr) == (["plan", *expected], "") and not any(tmp_path.iterdir())
    number = explored(x="$(touch pwn)", f="--out=pwn")["command"]
    assert shlex.split(number)[2:5] == ["--number", "$(touch pwn)", "--format=--out=pwn"]


@pytest.mark.parametrize(
    "request_",
    [
        *(None, [], "x", {}, {"page": "other", "state": {}}, {"page": "planner", "state": {"gpus": 8}}),
        *({"page": "explorer", "state": {}, "move": [1]}, {"page": "planner", "state": [["a", "b"]]}),
    ],
)
def test_malformed_requests_are_refused(request_: Any) -> None:
    assert list(answer(request_)) == ["refused"]


def test_answers_import_neither_torch_nor_numpy() -> None:
    code = "import sys, halfstep.cli.pages.answers; sys.exit(str({'torch', 'numpy', 'rich'} & set(sys.modules) or ''))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip() == ""
