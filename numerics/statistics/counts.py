"""Where the elements of tensors fall in a format: zero, flushed, subnormal, normal, overflowing, and how far rounding
moves them.

One pass over each tensor (kernels/statistics.py), counted on its device; nothing waits until a number is asked for.
All counts are exact: as if each element, times a scale that is a power of two without rounding, were rounded to the
format to nearest, ties to even. A scale that is none multiplies in fp32 first, as a training loop would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.kernels.statistics import (
    CELLS,
    CLASSES,
    ERROR_BINS,
    INFINITE,
    LOWEST,
    NOT_A_NUMBER,
    PER_OCTAVE,
    ROWS,
    ZERO,
    Grid,
    foreach_count_,
    width,
)
from halfstep.numerics.formats.table import Format, formats
from halfstep.numerics.presentation import shown
from halfstep.numerics.statistics.named_tensors import countable, named_tensors, scaled_to_odd

LEAST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126  # as GradScaler's: the inverse is finite too
QUANTILES = (0.5, 0.9, 0.99)
KINDS = ("zero", "flushed", "subnormal", "normal", "overflow", "infinite", "nan")


def grid_of(format: Format) -> Grid:
    """The format as counting knows it.

    Raises:
        ValueError: it is no floating-point format with mantissa bits, or reaches beyond fp32's range.
    """
    if format.kind in ("scale", "integer") or not 1 <= format.mantissa <= 23:
        raise ValueError(
            "Expected format to be a floating-point format with 1 to 23 mantissa bits, such as 'fp16' or 'e4m3fn', "
            f"but got {format.name!r}"
        )
    if format.emin - format.mantissa < -149 or format.emax > 127:
        raise ValueError(
            f"Expected format to be within fp32's range, 2^-149 to 2^127, but got {format.name!r}, with numbers from "
            f"2^{format.emin - format.mantissa} to 2^{format.emax}"
        )
    # In units of fp32's last place at 2^emax. Half a step beyond the largest number overflows itself if that number's
    # code is odd, since the tie then goes to the next one.
    threshold = math.ldexp(format.overflow, 23 - format.emax) - (1 << 23)
    overflow = math.ceil(threshold) + (format.largest_code % 2 == 0 and threshold == math.floor(threshold))
    return Grid(23 - format.mantissa, format.emin, format.emax, min(overflow, 1 << 23))


def checked_scale(name: str, scale: Any) -> float:
    """`scale` as the fp32 number it stands for."""
    if isinstance(scale, bool) or not isinstance(scale, Real) or not LEAST_SCALE <= float(scale) <= LARGEST_SCALE:
        raise ValueError(f"Expected {name} to be a number from 2^-126 to 2^126, or a tensor of one, but got {scale!r}")
    return float(np.float32(float(scale)))


# ------------------------------------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class Row:
    """What was counted of one tensor, or of all.

    Attributes:
        name, dtype: of the tensor.
        format, scale: what it was counted for.
        cells: int64 (exponents and specials, classes); see kernels/statistics.py.
        errors: int64, the histogram of relative rounding errors; None if they were not counted.
        largest_error: the largest of them, to fp32; None likewise.
    """

    name: str
    dtype: str
    format: Format
    scale: float
    cells: np.ndarray = field(repr=False)
    errors: np.ndarray | None = field(repr=False)
    largest_error: float | None

    @property
    def elements(self) -> int:
        """How many there are; of a sharded tensor those of this rank, of a sparse one those stored."""
        return int(self.cells.sum())

    @property
    def zero(self) -> int:
        """Exactly zero before any scaling and rounding."""
        return int(self.cells[ZERO].sum())

    @property
    def infinite(self) -> int:
        return int(self.cells[INFINITE].sum())

    @property
    def nan(self) -> int:
        return int(self.cells[NOT_A_NUMBER].sum())

    @property
    def flushed(self) -> int:
        """Not zero, and rounded to zero: at most half the smallest number of the format."""
        tie = self.format.emin - self.format.mantissa - 1 - LOWEST
        return int(self.cells[:tie].sum() + self.cells[tie, 0])

    @property
    def subnormal(self) -> int:
        """Not flushed, and below the smallest normal number, where the grid is coarser than the format's precision."""
        return int(self.cells[: self.format.emin - LOWEST].sum()) - self.flushed

    @property
    def overflow(self) -> int:
        """Finite, and rounded beyond the largest number: to infinity, or what the format has in its place."""
        top = self.format.emax - LOWEST
        return int(self.cells[top, 2] + self.cells[top + 1 : ZERO].sum())

    @property
    def normal(self) -> int:
        return int(self.cells[:ZERO].sum()) - self.flushed - self.subnormal - self.overflow

    def share(self, kind: str) -> float:
        """The share of elements of a kind, one of `KINDS`, from 0 to 1; 0 of a tensor without elements.

        Raises:
            ValueError: there is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"Expected kind to be one of {', '.join(map(repr, KINDS))}, but got {kind!r}")
        count: int = getattr(self, kind)
        return count / self.elements if self.elements else 0.0

    @property
    def lost(self) -> float:
        """The share of the numbers that are neither zero, infinite nor NaN that are flushed or overflow."""
        numbers = int(self.cells[:ZERO].sum())
        return (self.flushed + self.overflow) / numbers if numbers else 0.0

    @property
    def exponents(self) -> dict[int, int]:
        """How many numbers y have the exponent e, 2^e <= |y| < 2^(e + 1), scale included.

        -151 stands for all exponents below -150, 128 for all above 127.
        """
        counts = self.cells[:ZERO].sum(1)
        return {int(place) + LOWEST: int(counts[place]) for place in np.flatnonzero(counts)}

    def error_quantile(self, q: float) -> tuple[float, float]:
        """Bounds of the q-quantile of the relative rounding error |y - round(y)| / |y|.

        Over the numbers that neither are zero nor overflow; the flushed ones have an error of 1. The quantile is the
        least error that a share of at least `q` of them does not exceed. It is known by its bin, of which there are
        eight per octave.

        Returns:
            ``(low, high)``: low <= quantile < high, or the quantile itself, twice, where it is 0 or 1. NaN without
            numbers.

        Raises:
            ValueError: `q` is not from 0 to 1, or errors were not counted.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"Expected q to be a number from 0 to 1, but got {q!r}")
        if self.errors is None:
            raise ValueError("errors were not counted; count them with halfstep.statistics(..., errors=True)")
        numbers = int(self.errors.sum())
        if numbers == 0:
            return math.nan, math.nan
        rank = max(1, math.ceil(q * numbers))
        place = int(np.searchsorted(np.cumsum(self.errors), rank))
        if place in (0, ERROR_BINS - 1):
            return (0.0, 0.0) if place == 0 else (1.0, 1.0)
        return _edge(place), _edge(place + 1)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: counts, exponents, and the quantiles' bounds."""
        made: dict[str, Any] = {"name": self.name, "dtype": self.dtype, "elements": self.elements}
        made |= {kind: getattr(self, kind) for kind in KINDS}
        made["exponents"] = {str(exponent): count for exponent, count in self.exponents.items()}
        if self.errors is not None:
            bounds = {str(q): self.error_quantile(q) for q in QUANTILES}
            made["error_quantiles"] = {q: None if math.isnan(low) else [low, high] for q, (low, high) in bounds.items()}
            made["largest_error"] = self.largest_error
        return made


