"""The explorer of formats as one page, which needs no server and no network.

exact.mjs has the rules of rounding. The table of formats is written into the page from `formats`, the modes and the
options of overflow from the codec.
"""

from __future__ import annotations

from halfstep.cli.pages.html import html, literal, text
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS, OVERFLOWS
from halfstep.numerics.formats.table import formats

_FIELDS = ("name", "title", "exponent", "mantissa", "bias", "kind", "aliases", "hardware")


def script_of_formats() -> str:
    """exact.mjs, and ``formats``: an object of formats by name, in the order of the table."""
    rows = [{field: getattr(form, field) for field in _FIELDS} for form in formats.values()]
    return (
        f"{text(__package__, 'exact.mjs')}\n"
        f"export const formats = Object.fromEntries({literal(rows)}.map((row) => [row.name, format(row)]));\n"
        f"export const modes = {literal(ENCODE_ROUNDINGS)};\nexport const overflows = {literal(OVERFLOWS)};\n"
    )


def explorer_page() -> str:
    """The HTML of the explorer."""
    return html(__package__, script_of_formats() + text(__package__, "explorer.mjs"))
