"""Optimizers on the host whose parameters are DTensors: cases of ranks, for test_cases_on_ranks.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rule_ranks import loss_of, net, optimizer_of, sharded
from stream_model import Model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.fsdp import keep_reduced_gradients
from halfstep.integrations.offload import OffloadedAdamW, OffloadedMuon, OffloadedSGD
from halfstep.integrations.optim.state import like
from halfstep.numerics.planning import plan, unit
from halfstep.numerics.scaling.sharding import local

LAYOUTS: dict[str, dict[str, Any]] = {
    "split": {},
    "split24, 8 bits": {"master_weights": "split24", "state_dtype": "8bit"},
    "full, bf16": {"master_weights": "full", "state_dtype": torch.bfloat16},
    "no master, stochastic": {"master_weights": None, "rounding": "stochastic"},
}
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.01}


def optimizer_for(
    model: torch.nn.Module, layout: str = "split", where: Any = "device", muon: bool = False, **options: Any
) -> Any:
    """AdamW, or Muon, on the device, or on the host with `where` as `in_backward`."""
    options = {**OPTIONS, **LAYOUTS[layout], **options}
    if where != "device":
        size = sum(local(parameter.detach()).nbytes for parameter in model.parameters())
        options |= {"in_backward": where, "bucket_bytes": 2 * size // 3}
    if muon:
        return optimizer_of("Muon", model, None if where == "device" else OffloadedMuon, **options)
    return (halfstep.AdamW if where == "device" else OffloadedAdamW)(model.parameters(), **options)


def backward(model: torch.nn.Module, scaler: Any, step: int, last: bool = True) -> None:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    scaler.scale(loss_of(model, step)).backward()


def train(model: torch.nn.Module, optimizer: Any, steps: range = range(4), scaler: Any = None) -> None:
    """The second step has two micro-batches, the third one overflows on a rank and is skipped, and before the fourth
    one other code writes a weight."""
    scaler = scaler or halfstep.GradScaler("cpu", init_scale=256.0)
    for step in steps:
        model.zero_grad()
        if step == 1:
            backward(model, scaler, 7, last=False)
        backward(model, scaler, step)
        if step == 2:
            next(model.parameters()).grad.mul_(torch.inf)  # type: ignore[union-attr]
        if step == 3:
            with torch.no_grad():
                model.up.bias.fill_(0.5)  # type: ignore[operator, union-attr]
        scaler.step(optimizer)
        scaler.update()


def shards(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Weights and states, whose order is not that of the steps."""
    states = optimizer.canonical_state_dict()["state"]
    numbers = sorted(states)
    return [*model.parameters(), *(states[number][key] for number in numbers for key in sorted(states[number]))]


