"""The output of every command, to terminals, pipes and other encodings."""

import json
import re
from pathlib import Path

import pytest
import torch
from lookup_run import lines, said

from halfstep.integrations import checkpoint
from halfstep.numerics.formats.table import formats

HOSTILE = "\x1b[2J\rw[red]$\\frac$\u202e"
COMMANDS = [
    *("format", "format e2m1", "encode 500 -inf -0 -300.7 1e-400 nan", "encode 0.1 -f fp16 bf16 e4m3"),
    *("decode 0x0041 0x41 0x7fc00001 0b0101 0x3ff0000000000001", f"compare {' '.join(formats)}"),
    *(f"why 0.1 {' '.join(formats)}", "why 1e9 fp16 e4m3 e2m1", "why nan fp16 e8m0 int8"),
    *("plan --params 7e9", "plan --model llama-3-8b --gpus 16 --strategy hsdp --shard 8 --seq 4096 --card h100"),
    *("plan --params 7e9 --gpus 8 --compare layouts", "plan --params 7e9 --gpus 64 --compare strategies --card h100"),
    *("inspect x.pt", "inspect x.pt --advise --scale 2^10", "doctor x.pt", "doctor", "help", "bench --help"),
]
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    weight = torch.randn(40) * 1e-6
    torch.save({"encoder.layers.0.self_attention.in_proj.weight": weight, HOSTILE: torch.full((3,), 0.1)}, "x.pt")


def printed(words: str, **more: object) -> list[str]:
    if not words.startswith("doctor"):
        return lines(*words.split(), **more)  # type: ignore[arg-type]
    status, out, errors = said(*words.split(), **more)  # type: ignore[arg-type]
    assert status in (0, 1) and errors == ""  # what this machine has
    return out.splitlines()


@pytest.mark.parametrize("words", COMMANDS)
def test_every_output_is_printable_and_the_same_with_colour_and_in_ascii(words: str) -> None:
    plain = printed(words, COLUMNS="80")
    assert max(map(len, plain)) <= 80
    assert all(line.isprintable() for line in plain)
    if "x.pt" in words and "doctor" not in words:
        assert any(line.startswith(r"\x1b[2J\rw[red]$\frac$\u202e") for line in plain), "as it is written, escaped"

    coloured = printed(words, COLUMNS="80", terminal=True, TERM="xterm")
    assert [ESCAPE.sub("", line).rstrip() for line in coloured] == plain
    for line in coloured:  # what is switched on is switched off on the same line
        assert [code == "\x1b[0m" for code in ESCAPE.findall(line)] == [False, True] * (len(ESCAPE.findall(line)) // 2)
    assert any("\x1b" in line for line in coloured) or "help" in words

    ascii = printed(words, encoding="ascii", COLUMNS="80")
    assert all(line.isascii() for line in ascii)
    assert [len(line) for line in ascii] == [len(line) for line in plain], "no character is escaped"

    assert max(map(len, printed(words, COLUMNS="40"))) <= 40


@pytest.mark.parametrize("words", [words for words in COMMANDS[::2] if not words.startswith(("doctor", "inspect"))])
def test_lines_in_a_pipe_are_never_broken(words: str) -> None:
    whole, wide = printed(words, COLUMNS=""), printed(words, COLUMNS="3000")
    assert whole == wide and len(whole) <= len(printed(words, COLUMNS="160"))


@pytest.mark.parametrize(
    ("variables", "is_terminal", "coloured"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colour_follows_terminal_and_environment(variables: dict[str, str], is_terminal: bool, coloured: bool) -> None:
    found = lines("encode", "2.5", "-f", "fp16", terminal=is_terminal, **{"TERM": "xterm", **variables})
    assert any("\x1b" in line for line in found) == coloured
    assert "\x1b" not in said("encode", "2.5", "--json", terminal=is_terminal, **{"TERM": "xterm", **variables})[1]
    if coloured:  # sign, exponent and mantissa have colours of their own
        assert "\x1b[31m0\x1b[0m \x1b[32m10000\x1b[0m \x1b[36m0100000000\x1b[0m" in found[2]


@pytest.mark.parametrize(
    "words", ["format", "encode 2.5", "decode 0x4100", "why 0.1", "compare fp16 bf16", "plan --params 7e9",
              "plan --params 7e9 --gpus 8 --compare strategies", "inspect x.pt --advise", "inspect .", "doctor x.pt",
              "doctor", "convert --model SAVED out"],
)  # fmt: skip
def test_json_is_one_object_and_nothing_else(words: str) -> None:
    saved = checkpoint.save("saved", 1, model=torch.nn.Linear(3, 2)) if "convert" in words else None
    words = words.replace("SAVED", str(saved))
    status, out, errors = said(*words.split(), "--json", terminal=True, TERM="xterm")
    assert (status in ((0, 1) if "doctor" in words else (0,))) and errors == ""
    assert isinstance(json.loads(out), dict)
    status, out, errors = said(*words.split(), "--json", "--nope")
    assert (status, out) == (2, "") and "unknown option --nope; " in errors and "leave it out, or see half" in errors
