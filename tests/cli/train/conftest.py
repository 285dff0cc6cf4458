"""What the tests of ``halfstep train`` have in common."""

from __future__ import annotations

import pytest
import train_runs


@pytest.fixture
def picture() -> None:
    """For a test whose reports are to have pictures."""


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without what takes longer than they do, unless a test asks for `picture`."""
    if "picture" not in request.fixturenames:
        train_runs.make_small(monkeypatch)