def whole(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """The same, not sharded. Collective."""
    return [getattr(tensor, "full_tensor", tensor.clone)().detach() for tensor in shards(model, optimizer)]


def shards_have_the_bits_of_the_device_and_of_one_process(cut: str, layouts: Iterable[str], muon: bool = False) -> None:
    """Without and with clipping: the sum of squares is rounded to fp32 in each chunk, and chunks depend on shards, so
    that norms of one process differ in the last bit."""
    different = []
    for layout in layouts:
        for limit in (None, 0.5):
            results = []
            for model, where in ((net(), "device"), (sharded(cut), "device"), (sharded(cut), "copy")):
                optimizer = optimizer_for(model, layout, where, muon, max_grad_norm=limit)
                train(model, optimizer)
                results.append(whole(model, optimizer))
            expected = results[:2] if limit is None else results[1:2]
            different += [f"{layout}, {limit}" for one in expected if not all(map(torch.equal, one, results[2]))]
    assert different == []


class Net(torch.nn.Module):
    """A block that is used twice, one that odd steps use, and one that fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 64)
        self.block, self.sometimes = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 33)
        self.step, self.fails = 0, False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.fails and x.requires_grad:
            x.register_hook(_raise)
        x = torch.tanh(self.block(torch.tanh(self.block(x))))
        return self.head(self.sometimes(x) if self.step % 2 else x)  # type: ignore[no-any-return]


def _raise(grad: torch.Tensor) -> None:
    raise RuntimeError("in the backward")


POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def made(
    dtype: torch.dtype = torch.bfloat16, keeps: bool = False, recomputes: bool = False, device: str = "cpu"
) -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = Net().to(dtype)
    if recomputes:
        apply_activation_checkpointing(model, check_fn=lambda module: module is model.block)
    for module in (model.block, model.sometimes, model):
        fully_shard(module, mesh=mesh, mp_policy=POLICY)
    if keeps:
        keep_reduced_gradients(model)
    return model


def loss(model: Any, step: int) -> torch.Tensor:
    """Of another batch on each rank."""
    model.step = step
    tokens = torch.randint(16, (8,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return model(tokens.to(model.head.weight.device)).float().square().mean()  # type: ignore[no-any-return]


def plain(model: Any, optimizer: Any) -> None:
    for step in range(4):
        model.set_requires_gradient_sync(step != 1)
        loss(model, step).backward()
        if step != 1:
            optimizer.step()
            model.zero_grad()


def clipped_by_torch(model: Any, optimizer: Any) -> None:
    """With torch's scaler, gradients set to 0, gathered ones, and weights that are written without a trace."""
    device = model.head.weight.device.type
    scalers = torch.amp.GradScaler if device == "cpu" else halfstep.GradScaler  # torch's takes no bf16 on a GPU
    scaler = scalers(device, init_scale=2.0**8)
    for step in range(5):
        scaler.scale(loss(model, step)).backward()
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            local(model.head.weight.grad).view(-1)[:1] = torch.inf
        scaler.unscale_(optimizer)
        optimizer.param_groups[0]["lr"] = 0.01 + float(model.head.weight.grad.full_tensor().isfinite().sum()) / 1e6
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        local(model.head.weight).data.mul_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert scaler.get_scale() == 2.0**7


def interrupted(model: Any, optimizer: Any) -> None:
    """By a state that is saved and loaded before the step, an exception in a backward, and gradients that one rank
    does not have."""
    for step in range(4):
        loss(model, step).backward()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 2:
            optimizer.zero_grad()
            model.fails = True
            with suppress(RuntimeError):
                loss(model, 2).backward()
            model.fails = False
            optimizer.zero_grad()
            loss(model, 3).backward()
        if step == 3 and dist.get_rank() == 1:
            model.zero_grad()
        halfstep.GradScaler("cpu", enabled=False).clip_grad_norm_(optimizer, 0.03)
        optimizer.step()
        optimizer.zero_grad()


# What is trained, the arguments of `made`, options of the optimizer, and values of in_backward.
PROGRAMS: dict[str, tuple[Callable[[Any, Any], None], dict[str, Any], dict[str, Any], tuple[Any, ...]]] = {
    "steps in the backward": (plain, {}, {"state_dtype": "8bit"}, ("step",)),
    "recomputed": (plain, {"recomputes": True}, {}, ("copy", "step", None)),
    "fp32": (plain, {"dtype": torch.float32}, {"max_grad_norm": 0.02}, ("copy",)),
    "kept fp32 gradients": (plain, {"keeps": True}, {"max_grad_norm": 0.02}, ("copy",)),
    "clipped by torch": (clipped_by_torch, {}, {"master_weights": "full"}, ("copy", None)),
    "interrupted": (interrupted, {}, {"max_grad_norm": 0.02}, ("copy", None)),
}


def what_users_do_has_the_bits_of_the_device(name: str, muon: bool = False) -> None:
    program, options, of_optimizer, modes = PROGRAMS[name]
    results = []
    for where in ("device", *modes):
        if muon and where == "step":
            continue
        model = made(**options)
        optimizer = optimizer_for(model, "split", where, muon, **of_optimizer)
        program(model, optimizer)
        results.append(whole(model, optimizer))
    assert [number for number, other in enumerate(results) if not same(results[0], other)] == []


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def partial_sums_of_gradients_are_added_before_they_leave() -> None:
    """All numbers are integers, so that sums have the same bits in every order."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = []
    for cls in (halfstep.SGD, OffloadedSGD):
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
        optimizer = cls([weight], lr=0.5, max_grad_norm=1.0)
        for micro in range(2):
            rows = torch.randint(
                -3, 4, (2, 4), generator=torch.Generator().manual_seed(10 * micro + mesh.get_rank())
            ).float()
            (DTensor.from_local(rows, mesh, [Shard(0)]) @ weight).square().sum().backward()
        optimizer.step()
        weights.append(local(weight.detach()))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, weights[0])
    assert not torch.equal(weights[0], torch.ones(4, 4)) and same([weights[0]] * 3, [weights[1], *of_ranks])


def saved(rank: int, where: str, muon: bool, folder: Path) -> tuple[list[str], list[torch.Tensor]]:
    """Checkpoints after three steps, as held and canonical, and weights and states after two more steps."""
    model = sharded("rows")
    optimizer = optimizer_for(model, "split24, 8 bits", where, muon)
    train(model, optimizer, range(3))
    forms: tuple[Any, ...] = ("held", "canonical")
    paths = [
        checkpoint.save(folder / form, 3, model=model, optimizer=optimizer, optimizer_state=form) for form in forms
    ]
    train(model, optimizer, range(3, 5))
    return list(map(str, paths)), whole(model, optimizer)


def continued(rank: int, ranks: int, paths: list[str], wheres: list[str], muon: bool) -> list[list[torch.Tensor]]:
    """Weights and states after two more steps from each checkpoint, which replaces another state."""
    results = []
    for path, where in product(paths, wheres):
        model = sharded("rows") if ranks > 1 else net(1)
        optimizer = optimizer_for(model, "split24, 8 bits", where, muon, lr=0.5)
        train(model, optimizer, range(1))
        checkpoint.load(path, model=model, optimizer=optimizer)
        train(model, optimizer, range(3, 5))
        results.append(whole(model, optimizer))
    return results


def a_state_is_saved_while_a_first_backward_is_stepped() -> None:
    """And has the weights and states of a step on the device, when it is loaded."""
    results = []
    for where in ("device", "step"):
        model = made()
        optimizer = optimizer_for(model, "split24, 8 bits", where)
        if where == "step":
            submit = optimizer._submit
            optimizer._submit = lambda call, submit=submit: submit(partial(_later, call))
        loss(model, 1).backward()
        if where == "device":
            optimizer.step()
        else:
            assert optimizer.clip_grad_norm_(torch.inf).isnan()  # which trainers log
            state = get_optimizer_state_dict(model, optimizer)
            weights = get_model_state_dict(model)
            model = made()
            optimizer = optimizer_for(model, "split24, 8 bits", "copy")
            set_model_state_dict(model, weights)
            set_optimizer_state_dict(model, optimizer, state)
        results.append(whole(model, optimizer))
    assert same(*results)


def _later(call: Callable[[], None]) -> None:
    time.sleep(0.05)
    call()


def the_bytes_are_those_planned(muon: bool) -> None:
    """After a step of two ranks: on the host, of weights and gradients on the device, and copied in a step."""
    model = made()
    optimizer = optimizer_for(model, "split", "copy", muon)
    loss(model, 1).backward()
    optimizer.step()
    mirrors = list(optimizer._mirrors.values())
    on_host = [local(tensor) for mirror in mirrors for tensor in (mirror.host, mirror.host.grad)]
    on_host += [local(value) for state in optimizer.state.values() for value in state.values()]
    counted = {
        "host": _storages(on_host),
        "weights": _storages([local(parameter.detach()) for parameter in model.parameters()]),
        "gradients": _storages([local(parameter.grad) for parameter in model.parameters()]),
        "copied": 3 * sum(mirror.weight.nbytes for mirror in mirrors),
    }
    inner = (model.block, model.sometimes)
    root = {"embed": _shape(model.embedding.weight), "head": _shape(model.head.weight), "bias": _shape(model.head.bias)}
    units = [unit("block", [*map(_shape, module.parameters())]) for module in inner] + [unit("root", root, root=True)]
    name = "halfstep-muon" if muon else "halfstep"
    settings: dict[str, Any] = {"strategy": "fsdp", "offload": True, "keep_weights": True, "optimizer": name}
    result = plan(units=units, gpus=2, rank=dist.get_rank(), **settings)
    copied = sum(message.bytes for message in result.communication if message.ranks == 1)
    weights, host = result.part("weights").bytes, result.totals.host
    if muon:  # the host is the device: the matrices are in one memory, and not copied
        matrices = result.part("scratch on the host").bytes
        host, copied = host - matrices, copied - 2 * matrices
        memory = optimizer._plans.scratch[torch.device("cpu"), 0, "parts"]
        assert memory.nbytes == matrices
    assert counted == {"host": host, "weights": weights, "gradients": 0, "copied": copied}


def matrices_are_exchanged_on_the_device() -> None:
    """On models of two GPUs, of which the ranks send copies on the host, in the order of the streams."""

    def all_to_all(into: torch.Tensor, source: torch.Tensor, *rest: Any, **options: Any) -> Any:
        received = torch.empty(into.shape, dtype=into.dtype)
        collective(received, source.cpu(), *rest, **(options | {"async_op": False}))
        into.copy_(received)
        return mock.Mock()

    collective, mesh, weights = dist.all_to_all_single, init_device_mesh("cpu", (dist.get_world_size(),)), []
    for order in (None, "late", "random"):
        random = torch.Generator().manual_seed(0)
        gpu = nullcontext(None) if order is None else Model(order)
        with gpu as model, mock.patch.object(dist, "all_to_all_single", collective if model is None else all_to_all):
            device, cls = ("cpu", halfstep.Muon) if model is None else (model.device, OffloadedMuon)
            parameters = []
            for shape in ((33, 64), (96, 17), (40, 40), (5, 300)):
                whole = distribute_tensor(torch.randn(shape, generator=random).bfloat16(), mesh, [Shard(0)])
                parameters.append(torch.nn.Parameter(like(whole, local(whole).to(device))))
            # The shards of rank 1, but not those of rank 0, would share a bucket.
            sized = {} if model is None else {"bucket_bytes": 1500}
            optimizer = cls([{"params": parameters[:2]}, {"params": parameters[2:], "ns_steps": 3}], lr=0.02, **sized)
            for _ in range(3):
                for parameter in parameters:
                    whole = distribute_tensor(
                        torch.randn(parameter.shape, generator=random).bfloat16(), mesh, [Shard(0)]
                    )
                    parameter.grad = like(whole, local(whole).to(device))
                optimizer.step()
            weights.append([local(parameter.detach()).cpu() for parameter in parameters])
            uses = {use for on, _, use in optimizer._plans.scratch if on == torch.device(device)}
            assert uses == {"parts", "received"}
    assert same(weights[0], weights[1]) and same(weights[0], weights[2])


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape)


def _storages(tensors: list[torch.Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


ROWS = partial(shards_have_the_bits_of_the_device_and_of_one_process, "rows")
COLUMNS = partial(shards_have_the_bits_of_the_device_and_of_one_process, "columns")
HSDP = partial(shards_have_the_bits_of_the_device_and_of_one_process, "hsdp", ["split24, 8 bits"])
CASES: dict[str, Callable[[], None]] = {
    "shards by rows": partial(ROWS, LAYOUTS),
    "shards by columns": partial(COLUMNS, ["split24, 8 bits"]),
    **{f"what users do: {name}": partial(what_users_do_has_the_bits_of_the_device, name) for name in PROGRAMS},
    **{
        case.__name__: case
        for case in (
            partial_sums_of_gradients_are_added_before_they_leave,
            a_state_is_saved_while_a_first_backward_is_stepped,
            matrices_are_exchanged_on_the_device,
        )
    },
    "Muon, shards by rows": partial(ROWS, ["split", "split24, 8 bits"], muon=True),
    "Muon, shards by columns": partial(COLUMNS, ["split"], muon=True),
    **{
        f"Muon, what users do: {name}": partial(what_users_do_has_the_bits_of_the_device, name, muon=True)
        for name in ("recomputed", "fp32", "kept fp32 gradients", "clipped by torch")
    },
    "planned": partial(the_bytes_are_those_planned, muon=False),
    "Muon, planned": partial(the_bytes_are_those_planned, muon=True),
}
ON_FOUR_RANKS = {"HSDP": HSDP, "Muon, HSDP": partial(HSDP, muon=True)}
EVERY_CASE_ON_FOUR_RANKS = {
    "shards by rows": partial(ROWS, ["split24, 8 bits"]),
    "Muon, shards by rows": partial(ROWS, ["split24, 8 bits"], muon=True),
}
