"""Start here: counting against torch's casts. test_statistics.py has every threshold of every format."""

import pytest
import torch
from devices import WHERE, kernels_on

from halfstep.kernels.cells import CELLS, CLASSES, INFINITE, LOWEST, NOT_A_NUMBER, ZERO, width
from halfstep.kernels.statistics import foreach_count_
from halfstep.numerics.formats.table import formats
from halfstep.numerics.statistics.counts import grid_of

FP16 = formats["fp16"]


def values(device: torch.device) -> list[torch.Tensor]:
    """Odd sizes and all exponents of fp32, zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4099,), generator=generator).to(torch.int32)
    numbers = bits.view(torch.float32)
    numbers[:5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    return [numbers.to(device), torch.randn(15, generator=generator).to(device), torch.empty(0, device=device)]


@pytest.mark.parametrize("where", [*WHERE, "cpu"])
def test_counts_predict_a_cast_to_fp16(where: str) -> None:
    with kernels_on(where) as device:
        tensors = values(device)
        counts = torch.zeros(len(tensors), width(True), dtype=torch.int64, device=device)
        assert foreach_count_(tensors, counts, grid_of(FP16)) is counts
    for row, x in zip(counts.cpu(), map(torch.Tensor.cpu, tensors), strict=True):
        cells, y = row[:CELLS].view(-1, CLASSES), x.half()
        by_row = cells.sum(1)
        assert by_row.sum() == x.numel()
        assert by_row[ZERO] == (x == 0).sum()
        assert by_row[INFINITE] == x.isinf().sum() and by_row[NOT_A_NUMBER] == x.isnan().sum()
        overflow = by_row[FP16.emax + 1 - LOWEST : ZERO].sum() + cells[FP16.emax - LOWEST, 2]
        assert overflow == (y.isinf() & ~x.isinf()).sum()
        tie = FP16.emin - FP16.mantissa - 1 - LOWEST
        assert by_row[:tie].sum() + cells[tie, 0] == ((y == 0) & (x != 0)).sum()
        errors = row[CELLS:-1]
        assert errors[0] == ((x.double() == y.double()) & (x != 0) & x.isfinite()).sum(), "exact"
        assert errors[-1] == ((y == 0) & (x != 0)).sum(), "flushed: an error of the whole number"


@pytest.mark.parametrize("where", [*WHERE, "cpu"])
def test_a_power_of_two_moves_the_rows(where: str) -> None:
    with kernels_on(where) as device:
        x = torch.randn(777, generator=torch.Generator().manual_seed(1)).to(device)
        plain, scaled = (torch.zeros(1, width(False), dtype=torch.int64, device=device) for _ in range(2))
        foreach_count_([x], plain, grid_of(FP16))
        foreach_count_([x], scaled, grid_of(FP16), scale=torch.tensor(2.0**10, device=device))
    by_row = [counts.cpu().view(-1, CLASSES).sum(1)[:ZERO] for counts in (plain, scaled)]
    assert torch.equal(by_row[0][:-10], by_row[1][10:])
