"""Communication hooks that divide before they round, in two processes."""

from __future__ import annotations

import ddp_hook_ranks
import pytest
import rank_processes
import torch


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, torch.Tensor]]:
    return rank_processes.run(ddp_hook_ranks.run, 2)


@pytest.mark.parametrize("group", ["default", "given"])
def test_hooks_divide_before_they_round(ranks: list[dict[str, torch.Tensor]], group: str) -> None:
    for rank in ranks:
        fp16, bf16, torchs = (rank[f"{name}, {group}"] for name in ("fp16", "bf16", "torch"))
        assert fp16[:3].tolist() == [35008.0, 2.0**-23, 2.0], "35000 and 3e-8 to nearest"
        assert bf16[0].item() == 35072.0 and bf16[2].item() == 2.0
        assert bf16[1].item() == pytest.approx(6e-8, rel=2**-8)
        assert torchs[0].item() == float("inf"), "torch casts first"
        for found in (fp16, bf16):
            assert found[3:5].isnan().all(), "infinities of both signs and NaN stay"
        assert fp16[5].item() == float("inf") and bf16[5].isfinite()
