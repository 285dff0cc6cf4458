"""Every public function gives the same bits whatever torch's default dtype and device: a part of the campaign.

Each run is a process of its own, so that a crash is a failure: C++ once wrote fp32 into what a default had made bf16,
and the heap was corrupt.
"""

from __future__ import annotations

import os
from pathlib import Path

import defaults
import forks
import pytest

import halfstep
from halfstep.kernels import backend

SCRIPT = Path(defaults.__file__)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("auto", ["--tries", "1"]),
        ("reference", ["--tries", "1", "--cases", "checks", "optimizers"]),
        ("triton", ["--tries", "1", "--cases", "checks"]),
    ],
)
def test_nothing_depends_on_the_defaults_of_torch(name: str, arguments: list[str]) -> None:
    if name == "triton" and (backend.triton is None or not backend.INTERPRET):
        pytest.skip("needs Triton's interpreter")
    environment = {key: value for key, value in os.environ.items() if key != "HALFSTEP_BACKEND"}
    done = forks.run([SCRIPT, "--backend", name, *arguments], environment, timeout=540)
    assert done.returncode == 0 and ", 0 wrong, " in done.stdout, done.stdout + done.stderr


def test_every_public_name_is_used_there() -> None:
    text = SCRIPT.read_text()
    missing = [name for name in halfstep.__all__ if f"halfstep.{name}" not in text]
    assert missing == ["__version__"]
