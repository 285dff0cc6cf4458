"""The texts of results: statistics of tensors, advice on a loss scale, overflows; and the functions that draw them.

`numerics.messages.shown` calls these by name: ``str(result)``, ``result.table()`` and ``result.picture(path)``. Plain
text, at most 80 columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.cli.terminal import UNBROKEN, Table, rendered
from halfstep.numerics.formats.table import formats
from halfstep.numerics.messages import count, percent

if TYPE_CHECKING:  # `halfstep inspect` does not import torch for its texts
    from halfstep.numerics.scaling.overflow import OverflowReport
    from halfstep.numerics.statistics.advice import ScaleAdvice
    from halfstep.numerics.statistics.counts import Row, Statistics


def shortened(name: str, room: int) -> str:
    """A dotted name shortened to fit: parts are replaced by their first letters, from the left, as far as necessary.

    ``"encoder.layers.0.self_attn.in_proj_weight"`` becomes ``"e.l.0.s.in_proj_weight"``. If that is still too long, the
    middle is omitted.
    """
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= room:
            break
        parts[index] = part if part.isdigit() else part[:1]
    short = ".".join(parts)
    if len(short) <= room:
        return short
    front = (room - 1) // 2
    return f"{short[:front]}…{short[len(short) - (room - 1 - front) :]}"


def power(scale: float) -> str:
    """A power of two as ``"2^16"``; other numbers unchanged."""
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{scale:g}"


def _magnitudes(row: Row) -> str:
    """From the smallest exponent to the largest, without the scale."""
    exponents, shift = list(row.exponents), math.log2(row.scale)
    ends = (f"2^{exponent - shift:.0f}" for exponent in (exponents[:1] + exponents[-1:]))
    return "..".join(dict.fromkeys(ends)) or "-"


def _error(row: Row, q: float) -> str:
    low, high = (math.nan, math.nan) if row.errors is None else row.error_quantile(q)
    return "-" if math.isnan(low) else f"{high:.2g}"


# The columns of tables of tensors, after the name.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "dtype": lambda row: formats[row.dtype].name if row.dtype else "",
    "size": lambda row: count(row.elements),
    "zero": lambda row: percent(row.share("zero")),
    "flushed": lambda row: percent(row.share("flushed")),
    "subn.": lambda row: percent(row.share("subnormal")),
    "normal": lambda row: percent(row.share("normal")),
    "overfl.": lambda row: percent(row.share("overflow")),
    "Inf": lambda row: count(row.infinite),
    "NaN": lambda row: count(row.nan),
    "magnitudes": _magnitudes,
    "error\np50": lambda row: _error(row, 0.5),
    "error\np99": lambda row: _error(row, 0.99),
    "largest\nerror": lambda row: "-" if row.largest_error is None else f"{row.largest_error:.2g}",
}
SHARES = ("zero", "flushed", "subn.", "normal", "overfl.")


def statistics_table(statistics: Statistics, limit: int | None) -> str:
    rows, total = statistics.worst(limit), statistics.total
    heads = {"size": "size", **{name: name for name in SHARES}, "error\np99": "err p99"}
    if total.errors is None:
        del heads["error\np99"]
    lines = [[shortened(row.name, 23), *(COLUMNS[name](row) for name in heads)] for row in (*rows, total)]
    text = rendered([Table(["tensor", *heads.values()], lines, range(1, len(heads) + 1))], UNBROKEN)
    if len(rows) < len(statistics):
        text.insert(-1, f"... and {len(statistics) - len(rows)} more that lose no more")
    if total.infinite or total.nan:
        text.append(f"and {total.infinite:,} infinite, {total.nan:,} NaN before rounding")
    return "\n".join([f"{statistics.format.name} at scale {statistics.scale:g}, shares in %", *text])


def picture(statistics: Statistics, advice: ScaleAdvice | None, path: str | Path) -> None:
    from halfstep.cli import figures, results_picture

    figures.save(results_picture.figure_of(statistics, advice), path)


_VERDICTS = {
    "unscaled": "{name} suffices without loss scaling",
    "scaled": "{name} suffices with loss scaling",
    "bf16": "{name} is too narrow for these gradients, bf16 is not: use bf16, with fp32 masters or stochastic rounding",
    "neither": "neither {name} nor bf16 holds these gradients",
}


def advice_text(advice: ScaleAdvice) -> str:
    name, acceptable, best = advice.format.name, percent(advice.share), power(advice.scale)
    lines = [f"{name}: no scale is good enough; {best} loses least"]
    if advice.interval:
        low, high = power(advice.low), power(advice.high)
        scales = f"at {low}" if advice.low == advice.high else f"from {low} to {high}"
        lines = [f"{name}: scale {best}; {scales} nothing overflows and no more than"]
        lines.append(f"  {acceptable} % of any gradient is flushed to zero")
    if advice.below:
        lost = f"{percent(advice.below.share)} % of {advice.below.name} flushed"
        lines.append(f"  at {power(advice.below.scale)}: {lost}")
    if advice.above:
        lines.append(f"  at {power(advice.above.scale)}: {advice.above.name} overflows")
    subnormal, headroom = advice.statistics.total.share("subnormal"), math.log2(advice.high / advice.scale)
    kept = f"{percent(subnormal)} % subnormal, {headroom:.0f} bits of headroom"
    lines.append(f"  at {best}: {percent(advice.lost)} % flushed, {kept}")
    lines.append(_VERDICTS[advice.verdict].format(name=name))
    return "\n".join([*lines, *advice.notes])


def overflow_text(report: OverflowReport) -> str:
    head = f"{report.skipped} of {report.steps} steps skipped"
    if not report.parameters:
        return head
    lines, width = [f"{head}, the last one step {report.last_skipped}"], max(len(row.name) for row in report.parameters)
    for row in report.parameters:
        steps = (("Inf", row.inf_steps), ("NaN", row.nan_steps))
        kinds = ", ".join(f"{name} {number}" for name, number in steps if number)
        lines.append(f"  {row.name:{width}}  {kinds:10}  first at step {row.first_step}, last at {row.last_step}")
    return "\n".join(lines)
