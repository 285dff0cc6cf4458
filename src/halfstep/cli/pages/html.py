"""A page as one HTML file, from its template, the style and the scripts that all pages share, and its first answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files

from halfstep.cli.pages.answers import EXAMPLES, FIXED, answer

DOCUMENTATION = "https://github.com/halfstep/halfstep/tree/main/docs"  # to which pages outside of the site link
MODES = ("local", "site", "file")  # who answers: the local server, Pyodide, nobody


def html(page: str, mode: str, state: Mapping[str, str] | None = None) -> str:
    """The page ``"explorer"`` or ``"planner"`` in one of `MODES` with the answer to `state`, by default its example."""
    first = answer({"page": page, "state": dict(EXAMPLES[page] if state is None else state)})
    if "refused" in first:
        raise ValueError(first["refused"])
    start = {"page": page, "mode": mode, "answer": first, **(FIXED if page == "explorer" else {})}
    # Without imports and exports: in one file, a page also opens from the file system.
    modules = "\n".join(map(asset, ("common.mjs", f"{page}.mjs")))
    script = re.sub(r"^import .*\n|^export (?=\w)", "", modules, flags=re.MULTILINE)
    texts = {
        "style": asset("common.css"),
        "documentation": "index.html" if mode == "site" else DOCUMENTATION,
        # "</" would end the script, and "<!--" hide its end.
        "start": json.dumps(start, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: texts[name[1]], asset("head.html") + asset(f"{page}.html"))


def asset(name: str) -> str:
    """A file of this folder, such as ``"worker.mjs"``."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
