"""Every pairing of an optimizer or a scaler of ours with torch's, by strategy, with an Inf on one rank.

Two processes are started once and walk all of them. All ranks must agree.
"""

from __future__ import annotations

from typing import Any

import pairing_ranks
import pytest
import rank_processes
import torch
from pairing_ranks import PAIRS, SHARDED, WORLD


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return rank_processes.run(pairing_ranks.run, WORLD)


@pytest.mark.parametrize("key", PAIRS, ids=", ".join)
@pytest.mark.parametrize("unscale", [False, True])
def test_all_ranks_agree_and_have_the_weights_of_one_process(ranks: list[Any], key: Any, unscale: bool) -> None:
    found = [rank[(*key, unscale)] for rank in ranks]
    assert [(cell["steps"], cell["scale"], cell["error"]) for cell in found] == [([2.0], 4.0, "")] * WORLD
    copies = [cell["weights"] for cell in found]
    if key[2] in SHARDED:
        copies = [[torch.cat(shards) for shards in zip(*copies, strict=True)]]
    for weights in copies:
        for weight, expected in zip(weights, ranks[0]["control"], strict=True):
            torch.testing.assert_close(weight, expected)


def test_the_norm_of_a_torch_optimizer_has_the_dtype_that_torchs_clipping_returns(ranks: list[Any]) -> None:
    """And that of ours is fp32, as its gradients are in its step."""
    for rank in ranks:
        bf16, fp32 = torch.bfloat16, torch.float32
        for dtype, dtypes in ((bf16, [bf16, fp32, bf16, bf16]), (fp32, [fp32] * 4)):
            torchs, *ours = rank["norms"][str(dtype)]
            assert [norm.dtype for norm in (torchs, *ours)] == dtypes
            for norm, times in zip(ours, (8, 8, 64), strict=True):
                assert float(norm) * times == pytest.approx(float(torchs), rel=2**-6)
