"""These tests need the software GPU in their process: ``pytest --software-gpu sm_90 tests/software_gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_gpu.gpu import SoftwareGPU, installed

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--software-gpu"):
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs --software-gpu"))


@pytest.fixture
def machine() -> SoftwareGPU:
    """The software GPU of this process."""
    return installed()