def _edge(place: int) -> float:
    """The lower end of a bin of the error histogram."""
    octave, part = divmod(place - 1, PER_OCTAVE)
    return math.ldexp(1 + part / PER_OCTAVE, octave - 24)


class Statistics(Sequence[Row]):
    """Where tensors fall in a format. Made by `statistics`; reading anything but names waits for the device, once.

    A sequence of one `Row` per tensor, in the order given; ``found["name"]`` is a tensor's row, `total` that of all.

    Attributes:
        names: of the tensors.
        format: the format.
    """

    def __init__(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        format: Format,
        scale: float | torch.Tensor,
        counted: Sequence[tuple[torch.Tensor, Sequence[int]]],
    ) -> None:
        self.names, self.format = tuple(names), format
        self._dtypes = tuple(dtypes)
        self._scale = scale
        self._counted = list(counted)
        self._counts: np.ndarray | None = None

    # ------------------------------------------------------------------------------------------------------- reading

    def read(self) -> Statistics:
        """Wait for the device and fetch the counts, if that was not done. Returns itself."""
        if self._counts is None:
            columns = self._counted[0][0].shape[1] if self._counted else width(True)
            counts = np.zeros((len(self.names), columns), dtype=np.int64)
            for table, places in self._counted:
                counts[list(places)] = table.cpu().numpy()
            if isinstance(self._scale, torch.Tensor):
                self._scale = checked_scale("scale", float(self._scale))
            self._counts, self._counted = counts, []
        return self

    @property
    def counts(self) -> np.ndarray:
        """int64 (tensors, columns): all there is, as kernels/statistics.py has it."""
        self.read()
        assert self._counts is not None
        return self._counts

    @property
    def scale(self) -> float:
        self.read()
        assert isinstance(self._scale, float)
        return self._scale

    def _row(self, name: str, dtype: str, counts: np.ndarray) -> Row:
        errors = largest = None
        if counts.size > CELLS:
            errors = counts[CELLS : CELLS + ERROR_BINS]
            largest = float(np.int32(counts[-1]).view(np.float32))
        return Row(name, dtype, self.format, self.scale, counts[:CELLS].reshape(ROWS, CLASSES), errors, largest)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return [self[index] for index in range(len(self))[key]]
        if isinstance(key, str):
            if key not in self.names:
                raise KeyError(f"no tensor is called {key!r}; the names are in .names")
            key = self.names.index(key)
        return self._row(self.names[key], self._dtypes[key], self.counts[key])

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    @property
    def total(self) -> Row:
        """All tensors together."""
        counts = self.counts
        together = counts.sum(0)
        if counts.shape[1] > CELLS:
            together[-1] = counts[:, -1].max(initial=0)
        return self._row("total", "", together)

    # ------------------------------------------------------------------------------------------------------ combining

    def at(self, scale: float) -> Statistics:
        """What would have been counted at another scale, without errors, from the same counts.

        Exact for all numbers that this scale left within fp32's range, which are all if it is 1 and none was fp64.

        Raises:
            ValueError: `scale` is out of range or is not this one times a power of two.
        """
        fraction, exponent = math.frexp(checked_scale("scale", scale) / self.scale)
        if fraction != 0.5:
            raise ValueError(
                f"Expected scale to be {self.scale} times a power of two, but got {scale!r}: count again for other "
                "scales"
            )
        shift = exponent - 1
        cells = self.counts[:, :CELLS].reshape(len(self), ROWS, CLASSES)
        moved = np.zeros_like(cells)
        moved[:, ZERO:] = cells[:, ZERO:]
        where = (np.arange(ZERO) + shift).clip(0, ZERO - 1)
        # What has left the range does not come back.
        where[0], where[-1] = 0, ZERO - 1
        for place, new in enumerate(where):
            moved[:, new] += cells[:, place]
        return self._with(moved.reshape(len(self), CELLS), float(np.float32(scale)))

    def relabelled(self, scale: float) -> Statistics:
        """The same counts as those of other elements at another scale: of gradients that were scaled when counted."""
        return self._with(self.counts, scale)

    def _with(self, counts: np.ndarray, scale: float) -> Statistics:
        made = Statistics(self.names, self._dtypes, self.format, scale, [])
        made._counts = counts
        return made

    def __add__(self, other: Statistics) -> Statistics:
        """Of the same tensors counted elsewhere or at another time: what was counted of both, by name.

        Raises:
            ValueError: formats, scales or what was counted differ.
        """
        if (self.format, self.scale, self.counts.shape[1:]) != (other.format, other.scale, other.counts.shape[1:]):
            raise ValueError(
                f"Expected statistics of the same format, scale and choice of errors, {self.format.name} at "
                f"{self.scale}, but got {other.format.name} at {other.scale}"
            )
        dtypes = {
            **dict(zip(other.names, other._dtypes, strict=True)),
            **dict(zip(self.names, self._dtypes, strict=True)),
        }
        names = [*self.names, *(name for name in other.names if name not in self.names)]
        counts = np.zeros((len(names), self.counts.shape[1]), dtype=np.int64)
        for part in (self, other):
            rows = [names.index(name) for name in part.names]
            most = np.maximum(counts[rows, -1], part.counts[:, -1])
            counts[rows] += part.counts
            if counts.shape[1] > CELLS:
                counts[rows, -1] = most
        made = Statistics(names, [dtypes[name] for name in names], self.format, self.scale, [])
        made._counts = counts
        return made

    # -------------------------------------------------------------------------------------------------------- showing

    def worst(self, limit: int | None = None) -> list[Row]:
        """The tensors that lose most to flushing and overflow first, then those with most subnormals."""
        found = sorted(self, key=lambda row: (-row.lost, -row.share("subnormal")))
        return found if limit is None else found[:limit]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": self.format.name,
            "scale": self.scale,
            "total": self.total.as_dict(),
            "tensors": [row.as_dict() for row in self],
        }

    def table(self, limit: int | None = None) -> str:
        """A table of at most 80 columns: the worst tensors first, the total last; shares in %.

        Args:
            limit: how many tensors; None: all.
        """
        text: str = shown("statistics_table", self, limit)
        return text

    def __str__(self) -> str:
        return self.table(limit=20)

    def __repr__(self) -> str:
        # Without waiting for the device, as a debugger may ask at any time.
        return f"<Statistics of {len(self)} tensors in {self.format.name}>"

    def picture(self, path: str | Path) -> None:
        """Draw exponents under the format's range, and bars of the worst tensors, into a file (PNG, SVG or PDF).

        Raises:
            ImportError: matplotlib is missing.
        """
        shown("statistics_picture", self, path)


