"""Fixtures of the tests of examples/train_gpt.py."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of some 40 kB of Python."""
    path = tmp_path / "text.py"
    path.write_bytes(Path(os.__file__).read_bytes())
    return path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs short."""
    # Not imported above: it imports halfstep, and pytest loads this file before tests/conftest.py sets TRITON_INTERPRET
    # if the command line names tests in this folder.
    import train_runs

    train_runs.make_small(monkeypatch)
