"""Steps inside the backward, and on the host, on two ranks: the bits of a step after it, and few gradients.

For test_cases_on_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from errors import error_of
from keeping import can_keep
from shard_ranks import IN_FP32, whole
from states import same_bits
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Linear, Module, Sequential, Tanh
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.integrations.fsdp import keep_reduced_gradients
from halfstep.integrations.offload import OffloadedAdamW
from halfstep.integrations.release import step_in_backward
from halfstep.numerics.planning import plan, unit
from halfstep.numerics.scaling.sharding import local
from halfstep.numerics.scaling.stand_ins import gradient_of

WORLD = 2
STEPS = 4


def model_of(width: int = 7) -> Sequential:
    torch.manual_seed(0)
    # 7 rows over 2 ranks are uneven.
    return Sequential(*[Sequential(Linear(6, width), Tanh(), Linear(width, 6)) for _ in range(8)]).bfloat16()


def _loss(model: Module, step: int) -> torch.Tensor:
    part = dist.get_rank() if isinstance(model, FSDPModule) else 0
    inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + part))
    return model(inputs.to(next(model.parameters()).dtype)).float().square().mean()


def _fsdp2(**options: Any) -> Sequential:
    model = model_of()
    for block in model:
        fully_shard(block, mp_policy=IN_FP32, **options)
    return fully_shard(model, mp_policy=IN_FP32, **options)


def _fsdp2_fp16() -> Sequential:
    model = model_of().half()
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def _kept() -> Sequential:
    model = _fsdp2()
    keep_reduced_gradients(model)
    return model


def _replicated() -> Sequential:
    return _fsdp2(mesh=dist.init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard")))


def _tensor_parallel() -> Sequential:
    model = model_of(width=8)
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


MODELS: dict[str, Callable[[], Sequential]] = {
    "FSDP2": _fsdp2,
    "FSDP2, offloaded": lambda: _fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "HSDP that only replicates": _replicated,
    "tensor parallelism": _tensor_parallel,
}
if can_keep():
    MODELS["FSDP2 with fp32 gradients"] = _kept


def _storages(model: Module) -> dict[int, int]:
    """Bytes of the storages of this rank's gradients, by address. Under FSDP2 those of a unit share one."""
    storages = [local(p.grad).untyped_storage() for p in model.parameters() if gradient_of(p) is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _whole_state(optimizer: halfstep.AdamW) -> dict[str, torch.Tensor]:
    state = optimizer.canonical_state_dict()["state"]
    return {f"{number} {key}": whole(value) for number, one in state.items() for key, value in one.items()}


def all_have(value: Any) -> bool:
    """Whether all ranks have the same bits. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(same_bits(other, value) for other in values)


def trained(make: Callable[[], Sequential], bucket_bytes: int | None, micro_batches: int = 1) -> dict[str, Any]:
    """The unsharded state after some steps, and bytes: most of all storages at a time, and each of them and bucket."""
    model = make()
    seen: list[dict[int, int]] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(_storages(model)))
    optimizer = halfstep.AdamW(model.parameters(), lr=0.01, master_weights="split24", rounding="stochastic")
    handle = None if bucket_bytes is None else step_in_backward(model, optimizer, bucket_bytes=bucket_bytes)
    for step in range(STEPS):
        for micro in range(micro_batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro + 1 == micro_batches)
            _loss(model, micro_batches * step + micro).backward()
        if handle is not None:
            assert _storages(model) == {}
            message = error_of(RuntimeError, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            assert "call step_in_backward with clipping='exact' or 'previous'" in message
        optimizer.step()
        if handle is None or step % 2:  # after the first step, the next gradients replace the stand-ins
            optimizer.zero_grad()
    return {
        "state": _whole_state(optimizer),
        "peak": max(sum(storages.values()) for storages in seen),
        "largest": max(size for storages in seen for size in storages.values()),
        "buckets": [] if handle is None else handle.buckets,
    }


def bits_and_memory_of_steps_in_the_backward(name: str) -> None:
    """The gradients of one bucket exist, and those that share its memory."""
    after = trained(MODELS[name], None)
    assert after["state"] and all_have(after["state"])
    for size in (1, 150):
        inside = trained(MODELS[name], size)
        assert same_bits(inside["state"], after["state"])
        assert len(inside["buckets"]) > 3 and sum(inside["buckets"]) <= after["peak"]
        assert inside["peak"] <= size + 2 * inside["largest"] <= after["peak"] / 2
        if name == "FSDP2":
            blocks = [unit("block", [p.shape for p in block.parameters()]) for block in model_of()]
            planned = plan(units=blocks, gpus=2, strategy="fsdp", step_in_backward=size)
            assert planned.part("gradients").bytes == size + 2 * inside["largest"]


def accumulated_steps() -> None:
    after, inside = (trained(_fsdp2, size, micro_batches=2) for size in (None, 150))
    assert same_bits(inside["state"], after["state"])


def clipped(make: Callable[[], Sequential], how: str | None, scaled: bool = False) -> dict[str, Any]:
    """The unsharded state and the norms of some steps that clip, after the backward or inside it.

    Args:
        make: makes the model.
        how: None for steps after the backward, "kept graph" or "computed again" for the second backward of a step.
        scaled: whether the loss is scaled. In the second step it overflows on the last rank.
    """
    model = make()
    optimizer = halfstep.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.02)
    scaler = halfstep.GradScaler("cpu", enabled=scaled)
    handle = None
    if how is not None:
        passed = scaler if scaled else None
        handle = step_in_backward(model, optimizer, bucket_bytes=150, clipping="exact", scaler=passed)
    norms = []

    def loss(step: int) -> torch.Tensor:
        overflows = scaled and step == 1 and dist.get_rank() == WORLD - 1
        return scaler.scale(_loss(model, step) * (float("inf") if overflows else 1.0))

    for step in range(3):
        scaled_loss = loss(step)
        if handle is not None:
            with handle.check():
                scaled_loss.backward(retain_graph=how == "kept graph")
            assert _storages(model) == {}
            if how == "computed again":
                scaled_loss = loss(step)
        scaled_loss.backward()
        assert handle is None or _storages(model) == {}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        norms.append(str(optimizer.grad_norm))
    return {"state": _whole_state(optimizer), "norms": norms, "skipped": scaler.skips_known() if scaled else None}


def exact_clipping_has_the_bits_of_steps_after_the_backward(
    make: Callable[[], Sequential], hows: tuple[str, ...], scaled: bool = False
) -> None:
    """Scaled, the last rank alone overflows in the second step, which all ranks skip."""
    expected = clipped(make, None, scaled)
    assert all_have(expected) and expected["skipped"] == (1 if scaled else None)
    assert (expected["norms"][1] == "tensor(nan)") == scaled and len(set(expected["norms"])) == 3
    for how in hows:
        assert same_bits(clipped(make, how, scaled), expected), how


def previous_norms_are_those_of_all_ranks() -> None:
    """Rank 0 resumes after two steps."""
    model = _fsdp2()
    optimizer = halfstep.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.02)
    handle = step_in_backward(model, optimizer, bucket_bytes=150, clipping="previous")
    norms = []
    for step in range(STEPS):
        _loss(model, step).backward()
        optimizer.step()
        norms.append(str(optimizer.grad_norm))
        if step == 1 and dist.get_rank() == 0:
            handle.load_state_dict(handle.state_dict())
    state, exact = _whole_state(optimizer), clipped(_fsdp2, None)
    assert all_have([norms, state])
    assert norms[0] == exact["norms"][0] and not same_bits(state, exact["state"])


def a_check_refuses_gradients_that_were_not_reduced() -> None:
    model = _fsdp2()
    optimizer = halfstep.AdamW(model.parameters(), max_grad_norm=1.0)
    model.set_requires_gradient_sync(False)
    _loss(model, 0).backward()
    handle = step_in_backward(model, optimizer, clipping="exact")
    assert "Expected no gradient before check()" in error_of(RuntimeError, lambda: handle.check().__enter__())


def an_offloaded_optimizer_under_ddp() -> None:
    """Its gradients are copied at the step, when they are reduced."""
    states = []
    for cls, options in ((halfstep.AdamW, {}), (OffloadedAdamW, {"in_backward": None})):
        model = model_of()
        wrapped = DistributedDataParallel(model)
        optimizer = cls(model.parameters(), lr=0.01, max_grad_norm=0.02, **options)
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            wrapped(inputs.bfloat16()).float().square().mean().backward()
            optimizer.step()
        states.append(_whole_state(optimizer))
    assert same_bits(*states)
    optimizer = OffloadedAdamW(model.parameters())
    assert error_of(RuntimeError, lambda: wrapped(torch.ones(3, 6, dtype=torch.bfloat16)).sum().backward()) == (
        "Expected the model not to be wrapped by DistributedDataParallel, whose gradients are reduced after they are "
        "complete: use in_backward=None, which copies them in step()"
    )
    assert error_of(TypeError, lambda: OffloadedAdamW(_fsdp2().parameters())) == (
        "Expected a parameter that is not sharded, but got one of shape (7, 6) under FSDP: use fully_shard(..., "
        "offload_policy=CPUOffloadPolicy()) with halfstep.AdamW, which steps on the host too"
    )


def ddp_is_refused_before_anything_changes() -> None:
    advice = (
        "DistributedDataParallel, whose buckets keep all gradients and are reduced after the step: for replicas, use "
        "fully_shard with a mesh of (ranks, 1)"
    )
    model = DistributedDataParallel(model_of())
    optimizer = halfstep.AdamW(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert error_of(ValueError, lambda: step_in_backward(model, optimizer)) == (
        f"Expected model not to be wrapped, but module '' is a {advice}"
    )
    step_in_backward(model.module, optimizer)
    message = error_of(RuntimeError, lambda: _loss(model, 0).backward())
    assert message == f"Expected the model not to be wrapped by {advice}"
    assert all(map(torch.equal, before, model.parameters()))


BOTH = ("kept graph", "computed again")
CASES: dict[str, Callable[[], None]] = {
    **{name: partial(bits_and_memory_of_steps_in_the_backward, name) for name in MODELS},
    "accumulated": accumulated_steps,
    "clipped FSDP2": partial(exact_clipping_has_the_bits_of_steps_after_the_backward, _fsdp2, BOTH),
    "clipped TP": partial(exact_clipping_has_the_bits_of_steps_after_the_backward, _tensor_parallel, BOTH[:1]),
    "scaled FSDP2": partial(exact_clipping_has_the_bits_of_steps_after_the_backward, _fsdp2_fp16, BOTH[1:], True),
    "previous norms": previous_norms_are_those_of_all_ranks,
    "a check before a reduction": a_check_refuses_gradients_that_were_not_reduced,
    "offloaded under DDP": an_offloaded_optimizer_under_ddp,
    "DDP, refused": ddp_is_refused_before_anything_changes,
}
