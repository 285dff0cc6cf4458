"""One HTML file from its parts: a template, the style that all pages share, and a script. It needs no server."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def html(package: str, script: str) -> str:
    """page.html of `package` with the shared style and with `script`, an ES module."""
    return text(package, "page.html").replace("{{css}}", text(__package__, "page.css")).replace("{{script}}", script)


def text(package: str, name: str) -> str:
    """The file `name` of `package`."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def literal(value: Any) -> str:
    """`value` as an expression of JavaScript inside HTML."""
    # "</" would end the script of the page, and "<!--" hide its end.
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
