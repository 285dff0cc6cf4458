"""Start here: the sum over ranks against numpy's fp32 additions in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import WHERE, assert_same_bits, kernels_on, normal

from halfstep.kernels.rank_sum import BLOCK, sum_of_ranks

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
