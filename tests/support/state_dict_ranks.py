"""PyTorch's tests of `torch.distributed.checkpoint.state_dict`, asked of our optimizers on two ranks.

For test_cases_on_ranks.py.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._composable import replicate
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_dist_composable import CompositeParamModel, UnitModule
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

import halfstep

WORLD = 2
CPU = torch.device("cpu")
FULL = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
CLASSES = (halfstep.Adam, halfstep.AdamW)
# By name: the parameters' dtype and further options.
LAYOUTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {"fp32": (torch.float32, {}), "split": (torch.bfloat16, {})}


class Checks(VerifyStateDictMixin, TestCase):
    """torch's comparison of state dicts."""

    def runTest(self) -> None: ...


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 30)
        self.decoder = torch.nn.Linear(30, 50)
        self.decoder.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.embedding((inputs.float() * 10).int()))


def _fsdp1(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    return FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True, **options)


def _sharded(model: Any, **options: Any) -> torch.nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), **options)


WRAPPINGS: dict[str, Callable[[Any], Any]] = {
    "single": lambda model: model,
    "ddp": DistributedDataParallel,
    "replicate": replicate,
    "fsdp1": lambda model: _fsdp1(model, auto_wrap_policy=ModuleWrapPolicy({UnitModule})),
    "fsdp1, linear": lambda model: _fsdp1(model, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear, UnitModule})),
    "fsdp2": _sharded,
    "fsdp2, kept whole": lambda model: _sharded(model, reshard_after_forward=False),
}


def train(model: torch.nn.Module, *optimizers: Any, steps: int = 3) -> None:
    """Train with the same inputs on every rank, so that all wrappings give the same bits."""
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs = torch.rand(8, 100, generator=torch.Generator().manual_seed(step))
        model(inputs.to(next(model.parameters()).dtype)).float().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def whole(model: Any, optimizer: Any) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer, options=FULL)


def round_trip(wrapping: str, cls: Any, layout: str, flat: bool, kind: str = "") -> None:
    """The state dicts of wrapped and plain models are equal, before and after they are loaded."""
    checks = Checks()
    options = StateDictOptions(flatten_optimizer_state_dict=flat, ignore_frozen_params=kind == "frozen")
    dtype, more = LAYOUTS[layout]
    if flat or wrapping.startswith("fsdp1"):
        more = {**more, "state_dict_format": "canonical"}
    torch.manual_seed(0)
    model: Any = Tied().to(dtype) if kind == "tied" else CompositeParamModel(device=CPU).to(dtype)
    if kind == "frozen":
        model.u1.requires_grad_(False)
        model.u2.requires_grad_(False)
    first = copy.deepcopy(model)
    optimizer, other = (cls(model.parameters(), lr=1e-2, **more) for _ in range(2))

    def made() -> tuple[Any, Any]:
        wrapped = WRAPPINGS[wrapping](copy.deepcopy(first))
        return wrapped, cls(wrapped.parameters(), lr=1e-2, **more)

    wrapped, its = made()
    train(model, optimizer)
    train(wrapped, its)
    plain = model.state_dict(), optimizer.state_dict()
    for loaded in (False, True):
        weights, state = get_state_dict(wrapped, its, options=options)
        checks._verify_msd(plain[0], weights, options)
        checks._verify_osd_by_load(model, optimizer, other, copy.copy(state))
        if not flat and kind != "tied":
            checks._verify_osd(model, optimizer, plain[1], state)
        if loaded or kind == "frozen":
            return
        wrapped, its = made()
        get_state_dict(wrapped, its, options=options)
        set_model_state_dict(wrapped, weights, options=options)
        set_optimizer_state_dict(wrapped, its, state, options=options)


