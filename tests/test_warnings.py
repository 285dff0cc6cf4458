"""A warning of ours, or one that torch attributes to a line of ours, fails the test that it comes up in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("module", "category", "fails"),
    [
        ("halfstep.kernels.cast", "RuntimeWarning", True),
        ("test_it", "UserWarning", True),
        ("test_it", "DeprecationWarning", True),
        ("torch.distributed.checkpoint.utils", "UserWarning", False),
        ("triton.runtime.interpreter", "RuntimeWarning", False),
        ("test_it", "ResourceWarning", False),
    ],
)
def test_a_warning_fails_a_test_where_it_is_ours(tmp_path: Path, module: str, category: str, fails: bool) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        "import warnings\ndef test_it():\n"
        f"    warnings.warn_explicit('this is old', {category}, 'a file', 1, module={module!r})\n"
    )
    options = ("-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "--noconftest", "-p", "no:cacheprovider", "-q")
    command = [sys.executable, "-c", "import pytest; raise SystemExit(pytest.console_main())", *options, test]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # whose imports take most of the time
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == int(fails), done.stdout + done.stderr
    assert ("this is old" in done.stdout) is (fails or module.startswith("torch"))
