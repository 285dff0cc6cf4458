"""A rank of two that steps inside the backward, for tests/integrations/distributed/test_release.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from keeping import can_keep
from shard_ranks import IN_FP32, whole
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Linear, Module, Sequential, Tanh
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.integrations.fsdp import keep_reduced_gradients
from halfstep.integrations.offload import OffloadedAdamW
from halfstep.integrations.release import step_in_backward
from halfstep.numerics.scaling.stand_ins import gradient_of
from halfstep.numerics.scaling.topology import local

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


def train(make: Callable[[], Sequential], bucket_bytes: int | None, micro_batches: int = 1) -> dict[str, Any]:
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
            message = _message(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            assert "call step_in_backward with clipping='exact' or 'previous'" in message
        optimizer.step()
        if handle is None or step % 2:  # after the first step, the next gradients replace the stand-ins
            optimizer.zero_grad()
    return {
        "state": _whole_state(optimizer),
        "peak": max(sum(one.values()) for one in seen),
        "largest": max(size for one in seen for size in one.values()),
        "buckets": [] if handle is None else handle.buckets,
    }


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
        found: torch.Tensor = scaler.scale(_loss(model, step) * (float("inf") if overflows else 1.0))
        return found

    for step in range(3):
        one = loss(step)
        if handle is not None:
            with handle.check():
                one.backward(retain_graph=how == "kept graph")
            assert _storages(model) == {}
            if how == "computed again":
                one = loss(step)
        one.backward()
        assert handle is None or _storages(model) == {}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        norms.append(str(optimizer.grad_norm))
    return {"state": _whole_state(optimizer), "norms": norms, "skipped": scaler.skips_known() if scaled else None}


def _by_previous_norms() -> dict[str, Any]:
    """As `clipped`, with the norms of the steps before. Rank 0 resumes after two steps."""
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
    return {"state": _whole_state(optimizer), "norms": norms}


def _accumulated_before_check() -> str:
    """What is raised where FSDP2 holds gradients that it has not reduced."""
    model = _fsdp2()
    optimizer = halfstep.AdamW(model.parameters(), max_grad_norm=1.0)
    model.set_requires_gradient_sync(False)
    _loss(model, 0).backward()
    handle = step_in_backward(model, optimizer, clipping="exact")
    return _message(lambda: handle.check().__enter__())


REPLICAS = ("replicas", "replicas, accumulated", "replicas, clipped", "replicas, previous", "replicas, scaled")


class Skipping(Module):
    """Blocks, of which this rank does not use the third in its own steps."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = model_of().to(dtype)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.step = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != 2 or self.step not in (1, 2 + dist.get_rank()):
                values = block(values)
        return values


def replicas(name: str, bucket_bytes: int | None) -> dict[str, Any]:
    """The state after some steps of replicas with gradients of their own: under DDP, or inside the backward."""
    scaled = "scaled" in name
    # With the norm of the last step, a limit that no norm reaches: the steps of DDP, and the same norms.
    clipping, limit = {"replicas, clipped": ("exact", 0.02), "replicas, previous": ("previous", 1e9)}.get(
        name, (None, None)
    )
    torch.manual_seed(dist.get_rank())
    model = Skipping(torch.float16 if scaled else torch.bfloat16)
    if dist.get_rank() == 1:  # DDP and we take the parameters of the first rank
        torch.nn.init.normal_(next(model.parameters()))
        model.seen.fill_(7)
    optimizer = halfstep.AdamW(model.parameters(), lr=0.01, max_grad_norm=limit)
    scaler = halfstep.GradScaler("cpu", enabled=scaled)
    used: Module = model
    handle = None
    if bucket_bytes is None:
        used = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        handle = step_in_backward(
            model,
            optimizer,
            bucket_bytes=bucket_bytes,
            clipping=clipping,
            scaler=scaler if scaled else None,
            process_group=dist.group.WORLD,
        )
    assert model.seen.tolist() == [0, 0]
    most = [0]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: most.append(_bytes_of(model, handle) if model.step == 0 else 0)
        )
    logged = []

    def loss(step: int, micro: int = 0) -> torch.Tensor:
        model.step = step
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank()))
        inf = scaled and step == 2 and dist.get_rank() == 1
        found: torch.Tensor = used(inputs.to(model.blocks[0][0].weight.dtype)).float().square().mean()
        scaled_loss: torch.Tensor = scaler.scale(found * (float("inf") if inf else 1.0))
        return scaled_loss

    for step in range(5):
        if "accumulated" in name:
            with used.no_sync() if handle is None else handle.accumulate():  # type: ignore[operator]
                loss(step, 1).backward()
        if handle is not None and (scaled or clipping == "exact"):
            with handle.check():
                loss(step).backward()
        loss(step).backward()
        scaler.step(optimizer)
        scaler.update()
        logged.append(str(optimizer.grad_norm))
        left = sum(gradient_of(parameter) is not None for parameter in model.parameters())
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return {
        "state": _whole_state(optimizer),
        "peak": sum(p.numel() * p.element_size() for p in model.parameters()) if handle is None else max(most),
        "left": left,
        "logged": [*logged, scaler.skips_known() if scaled else 0],
        "buckets": [] if handle is None else handle.buckets,
    }


