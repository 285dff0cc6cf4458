"""Ranks that train FSDP2's shards with the check at `step` and in the backward; see test_overlap_fsdp.py."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from overlap_ranks import Net, Passes, batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import halfstep
from halfstep.integrations import fsdp

WORLD = 2
Tamper = Callable[[torch.nn.Module, torch.optim.Optimizer, Any], None]


def multiply(net: Any, optimizer: Any, scaler: Any) -> None:
    for parameter in net.parameters():
        parameter.grad.mul_(0.5)


def shard_to_nan(net: Any, optimizer: Any, scaler: Any) -> None:
    if dist.get_rank() == 0:
        net.second.weight.grad._local_tensor.view(-1)[3] = float("nan")


def replace(net: Any, optimizer: Any, scaler: Any) -> None:
    for _ in range(3):
        net.first.weight.grad = net.first.weight.grad * 2


def clip_by_torch(net: Any, optimizer: Any, scaler: Any) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 3.0)


def clip_values_by_torch(net: Any, optimizer: Any, scaler: Any) -> None:
    torch.nn.utils.clip_grad_value_(net.parameters(), 1e-2)


def divide_aliases(net: Any, optimizer: Any, scaler: Any) -> None:
    torch._foreach_div_([parameter.grad.detach() for parameter in net.parameters()], 3.0)


def clip_shards(net: Any, optimizer: Any, scaler: Any) -> None:
    torch._foreach_clamp_max_([parameter.grad.to_local() for parameter in net.parameters()], 1e-2)


def rescale(net: Any, optimizer: Any, scaler: Any) -> None:
    scaler._scale.mul_(2.0)


TAMPERS: dict[str, Tamper] = {
    "multiplied": multiply,
    "one shard made NaN": shard_to_nan,
    "replaced": replace,
    "clipped by torch": clip_by_torch,
    "values clipped by torch": clip_values_by_torch,
    "divided through aliases": divide_aliases,
    "shards clipped": clip_shards,
    "another scale": rescale,
}
IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# What `train` takes besides.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"steps": 12, "bad": (3, 4, 9)},
    "kept unsharded": {"reshard_after_forward": False},
    "mixed precision": {"mp_policy": IN_BF16},
    "bf16 shards": {"dtype": torch.bfloat16, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
    "bf16 shards, fp32 gradients": {
        "dtype": torch.bfloat16,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        "keep": True,
    },
    "two optimizers": {"optimizers": 2},
    "three micro-batches, one reduction": {"micro": 3, "sync": False},
    "three micro-batches, three reductions": {"micro": 3},
    "unused parameters": {"optional": True, "steps": 7},
    "gradients kept": {"to_none": False},
    "one group": {"inner": False},
    "copies and shards": {"mesh": (WORLD, 1)},
    "a parameter ignored": {"ignored": True, "expected": 1},
    "a backward discarded": {"discard": 3},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False), "expected": 1},
    **{name: {"tamper": tamper, "steps": 4, "expected": 1} for name, tamper in TAMPERS.items()},
}


def train(
    overlap: bool,
    *,
    steps: int = 5,
    bad: tuple[int, ...] = (2,),
    dtype: torch.dtype = torch.float32,
    keep: bool = False,
    optimizers: int = 1,
    micro: int = 1,
    sync: bool = True,
    optional: bool = False,
    to_none: bool = True,
    inner: bool = True,
    mesh: tuple[int, ...] | None = None,
    ignored: bool = False,
    discard: int | None = None,
    tamper: Tamper | None = None,
    expected: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Train; what came of it, and how many passes over gradients each step made.

    Args:
        keep: gradients in fp32 as they were reduced.
        sync: reduce every micro-batch.
        inner: shard layers as groups of their own.
        mesh: of HSDP.
        ignored: leave a parameter out, so that it stays a plain tensor.
        expected: the passes that the test expects; not used here.
        The rest as in overlap_ranks.py, or for `fully_shard`.
    """
    net = Net((dtype,), optional, empty=False)  # which FSDP2 cannot reduce
    if mesh is not None:
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("copies", "shards"))
    if inner:
        for layer in (net.first, net.second):
            fully_shard(layer, **options)
    if ignored:
        options["ignored_params"] = {net.last.bias}
    fully_shard(net, **options)
    if keep:
        fsdp.keep_reduced_gradients(net)
    scaler = halfstep.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    if overlap:
        fsdp.overlap_overflow_check(net, scaler)
    parameters = list(net.parameters())
    torch.manual_seed(1)
    shuffled = [parameters[index] for index in torch.randperm(len(parameters)).tolist()]
    made = [halfstep.AdamW(shuffled[number::optimizers], lr=1e-2, eps=1e-4) for number in range(optimizers)]
    found: dict[str, Any] = {"losses": [], "norms": [], "scales": [], "skipped": [], "passes": []}
    for step in range(steps):
        net.zero_grad(set_to_none=to_none)
        losses = []
        for number in range(micro):
            net.set_requires_gradient_sync(sync or number == micro - 1)
            broken = (step in bad or step == discard) and dist.get_rank() == 1 and number == micro - 1
            net.poison = float("inf") if broken else None
            # With unused parameters FSDP2 wants the same of all ranks.
            loss = net(batch(step, number), **({"further": True} if optional and step % 2 == 0 else {}))
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        if step == discard:
            continue
        if tamper is not None:
            tamper(net, made[0], scaler)
        passes = Passes()
        with passes.counting():
            for optimizer in made:
                found["norms"].append(scaler.clip_grad_norm_(optimizer, 0.05).clone())
                scaler.step(optimizer)
            scaler.update()
        found["losses"] += losses
        found["scales"].append(scaler.get_scale())
        found["skipped"].append(scaler.last_step_skipped())
        found["passes"].append(passes.made)
    report = scaler.overflow_report(net.named_parameters())
    found["report"] = sorted((one.name, one.inf_steps, one.nan_steps, one.first_step) for one in report.parameters)
    found["weights"] = [_own(parameter).clone() for parameter in net.parameters()]
    found["states"] = [_own(one).clone() for opt in made for state in opt.state.values() for one in state.values()]
    return found


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def errors() -> dict[str, str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    scaler = halfstep.GradScaler("cpu")
    used = fully_shard(torch.nn.Linear(2, 2))
    fsdp.overlap_overflow_check(used, scaler)
    older = FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
    calls: dict[str, Callable[[], None]] = {
        "not sharded": lambda: fsdp.overlap_overflow_check(torch.nn.Linear(2, 2), scaler),
        "twice": lambda: fsdp.overlap_overflow_check(used, scaler),
        "FSDP1": lambda: fsdp.overlap_overflow_check(older, scaler),
        "their scaler": lambda: fsdp.overlap_overflow_check(used, torch.amp.GradScaler("cpu")),  # type: ignore[arg-type]
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = ""
        except (TypeError, ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def memory() -> dict[str, bool]:
    """Whether a model that is gone takes its check with it, though its parameters live on."""
    scaler = halfstep.GradScaler("cpu")
    net = fully_shard(torch.nn.Linear(3, 3))
    parameters = list(net.parameters())
    fsdp.overlap_overflow_check(net, scaler)
    scaler.scale(net(torch.ones(2, 3)).sum()).backward()
    (reference,) = scaler._early_checks
    alive = reference() is not None
    del net
    gc.collect()
    assert parameters[0].grad is not None
    return {"with the model": alive, "without it": reference() is not None}


def run(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        found[name] = {overlap: train(overlap, **setting) for overlap in (False, True)}
    return {**found, "errors": errors(), "memory": memory()}
