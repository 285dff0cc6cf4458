"""A page as one HTML file, from its template, the style and the scripts that all pages share, and its first answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files

from halfstep.cli.pages.answers import EXAMPLES, answer, fixed

DOCUMENTATION = "https://github.com/halfstep/halfstep/tree/main/docs"  # to which pages outside of the site link
MODES = ("local", "site", "file")  # who answers: the local server, Pyodide, nobody


def html(page: str, mode: str, state: Mapping[str, str] | None = None) -> str:
    """The page ``"explorer"`` or ``"planner"`` in one of `MODES` with the answer to `state`, by default its example."""
    first = answer({"page": page, "state": dict(EXAMPLES[page] if state is None else state)})
    if "refused" in first:
        raise ValueError(first["refused"])
    start = {"page": page, "mode": mode, "answer": first, **fixed(page)}
    script = "\n".join(_script(name) for name in ("common.mjs", f"{page}.mjs"))
    texts = {
        "style": _text("common.css"),
        "documentation": "index.html" if mode == "site" else DOCUMENTATION,
        # "</" would end the script, and "<!--" hide its end.
        "start": json.dumps(start, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        "script": script,
    }
    head = _text("head.html") + _text(f"{page}.html")
    return re.sub(r"\{\{(\w+)\}\}", lambda name: texts[name[1]], head)


def worker() -> str:
    """The script in which Pyodide answers the pages of the site."""
    return _text("worker.mjs")


def _script(name: str) -> str:
    """A module without its imports and exports: in one file, a page also opens from the file system."""
    return re.sub(r"^import .*\n|^export (?=\w)", "", _text(name), flags=re.MULTILINE)


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
