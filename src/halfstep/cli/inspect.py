"""``halfstep inspect FILE``: where the tensors in a checkpoint fall in a format.

Reads files of torch.save (state dicts, nested or not) and safetensors; maps them into memory and executes nothing.
Prints a table, ``--json`` everything there is, ``--out`` draws a picture; ``--advise`` takes the tensors for gradients
and advises a loss scale.

Exit status: 0; 2 for a file that cannot be read and for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from halfstep.cli.command_line import Parser, a_path, picture, run
from halfstep.cli.numbers import number, whole
from halfstep.cli.results import count, power, shortened
from halfstep.cli.terminal import Progress, Table, show, width
from halfstep.integrations.tensor_files import TensorFileError, read_tensors
from halfstep.numerics.formats.table import UnknownFormat, formats
from halfstep.numerics.messages import percent
from halfstep.numerics.statistics.advice import advise_scale
from halfstep.numerics.statistics.counts import Row, Statistics, checked_scale, grid_of, statistics
from halfstep.numerics.statistics.named_tensors import named_tensors

PATIENCE = 2.0  # seconds before progress is shown
BATCH = 64 << 20  # bytes of tensors counted at a time, so that the bar moves
WIDE = 140  # columns of the screen that show all columns of the table

SORTS = {
    "size": lambda row: -row.elements,
    "lost": lambda row: (-row.lost, -row.share("subnormal")),
    "zero": lambda row: -row.share("zero"),
    "error": lambda row: -(row.largest_error or 0.0),
    "name": lambda row: row.name,
    "file": lambda row: 0,
}


def _power_or_number(text: str) -> float:
    found = re.fullmatch(r"2\^([+-]?\d{1,3})", text.strip())
    return checked_scale("scale", math.ldexp(1.0, int(found[1])) if found else float(text))


_SCALE = number(_power_or_number, lambda scale: True, "a number from 2^-126 to 2^126, such as 65536 or 2^16")


def _format(text: str) -> str:
    try:
        grid_of(formats[text])
    except (UnknownFormat, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return formats[text].name


def _parser() -> Parser:
    parser = Parser(
        "inspect",
        description="Count the values of the tensors in a checkpoint by their class in a number format: zero, flushed "
        "to zero, subnormal, normal or overflowing. Also shows rounding errors and exponents. Reads files of "
        "torch.save and safetensors, and executes nothing in them.",
        epilog="examples: halfstep inspect model.safetensors    halfstep inspect grads.pt --scale 2^16 --advise",
    )
    add = parser.add_argument
    add("files", metavar="FILE", nargs="+", type=a_path, help="a checkpoint, or all parts of one")
    add("--format", type=_format, default="fp16", metavar="NAME", help="fp16, bf16, e4m3fn, e5m7, ...")
    add("--scale", type=_SCALE, default=1.0, metavar="S", help="multiply by S first: a number, or a power as 2^16")
    add("--sort", choices=SORTS, default="size", help=f"order of the tensors: {', '.join(SORTS)}", metavar="BY")
    add("--limit", type=whole(0, note=", 0 for all"), default=40, metavar="N", help="tensors in the table; 0 for all")
    add("--advise", action="store_true", help="treat the tensors as gradients and recommend a loss scale")
    add("--json", action="store_true", help="print everything as JSON")
    add("--out", type=picture, metavar="PICTURE", help="draw exponents and the worst tensors: .png, .svg or .pdf")
    return parser


# ----------------------------------------------------------------------------------------------------------- counting


def _read(files: Sequence[Path]) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The tensors that can be counted, and how many were left out by dtype."""
    found: dict[str, torch.Tensor] = {}
    left_out: dict[str, int] = {}
    for file in files:
        for name, tensor in read_tensors(file).items():
            if not tensor.dtype.is_floating_point:
                dtype = str(tensor.dtype).removeprefix("torch.")
                left_out[dtype] = left_out.get(dtype, 0) + 1
            elif name in found:
                raise TensorFileError(
                    f"{file} has a tensor {name!r}, and so has a file before it; inspect them one by one"
                )
            else:
                found[name] = tensor
    if not found:
        also = f", only {sum(left_out.values())} of {', '.join(left_out)}" if left_out else ""
        raise TensorFileError(f"{', '.join(map(str, files))}: expected floating-point tensors, but got none{also}")
    return found, left_out


