"""Optimizers on the host under FSDP2 on one rank, and checkpoints on several. See also test_cases_on_ranks.py."""

from __future__ import annotations

from pathlib import Path

import offload_ranks
import pytest
import rank_processes
import torch
import torch.distributed as dist
from offload_ranks import PROGRAMS

from halfstep.numerics.scaling.sharding import local


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(needs="NCCL"))])
@pytest.mark.parametrize("muon", [False, True], ids=["AdamW", "Muon"])
@pytest.mark.parametrize("name", ["recomputed", "kept fp32 gradients", "clipped by torch"])
def test_one_rank_has_the_bits_of_the_device(name: str, muon: bool, device: str) -> None:
    program, options, of_optimizer, modes = PROGRAMS[name]
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        results = []
        for where in ("device", *(mode for mode in modes if not (muon and mode == "step"))):
            model = offload_ranks.made(**options, device=device)
            optimizer = offload_ranks.optimizer_for(model, "split24, 8 bits", where, muon, **of_optimizer)
            program(model, optimizer)
            results.append([local(tensor.detach()).cpu().clone() for tensor in offload_ranks.shards(model, optimizer)])
            tensors = [local(value) for state in optimizer.state.values() for value in state.values()]
            assert {tensor.device.type for tensor in tensors} == {device if where == "device" else "cpu"}
        assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("where", "muon", "on_one"),
    [("copy", False, ["device", "copy"]), ("device", True, ["device", "copy"]), ("copy", True, ["device"])],
)
def test_checkpoints_continue_on_other_ranks_and_on_the_device(
    where: str, muon: bool, on_one: list[str], tmp_path: Path
) -> None:
    (paths, expected), _ = rank_processes.run(offload_ranks.saved, 2, where, muon, tmp_path)
    for ranks, wheres in ((1, on_one), (4, [where])):
        for results in rank_processes.run(offload_ranks.continued, ranks, ranks, paths, wheres, muon):
            assert all(torch.equal(*pair) for tensors in results for pair in zip(expected, tensors, strict=True))
