"""The explorer of formats as one page, which needs no server and no network.

exact.mjs has the rules of rounding. The table of formats is written into the page from `formats`, the modes and the
options of overflow from the codec.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS, OVERFLOWS
from halfstep.numerics.formats.table import formats

_FIELDS = ("name", "title", "exponent", "mantissa", "bias", "kind", "aliases", "hardware")


def script_of_formats() -> str:
    """exact.mjs, and ``formats``: an object of formats by name, in the order of the table."""
    rows = [{field: getattr(form, field) for field in _FIELDS} for form in formats.values()]
    return (
        f"{_text('exact.mjs')}\n"
        f"export const formats = Object.fromEntries({_literal(rows)}.map((row) => [row.name, format(row)]));\n"
        f"export const modes = {_literal(ENCODE_ROUNDINGS)};\nexport const overflows = {_literal(OVERFLOWS)};\n"
    )


def explorer_page() -> str:
    """The HTML of the explorer."""
    script = script_of_formats() + _text("explorer.mjs")
    return _text("page.html").replace("{{css}}", _text("page.css")).replace("{{script}}", script)


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/")  # "</" would end the script of the page
