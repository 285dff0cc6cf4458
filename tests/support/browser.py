"""Scripts of the pages run in node or in a headless Chromium, where they are installed."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NODE = shutil.which("node")


def _chromium() -> str | None:
    """A Chromium that can read the tests' folders: one installed as a snap sees a /tmp of its own."""
    for name in ("chromium", "google-chrome", "chromium-browser"):
        path = shutil.which(name)
        if path and not path.startswith("/snap/") and b"/snap/" not in Path(path).read_bytes()[:8192]:
            return path
    return None


CHROMIUM = _chromium()


def run_script(engine: str, module: str, body: str, given: Any, folder: Path) -> Any:
    """What `body` passes to ``answer``: it sees ``input``, which is `given`, and everything in `module`."""
    source = f"{module}\nconst input = {json.dumps(given)};\n"
    if engine == "node":
        if NODE is None:
            pytest.skip("node is not installed")
        script = folder / "script.mjs"
        script.write_text(f"{source}const answer = (out) => process.stdout.write(JSON.stringify(out));\n{body}")
        done = subprocess.run([NODE, script], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)
    page = folder / "page.html"
    answer = "const answer = (out) => { document.querySelector('pre').textContent = JSON.stringify(out); };"
    page.write_text(f'<meta charset="utf-8"><pre></pre><script type="module">{source}{answer}\n{body}</script>')
    shown = chromium("--dump-dom", page.as_uri(), folder=folder)
    found = re.search(r"<pre>(.+?)</pre>", shown, re.DOTALL)
    assert found, shown[:1000]
    return json.loads(html.unescape(found[1]))


def chromium(*words: str, folder: Path) -> str:
    """What a headless Chromium with these arguments prints."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    sandbox = ["--no-sandbox"] if os.getuid() == 0 else []  # Chromium refuses root inside its sandbox
    command = [CHROMIUM, "--headless", "--disable-gpu", "--disable-dev-shm-usage", *sandbox]
    command += [f"--user-data-dir={folder / 'profile'}", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
