"""A rank of four that trains in every topology, with faults, for integrations/distributed/test_topologies.py."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from typing import Any

import topologies
import torch
import torch.distributed as dist
from topologies import SAMPLE, TOPOLOGIES, Net, mesh_of, parameters_of
from topology_walk import MAX_NORM, VALUES, Fault, Walk, clipping_itself, fused, ours, unfused
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import halfstep
from halfstep.numerics.scaling import wrappers

INF = float("inf")


def quiet() -> None:
    warnings.simplefilter("ignore")  # of FSDP: no accelerator, deprecated, no mixed precision
    logging.disable(logging.WARNING)


def run(rank: int, sample: bool) -> dict[str, Any]:
    """What happened in the topologies of `SAMPLE` and in the special cases, or in the other topologies."""
    quiet()
    names = {name: number for number, name in enumerate(TOPOLOGIES) if (name in SAMPLE) == sample}
    return {
        "walks": {name: broken_on_every_rank(name, number) for name, number in names.items()},
        "norms": {name: norms(name) for name in names},
        "reductions": {name: reductions_of_a_step(name) for name in names},
        "skipped": skipped_with_torchs_optimizers() if sample else {},
        "special": {case.__name__: case() for case in SPECIAL} if sample else {},
    }


# ----------------------------------------------------------------------------------------------- broken and not broken


def broken_on_every_rank(name: str, number: int) -> dict[str, Any]:
    """Faults on each rank, before or after the reduction, between steps without faults.

    Not all combinations of value and rank are tried, since the value affects only the flag, and the rank only its
    origin. The campaign combines them at random, thousands of times in `make soak`.
    """
    dtype = (torch.bfloat16, torch.float32)[number % 2]
    walk, undisturbed = Walk(name, dtype), Walk(name, dtype)
    for turn in range(4):
        rank, value = (turn + number) % 4, VALUES[(turn + number) % 3]
        walk.step(Fault(rank, value, early=turn % 2 == 0, choice=7 * turn), clip=turn % 3 != 0)
        if turn % 2:
            walk.step(None, clip=turn == 1)
    walk.step(None, clip=False)
    for clip in walk.clipped:
        undisturbed.step(None, clip)
    same = topologies.held(walk.optimizer) == topologies.held(undisturbed.optimizer)
    return {
        "complaints": walk.complaints + undisturbed.complaints,
        "faults": walk.faults,
        "clean": (walk.clean, undisturbed.clean),
        "as if never broken": same,
    }


# ------------------------------------------------------------------------------------------------- norm and clipping


WAYS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "scaler, halfstep.AdamW": (ours, True),
    "scaler, torch.optim.AdamW": (unfused, True),
    "scaler, torch.optim.AdamW(fused=True)": (fused, True),
    "halfstep.AdamW(max_grad_norm=)": (clipping_itself, False),
}


def ways_of(name: str) -> list[str]:
    """Those of `WAYS` to try on a topology."""
    if "pipeline" in name:
        return list(WAYS)[:3]  # an optimizer without a scaler knows of its own stage only
    return [way for way in WAYS if way != "scaler, torch.optim.AdamW" or "FSDP1" not in name]


def norms(name: str) -> dict[str, Any]:
    """The norms before clipping by each function, and the difference between the weights and those of one process."""
    found: dict[str, Any] = {}
    single = topologies.single(name, torch.float32).double()
    topologies.loss_of(single(topologies.batch(0, torch.float64))).backward()
    found["expected"] = torch.cat([p.grad.flatten() for p in single.parameters() if p.grad is not None]).norm().item()
    for way, (make, scaled) in WAYS.items():
        if way not in ways_of(name):
            continue
        one = topologies.single(name, torch.float32)
        topologies.loss_of(one(topologies.batch(0, torch.float32))).backward()
        reference = unfused(one.parameters())
        torch.nn.utils.clip_grad_norm_(one.parameters(), MAX_NORM)
        reference.step()
        spread = TOPOLOGIES[name](torch.float32)
        optimizer = spread.optimizer_of(make)
        scaler = halfstep.GradScaler("cpu", init_scale=2.0**10, enabled=scaled, process_group=spread.process_group)
        spread.backward(scaler, 0, torch.float32)
        norm = scaler.clip_grad_norm_(optimizer, MAX_NORM) if scaled else None
        scaler.step(optimizer)
        scaler.update()
        if norm is None:
            norm = topologies.stepping(optimizer).grad_norm
        whole, expected = spread.whole(), dict(one.named_parameters())
        off = max((value - expected[key]).abs().max().item() for key, value in whole.items())
        found[way] = {"norm": float(norm), "off": off}
    return found


# ------------------------------------------------------------------------------------- where torch's scaler goes wrong


def _two_steps(spread: Any, optimizer: Any, scaler: Any, broken: int) -> dict[str, Any]:
    """Two steps, the first with an Inf in the gradient of a rank (-1: none). Returns which were taken on this rank."""
    taken = []
    for step in range(2):
        optimizer.zero_grad()
        spread.backward(scaler, step, torch.float32)
        if step == 0 and dist.get_rank() == broken:
            # A gradient that tensor parallelism has cut, where there is one; choice 3 is an element of the last.
            topologies.break_shard(optimizer, 3, INF)
        before = topologies.held(optimizer)
        scaler.step(optimizer)
        scaler.update()
        taken.append(not topologies.unchanged(before, topologies.held(optimizer)))
    return {"taken": taken, "scale": scaler.get_scale()}


# The topology, and the rank that breaks.
CASES: dict[str, tuple[str, int]] = {
    "TP and FSDP2, norm first": ("TP and FSDP2, norm first", 3),
    "DTensors beside plain tensors": ("TP beside plain tensors", -1),
    "pipeline": ("pipeline of FSDP2", 3),
}


def skipped_with_torchs_optimizers() -> dict[str, Any]:
    found = {}
    for case, (name, broken) in CASES.items():
        for whose, make in (("fused", fused), ("not fused", unfused)):
            spread = TOPOLOGIES[name](torch.float32)
            scaler = halfstep.GradScaler("cpu", init_scale=8.0, process_group=spread.process_group)
            found[case, whose] = _two_steps(spread, spread.optimizer_of(make), scaler, broken)
    return found


# ------------------------------------------------------------------------------------------------------------ special


def two_optimizers_on_different_meshes() -> dict[str, Any]:
    """One optimizer over pairs of ranks, one over all, an Inf in the first one on rank 3: its pair skips."""
    mesh = mesh_of("dp", "tp")
    on_pairs = torch.nn.Parameter(distribute_tensor(torch.ones(8), mesh["tp"], src_data_rank=None))
    on_all = torch.nn.Parameter(distribute_tensor(torch.ones(8), mesh_of("all")))
    scaler = halfstep.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    optimizers = [halfstep.AdamW([on_pairs]), halfstep.AdamW([on_all])]
    taken = []
    for step in range(2):
        on_pairs.grad, on_all.grad = torch.ones_like(on_pairs), torch.ones_like(on_all)
        if step == 0 and dist.get_rank() == 3:
            on_pairs.grad._local_tensor[0] = INF
        before = [topologies.held(optimizer) for optimizer in optimizers]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        taken.append([not topologies.unchanged(b, topologies.held(o)) for b, o in zip(before, optimizers, strict=True)])
    return {"taken": taken, "scale": scaler.get_scale()}


def stage_without_gradients() -> dict[str, Any]:
    """The first stage of a pipeline is frozen for a step, and takes part in the reductions."""
    spread = TOPOLOGIES["pipeline of FSDP2"](torch.float32)
    optimizer = spread.optimizer_of(ours)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0, process_group=spread.process_group)
    skipped = []
    for step, value in enumerate((1.0, INF)):
        optimizer.zero_grad()
        spread.backward(scaler, step, torch.float32)
        if dist.get_rank() < 2:
            optimizer.zero_grad()
        elif dist.get_rank() == 3:
            topologies.local(parameters_of(optimizer)[0].grad).mul_(value)  # type: ignore[arg-type]
        norm = scaler.clip_grad_norm_(optimizer, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.last_step_skipped())
    return {"skipped": skipped, "scale": scaler.get_scale(), "finite": bool(norm.isfinite())}


def at_rest_without_gradients() -> dict[str, Any]:
    """Steps with lr = 0 in which one rank has no gradients. All ranks must take part in the same reductions."""
    spread = TOPOLOGIES["FSDP1, some ranks with nothing"](torch.float32)
    optimizer = spread.optimizer_of(lambda groups: halfstep.AdamW(groups, lr=0.0))
    scaler = halfstep.GradScaler("cpu", enabled=False)
    for step in range(3):
        optimizer.zero_grad()
        if step:
            spread.backward(scaler, step, torch.float32)
        else:
            for parameter in parameters_of(optimizer):
                parameter.grad = torch.zeros_like(parameter) if parameter.numel() else None
        optimizer.step()
    steps = [int(state["step"]) for state in optimizer.state.values()]
    return {"steps": steps, "holds": any(p.numel() for p in parameters_of(optimizer))}


def flat_parameters_of_nobody() -> dict[str, Any]:
    """Their modules are not known, and so the ranks that share a flat parameter."""
    spread = TOPOLOGIES["FSDP1 FULL_SHARD"](torch.float32)
    optimizer = spread.optimizer_of(ours)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0)
    spread.backward(scaler, 0, torch.float32)
    wrappers._wrappers.clear()
    message = ""
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        message = str(error)
    remedy = halfstep.GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    remedy.scale(torch.zeros(()))
    if dist.get_rank() == 2:
        topologies.break_shard(optimizer, 3, INF)
    remedy.step(optimizer)
    remedy.update()
    return {"error": message, "skipped": remedy.last_step_skipped()}


def tensor_parallel_inside_flat_parameters() -> dict[str, Any]:
    """FSDP1 stores local tensors of DTensors: the flat parameter does not show their other sharding."""
    mesh, cpu = mesh_of("dp", "tp"), torch.device("cpu")
    net = Net(torch.float32)
    parallelize_module(net, mesh["tp"], {name: style() for name, style in topologies.PLAN.items()})
    model = FullyShardedDataParallel(net, device_mesh=mesh["dp"], use_orig_params=True, device_id=cpu)
    spread = topologies.Spread(net, model)
    optimizer, scaler = spread.optimizer_of(ours), halfstep.GradScaler("cpu", init_scale=8.0)
    spread.backward(scaler, 0, torch.float32)
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


def sequence_parallel_without_a_scaler() -> dict[str, Any]:
    """Without a scaler, the optimizer must sum the partial gradients of the norm, so that all replicas stay equal."""
    spread = TOPOLOGIES["TP with sequence parallelism"](torch.float32)
    optimizer = spread.optimizer_of(ours)
    one = Net(torch.float32)
    reference = ours(one.parameters())
    disabled = halfstep.GradScaler("cpu", enabled=False)
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        spread.backward(disabled, step, torch.float32)
        optimizer.step()
        topologies.loss_of(one(topologies.batch(step, torch.float32))).backward()
        reference.step()
    whole = spread.whole()
    off = max((whole[key] - value).abs().max().item() for key, value in one.named_parameters())
    return {"off": off}


def an_optimizer_that_outlives_another() -> dict[str, Any]:
    """The scaler keeps no model alive, and determines the topology of parameters at reused addresses again."""
    import weakref

    scaler = halfstep.GradScaler("cpu", init_scale=8.0)
    gone = []
    for _ in range(2):
        spread = TOPOLOGIES["FSDP2"](torch.float32)
        optimizer = spread.optimizer_of(ours)
        spread.backward(scaler, 0, torch.float32)
        scaler.step(optimizer)
        scaler.update()
        gone.append(weakref.ref(optimizer))
        del optimizer, spread
        gc.collect()
    # Other parameters in the same optimizer: plain ones first, shards then.
    plain = Net(torch.float32)
    optimizer = ours(plain.parameters())
    topologies.loss_of(plain(topologies.batch(0, torch.float32))).backward()
    scaler.step(optimizer)
    scaler.update()
    sharded = fully_shard(Net(torch.float32), mesh=mesh_of("all"))
    optimizer.param_groups[0]["params"] = list(sharded.parameters())
    optimizer.state.clear()
    topologies.loss_of(sharded(topologies.batch(0, torch.float32))).backward()
    if dist.get_rank() == 2:
        topologies.break_shard(optimizer, 3, INF)
    scaler.step(optimizer)
    scaler.update()
    return {"kept": len(scaler._checkers), "skipped": scaler.last_step_skipped()}


def reductions_of_a_step(name: str) -> dict[str, Any]:
    """The number of collectives of a step and its norm, and whether they allocate memory in the steady state."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not function.is_view and function.namespace != "profiler":
                self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    spread = TOPOLOGIES[name](torch.float32)
    optimizer = spread.optimizer_of(ours)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0, process_group=spread.process_group)
    for _ in range(2):
        optimizer.zero_grad()
        spread.backward(scaler, 0, torch.float32)
        reduced, real = [], dist.all_reduce
        dist.all_reduce = lambda tensor, *args, reduced=reduced, real=real, **options: (
            reduced.append(tensor.numel()),
            real(tensor, *args, **options),
        )
        try:
            with Operations() as operations:
                scaler._check_inf_per_device(optimizer)
        finally:
            dist.all_reduce = real
        scaler.step(optimizer)
        scaler.update()
    return {"reduced": reduced, "operations": sorted(set(operations.names))}


SPECIAL = (
    two_optimizers_on_different_meshes,
    stage_without_gradients,
    at_rest_without_gradients,
    sequence_parallel_without_a_scaler,
    an_optimizer_that_outlives_another,
    tensor_parallel_inside_flat_parameters,
    flat_parameters_of_nobody,
)
