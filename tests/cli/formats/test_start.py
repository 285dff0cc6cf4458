"""The lookup loads nothing it does not need, and answers as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "words",
    [
        ["format"],
        ["encode", "2.5", "--json"],
        ["encode", "500", "--rounding", "stochastic", "--seed", "1"],
        ["decode", "0x4100"],
        ["why", "1.0001", "fp16", "e4m3"],
        ["compare", "fp16", "bf16"],
        ["encode", "nonsense"],
    ],
    ids=lambda words: words[0],
)
def test_no_library_is_loaded(words: list[str]) -> None:
    code = f"""
import sys
from halfstep.__main__ import main
main({words})
heavy = {{"torch", "numpy", "ml_dtypes", "matplotlib", "triton", "halfstep.numerics.formats.codec"}}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "halfstep", "encode", "-2.5", "-f", "fp16", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["results"][0]["code"] == "0xc100"
    assert "\x1b" not in done.stdout
