"""The script of the explorer of formats: exact.mjs with the table of formats, which is written from `formats`."""

from __future__ import annotations

import json
from importlib.resources import files

from halfstep.numerics.formats.table import formats

_FIELDS = ("name", "title", "exponent", "mantissa", "bias", "kind", "aliases", "hardware")


def script_of_formats() -> str:
    """exact.mjs, and ``formats``: an object of formats by name, in the order of the table."""
    rows = [{field: getattr(form, field) for field in _FIELDS} for form in formats.values()]
    # "</" would end the script of a page.
    table = json.dumps(rows, ensure_ascii=False).replace("</", "<\\/")
    module = files(__package__).joinpath("exact.mjs").read_text(encoding="utf-8")
    return f"{module}\nexport const formats = Object.fromEntries({table}.map((row) => [row.name, format(row)]));\n"
