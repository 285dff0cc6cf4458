"""``halfstep inspect PATH``: where the tensors in a checkpoint fall in a format.

Exit status: 0; 2 for a file that cannot be read and for wrong arguments.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halfstep.cli.command_line import Parser, UsageError, a_path, answer, number, picture, run, whole
from halfstep.cli.results import COLUMNS, SHARES, power, shortened
from halfstep.cli.terminal import Progress, Table, width
from halfstep.numerics.formats.exact import parse_number
from halfstep.numerics.formats.table import formats

if TYPE_CHECKING:  # imported where needed, since torch takes longer than all else
    import torch

    from halfstep.numerics.statistics.counts import Row, Statistics

BATCH = 64 << 20  # bytes counted at a time, so that the bar moves
WIDE = 140  # columns of the screen that show all columns of the table

SORTS = {
    "size": lambda row: -row.elements,
    "lost": lambda row: (-row.lost, -row.share("subnormal")),
    "zero": lambda row: -row.share("zero"),
    "error": lambda row: -(row.largest_error or 0.0),
    "name": lambda row: row.name,
    "file": lambda row: 0,
}


def _scale(text: str) -> float:
    from halfstep.numerics.statistics.counts import checked_scale

    return checked_scale("scale", float(parse_number(text)))


def _format(text: str) -> str:
    from halfstep.numerics.statistics.counts import grid_of

    try:
        grid_of(formats.element(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return formats[text].name


def _batches(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors together up to `BATCH` bytes, longer ones in pieces."""
    batch: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        for piece in tensor.reshape(-1).split(BATCH // tensor.element_size()):
            batch[name] = piece
            size += piece.nbytes
            if size >= BATCH:
                yield batch
                batch, size = {}, 0
    yield batch


def _count(options: argparse.Namespace) -> tuple[Statistics, dict[str, int], dict[str, Any], list[str]]:
    """The statistics of all tensors, how many were left out by dtype, and the files as JSON and in words."""
    from halfstep.integrations.tensor_files import TensorFileError, read_all
    from halfstep.numerics.statistics.counts import statistics

    checkpoint = read_all(options.files)
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.dtype.is_floating_point}
    dtypes = [tensor.dtype for tensor in checkpoint.tensors.values() if not tensor.dtype.is_floating_point]
    left_out = Counter(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not tensors:
        also = f", only {left_out.total()} of {', '.join(left_out)}" if left_out else ""
        names = ", ".join(map(str, options.files))
        raise TensorFileError(f"{names}: expected floating-point tensors, but got none{also}; pass a file of weights")
    total = statistics({}, options.format, options.scale)
    with Progress(sum(tensor.nbytes for tensor in tensors.values()), patience=2.0) as progress:
        for batch in _batches(tensors):
            total = total + statistics(batch, options.format, options.scale)
            done = progress.done + sum(tensor.nbytes for tensor in batch.values())
            progress.show(done, f"counting, {done / 2**30:.1f} GiB")
    return total, dict(left_out), checkpoint.as_dict(), checkpoint.lines()


# Of which there is room on a wide screen only.
ONLY_WIDE = ("dtype", "normal", "Inf", "NaN", "magnitudes", "error\np50", "largest\nerror")


def table(statistics: Statistics, rows: Sequence[Row], columns: int) -> Table:
    """The tensors and their total, with the cells that a screen of so many columns has room for."""
    chosen = {name: cell for name, cell in COLUMNS.items() if columns >= WIDE or name not in ONLY_WIDE}
    *cells, total = [[cell(row) for cell in chosen.values()] for row in (*rows, statistics.total)]
    heads = [f"{name}\n%" if name in SHARES else name for name in chosen]
    room = max(12, columns - Table(heads, [*cells, total]).width - 2)
    named = [(shortened(row.name, room), *line) for row, line in zip(rows, cells, strict=True)]
    return Table(["tensor", *heads], [*named, (), ("total", *total)], range(1, 1 + len(chosen)), ruled=True)


def _caption(statistics: Statistics) -> str:
    form = statistics.format
    scaled = f" times {power(statistics.scale)}" if statistics.scale != 1 else ""
    return (
        f"In {form.name}{scaled}: flushed up to 2^{form.emin - form.mantissa - 1}, subnormal below 2^{form.emin}, "
        f"overflow from {form.overflow:g}. Errors are relative to the number."
    )


def _inspect(options: argparse.Namespace) -> None:
    if options.advise and math.frexp(options.scale)[0] != 0.5:
        raise UsageError(f"--advise: expected --scale to be a power of two, such as 2^16, but got {options.scale:g}")
    counts, left_out, files, lines = _count(options)
    advice = None
    if options.advise:
        from halfstep.numerics.statistics.advice import advise_scale

        advice = advise_scale(counts, options.format)
    if options.out is not None:
        (counts if advice is None else advice).picture(options.out)

    def content() -> dict[str, Any]:
        advised = {} if advice is None else {"advice": advice.as_dict()}
        return {**files, "left_out": left_out, **counts.as_dict(), **advised}

    def parts() -> list[Any]:
        rows = sorted(counts, key=SORTS[options.sort])
        listed = rows[: options.limit] if options.limit else rows
        shown = [*lines, *[""] * bool(lines), table(counts, listed, width()), _caption(counts)]
        if len(listed) < len(rows):
            shown.append(f"{len(rows) - len(listed)} more tensors: --limit 0 shows all")
        if left_out:
            shown.append(f"left out: {', '.join(f'{number} of {dtype}' for dtype, number in left_out.items())}")
        shown += [] if advice is None else str(advice).splitlines()
        return shown + ([] if options.out is None else [f"picture: {options.out}"])

    answer(options, content, parts)


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "inspect",
        description="Count the values of the tensors in a checkpoint by their class in a number format: zero, flushed "
        "to zero, subnormal, normal or overflowing. Also shows rounding errors and exponents. Reads files of "
        "torch.save and safetensors, and executes nothing in them.",
        epilog="examples: halfstep inspect model.safetensors; halfstep inspect grads.pt --scale 2^16 --advise",
    )
    add = parser.add_argument
    add("files", metavar="PATH", nargs="+", type=a_path, help="a checkpoint, or all parts of one")
    add("-f", "--format", type=_format, default="fp16", metavar="FORMAT", help="fp16, bf16, e4m3fn, e5m7, ...")
    scale = number(_scale, lambda scale: True, "a number from 2^-126 to 2^126, such as 65536 or 2^16")
    add("--scale", type=scale, default=1.0, metavar="S", help="multiply by S first: a number, or a power such as 2^16")
    add("--sort", choices=SORTS, default="size", help=f"order of the tensors: {', '.join(SORTS)}", metavar="BY")
    add("--limit", type=whole(0, note=", 0 for all"), default=40, metavar="N", help="tensors in the table; 0 for all")
    add("--advise", action="store_true", help="treat the tensors as gradients and recommend a loss scale")
    add("--out", type=picture, metavar="FILE", help="draw exponents and the worst tensors to a .png, .svg or .pdf")
    return run(parser, argv, _inspect, (ImportError, TypeError, ValueError))
