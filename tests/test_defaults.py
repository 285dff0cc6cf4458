"""Every public function gives the same bits whatever torch's default dtype and device: a part of the campaign.

Each run is a process of its own, so that a crash is a failure: C++ once wrote fp32 into what a default had made bf16,
and the heap was corrupt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import defaults
import forks
import pytest
import torch

import halfstep
from halfstep.kernels import backend

SCRIPT = Path(defaults.__file__)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("auto", ["--tries", "3"]),
        ("reference", ["--tries", "1", "--cases", "checks", "optimizers"]),
        ("triton", ["--tries", "1", "--cases", "checks", "training"]),
    ],
)
def test_nothing_depends_on_the_defaults_of_torch(name: str, arguments: list[str]) -> None:
    if name == "triton" and (backend.triton is None or not backend.interpreting()):
        pytest.skip("needs Triton's interpreter")
    environment = {key: value for key, value in os.environ.items() if key != "HALFSTEP_BACKEND"}
    done = forks.run([SCRIPT, "--backend", name, *arguments], environment, timeout=540)
    assert done.returncode == 0 and ", 0 wrong, " in done.stdout, done.stdout + done.stderr


def test_every_public_name_is_used_there() -> None:
    text = SCRIPT.read_text()
    missing = [name for name in halfstep.__all__ if f"halfstep.{name}" not in text]
    assert missing == ["__version__"]


@pytest.mark.parametrize("careless", [lambda: torch.zeros(3), lambda: torch.tensor([1, 2]) / 3, None])
def test_the_campaign_can_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], careless: object
) -> None:
    def case(data: defaults.Data) -> Iterator[object]:
        yield data.normal(3)
        if careless is None:
            raise ValueError("never works")
        yield careless()  # type: ignore[operator]

    monkeypatch.setitem(defaults.CASES, "case", case)
    threads = torch.get_num_threads()
    assert defaults.main(["--tries", "2", "--cases", "case"]) == 1
    torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert "case raised: ValueError: never works" in said if careless is None else "case 1: " in said
    assert torch.get_default_dtype() == torch.float32 and torch.zeros(1).device.type == "cpu"


def test_defaults_are_set_and_put_back() -> None:
    for dtype in defaults.DTYPES:
        for device in defaults.DEVICES:
            with defaults.defaults(dtype, device):
                made = torch.zeros(1)
                assert made.dtype == dtype and made.is_meta is device.endswith("meta")
            made = torch.zeros(1)
            assert made.dtype == torch.float32 and not made.is_meta
