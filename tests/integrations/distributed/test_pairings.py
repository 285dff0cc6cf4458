"""Every pairing of optimizer, scaler and strategy, with an Inf on one rank: with our scaler all ranks agree.

The table in docs/distributed.md is `OUTCOMES`. Two processes are started once and walk all cells; what is torch's own
pair and goes wrong there is named as such, and must go wrong in the version that it was found in.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from typing import Any

import pairing_ranks
import pytest
import rank_processes
import torch
import torch.multiprocessing
from pairing_ranks import OPTIMIZERS, SCALERS, SHARDED, STRATEGIES, WORLD

RIGHT, RAISES = "right", "raises"
DIVERGES, RAISES_LATE = "diverges", "raises after changing parameters"  # with torch's scalers only
# All that is not right, by (optimizer, scaler, strategy, unscaled before the step).
OUTCOMES = {
    ("halfstep.AdamW", "torch.amp.GradScaler", "FSDP1", False): DIVERGES,
    ("halfstep.AdamW", "torch.amp.GradScaler", "FSDP1", True): DIVERGES,
    ("torch.optim.AdamW", "torch.amp.GradScaler", "FSDP1", False): DIVERGES,
    ("torch.optim.AdamW", "torch.amp.GradScaler", "FSDP1", True): DIVERGES,
    ("torch.optim.AdamW(fused=True)", "torch.amp.GradScaler", "FSDP1", False): DIVERGES,
    ("torch.optim.AdamW(fused=True)", "torch.amp.GradScaler", "FSDP1", True): DIVERGES,
    ("torch.optim.AdamW(fused=True)", "ShardedGradScaler", "FSDP1", False): DIVERGES,
    **{("torch.optim.AdamW(fused=True)", "ShardedGradScaler", strategy, True): RAISES_LATE for strategy in STRATEGIES},
}
CELLS = list(itertools.product(OPTIMIZERS, SCALERS, STRATEGIES, (False, True)))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return rank_processes.run(pairing_ranks.run, WORLD)


def outcome(found: list[Any], control: list[torch.Tensor], sharded: bool) -> str:
    """What became of one cell on all ranks; weights must be the control's wherever nothing went wrong."""
    if any(one["error"] for one in found):
        stepped = any(one["steps"] for one in found) or not all(one["error"] for one in found)
        return RAISES_LATE if stepped else RAISES
    if any((one["steps"], one["scale"]) != (found[0]["steps"], found[0]["scale"]) for one in found):
        return DIVERGES
    assert found[0]["steps"] == [2.0] and found[0]["scale"] == 4.0
    copies = [one["weights"] for one in found]
    if sharded:
        copies = [[torch.cat(parts) for parts in zip(*copies, strict=True)]]
    for copy in copies:
        for mine, expected in zip(copy, control, strict=True):
            torch.testing.assert_close(mine, expected)
    return RIGHT


@pytest.mark.parametrize("key", CELLS, ids=lambda key: ", ".join(map(str, key)))
def test_all_ranks_agree_where_the_table_says_so(ranks: list[Any], key: tuple[str, str, str, bool]) -> None:
    optimizer, scaler, strategy, _ = key
    found = outcome([rank[key] for rank in ranks], ranks[0]["control"], strategy in SHARDED)
    expected = OUTCOMES.get(key, RIGHT)
    ours = scaler.startswith("halfstep") or (optimizer.startswith("halfstep") and scaler == "ShardedGradScaler")
    assert not (ours and expected in (DIVERGES, RAISES_LATE)), "nothing of ours may"
    installed = importlib.metadata.version("torch")
    if found != expected and not ours and not installed.startswith("2.13"):
        pytest.skip(f"torch {installed}: {', '.join(map(str, key))} {found}: correct docs/distributed.md")
    assert found == expected


def test_the_norm_of_a_torch_optimizer_has_the_dtype_that_torchs_clipping_returns(ranks: list[Any]) -> None:
    """And that of ours is fp32, as its gradients are in its step."""
    for rank in ranks:
        bf16, fp32 = torch.bfloat16, torch.float32
        for dtype, dtypes in ((bf16, [bf16, fp32, bf16, bf16]), (fp32, [fp32] * 4)):
            torchs, *ours = rank["norms"][str(dtype)]
            assert [norm.dtype for norm in (torchs, *ours)] == dtypes
            for norm, times in zip(ours, (8, 8, 64), strict=True):
                assert float(norm) * times == pytest.approx(float(torchs), rel=2**-6)
