"""Count where the elements of tensors fall in a format: zero, flushed, subnormal, normal or overflowing, and how large
their relative rounding errors are.

Each tensor is read once, on its device (kernels/statistics.py), and the host only waits when a result is read. All
counts are exact. If the scale is a power of two, they are those of the exact product, rounded to the format to nearest,
ties to even. Any other scale is multiplied in fp32 first, as in a training loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfstep.kernels.cells import CELLS, CLASSES, ERROR_BINS, LOWEST, PER_OCTAVE, ROWS, ZERO, Grid, width
from halfstep.numerics.formats.table import Format, formats
from halfstep.numerics.messages import shown

if TYPE_CHECKING:  # torch takes longer to import than many a checkpoint to count
    import torch

LEAST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126  # as for GradScaler, so that 1 / scale is finite too
QUANTILES = (0.5, 0.9, 0.99)
KINDS = ("zero", "flushed", "subnormal", "normal", "overflow", "infinite", "nan")


def grid_of(format: Format) -> Grid:
    """The parameters of a format for the kernel that counts. Raises a ValueError for a format that it cannot count."""
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
    # In units of the last place of an fp32 number with exponent emax. The tie half a step above the largest number
    # overflows if the code of that number is odd, since it rounds to the next code, which is even.
    threshold = math.ldexp(format.overflow, 23 - format.emax) - (1 << 23)
    overflow = math.ceil(threshold) + (format.largest_code % 2 == 0 and threshold == math.floor(threshold))
    return Grid(23 - format.mantissa, format.emin, format.emax, min(overflow, 1 << 23))


def checked_scale(name: str, scale: Any) -> float:
    """A scale, rounded to fp32. Raises a ValueError unless it is a number from 2^-126 to 2^126."""
    if isinstance(scale, bool) or not isinstance(scale, Real) or not LEAST_SCALE <= float(scale) <= LARGEST_SCALE:
        raise ValueError(f"Expected {name} to be a number from 2^-126 to 2^126, or a tensor of one, but got {scale!r}")
    return float(np.float32(float(scale)))


# ------------------------------------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class Row:
    """The counts of one tensor, or of all tensors together. Each element is of exactly one of the `KINDS`."""

    name: str  # "total" for all tensors together
    dtype: str  # such as "float32"; "" for all tensors together
    format: Format  # for which the elements were counted
    scale: float  # by which the elements were multiplied
    # int64 (286, 3), the counts by exponent (280 rows, from -151 on), zeros, infinities and NaNs, and by the class of
    # the fraction; see kernels/cells.py.
    cells: np.ndarray = field(repr=False)
    errors: np.ndarray | None = field(repr=False)  # int64 (194,), a histogram of the relative rounding errors
    largest_error: float | None  # rounded to fp32; None, as `errors`, if errors were not counted
    elements: int = field(init=False)  # for a sharded tensor those of this rank, for a sparse tensor the stored ones
    zero: int = field(init=False)  # elements that are zero, infinite or NaN before they are scaled and rounded
    infinite: int = field(init=False)
    nan: int = field(init=False)
    flushed: int = field(init=False)  # nonzero, but rounds to zero: at most half the smallest number of the format
    subnormal: int = field(init=False)  # below the smallest normal number, not flushed, kept with fewer bits
    overflow: int = field(init=False)  # finite, but rounds beyond the largest number: to infinity, or its replacement
    normal: int = field(init=False)  # rounds to a number of the format with its full precision

    def __post_init__(self) -> None:
        rows, form = self.cells.sum(1), self.format
        tie, normal, top = (exponent - LOWEST for exponent in (form.emin - form.mantissa - 1, form.emin, form.emax))
        flushed = rows[:tie].sum() + self.cells[tie, 0]
        overflow = self.cells[top, 2] + rows[top + 1 : ZERO].sum()
        counts = {"elements": rows.sum(), "flushed": flushed, "subnormal": rows[:normal].sum() - flushed}
        counts |= {"overflow": overflow, "normal": rows[normal:ZERO].sum() - overflow}
        counts |= dict(zip(("zero", "infinite", "nan"), rows[ZERO:], strict=True))
        for name, count in counts.items():
            object.__setattr__(self, name, int(count))

    def share(self, kind: str) -> float:
        """The share of the elements of one of the `KINDS`, from 0 to 1; 0 for a tensor without elements."""
        if kind not in KINDS:
            raise ValueError(f"Expected kind to be one of {', '.join(map(repr, KINDS))}, but got {kind!r}")
        return float(getattr(self, kind)) / max(self.elements, 1)

    @property
    def lost(self) -> float:
        """The share of the finite nonzero elements that are flushed or overflow, from 0 to 1."""
        return (self.flushed + self.overflow) / max(int(self.cells[:ZERO].sum()), 1)

    @property
    def exponents(self) -> dict[int, int]:
        """The number of scaled elements y by exponent e, where 2^e <= |y| < 2^(e + 1); only exponents that occur.

        Exponent -151 includes all smaller exponents, and exponent 128 all larger ones.
        """
        counts = self.cells[:ZERO].sum(1)
        return {int(row) + LOWEST: int(counts[row]) for row in np.flatnonzero(counts)}

    def error_quantile(self, q: float) -> tuple[float, float]:
        """Bounds of the q-quantile of the relative rounding error |y - round(y)| / |y|, low <= quantile < high.

        The quantile is the least error that at least a share of `q` of the elements does not exceed. Zeros and
        elements that overflow have no error; elements that are flushed have an error of 1. The bounds are the ends of
        the histogram's bin, of which there are eight per octave; twice the quantile itself if it is 0 or 1; twice NaN
        if no element has an error.

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
        index = int(np.searchsorted(np.cumsum(self.errors), rank))
        if index in (0, ERROR_BINS - 1):
            return (0.0, 0.0) if index == 0 else (1.0, 1.0)
        octaves = (divmod(end, PER_OCTAVE) for end in (index - 1, index))
        low, high = (math.ldexp(1 + eighths / PER_OCTAVE, octave - 24) for octave, eighths in octaves)
        return low, high

    def as_dict(self) -> dict[str, Any]:
        """The counts, exponents and bounds of error quantiles, as a dict that can be written as JSON."""
        result: dict[str, Any] = {name: getattr(self, name) for name in ("name", "dtype", "elements", *KINDS)}
        result["exponents"] = {str(exponent): count for exponent, count in self.exponents.items()}
        if self.errors is not None:
            bounds = {str(q): self.error_quantile(q) for q in QUANTILES}
            quantiles = {q: None if math.isnan(low) else [low, high] for q, (low, high) in bounds.items()}
            result |= {"error_quantiles": quantiles, "largest_error": self.largest_error}
        return result


