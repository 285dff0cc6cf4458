"""A rank of two that steps shards of FSDP1 and FSDP2, for tests/integrations/distributed/test_shards.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import halfstep
from halfstep.integrations.fsdp import keep_reduced_gradients

WORLD = 2
STEPS = 4
IN_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def model_of(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    # 7 rows over 2 ranks are uneven; of the last bias rank 1 has nothing; in a flat parameter nothing is aligned.
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).to(dtype)


def batch(step: int, part: int = 0) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + part))


def loss(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(inputs.to(dtype)).float().square().mean()


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def masters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The unsharded masters by the names of the parameters. Collective."""
    state = optimizer.canonical_state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    return {name: whole(state[number]["master"]) for number, name in enumerate(names)}


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, part: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, batch(step, part)).backward()
        optimizer.step()


# -------------------------------------------------------------------------------------------- FSDP2 from end to end


def trained(keep: bool, offload: bool = False) -> dict[str, torch.Tensor]:
    """The masters after training under FSDP2 with split masters, with another batch on each rank."""
    policy: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    model = fully_shard(model_of(torch.bfloat16), mp_policy=IN_FP32, **policy)
    if keep:
        keep_reduced_gradients(model)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, dist.get_rank())
    return masters(model, optimizer)


def alone(keep: bool, order: list[int], in_one: bool = False) -> dict[str, torch.Tensor]:
    """The same in one process, with the gradients of all parts added in fp32 in a given order, or in one batch."""
    model = model_of(torch.bfloat16)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for parameter, grad in zip(model.parameters(), gradients(model, step, order, in_one), strict=True):
            parameter.grad_dtype = None  # any
            parameter.grad = grad if keep else grad.bfloat16()
        optimizer.step()
    return masters(model, optimizer)


def gradients(model: torch.nn.Module, step: int, order: list[int], in_one: bool) -> list[torch.Tensor]:
    """The mean of the gradients of all parts, in fp32."""
    if in_one:
        inputs = torch.cat([batch(step, part) for part in order])
        return [grad.float() for grad in torch.autograd.grad(loss(model, inputs), list(model.parameters()))]
    total = [torch.zeros(p.shape) for p in model.parameters()]
    for part in order:
        found = torch.autograd.grad(loss(model, batch(step, part)), list(model.parameters()))
        total = [one + grad.float() for one, grad in zip(total, found, strict=True)]
    return [one / len(order) for one in total]


# --------------------------------------------------------------------------------------------------- reduced gradients


def reduced(kept: bool, backwards: int, offload: bool = False, hybrid: bool = False) -> dict[str, Any]:
    """Unsharded gradients after some backwards, and their dtype. `hybrid`: two replicas instead of two shards."""
    policy: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    if hybrid:
        policy["mesh"] = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))
    model = model_of(torch.bfloat16)
    fully_shard(model[0], mp_policy=IN_FP32, **policy)  # type: ignore[index]
    fully_shard(model, mp_policy=IN_FP32, **policy)
    if kept:
        keep_reduced_gradients(model)
    for step in range(backwards):
        loss(model, batch(step, dist.get_rank())).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    storages = [grad._local_tensor.untyped_storage() for grad in grads.values()]  # type: ignore[attr-defined]
    return {
        "values": {name: whole(grad).float() for name, grad in grads.items()},
        "dtypes": sorted({str(grad.dtype) for grad in grads.values()}),
        "bytes": sum({one.data_ptr(): one.nbytes() for one in storages}.values()),
    }


def scaled_overflow() -> dict[str, Any]:
    """Three steps, the second with an Inf only in the kept gradient of rank 1."""
    model = fully_shard(model_of(torch.bfloat16), mp_policy=IN_FP32)
    keep_reduced_gradients(model)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1e-3)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0)
    scales, norms = [], []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss(model, batch(step))).backward()
        if step == 1 and dist.get_rank() == 1:
            next(model.parameters()).grad._local_tensor.view(-1)[0] = float("inf")  # type: ignore[union-attr]
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        scaler.step(optimizer)
        norms.append((float(whole(expected)) / scaler.get_scale(), float(optimizer.grad_norm)))  # type: ignore[arg-type]
        scaler.update()
        scales.append(scaler.get_scale())
    return {"scales": scales, "norms": [norms[0], norms[2]]}


# ----------------------------------------------------------------------------------------------- launches and layouts


# ---------------------------------------------------------------------------------------------------------------- FSDP1


def flat(dtype: torch.dtype, use_orig_params: bool) -> dict[str, Any]:
    """Train FSDP1's flat parameters. Every rank has the same batch, so that the mean is the gradient of one process."""
    model = FullyShardedDataParallel(model_of(dtype), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, batch(step)).backward()
        optimizer.step()
    stepped = [p for p in model.parameters() if p.grad is not None]
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        weights = {name: whole(p) for name, p in model.module.named_parameters()}
    return {
        "misaligned": sum(bool(p.numel()) and p.data_ptr() % 16 != 0 for p in stepped),
        "empty": sum(p.numel() == 0 for p in model.parameters()),
        "weights": weights,
    }


def plain(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = model_of(dtype)
    steps(model, halfstep.AdamW(model.parameters(), lr=1e-2), 0)
    return {name: whole(p) for name, p in model.named_parameters()}


def refused() -> list[str]:
    in_bf16 = fully_shard(model_of(torch.bfloat16), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    messages = []
    for model in (model_of(torch.bfloat16), in_bf16):
        try:
            keep_reduced_gradients(model)
        except ValueError as error:
            messages.append(str(error))
    return messages


def run(rank: int) -> dict[str, Any]:
    return {
        "trained": {keep: trained(keep) for keep in (True, False)},
        "offloaded": trained(True, offload=True),
        "reduced": {(kept, n): reduced(kept, n) for kept in (True, False) for n in (1, 2)},
        "reduced offloaded": reduced(True, 1, offload=True),
        "reduced hybrid": reduced(True, 1, hybrid=True),
        "overflow": scaled_overflow(),
        "flat": {
            (str(dtype), orig): flat(dtype, orig) for dtype in (torch.bfloat16, torch.float32) for orig in (True, False)
        },
        "refused": refused(),
    }
