"""One HTML file from its parts: a template, the style that all pages share, and a script. It needs no server."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from importlib.resources import files
from pathlib import Path
from typing import Any

DOCUMENTATION = "https://github.com/halfstep/halfstep/tree/main/docs"  # to which the pages link


def html(package: str, script: str) -> str:
    """page.html of `package` with the head that all pages share and with `script`, an ES module."""
    head = text(__package__, "head.html").replace("{{css}}", text(__package__, "page.css"))
    page = text(package, "page.html").replace("{{head}}", head).replace("{{documentation}}", DOCUMENTATION)
    return page.replace("{{script}}", script)


def text(package: str, name: str) -> str:
    """The file `name` of `package`."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def literal(value: Any) -> str:
    """`value` as an expression of JavaScript inside HTML."""
    # "</" would end the script of the page, and "<!--" hide its end.
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def write(path: Path, page: str, opens: bool) -> str:
    """Write a page, and open it if `opens`. Returns what happened, with the address of the page."""
    path.write_text(page, encoding="utf-8")
    address = path.resolve().as_uri()
    if not opens:
        return f"wrote {path}: open {address} in a browser"
    if _has_screen() and webbrowser.open(address):
        return f"wrote {path}, opened in the browser: {address}"
    return f"wrote {path}; no browser was found here: open {address} in one"


def _has_screen() -> bool:
    """Whether a browser could show a page: without a screen, Linux would start one in the terminal, without scripts."""
    if not sys.platform.startswith("linux"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
