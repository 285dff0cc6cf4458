"""Counting: cells and bins against rounding in float64, and the same integers from both implementations."""

import itertools

import falling
import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import twins, using
from oracles import BF16, DTYPES, FP16
from strategies import laid_out

from halfstep.kernels.cells import (
    CELLS,
    CLASSES,
    ERROR_BINS,
    HIGHEST,
    INFINITE,
    LOWEST,
    NOT_A_NUMBER,
    ZERO,
    Grid,
    width,
)
from halfstep.kernels.statistics import BLOCK, CHUNK, PATTERNS, count_on_cpu, foreach_count_, reference
from halfstep.numerics.formats.table import formats

pytestmark = [pytest.mark.sample(3), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy, on overflow and NaN

ALL = ("reference", "triton")  # the former as it runs on a CPU, in parts and by patterns

# What `numerics.statistics.counts.grid_of` makes of a format, written out by hand from the format's specification.
GRIDS = {
    "fp32": Grid(0, -126, 127, 1 << 23),
    "tf32": Grid(13, -126, 127, 0x7FF000),
    "fp16": Grid(13, -14, 15, 0x7FF000),  # 65520
    "bf16": Grid(16, -126, 127, 0x7F8000),
    "e4m3fn": Grid(20, -6, 8, 0x680001),  # above 464, which itself rounds to the even 448
    "e5m2": Grid(21, -14, 15, 0x700000),  # 61440
}


def count_by(name: str, tensors: list[torch.Tensor], grid: Grid, scale: float | None = None, **options: object):
    """One implementation's counts, with errors; without them it must count the same cells."""
    with using(name, "statistics") as device:
        placed = twins(tensors, device)
        number = None if scale is None else torch.tensor(scale, dtype=torch.float32, device=device)
        both = []
        for errors in (True, False):
            counts = torch.zeros(len(tensors), width(errors), dtype=torch.int64, device=device)
            assert foreach_count_(placed, counts, grid, scale=number, **options) is counts  # type: ignore[arg-type]
            both.append(counts.cpu())
    assert torch.equal(both[0][:, :CELLS], both[1]), name
    return both[0]


def bin_of(errors: np.ndarray) -> np.ndarray:
    """0 for no error, else eight bins per octave of equal width, from 2^-24 on."""
    fraction, exponent = np.frexp(errors)
    found = 1 + (exponent + 23) * 8 + np.floor((fraction * 2 - 1) * 8).astype(int)
    return np.where(errors == 0, 0, found)


def expect(row: torch.Tensor, values: np.ndarray, name: str, scale: float) -> None:
    """One tensor's counts against its values, rounded in float64."""
    grid, form = GRIDS[name], formats[name]
    fallen = falling.fall(values, scale, form)
    cells = row[:CELLS].view(-1, CLASSES)
    rows = cells.sum(1).tolist()
    assert (rows[ZERO], rows[INFINITE], rows[NOT_A_NUMBER]) == (fallen.zero, fallen.infinite, fallen.nan)
    assert sum(rows) == values.size
    numbers = {exponent: rows[exponent - LOWEST] for exponent in range(LOWEST, HIGHEST + 1) if rows[exponent - LOWEST]}
    assert numbers == falling.exponents(values, scale)
    flush = form.emin - form.mantissa - 1
    flushed = sum(rows[: flush - LOWEST]) + int(cells[flush - LOWEST, 0])
    overflow = sum(rows[grid.emax + 1 - LOWEST : ZERO]) + int(cells[grid.emax - LOWEST, 2])
    below = sum(rows[: form.emin - LOWEST])
    assert (flushed, below - flushed, overflow) == (fallen.flushed, fallen.subnormal, fallen.overflow)
    bins = np.bincount(bin_of(fallen.errors.astype(np.float64)), minlength=ERROR_BINS)
    assert row[CELLS:-1].tolist() == bins.tolist()
    most = fallen.errors.max(initial=0.0)
    assert row[-1:].int().view(torch.float32).item() == most


def examine(tensors: list[torch.Tensor], name: str, scale: float | None = None, inverted: bool = False) -> None:
    counted = [count_by(one, tensors, GRIDS[name], scale, inverted=inverted) for one in ALL]
    for one, counts in zip(ALL, counted, strict=True):
        assert torch.equal(counts, counted[0]), one
    applied = 1.0 if scale is None else scale
    if inverted:
        applied = float(np.float32(1) / np.float32(applied)) if np.frexp(applied)[0] != 0.5 else 1 / applied
    for row, tensor in zip(counted[0], tensors, strict=True):
        expect(row, oracles.to_numpy(tensor).astype(np.float32).reshape(-1), name, applied)


@pytest.fixture(scope="module")
def thresholds() -> torch.Tensor:
    """fp32: every code and midpoint of fp16 and bf16 with its neighbours, both signs, all specials."""
    found = np.concatenate([oracles.thresholds(FP16)[::29], oracles.thresholds(BF16)[::29], oracles.specials()])
    edges = []
    for form in (formats[name] for name in GRIDS):
        for edge in (form.min_subnormal / 2, form.min_subnormal, form.min_normal, form.max, form.overflow):
            edges += [edge * scale for scale in (1.0, 2.0**-16, 2.0**16)]
    with np.errstate(over="ignore"):
        edges_fp32 = np.array(edges).astype(np.float32)
        near = [edges_fp32, np.nextafter(edges_fp32, np.float32(0)), np.nextafter(edges_fp32, np.float32(np.inf))]
    return torch.from_numpy(np.concatenate([found, *near, *(-part for part in near)]))


@pytest.mark.parametrize("name", GRIDS)
def test_every_threshold_of_every_format(name: str, thresholds: torch.Tensor) -> None:
    examine([thresholds], name)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn"])
def test_every_code_of_a_16_bit_dtype_is_counted(name: str, dtype: torch.dtype) -> None:
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    examine([codes], name, 2.0**-3)


def long_and_short() -> list[torch.Tensor]:
    """Every 16-bit pattern, some twice; few of them; and fp32 numbers of any bits, more than are counted at a time."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.cat([torch.arange(65536), torch.randint(0, 65536, (5000,), generator=generator)]).to(torch.int16)
    bits = torch.randint(-(2**31), 2**31, (2 * CHUNK + 5,), generator=generator).to(torch.int32)
    halves = [part.view(dtype) for dtype in (FP16, BF16) for part in (codes, codes[31000 : 31000 + PATTERNS - 1])]
    return [*halves, codes[:0].view(BF16), torch.full((PATTERNS,), 1e-7, dtype=FP16), bits.view(torch.float32)]


@pytest.mark.parametrize("errors", [False, True])
@pytest.mark.parametrize(
    ("scale", "inverted"), [(None, False), *itertools.product((2.0**-9, 0.3, 1e30), (True, False))]
)
def test_patterns_and_parts_are_counted_as_by_the_reference(scale: float | None, inverted: bool, errors: bool) -> None:
    number = None if scale is None else torch.tensor(scale)
    for name, x in itertools.product(GRIDS, long_and_short()):
        counts = [torch.full((width(errors),), 5, dtype=torch.int64) for _ in range(2)]
        reference(x, counts[0], GRIDS[name], number, inverted)
        count_on_cpu(x, counts[1], GRIDS[name], number, inverted)
        assert torch.equal(*counts), (name, x.dtype, x.numel())


SCALES = (2.0**-40, 2.0**-1, 2.0**16, 2.0**40, 2.0**126, 2.0**-126, 1000.0, 3e38, 1.1e-38)


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_is_applied(scale: float, inverted: bool, thresholds: torch.Tensor) -> None:
    """Each scale with every ninth threshold, so that every threshold is multiplied by some scale."""
    for name in ("fp16", "fp32"):
        examine([thresholds[SCALES.index(scale) :: len(SCALES)].contiguous()], name, scale, inverted)


# Kernels are given no lazy negations.
TENSORS = st.lists(
    laid_out(DTYPES, (15, 512, 513, BLOCK - 1, BLOCK + 1, 5000)).map(torch.Tensor.resolve_neg), min_size=1, max_size=5
)


@settings(max_examples=15, deadline=None)
@given(TENSORS, st.sampled_from(list(GRIDS)), st.sampled_from([None, 2.0**16, 2.0**-10, 1000.0, 0.3]))
def test_random_lists_match_the_oracle(tensors: list[torch.Tensor], name: str, scale: float | None) -> None:
    examine(tensors, name, scale)


def test_long_and_short_and_strided_tensors_in_one_call() -> None:
    generator = torch.Generator().manual_seed(5)
    long = torch.randn(3 * CHUNK + 7, generator=generator) * 1e-5
    tensors = [
        long,
        long[1:],
        long[:CHUNK],
        long[: 2 * CHUNK].view(128, -1).t(),
        long[::3],
        torch.tensor(-0.0),
        torch.empty(0),
        long.view(-1)[: 2 * CHUNK].to(FP16),
        torch.view_as_complex(long[:8].view(4, 2)).conj().imag,
        long[:1].expand(600),
    ]
    examine(tensors, "fp16", 2.0**10)


def test_a_scale_that_is_nan_makes_no_number_of_a_zero() -> None:
    values = torch.cat([torch.zeros(700), torch.ones(800), torch.tensor([torch.inf, torch.nan])])
    # By exponent: how the NaNs that the scale makes are divided into classes depends on the bits that it makes.
    counted = [count_by(one, [values], GRIDS["fp16"], float("nan"))[0, :CELLS].view(-1, CLASSES).sum(1) for one in ALL]
    assert all(torch.equal(counts, counted[0]) for counts in counted)
    assert counted[0][ZERO].item() == 700


def test_counts_are_added_to_the_rows_passed() -> None:
    tensors = [torch.tensor([1.0, 0.0]), torch.full((40000,), 2.0**-30), torch.tensor([1e6], dtype=BF16)]
    for name in ALL:
        with using(name, "statistics") as device:
            placed = twins(tensors, device)
            counts = torch.zeros(5, width(True), dtype=torch.int64, device=device)
            counts[2, :CELLS] = 2**40  # more than 32 bits hold
            version = counts._version
            for _ in range(3):
                foreach_count_(placed, counts, GRIDS["fp16"], rows=[4, 0, 2])
            assert counts._version > version
            counts = counts.cpu()
        assert counts[[1, 3]].sum() == 0, name
        assert counts[4, :CELLS].sum() == 6
        assert counts[4, ZERO * CLASSES] == 3
        assert counts[0, (-30 - LOWEST) * CLASSES] == 120000
        assert counts[0, -2] == 120000, "flushed: an error of all of it"
        assert counts[0, -1].int().view(torch.float32) == 1
        assert counts[2, :CELLS].sum() == CELLS * 2**40 + 3
        assert counts[2, CELLS:-1].sum() == 0, "what overflows has no error"


def test_empty_lists_and_tensors_count_nothing() -> None:
    counts = torch.zeros(1, width(False), dtype=torch.int64)
    assert foreach_count_([], counts, GRIDS["fp16"]) is counts
    for name in ALL:
        with using(name, "statistics") as device:
            counts = torch.zeros(1, width(False), dtype=torch.int64, device=device)
            foreach_count_([torch.empty(0, 3, device=device)], counts, GRIDS["fp16"])
            assert counts.sum() == 0