def _bytes_of(model: Module, handle: Any) -> int:
    """Bytes of the gradients of this rank, and of the bucket that is being reduced."""
    running = None if handle is None else handle._reduction._running
    return sum(_storages(model).values()) + (0 if running is None else running[2].untyped_storage().nbytes())


def offloaded() -> dict[str, Any]:
    """Steps on the host under DDP beside those on the device, and what is refused."""
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
    optimizer = OffloadedAdamW(model.parameters())

    def in_backward() -> None:
        wrapped(torch.ones(3, 6, dtype=torch.bfloat16)).sum().backward()

    refused = [_message(in_backward), _message(lambda: OffloadedAdamW(_fsdp2().parameters()))]
    return {"device": states[0], "host": states[1], "refused": refused}


def _refused_replicas() -> list[str]:
    def frozen() -> None:
        model = model_of()
        optimizer = halfstep.AdamW(model.parameters())
        model[0][0].weight.requires_grad_(dist.get_rank() == 0)
        step_in_backward(model, optimizer, process_group=dist.group.WORLD)

    def sharded() -> None:
        model = _fsdp2()
        step_in_backward(model, halfstep.AdamW(model.parameters()), process_group=dist.group.WORLD)

    def later() -> None:
        model = model_of()
        model[0][0].weight.requires_grad_(False)
        optimizer = halfstep.AdamW(model.parameters())
        step_in_backward(model, optimizer, process_group=dist.group.WORLD)
        model[0][0].weight.requires_grad_(True)
        _loss(model, 0).backward()
        optimizer.step()

    return [_message(call) for call in (frozen, sharded, later)]


def _outside() -> str:
    group = dist.new_group([0])
    model = model_of()
    return _message(lambda: step_in_backward(model, halfstep.AdamW(model.parameters()), process_group=group))


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def _refused(wrapped_is_passed: bool) -> str:
    model = DistributedDataParallel(model_of())
    optimizer = halfstep.AdamW(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        step_in_backward(model if wrapped_is_passed else model.module, optimizer)
        _loss(model, 0).backward()
    except (ValueError, RuntimeError) as error:
        assert all(map(torch.equal, before, model.parameters()))
        return str(error)
    return ""


def run(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {size: train(make, size) for size in (None, 1, 150)} for name, make in MODELS.items()
    }
    found["accumulated"] = {size: train(_fsdp2, size, micro_batches=2) for size in (None, 150)}
    found["clipped FSDP2"] = {how: clipped(_fsdp2, how) for how in (None, "kept graph", "computed again")}
    found["clipped tensor parallelism"] = {how: clipped(_tensor_parallel, how) for how in (None, "kept graph")}
    found["scaled"] = {how: clipped(_fsdp2_fp16, how, scaled=True) for how in (None, "computed again")}
    found["previous"] = _by_previous_norms()
    found["accumulated before a check"] = _accumulated_before_check()
    for name in REPLICAS:
        found[name] = {size: replicas(name, size) for size in ((None, 400, 1) if name == "replicas" else (None, 400))}
    found["refused replicas"], found["outside"] = _refused_replicas(), _outside()
    found["offloaded"] = offloaded()
    found["refused"] = [_refused(True), _refused(False)]
    return found
