"""Cases of one of four ranks that trains in every topology, with faults, for test_cases_on_ranks.py.

What they assert follows the last message between ranks, so that a rank that fails leaves no other one waiting.
"""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import topologies
import torch
import torch.distributed as dist
from counted_bytes import Operations
from errors import error_of
from topologies import SAMPLE, TOPOLOGIES, Net, mesh_of, parameters_of
from topology_walk import MAX_NORM, VALUES, Fault, Walk, clipping_itself, fused, ours, unfused
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import halfstep
from halfstep.numerics.scaling import wrappers

INF = float("inf")
SINGLE = ("DDP", "ZeRO-1")  # every rank has every gradient: nothing to agree on


# ----------------------------------------------------------------------------------------------- broken and not broken


def a_fault_on_any_rank_is_skipped_by_all_and_leaves_every_bit(name: str) -> None:
    """Faults on each rank, before or after the reduction, between steps without faults; see `Walk.step`.

    Not all combinations of value and rank are tried, since the value affects only the flag, and the rank only its
    origin. The campaign combines them at random, thousands of times in `make soak`.
    """
    number = list(TOPOLOGIES).index(name)
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
    assert walk.complaints + undisturbed.complaints == []
    # Of the ranks that hold nothing, none can be broken after the reduction.
    assert walk.faults == 4 or ("nothing" in name and 2 <= walk.faults < 4)
    assert walk.clean == undisturbed.clean >= 3
    assert topologies.held(walk.optimizer) == topologies.held(undisturbed.optimizer), "as if never broken"


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


def norm_and_clipped_step_are_those_of_one_process(name: str) -> None:
    single = topologies.single(name, torch.float32).double()
    topologies.loss_of(single(topologies.batch(0, torch.float64))).backward()
    expected = torch.cat([p.grad.flatten() for p in single.parameters() if p.grad is not None]).norm().item()
    found, off = [], []
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
        weights = dict(one.named_parameters())
        off.append(max((value - weights[key]).abs().max().item() for key, value in spread.whole().items()))
        found.append(float(norm))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    assert expected > 10 * MAX_NORM
    # fp32 gradients, summed over ranks in another order. A copy counted twice would change the norm by 1%.
    assert found == pytest.approx([expected] * len(found), rel=2**-20)
    assert of_ranks == [found] * len(of_ranks), "ranks have different bits"
    assert max(off) < 2**-22  # weights of about 1, moved by up to 1e-2


# ------------------------------------------------------------------------------------- where torch's scaler goes wrong


def torchs_optimizers_skip_on_all_ranks_what_one_found(name: str, broken: int, make: Any) -> None:
    """And step where plain tensors stand beside DTensors, which torch's scaler refuses. The first of two steps has an
    Inf in the gradient of a rank (-1: none)."""
    spread = TOPOLOGIES[name](torch.float32)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0, process_group=spread.process_group)
    optimizer, taken = spread.optimizer_of(make), []
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
    assert (taken, scaler.get_scale()) == ([broken == -1, True], 8.0 if broken == -1 else 4.0)


# ------------------------------------------------------------------------------------------------------------ special


def two_optimizers_on_different_meshes_have_one_scale() -> None:
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
    assert (taken, scaler.get_scale()) == ([[dist.get_rank() < 2, True], [True, True]], 4.0)


def a_pipeline_stage_without_gradients_takes_part() -> None:
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
    assert (skipped, scaler.get_scale(), bool(norm.isfinite())) == ([False, True], 4.0, False)


def ranks_without_gradients_do_not_keep_others_waiting_at_lr_zero() -> None:
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
    holds = any(p.numel() for p in parameters_of(optimizer))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, holds)
    assert set(of_ranks) == {True, False}
    assert steps == ([2] if holds else [])  # the first step, with gradients of 0, is not counted