class Statistics(Sequence[Row]):
    """Where tensors fall in a format, as counted by `statistics`.

    A sequence with one `Row` per tensor, in the order in which they were given. ``found["name"]`` is the row of one
    tensor, and ``found.total`` that of all tensors together. Reading anything but `names`, those of the tensors, and
    `format`, that for which they were counted, waits for the device, once.
    """

    def __init__(
        self, names: Sequence[str], dtypes: Sequence[str], format: Format, scale: float | torch.Tensor,
        counted: Sequence[tuple[torch.Tensor, Sequence[int]]] | np.ndarray,
    ) -> None:  # fmt: skip
        self.names, self.format = tuple(names), format
        self._dtypes, self._scale = tuple(dtypes), scale
        # Tables on devices with the rows that they count, until they are read; all counts on the host from then on.
        self._counted = counted

    def read(self) -> Statistics:
        """Wait for the device and copy the counts to the host, unless that was done before. Returns itself."""
        if not isinstance(self._counted, np.ndarray):
            counts = np.zeros((len(self.names), self._counted[0][0].shape[1]), dtype=np.int64)
            for table, rows in self._counted:
                counts[list(rows)] = table.cpu().numpy()
            self._scale, self._counted = checked_scale("scale", float(self._scale)), counts
        return self

    @property
    def counts(self) -> np.ndarray:
        """int64 (tensors, columns): all counts, in the order that kernels/statistics.py describes."""
        self.read()
        assert isinstance(self._counted, np.ndarray)
        return self._counted

    @property
    def scale(self) -> float:
        """The factor by which the elements were multiplied."""
        self.read()
        return float(self._scale)

    def _row(self, name: str, dtype: str, counts: np.ndarray) -> Row:
        errors = largest = None
        if counts.size > CELLS:
            errors, largest = counts[CELLS:-1], float(np.int32(counts[-1]).view(np.float32))
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

    @property
    def total(self) -> Row:
        """The counts of all tensors together."""
        total = self.counts.sum(0)
        if total.size > CELLS:
            total[-1] = self.counts[:, -1].max(initial=0)
        return self._row("total", "", total)

    def at(self, scale: float) -> Statistics:
        """The statistics at another scale, computed from these counts, without errors.

        They are exact for all elements that are within fp32's range at this scale. At a scale of 1, these are all
        elements, except of fp64 tensors.

        Raises:
            ValueError: `scale` is out of range or is not this one times a power of two.
        """
        fraction, exponent = math.frexp(checked_scale("scale", scale) / self.scale)
        if fraction != 0.5:
            raise ValueError(
                f"Expected scale to be {self.scale} times a power of two, but got {scale!r}: count again for other "
                "scales"
            )
        cells = self.counts[:, :CELLS].reshape(len(self), ROWS, CLASSES)
        moved = np.zeros_like(cells)
        moved[:, ZERO:] = cells[:, ZERO:]
        rows = (np.arange(ZERO) + exponent - 1).clip(0, ZERO - 1)
        # The exponents of elements that have left fp32's range are not known, so they stay in the outermost rows.
        rows[0], rows[-1] = 0, ZERO - 1
        np.add.at(moved.swapaxes(0, 1), rows, cells[:, :ZERO].swapaxes(0, 1))
        counts = moved.reshape(len(self), CELLS)
        return Statistics(self.names, self._dtypes, self.format, float(np.float32(scale)), counts)

    def relabelled(self, scale: float) -> Statistics:
        """The same counts with another scale, for gradients that were already scaled when they were counted."""
        return Statistics(self.names, self._dtypes, self.format, scale, self.counts)

    def __add__(self, addend: Statistics) -> Statistics:
        """Add the counts of two statistics by name, such as those of two ranks or of two steps.

        Raises:
            ValueError: they have different formats or scales, or only one has errors.
        """
        if (self.format, self.scale, self.counts.shape[1:]) != (addend.format, addend.scale, addend.counts.shape[1:]):
            raise ValueError(
                f"Expected statistics of the same format, scale and choice of errors, {self.format.name} at "
                f"{self.scale}, but got {addend.format.name} at {addend.scale}"
            )
        dtypes = dict(zip((*addend.names, *self.names), (*addend._dtypes, *self._dtypes), strict=True))
        names = list(dict.fromkeys((*self.names, *addend.names)))
        counts = np.zeros((len(names), self.counts.shape[1]), dtype=np.int64)
        for summand in (self, addend):
            rows = [names.index(name) for name in summand.names]
            largest = np.maximum(counts[rows, -1], summand.counts[:, -1])
            counts[rows] += summand.counts
            if counts.shape[1] > CELLS:
                counts[rows, -1] = largest
        return Statistics(names, [dtypes[name] for name in names], self.format, self.scale, counts)

    def worst(self, limit: int | None = None) -> list[Row]:
        """The rows by share of elements lost to flushing and overflow, the largest first, then by subnormal share."""
        return sorted(self, key=lambda row: (-row.lost, -row.share("subnormal")))[:limit]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        counted = {"total": self.total.as_dict(), "tensors": [row.as_dict() for row in self]}
        return {"format": self.format.name, "scale": self.scale, **counted}

    def table(self, limit: int | None = None) -> str:
        """A table of at most 80 columns: the `limit` worst tensors first (None: all), the total last; shares in %."""
        return shown("statistics_table", self, limit)

    def __str__(self) -> str:
        return self.table(limit=20)

    def __repr__(self) -> str:
        # This does not wait for the device, because debuggers call it at any time.
        return f"<Statistics of {len(self)} tensors in {self.format.name}>"

    def picture(self, path: str | Path) -> None:
        """Draw exponents under the format's range, and bars of the worst tensors: PNG, SVG or PDF, with matplotlib."""
        shown("picture", self, None, path)


