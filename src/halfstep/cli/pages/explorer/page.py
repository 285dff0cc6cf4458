"""The explorer of formats as one page, which needs no server and no network.

exact.mjs has the rules of rounding, parsing.mjs reads numbers and names of formats, texts.mjs writes numbers,
reasons.mjs says why a number becomes what it becomes, comparison.mjs compares two formats, and explorer.mjs shows all
of it. The table of formats is written into the page from `formats`, the modes and options from the codec.
"""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.cli.pages.html import html, literal, text
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS, NANS, OVERFLOWS
from halfstep.numerics.formats.table import AMBIGUOUS, FORMAT_KINDS, formats

_FIELDS = ("name", "title", "exponent", "mantissa", "bias", "kind", "aliases", "hardware", "container")
_SCRIPTS = ("exact.mjs", "parsing.mjs", "texts.mjs", "reasons.mjs", "comparison.mjs")


def script_of_formats() -> str:
    """The scripts but for the one that shows, and ``formats``: an object of formats by name, in the table's order."""
    rows = [{field: getattr(form, field) for field in _FIELDS} for form in formats.values()]
    constants = {
        "kinds": FORMAT_KINDS,
        "ambiguous": AMBIGUOUS,
        "roundingModes": ENCODE_ROUNDINGS,
        "overflowChoices": OVERFLOWS,
        "nanChoices": NANS,
    }
    return "\n".join(
        [
            *(text(__package__, name) for name in _SCRIPTS),
            f"const formats = Object.fromEntries({literal(rows)}.map((row) => [row.name, format(row)]));",
            *(f"const {name} = {literal(value)};" for name, value in constants.items()),
        ]
    )


def explorer_page(start: Mapping[str, str] | None = None) -> str:
    """The HTML of the explorer.

    Args:
        start: what it shows first, unless its address says otherwise. The keys are those of its address: ``x``, the
            number; ``f`` and ``g``, the formats; ``r``, the rounding; ``o`` and ``n``, what overflow and NaN become.
    """
    script = f"{script_of_formats()}\nconst start = {literal(dict(start or {}))};\n{text(__package__, 'explorer.mjs')}"
    return html(__package__, script).replace("{{style}}", text(__package__, "explorer.css"))