def _count(tensors: dict[str, torch.Tensor], format: str, scale: float) -> Statistics:
    """Statistics of all tensors, with a progress bar on a terminal if counting takes long."""
    found: Statistics | None = None
    batch: dict[str, torch.Tensor] = {}
    with Progress(sum(tensor.nbytes for tensor in tensors.values()), PATIENCE) as progress:
        for number, (name, tensor) in enumerate(tensors.items(), 1):
            batch[name] = tensor
            size = sum(one.nbytes for one in batch.values())
            if size >= BATCH or number == len(tensors):
                part = statistics(batch, format, scale).read()
                found = part if found is None else found + part
                progress.show(progress.done + size, f"counting, {(progress.done + size) / 2**30:.1f} GiB")
                batch = {}
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------------------ showing


def _magnitudes(row: Row) -> str:
    """From the smallest exponent to the largest, without the scale."""
    exponents = list(row.exponents)
    shift = math.log2(row.scale)
    if not exponents:
        return "-"
    low, high = (f"{exponent - shift:.0f}" for exponent in (exponents[0], exponents[-1]))
    return f"2^{low}..2^{high}" if low != high else f"2^{low}"


def _error(row: Row, q: float) -> str:
    low, high = row.error_quantile(q)
    return "-" if math.isnan(low) else f"{high:.2g}"


def _share(kind: str) -> Callable[[Row], str]:
    return lambda row: percent(row.share(kind))


# The columns after the name, and of which there is room on a wide screen only.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "dtype": lambda row: formats[row.dtype].name if row.dtype else "",
    "size": lambda row: count(row.elements),
    "zero\n%": _share("zero"),
    "flushed\n%": _share("flushed"),
    "subn.\n%": _share("subnormal"),
    "normal\n%": _share("normal"),
    "overfl.\n%": _share("overflow"),
    "Inf": lambda row: count(row.infinite),
    "NaN": lambda row: count(row.nan),
    "magnitudes": _magnitudes,
    "error\np50": lambda row: _error(row, 0.5),
    "error\np99": lambda row: _error(row, 0.99),
    "largest\nerror": lambda row: "-" if row.largest_error is None else f"{row.largest_error:.2g}",
}
ONLY_WIDE = ("dtype", "normal\n%", "Inf", "NaN", "magnitudes", "error\np50", "largest\nerror")


def table(found: Statistics, rows: Sequence[Row], columns: int) -> Table:
    """The tensors and their total, with the cells that a screen of so many columns has room for."""
    chosen = {name: cell for name, cell in COLUMNS.items() if columns >= WIDE or name not in ONLY_WIDE}
    *cells, total = [[cell(row) for cell in chosen.values()] for row in (*rows, found.total)]
    room = max(12, columns - Table([*chosen], [*cells, total]).width - 2)
    named = [(shortened(row.name, room), *line) for row, line in zip(rows, cells, strict=True)]
    return Table(["tensor", *chosen], [*named, (), ("total", *total)], range(1, 1 + len(chosen)), ruled=True)


def _caption(found: Statistics) -> str:
    form = found.format
    scaled = f" times {power(found.scale)}" if found.scale != 1 else ""
    return (
        f"In {form.name}{scaled}: flushed up to 2^{form.emin - form.mantissa - 1}, subnormal below 2^{form.emin}, "
        f"overflow from {form.overflow:g}. Errors are relative to the number."
    )


def _inspect(options: argparse.Namespace) -> int:
    tensors, left_out = _read(options.files)
    found = _count(named_tensors(tensors), options.format, options.scale)
    power_of_two = math.frexp(found.scale)[0] == 0.5
    if options.advise and not power_of_two:
        raise TensorFileError(
            f"--advise: expected --scale to be a power of two, such as 2^16, but got {options.scale:g}"
        )
    advice = advise_scale(found, options.format) if options.advise else None
    if options.out is not None:
        (found if advice is None else advice).picture(options.out)
    if options.json:
        content: dict[str, Any] = {
            "files": [str(file) for file in options.files],
            "left_out": left_out,
            **found.as_dict(),
        }
        content |= {} if advice is None else {"advice": advice.as_dict()}
        print(json.dumps(content, indent=1, allow_nan=False))
        return 0
    rows = sorted(found, key=SORTS[options.sort])
    listed = rows[: options.limit] if options.limit else rows
    parts: list[Any] = [table(found, listed, width()), _caption(found)]
    if len(listed) < len(rows):
        parts.append(f"{len(rows) - len(listed)} more tensors: --limit 0 shows all")
    if left_out:
        parts.append(f"left out: {', '.join(f'{number} of {dtype}' for dtype, number in left_out.items())}")
    parts += [] if advice is None else str(advice).splitlines()
    parts += [] if options.out is None else [f"picture: {options.out}"]
    show(*parts)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep inspect`` with these arguments and return its exit status (see ``halfstep.__main__``)."""
    return run(_parser(), argv, _inspect, (ImportError, TypeError, ValueError))