# -------------------------------------------------------------------------------------------------------------- public


def statistics(
    tensors: Any, format: Any = "fp16", scale: float | torch.Tensor = 1.0, *, of: str = "parameters",
    errors: bool = True,
) -> Statistics:  # fmt: skip
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
    import torch

    from halfstep.kernels.streams import to_device
    from halfstep.numerics.statistics.named_tensors import count_, countable, named_tensors

    chosen = formats.element(format)
    grid = grid_of(chosen)
    named = named_tensors(tensors, of=of)
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1:
            raise ValueError(f"Expected scale to be one number, but got shape {tuple(scale.shape)}")
        factor: float | torch.Tensor = scale.detach().reshape(()).float().clone()
    else:
        factor = checked_scale("scale", scale)
    values = dict(enumerate(countable(name, tensor, chosen) for name, tensor in named.items()))
    counted = []
    for device in {tensor.device: None for tensor in values.values()} or {torch.device("cpu"): None}:
        rows = [row for row, tensor in values.items() if tensor.device == device]
        counts = torch.zeros(len(rows), width(errors), dtype=torch.int64, device=device)
        number = None
        if isinstance(factor, torch.Tensor):
            number = to_device(factor, device)
        elif factor != 1:
            number = torch.full((), factor, dtype=torch.float32, device=device)
        count_(counts, {index: values[row] for index, row in enumerate(rows)}, grid, number)
        counted.append((counts, rows))
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in named.values()]
    return Statistics(list(named), dtypes, chosen, factor, counted)
