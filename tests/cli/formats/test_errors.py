"""What is refused, and how: status 2, one line on standard error that names what is allowed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lookup_run import complaint, said


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("encode", "2.5x"),
            "halfstep encode: error: argument NUMBER: '2.5x' is not a number: 'x' is not understood. Write "
            "decimals (1e-400), hexadecimal floats",
        ),
        (("encode", "1e99999999"), "argument NUMBER: Expected magnitudes from 2^-65536 to 2^65536"),
        (("encode", "-"), "argument NUMBER: '-' is not a number"),
        (("encode", "1/0"), "argument NUMBER: '1/0'"),
        (("encode", "2.5", "fp16"), "; fp16 is a format, and formats come after -f"),
        (("why", "fp16", "2.5"), "; fp16 is a format, and the number comes first"),
        (("encode", "2.5", "-f", "fp61"), "argument -f/--format: unknown format 'fp61'; did you mean 'fp64'? Choose"),
        (("encode", "2.5", "-f", "fp8"), "format 'fp8' is ambiguous: choose 'e4m3fn', 'e5m2',"),
        (("encode", "2.5", "-f", "e12m3"), "Expected exponent to be from 1 to 11 bits"),
        (("encode", "2.5", "-f"), "argument -f/--format: expected one argument; see halfstep encode --help"),
        (("encode",), "the following arguments are required: NUMBER; see halfstep encode --help"),
        (
            ("encode", "1", "--rounding", "nearst"),
            "argument --rounding: unknown rounding 'nearst'; did you mean 'nearest'? Choose from nearest, nearest_away",
        ),
        (
            ("encode", "1", "--overflow", "wrap"),
            "argument --overflow: unknown overflow 'wrap'; choose from inf, saturate, nan",
        ),
        (("encode", "1", "--seed", "-1", "--rounding", "stochastic"), "argument --seed: expected "),
        (("encode", "1", "--seed", "1"), "--seed 1 draws nothing with --rounding nearest; leave it out, or pass"),
        (("encode", "1", "--jsn"), "unknown option --jsn; did you mean --json? see halfstep encode --help"),
        (("encode", "1", "-q"), "unknown option -q; see halfstep encode --help for those there are"),
        (
            ("decode", "0x1ffff", "-f", "fp16"),
            "argument CODE: expected a code of fp16 from 0x0 to 0xffff, but got 0x1ffff",
        ),
        (("decode", "300", "-w", "8"), "argument CODE: expected a code of e4m3fn from 0x0 to 0xff, but got 300"),
        (("decode", "0x12345678123456789"), "expected up to 64 bits, but got 0x12345678123456789, which has 68"),
        (("decode", "18446744073709551616"), "expected up to 64 bits, but got 18446744073709551616, which has 65"),
        (("decode", "-1"), "without a sign, but got '-1': for numbers use halfstep encode"),
        (("decode", "2.5"), "argument CODE: expected a hexadecimal (0x4100), binary"),
        (("decode", "0x_"), "argument CODE: expected a code such as 0x4100, but got '0x_', which has no digits"),
        (("decode", "0x41", "-w", "7"), "unknown width '7'; choose from 4, 6, 8, 16, 19, 32, 64"),
        (("decode", "0x41", "-w", "8", "-f", "fp16"), "--width 8 is not the 16 bits of --format fp16; leave one out"),
        (("why", "1"), "argument FORMAT: none is named; name one or more, as in: halfstep why 1.0001 fp16"),
        (("format", "fp17"), "halfstep format: error: argument NAME: unknown format 'fp17'; did you mean 'fp16'?"),
        (("compare", "fp16"), "argument FORMAT: fp16 alone cannot be compared; name two or more"),
        (("compare", "fp16", "half"), "argument FORMAT: fp16 alone cannot be compared"),
        (("ladder",), "the following arguments are required: --out"),
        (("ladder", "--out", "x.bmp"), "argument --out: expected a file name ending in "),
        (("ladder", "--out", "x.png", "--kind", "rang"), "unknown kind 'rang'; did you mean 'range'?"),
        (("ladder", "--out", "x.png", "--codes", "fp16"), "expected a format of up to 8 bits, but got fp16, which"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, tuple) else "",
)
def test_what_is_refused_says_what_is_allowed(words: tuple[str, ...], text: str) -> None:
    found = complaint(*words)
    assert found.startswith(f"halfstep {words[0]}: error: ")
    assert text in found


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    out = tmp_path / "no" / "such" / "x.png"
    assert complaint("ladder", "--kind", "range", "-f", "fp16", "--out", str(out)) == (
        f"halfstep ladder: error: argument --out: '{out}' cannot be written: {os.strerror(errno.ENOENT)}; pass a file "
        "in a folder that can be"
    )
    assert os.strerror(errno.EISDIR) in complaint("ladder", "--kind", "range", "-f", "fp16", "--out", _folder(tmp_path))


def _folder(tmp_path: Path) -> str:
    folder = tmp_path / "folder.png"
    folder.mkdir()
    return str(folder)


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = complaint("ladder", "--out", str(tmp_path / "x.png"))
    assert "argument --out: pictures need matplotlib, which is not installed: pip install 'halfstep[plots]'" in found
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_command_is_told_the_nearest() -> None:
    status, _, errors = said("encod", "2.5")
    assert status == 2 and "unknown command 'encod'; did you mean 'encode'?" in errors


@pytest.mark.parametrize("command", ["format", "encode", "decode", "why", "compare", "ladder"])
def test_help_is_no_error(command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        said(command, "--help")
    assert ended.value.code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_output_that_nobody_takes(more: list[str]) -> None:
    command = [sys.executable, "-m", "halfstep", "encode", "2.5", *more]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "halfstep encode: error: standard output cannot be written: No space left on device\n"
    # A reader that has seen enough is no error.
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
