"""The explorer and the planner as pages of the site: files, common answers, and Python for the browser.

Pyodide is no part of the repository: `build` fetches a pinned version with npm, where npm is installed, and cuts it to
what the pages import. Without it the pages show the answers that are prepared, and say what to run for others.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfstep.cli.pages.answers import EXAMPLES, answer
from halfstep.cli.pages.html import asset, html
from halfstep.numerics.formats.table import formats
from halfstep.numerics.planning import CARDS, OPTIMIZERS, PRECISIONS, STRATEGIES

PYODIDE = "314.0.7"
INTEGRITY = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="  # SHA-512
CORE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json")
LICENSES = Path(__file__).with_name("licenses")
NUMBERS = ("1/3", "0.3", "1", "464", "65504", "65520", "1e-8", "nan")

Request = dict[str, Any]

COMMON = ("llama-3.1-8b", "llama-3-8b", "llama-3-70b", "qwen3-8b")  # models whose answers are prepared


def states(page: str) -> Iterator[dict[str, str]]:
    """The states whose answers are prepared: what one choice, or two of the most common, make of the example."""
    example = EXAMPLES[page]
    if page == "explorer":
        for form in formats:
            yield {**example, "f": form}
            yield {**example, "g": form}
            yield from ({**example, "f": form, "x": number} for number in NUMBERS)
        yield from ({**example, "r": mode} for mode in ("nearest_away", "toward_zero", "up", "down", "odd"))
        return
    choices = {"model": COMMON, "card": CARDS, "strategy": STRATEGIES, "optimizer": OPTIMIZERS, "precision": PRECISIONS}
    for name, values in {**choices, "gpus": ("2", "4", "16", "64"), "compare": ("layouts",)}.items():
        for value in values:
            yield {**example, name: value}
    for model in COMMON:
        for card in ("a100-80", "h100", "h200", "b200", "mi300x", "rtx4090"):
            yield {**example, "model": model, "card": card}
        for gpus in ("16", "64"):
            yield {**example, "model": model, "gpus": gpus}


def common_answers(page: str) -> dict[str, Any]:
    """The answers by the key that the page makes of a state."""
    answers = {}
    for state in states(page):
        key = json.dumps(sorted(map(list, state.items())), separators=(",", ":"), ensure_ascii=False)
        answers[key] = answer({"page": page, "state": state})
    return answers


def modules() -> dict[str, bytes]:
    """The modules of halfstep that the answers import, by their paths. Of others, Pyodide has the standard library.

    Raises:
        RuntimeError: they import something else.
    """
    code = (
        "import sys; before = set(sys.modules); import halfstep.cli.pages.answers\n"
        "for name in set(sys.modules) - before: print(name, getattr(sys.modules[name], '__file__', None), sep='|')"
    )
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    named = dict(line.split("|") for line in sorted(lines))
    others = {name.partition(".")[0] for name in named} - {"halfstep"} - set(sys.stdlib_module_names)
    if others:
        raise RuntimeError(f"Expected the pages to import the standard library only, but got {sorted(others)}")
    content = {}
    for name, file in named.items():
        if name.partition(".")[0] == "halfstep" and file != "None":
            folder = Path(file).name == "__init__.py"
            content[name.replace(".", "/") + ("/__init__.py" if folder else ".py")] = Path(file).read_bytes()
    return content


def fetch(folder: Path) -> Path | None:
    """Pyodide's folder, fetched with npm if it is not in `folder` yet; None where that cannot be done.

    Raises:
        RuntimeError: what was fetched is not what is pinned.
    """
    package = folder / f"pyodide-{PYODIDE}"
    if package.is_dir():
        return package
    if not shutil.which("npm") or not shutil.which("node"):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    packed = subprocess.run(
        ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"], cwd=folder, capture_output=True, text=True
    )
    if packed.returncode:
        return None
    archive = folder / packed.stdout.split()[-1]
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != INTEGRITY:
        raise RuntimeError(f"Expected {archive} to have the SHA-512 {INTEGRITY}, but got {digest}")
    with tarfile.open(archive) as content:
        content.extractall(folder / "unpacked", filter="data")
    (folder / "unpacked" / "package").rename(package)
    return package


def write(site: Path) -> None:
    """Write the pages with their common answers, and the modules for Python in the browser."""
    site.mkdir(parents=True, exist_ok=True)
    (site / "worker.mjs").write_text(asset("worker.mjs"), encoding="utf-8")
    for page in EXAMPLES:
        (site / f"{page}.html").write_text(html(page, "site"), encoding="utf-8")
        content = json.dumps(common_answers(page), ensure_ascii=False, separators=(",", ":")).encode()
        (site / f"{page}_answers.json.gz").write_bytes(gzip.compress(content, 9, mtime=0))
    with zipfile.ZipFile(site / "halfstep.zip", "w") as archive:
        for name, text in modules().items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED, 9)


def add_python(site: Path, pyodide: Path, requests: list[Request], folder: Path) -> list[Any]:
    """Add Pyodide to a written site, cut and compiled, with licences. Returns Pyodide's answers to the requests."""
    shutil.copytree(LICENSES, site / "pyodide", dirs_exist_ok=True)
    for name in CORE:
        shutil.copy(pyodide / name, site / "pyodide" / name)
    asked = folder / "requests.json"
    asked.write_text(json.dumps(requests), encoding="utf-8")
    command = ["node", str(Path(__file__).with_name("cut_python.mjs")), str(pyodide), str(asked), str(site)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    answers: list[Any] = json.loads(done.stdout)
    return answers


def sample() -> list[Request]:
    """Requests for which the answers import all that any answer does: also what refuses and suggests."""
    asked = [{"page": page, "state": state} for page, state in EXAMPLES.items()]
    asked += [
        {"page": "explorer", "state": state, "move": move}
        for state in ({"x": "zz"}, {"f": "fp1"}, {"c": "0x1", "f": "fp16"}, {"x": "-1/3", "f": "fp64", "g": "e5m7"})
        for move in ({}, {"step": 1}, {"flip": 3})
    ]
    asked += [
        {"page": "planner", "state": {**EXAMPLES["planner"], **state}}
        for state in ({"model": "lama"}, {"gpus": "x"}, {"compare": "layouts"}, {"no": ""})
    ]
    return asked


def build(site: Path, folder: Path) -> str:
    """Write the pages, with Python if it can be had. Returns what to say of it; `folder` keeps what was fetched."""
    write(site)
    pyodide = fetch(folder)
    if pyodide is None:
        return "The pages answer only what is prepared: npm and node, which fetch Pyodide, are not there."
    requests = sample()
    if add_python(site, pyodide, requests, folder) != [json.loads(json.dumps(answer(request))) for request in requests]:
        raise RuntimeError("Expected the same answers from Pyodide as from this Python, but they differ")
    return f"The pages answer with Pyodide {PYODIDE}."
