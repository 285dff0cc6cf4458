"""Fixtures of the tests of ``halfstep train``."""

from __future__ import annotations

import pytest


@pytest.fixture
def picture() -> None:
    """For tests whose reports have pictures."""


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs short, unless a test requests `picture`."""
    # Not imported above: it imports halfstep, and pytest loads this file before tests/conftest.py sets TRITON_INTERPRET
    # if the command line names tests in this folder.
    import train_runs

    if "picture" not in request.fixturenames:
        train_runs.make_small(monkeypatch)
