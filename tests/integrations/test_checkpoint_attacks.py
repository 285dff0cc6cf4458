"""A cross-section of the campaign of fuzz_checkpoints.py: bad checkpoints run, change and cost nothing."""

from __future__ import annotations

import fuzz_checkpoints
import pytest


def test_bad_checkpoints_run_nothing_and_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status = fuzz_checkpoints.main(["--tries", "100", "--seed", "3"])
    printed = capsys.readouterr()
    assert status == 0 and printed.out.endswith("\n0 complaints.\n"), printed