def flat_parameters_whose_ranks_are_unknown_are_refused_with_the_remedy() -> None:
    """Their modules are not known, and so the ranks that share a flat parameter."""
    spread = TOPOLOGIES["FSDP1 FULL_SHARD"](torch.float32)
    optimizer = spread.optimizer_of(ours)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0)
    spread.backward(scaler, 0, torch.float32)
    wrappers._wrappers.clear()
    message = error_of(RuntimeError, lambda: scaler.step(optimizer))
    remedy = halfstep.GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    remedy.scale(torch.zeros(()))
    if dist.get_rank() == 2:
        topologies.break_shard(optimizer, 3, INF)
    remedy.step(optimizer)
    remedy.update()
    assert "parameter 0 of the optimizer was flattened by FullyShardedDataParallel" in message
    assert "pass GradScaler(process_group=...)" in message and remedy.last_step_skipped()


def tensor_parallelism_inside_flat_parameters_is_refused() -> None:
    """FSDP1 stores local tensors of DTensors: the flat parameter does not show their other sharding."""
    mesh, cpu = mesh_of("dp", "tp"), torch.device("cpu")
    net = Net(torch.float32)
    parallelize_module(net, mesh["tp"], {name: style() for name, style in topologies.PLAN.items()})
    model = FullyShardedDataParallel(net, device_mesh=mesh["dp"], use_orig_params=True, device_id=cpu)
    spread = topologies.Spread(net, model)
    optimizer, scaler = spread.optimizer_of(ours), halfstep.GradScaler("cpu", init_scale=8.0)
    spread.backward(scaler, 0, torch.float32)
    message = error_of(RuntimeError, lambda: scaler.step(optimizer))
    assert "was flattened by FullyShardedDataParallel together with tensor parallelism" in message
    assert "use torch.distributed.fsdp.fully_shard" in message


def sequence_parallelism_without_a_scaler() -> None:
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
    assert max((whole[key] - value).abs().max().item() for key, value in one.named_parameters()) < 2**-22


def what_is_known_of_an_optimizer_ends_with_it_and_with_its_parameters() -> None:
    """The scaler keeps no model alive, and determines the topology of parameters at reused addresses again."""
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
    assert (len(scaler._checkers), scaler.last_step_skipped()) == (1, True)


def a_step_costs_one_reduction_of_two_numbers_and_no_memory(name: str) -> None:
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
    assert reduced == ([] if name in SINGLE else [2])
    allowed = {"aten.copy_.default", "aten.add_.Tensor", "aten.zero_.default", "aten.gt.Scalar_out"}
    allowed.add("c10d.allreduce_.default")
    if "sequence" in name:  # the partial sums are formed in new tensors
        allowed |= {operation for operation in operations.names if operation.startswith("_c10d_functional.")}
    assert set(operations.names) <= allowed


def _in_topologies(sample: bool) -> dict[str, Callable[[], None]]:
    checks = (
        a_fault_on_any_rank_is_skipped_by_all_and_leaves_every_bit,
        norm_and_clipped_step_are_those_of_one_process,
        a_step_costs_one_reduction_of_two_numbers_and_no_memory,
    )
    names = [name for name in TOPOLOGIES if (name in SAMPLE) == sample]
    return {f"{check.__name__}, {name}": partial(check, name) for check in checks for name in names}


ON_FOUR_RANKS: dict[str, Callable[[], None]] = {
    **_in_topologies(True),
    **{
        f"{torchs_optimizers_skip_on_all_ranks_what_one_found.__name__}, {name}, {make.__name__}": partial(
            torchs_optimizers_skip_on_all_ranks_what_one_found, name, broken, make
        )
        for name, broken in (("TP and FSDP2, norm first", 3), ("TP beside plain tensors", -1), ("pipeline of FSDP2", 3))
        for make in (fused, unfused)
    },
    **{
        case.__name__: case
        for case in (
            two_optimizers_on_different_meshes_have_one_scale,
            a_pipeline_stage_without_gradients_takes_part,
            ranks_without_gradients_do_not_keep_others_waiting_at_lr_zero,
            sequence_parallelism_without_a_scaler,
            what_is_known_of_an_optimizer_ends_with_it_and_with_its_parameters,
            tensor_parallelism_inside_flat_parameters_is_refused,
            flat_parameters_whose_ranks_are_unknown_are_refused_with_the_remedy,  # the last one: it forgets all others
        )
    },
}
EVERY_CASE_ON_FOUR_RANKS = _in_topologies(False)