# -------------------------------------------------------------------------------------------------------------- public


def statistics(
    tensors: Any,
    format: Any = "fp16",
    scale: float | torch.Tensor = 1.0,
    *,
    of: str = "parameters",
    errors: bool = True,
) -> Statistics:
    """Count where the elements of tensors, times `scale`, fall in a format, in one pass and one launch per dtype.

    Args:
        tensors: a tensor, a dict of tensors (nested ones get dotted names), a list of tensors or of (name, tensor)
            pairs, or a module. fp64, fp32, fp16, bf16 and FP8, on any devices, of any strides. fp64 and FP8 are copied
            to fp32 first; for fp64 the counts are still exact, and the errors are accurate to 2^-23. For a DTensor,
            this rank's shard is counted; for a sparse tensor, its stored values.
        format: a name or dtype that `halfstep.formats` knows, with at least one mantissa bit and within fp32's range.
        scale: the factor to multiply by: a number from 2^-126 to 2^126, or a one-element tensor, such as the scale of a
            loss scaler.
        of: ``"parameters"`` counts the tensors themselves, ``"gradients"`` the ``.grad`` of those that have one.
        errors: whether to count relative rounding errors too, which takes about twice as long.

    Returns:
        `Statistics`. The call does not wait for the device; reading the result does.

    Raises:
        TypeError: an element is not a tensor of these dtypes.
        ValueError: `format`, `scale` or `of` is out of range, or a name occurs twice.
        halfstep.numerics.formats.table.UnknownFormat: `format` is unknown.

    Examples:
        >>> weights = {"w": torch.tensor([0.0, 1e-9, 1e-6, 1.0, 1e6])}
        >>> found = halfstep.statistics(weights, "fp16")
        >>> found["w"].flushed, found["w"].subnormal, found.total.overflow
        (1, 1, 1)
        >>> found.total.share("flushed")
        0.2
    """
    chosen = formats[format]
    grid = grid_of(chosen)
    named = named_tensors(tensors, of=of)
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1:
            raise ValueError(f"Expected scale to be one number, but got shape {tuple(scale.shape)}")
        factor: float | torch.Tensor = scale.detach().reshape(()).float().clone()
    else:
        factor = checked_scale("scale", scale)
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for place, (name, tensor) in enumerate(named.items()):
        values = countable(name, tensor, chosen)
        by_device.setdefault(values.device, []).append((place, values))
    counted = []
    for device, placed in by_device.items():
        counts = torch.zeros(len(placed), width(errors), dtype=torch.int64, device=device)
        there: torch.Tensor | None = None
        if isinstance(factor, torch.Tensor):
            there = factor.to(device, non_blocking=True)
        elif factor != 1:
            there = torch.full((), factor, dtype=torch.float32, device=device)
        for double in (False, True):  # fp64 is scaled before it becomes fp32
            rows = [row for row, (_, values) in enumerate(placed) if (values.dtype == torch.float64) is double]
            listed = [placed[row][1] for row in rows]
            if double:
                listed = [scaled_to_odd(values, 1.0 if there is None else there.double()) for values in listed]
            foreach_count_(listed, counts, grid, scale=None if double else there, rows=rows)
        counted.append((counts, [place for place, _ in placed]))
    if not counted:
        counted = [(torch.zeros(0, width(errors), dtype=torch.int64, device="cpu"), [])]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in named.values()]
    return Statistics(list(named), dtypes, chosen, factor, counted)
