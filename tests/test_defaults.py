"""Every public function gives the same bits whatever torch's default dtype and device: a part of the campaign.

Each run is a process of its own, so that a crash is a failure: C++ once wrote fp32 into what a default had made bf16,
and the heap was corrupt.
"""

import os
from pathlib import Path

import defaults
import forks
import pytest

import halfstep
from halfstep.kernels import backend

SCRIPT = Path(defaults.__file__)


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("auto", tuple(defaults.CASES)),
        ("reference", ("checks", "states", "recorded adam")),
        ("triton", ("checks", "recorded check")),
    ],
)
def test_nothing_depends_on_the_defaults_of_torch(name: str, cases: tuple[str, ...]) -> None:
    if name == "triton" and (backend.triton is None or not backend.INTERPRET):
        pytest.skip("needs Triton's interpreter")
    environment = {**os.environ, "HALFSTEP_BACKEND": name, "MALLOC_PERTURB_": "165", "PYTHONWARNINGS": "ignore"}
    done = forks.run(["-c", f"import defaults; print(defaults.run(0, {cases}))"], environment, timeout=540)
    assert done.returncode == 0 and "'checks'" in done.stdout, done.stdout + done.stderr


def test_every_public_name_is_used_there() -> None:
    text = SCRIPT.read_text()
    missing = [name for name in halfstep.__all__ if f"halfstep.{name}" not in text]
    assert missing == ["__version__", "backend"]
