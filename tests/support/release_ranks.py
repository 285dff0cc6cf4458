"""Steps inside the backward, and on the host, on two ranks: the bits of a step after it, and few gradients.

For test_cases_on_ranks.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from errors import error_of, refuses
from shard_ranks import IN_FP32, whole
from states import same_bits
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Linear, Module, Sequential, Tanh
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.integrations.fsdp import keep_reduced_gradients, send_gradients_in_16_bits
from halfstep.integrations.offload import OffloadedAdamW, OffloadedMuon
from halfstep.integrations.release import step_in_backward
from halfstep.numerics.planning import plan, unit
from halfstep.numerics.scaling.sharding import local
from halfstep.numerics.scaling.stand_ins import gradient_of

WORLD = 2
STEPS = 3


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
    model = _fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False))
    keep_reduced_gradients(model)
    send_gradients_in_16_bits(model)
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
    "HSDP that only replicates": _replicated,
    "tensor parallelism": _tensor_parallel,
    "FSDP2 offloaded, with fp32 gradients": _kept,
}


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
    for size in (1, 150) if name == "FSDP2" else (150,):
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

    `how` is None for steps after the backward, "kept graph" or "computed again" for the second backward of a step. A
    `scaled` loss overflows in the second step on the last rank.
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
    text = (
        "no gradient before check(), which frees the gradients, but got some of an earlier backward: call zero_grad()"
    )
    refuses(RuntimeError, text, lambda: handle.check().__enter__())


class Skipping(Module):
    """Blocks, of which this rank does not use the third in its own steps, so that in one step nobody uses it."""

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


def replicas(
    bucket_bytes: int | None, clipping: Any, limit: float | None, scaled: bool, accumulated: bool
) -> dict[str, Any]:
    """The state after some steps of replicas with gradients of their own: under DDP, or inside the backward."""
    torch.manual_seed(dist.get_rank())
    model = Skipping(torch.float16 if scaled else torch.bfloat16)
    if dist.get_rank() == 1:  # DDP and we take the parameters of the first rank
        torch.nn.init.normal_(next(model.parameters()))
        model.seen.fill_(7)
    optimizer = halfstep.AdamW(model.parameters(), lr=0.01, max_grad_norm=limit)
    scaler = halfstep.GradScaler("cpu", enabled=scaled)
    wrapped: Any = model
    handle: Any = None
    if bucket_bytes is None:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        options: Any = {"bucket_bytes": bucket_bytes, "clipping": clipping, "scaler": scaler if scaled else None}
        handle = step_in_backward(model, optimizer, process_group=dist.group.WORLD, **options)
    assert model.seen.tolist() == [0, 0]
    seen = [0]

    def note(_: torch.Tensor) -> None:
        """The bytes of the gradients of this rank, and of the bucket that is being reduced, in the first step."""
        running = None if handle is None else handle._reduction._running
        size = sum(_storages(model).values()) + (0 if running is None else running[2].untyped_storage().nbytes())
        seen.append(size if model.step == 0 else 0)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)

    def loss(step: int, micro: int = 0) -> torch.Tensor:
        model.step = step
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank()))
        factor = float("inf") if scaled and step == 2 and dist.get_rank() == 1 else 1.0
        output = wrapped(inputs.to(model.blocks[0][0].weight.dtype)).float()
        return scaler.scale(output.square().mean() * factor)

    logged = []
    for step in range(5):
        if accumulated:
            with wrapped.no_sync() if handle is None else handle.accumulate():
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
        "peak": sum(p.numel() * p.element_size() for p in model.parameters()) if handle is None else max(seen),
        "left": left,
        "logged": [*logged, scaler.skips_known() if scaled else 0],
        "buckets": [] if handle is None else handle.buckets,
    }


def replicas_have_the_bits_of_ddp(
    clipping: Any = None, limit: float | None = None, scaled: bool = False, accumulated: bool = False
) -> None:
    plain = clipping is None and not scaled and not accumulated
    expected = replicas(None, clipping, limit, scaled, accumulated)
    assert all_have(expected["state"])
    # In a bucket that is reduced, gradients begin at multiples of 16 bytes, and a mark of 2 bytes follows for each.
    for size, members, number in ((400, 17, 4), (1, 1, 32)) if plain else ((400, 17, 4),):
        inside = replicas(size, clipping, limit, scaled, accumulated)
        assert same_bits(inside["state"], expected["state"]) and inside["logged"] == expected["logged"]
        assert inside["left"] == 0 and len(inside["buckets"]) == number
        assert expected["peak"] == sum(inside["buckets"])
        most = 2 * (max(inside["buckets"]) + (14 + 2) * members)
        assert inside["peak"] <= most or accumulated
        if plain:
            shapes = [p.shape for p in model_of().parameters()]
            planned = plan(units=[unit("all", shapes)], gpus=2, step_in_backward=size).part("gradients").bytes
            assert inside["peak"] <= planned - 16 * (32 - 32 // len(inside["buckets"]))
            assert size > 1 or inside["peak"] < expected["peak"] / 6


def what_replicas_refuse() -> None:
    def started(model: Module, group: Any = None) -> halfstep.AdamW:
        optimizer = halfstep.AdamW(model.parameters())
        step_in_backward(model, optimizer, process_group=group or dist.group.WORLD)
        return optimizer

    model = model_of()
    model[0][0].weight.requires_grad_(dist.get_rank() == 0)
    refuses(ValueError, "'torch.bfloat16', False) where rank 0 has ('0.0.weight', (7, 6),", lambda: started(model))
    refuses(ValueError, "but it is sharded: FSDP2 and HSDP average their", lambda: started(_fsdp2()))
    model = model_of()
    model[0][0].weight.requires_grad_(False)
    optimizer = started(model)
    model[0][0].weight.requires_grad_(True)
    _loss(model, 0).backward()
    refuses(RuntimeError, "but got some that no backward has averaged over its ranks: call", optimizer.step)
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        started(model_of(), group)
    else:
        refuses(ValueError, "None or a group that contains this rank, but got ", lambda: started(model_of(), group))


def an_offloaded_optimizer_under_ddp() -> None:
    """Its gradients are copied at the step, when they are reduced."""
    states = []
    for cls in (halfstep.AdamW, OffloadedAdamW, halfstep.Muon, OffloadedMuon):
        model = model_of()
        wrapped = DistributedDataParallel(model)
        groups = halfstep.muon_groups(model) if issubclass(cls, halfstep.Muon) else model.parameters()
        options: dict[str, Any] = {"in_backward": None} if cls in (OffloadedAdamW, OffloadedMuon) else {}
        optimizer = cls(groups, lr=0.01, max_grad_norm=0.02, **options)
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            wrapped(inputs.bfloat16()).float().square().mean().backward()
            optimizer.step()
        states.append(_whole_state(optimizer))
    assert same_bits(*states[:2]) and same_bits(*states[2:])
    optimizer = OffloadedAdamW(model.parameters())
    backward = wrapped(torch.ones(3, 6, dtype=torch.bfloat16)).sum().backward
    refuses(RuntimeError, "are reduced after they are complete: use in_backward=None, which copies them", backward)


def ddp_is_refused_before_anything_changes() -> None:
    advice = "DistributedDataParallel, whose buckets keep all gradients and are reduced after the step: pass the inner"
    model = DistributedDataParallel(model_of())
    optimizer = halfstep.AdamW(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    refuses(ValueError, f"but module '' is a {advice}", lambda: step_in_backward(model, optimizer))
    step_in_backward(model.module, optimizer)
    refuses(RuntimeError, f"the model not to be wrapped by {advice}", lambda: _loss(model, 0).backward())
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
    "replicas": replicas_have_the_bits_of_ddp,
    "replicas, accumulated": partial(replicas_have_the_bits_of_ddp, accumulated=True),
    "replicas, clipped": partial(replicas_have_the_bits_of_ddp, "exact", 0.02),
    # A limit that no norm reaches: the steps of DDP, and the same norms.
    "replicas, previous": partial(replicas_have_the_bits_of_ddp, "previous", 1e9),
    "replicas, scaled": partial(replicas_have_the_bits_of_ddp, scaled=True),
    "replicas, refused": what_replicas_refuse,
    "offloaded under DDP": an_offloaded_optimizer_under_ddp,
    "DDP, refused": ddp_is_refused_before_anything_changes,
}
