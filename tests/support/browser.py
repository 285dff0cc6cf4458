"""Pages in a headless Chromium, where it is installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def _chromium() -> str | None:
    """A Chromium that can read the tests' folders: one installed as a snap sees a /tmp of its own."""
    for name in ("chromium", "google-chrome", "chromium-browser"):
        path = shutil.which(name)
        if path and not path.startswith("/snap/") and b"/snap/" not in Path(path).read_bytes()[:8192]:
            return path
    return None


CHROMIUM = _chromium()


def chromium(*words: str, folder: Path) -> str:
    """What a headless Chromium with these arguments prints."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    sandbox = ["--no-sandbox"] if os.getuid() == 0 else []  # Chromium refuses root inside its sandbox
    command = [CHROMIUM, "--headless", "--disable-gpu", "--disable-dev-shm-usage", *sandbox]
    command += [f"--user-data-dir={folder / 'profile'}", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
