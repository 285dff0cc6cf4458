"""Start here: the sum over ranks against numpy's fp32 additions in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import WHERE, assert_same_bits, kernels_on, normal, placed

from halfstep.kernels import rank_sum
from halfstep.kernels.rank_sum import BLOCK, Ranges, sum_and_check, sum_of_ranks
from halfstep.kernels.unscale import HAS_INF, HAS_NAN, Factor, check_part

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def in_order(parts: torch.Tensor, divisor: float) -> torch.Tensor:
    total = np.zeros(parts.shape[1], np.float32)
    with np.errstate(invalid="ignore"):
        for part in parts.float().numpy():
            total = total + part  # -0.0 + 0.0 is 0.0: no part here is -0.0
        return torch.from_numpy(total / np.float32(divisor))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("ranks", "elements"), [(2, 1), (3, 17), (8, 2 * BLOCK), (5, BLOCK + 15), (1, 64), (2, 0)])
@pytest.mark.parametrize("where", [*WHERE, "cpu"])
def test_parts_are_added_in_the_order_of_ranks(where: str, ranks: int, elements: int, dtype: torch.dtype) -> None:
    parts = torch.stack([normal(elements, dtype, rank) * 10.0**rank for rank in range(ranks)])
    if elements > 17:
        parts[0, 3], parts[-1, 11] = torch.nan, torch.inf
    for divisor in (1.0, float(ranks), 0.3):
        with kernels_on(where) as device:
            out = torch.empty(elements, device=device)
            sum_of_ranks(parts.to(device), out, divisor)
        assert_same_bits(out, in_order(parts, divisor), divisor)


def test_another_order_has_other_bits() -> None:
    parts = torch.stack([normal(1000, torch.bfloat16, rank) * 10.0**rank for rank in range(8)])
    out, other = torch.empty(2, 1000)
    sum_of_ranks(parts, out, 8.0)
    sum_of_ranks(parts.flip(0), other, 8.0)
    assert not torch.equal(out, other)


def test_the_kernel_runs_where_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(rank_sum, "launch_kernel", lambda kernel, *_: launched.append(kernel))
    with kernels_on("interpreter") as device:
        sum_of_ranks(torch.ones(2, 8, device=device), torch.empty(8, device=device), 1.0)
        sum_and_check(torch.ones(2, 8, device=device), torch.empty(8, device=device), 1.0, Ranges([(0, 8)], 8), None)
    assert launched == [rank_sum.rank_sum_kernel, rank_sum.rank_sum_check_kernel]


# (start, elements), padded up to the next: the fourth starts at a multiple of 16, the last has padding in a new chunk
RANGES = [(0, 1), (3, 4096), (4100, 0), (4112, 8200), (12_320, 4090)]


@pytest.mark.parametrize("scale", [None, 1024.0, 3.0])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("padding", "offset"), [(6, 0), (7, 0), (6, 1)], ids=["", "odd sizes", "misaligned"])
@pytest.mark.parametrize("where", [*WHERE, "cpu"])
def test_the_check_of_ranges_is_a_separate_check(
    where: str, padding: int, offset: int, dtype: torch.dtype, scale: float | None
) -> None:
    elements = sum(RANGES[-1]) + padding
    for spoiled in (False, True):
        parts = torch.stack([normal(elements, dtype, rank) * 10.0**rank for rank in range(3)])
        parts[0, 2] = torch.nan  # padding
        if spoiled:
            parts[0, 4112], parts[1, 12_320 + 4089], parts[2, 5] = torch.nan, torch.inf, -torch.inf
        with kernels_on(where) as device:
            out, ranges = placed(torch.zeros(elements), device, offset), Ranges(RANGES, elements)
            factor = None if scale is None else Factor(torch.tensor(scale, device=device), inverted=True)
            version = out._version
            found = sum_and_check(placed(parts, device, offset), out, 3.0, ranges, factor)
            assert out._version > version
            expected = check_part([out[start : start + size] for start, size in RANGES], factor)
        sums = in_order(parts, 3.0)
        for start, size in RANGES:
            assert_same_bits(out[start : start + size], sums[start : start + size])
        for part, other in zip(found, expected, strict=True):
            assert_same_bits(part.sums, other.sums)
            assert_same_bits(part.flag.reshape(()), other.flag.reshape(()))
        flags = [part.flag.item() for part in found]
        assert flags == ([0, HAS_INF, 0, HAS_NAN, HAS_INF] if spoiled else [0] * 5)


@pytest.mark.parametrize("where", [*WHERE, "cpu"])
def test_what_is_checked_is_the_unscaled_sum(where: str) -> None:
    """A finite sum overflows by a scale below 1, and the squares are those of the quotient."""
    with kernels_on(where) as device:
        out, scale = torch.empty(2, device=device), torch.tensor(0.5, device=device)
        for value, flag in ((2.0**127, HAS_INF), (3.0, 0)):
            parts = torch.tensor([[value, 0.0], [0.0, 0.0]], device=device)
            (part,) = sum_and_check(parts, out, 1.0, Ranges([(0, 2)], 2), Factor(scale, inverted=True))
            assert out.tolist() == [value, 0.0] and part.flag.item() == flag
    assert part.sums.tolist() == [36.0]
