"""These tests need the software GPU: ``pytest --software-gpu sm_90 tests/software_gpu``."""

from pathlib import Path

import pytest
from software_gpu.gpu import SoftwareGPU, installed

HERE = Path(__file__).parent
FOR_ALL = ("test_kernels.py",)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    target = config.getoption("--software-gpu")
    for item in items:
        if HERE in item.path.parents:
            amd = item.path.name.startswith("test_amd")
            if not target:
                item.add_marker(pytest.mark.skip(reason="needs --software-gpu"))
            elif item.path.name not in FOR_ALL and amd != target.startswith("gfx"):
                item.add_marker(pytest.mark.skip(reason=f"asks about the machine for {'AMD' if amd else 'NVIDIA'}"))


@pytest.fixture
def machine() -> SoftwareGPU:
    """The software GPU of this process."""
    return installed()
