"""A cross-section of the campaign of fuzz_checkpoints.py: bad checkpoints run, change and cost nothing."""

from __future__ import annotations

import subprocess
import sys

import fuzz_checkpoints


def test_bad_checkpoints_run_nothing_and_change_nothing() -> None:
    command = [sys.executable, fuzz_checkpoints.__file__, "--tries", "150", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 complaints" in done.stdout