def from_the_first_rank(wrapping: str, cls: Any, layout: str) -> None:
    """Load a state that only the first rank has; afterwards all ranks have it."""
    checks, (dtype, more) = Checks(), LAYOUTS[layout]
    if wrapping.startswith("fsdp1"):
        more = {**more, "state_dict_format": "canonical"}
    torch.manual_seed(0)
    plain = CompositeParamModel(device=CPU).to(dtype)
    model = WRAPPINGS[wrapping](copy.deepcopy(plain))
    optimizers = [cls(one.parameters(), lr=1e-2, **more) for one in (plain, model)]
    train(plain, optimizers[0], steps=1)
    train(model, optimizers[1], steps=1)
    weights, state = get_state_dict(plain, optimizers[0])
    weights, state = copy.deepcopy(weights), copy.deepcopy(state)

    def alike() -> bool:
        try:
            checks.assertEqual(weights, get_model_state_dict(model, options=FULL))
            checks.assertEqual(state, whole(model, optimizers[1]))
        except AssertionError:
            return False
        return True

    assert alike()
    train(model, optimizers[1], steps=2)
    assert not alike()
    here = dist.get_rank() == 0
    set_model_state_dict(model, copy.deepcopy(weights) if here else {}, options=FROM_FIRST)
    set_optimizer_state_dict(model, optimizers[1], copy.deepcopy(state) if here else {}, options=FROM_FIRST)
    assert alike()


def groups_of_a_parallel_model(cls: Any, empty: bool, full: bool, first: bool) -> None:
    checks = Checks()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    plan: Any = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel(use_local_output=False)}
    parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)
    weights = [model[0].weight, model[1].weight]
    groups: list[Any] = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.2}]
    if empty:
        groups = [{"params": weights}, {"params": [], "lr": 0.2}]
    optimizer = cls(copy.copy(groups), lr=0.1)
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=first)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    other = cls([{name: value for name, value in group.items()} for group in groups], lr=0.1)
    set_optimizer_state_dict(model, other, state, options=options)
    checks.assertEqual(optimizer.param_groups, other.param_groups)
    checks.assertEqual(optimizer.state, other.state)


def before_the_first_forward(cls: Any) -> None:
    model = _fsdp1(CompositeParamModel(device=CPU))
    optimizer = cls(model.parameters())
    get_model_state_dict(model)
    state = _gather_state_dict(get_optimizer_state_dict(model, optimizer))
    assert state["state"] and all(entry["step"].item() == 0 for entry in state["state"].values())


def without_a_group(cls: Any, layout: str) -> None:
    """One process without torch.distributed, which is not in `cases`."""
    checks, (dtype, more) = Checks(), LAYOUTS[layout]
    assert not dist.is_initialized()
    model = CompositeParamModel(device=CPU).to(dtype)
    optimizer = cls(model.parameters(), lr=1e-4, **more)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for steps in (0, 2):
        train(model, optimizer, steps=steps)
        checks.assertEqual(model.state_dict(), get_model_state_dict(model, options=options))
        before = copy.deepcopy(optimizer.state_dict())
        state = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(model, optimizer, state)
        if steps:
            checks.assertEqual(before, optimizer.state_dict())
        set_optimizer_state_dict(model, optimizer, optimizer.state_dict())


def cases(every: bool) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
    """Round trips of every wrapping, layout and kind of state dict; unless `every`, each wrapping in one layout."""
    found: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    for number, wrapping in enumerate(WRAPPINGS):
        for index, layout in enumerate(LAYOUTS):
            kinds = (False, True) if every else (number % 4 < 2,) * ((number + index) % 2)
            found += [(round_trip, (wrapping, halfstep.AdamW, layout, flat)) for flat in kinds]
    for index, layout in enumerate(LAYOUTS):
        for wrapping in ("fsdp1", "fsdp2") if every else (("fsdp1", "fsdp2")[index],):
            found += [(round_trip, (wrapping, halfstep.Adam, layout, False))]
            found += [(round_trip, (wrapping, halfstep.AdamW, layout, False, "frozen"))]
        for wrapping in ("fsdp1", "fsdp2"):
            found += [(from_the_first_rank, (wrapping, halfstep.AdamW, layout))]
        found += [(round_trip, ("fsdp1", halfstep.AdamW, layout, flat, "tied")) for flat in (False, True)]
    for cls in CLASSES:
        found += [(before_the_first_forward, (cls,))]
        kinds = [(empty, *kind) for empty in (False, True) for kind in ((False, False), (True, False), (True, True))]
        found += [(groups_of_a_parallel_model, (cls, *kind)) for kind in kinds]
    return found


def named(every: bool) -> dict[str, Callable[[], None]]:
    return {f"{case.__name__}{arguments}": partial(case, *arguments) for case, arguments in cases(every)}


CASES, EVERY_CASE = named(every=False), named(every=True)
