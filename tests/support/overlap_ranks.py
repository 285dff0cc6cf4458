"""Ranks that train under DistributedDataParallel with the check at `step` and in the backward; see test_overlap_ddp.py.

Three ranks; most cases run on the first two while the third waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.integrations import ddp
from halfstep.kernels import unscale
from halfstep.kernels.unscale import CheckInParts

WORLD = 3


class Net(torch.nn.Module):
    """Odd sizes, a 0-element parameter, a layer that only some ranks use, one that nobody uses, two dtypes at will."""

    def __init__(
        self, dtypes: tuple[torch.dtype, ...] = (torch.float32,), optional: bool = False, empty: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(7, 37)
        self.second = torch.nn.Linear(37, 129)
        self.empty = torch.nn.Parameter(torch.zeros(0)) if empty else None
        self.last = torch.nn.Linear(129, 1)
        if optional:
            self.sometimes = torch.nn.Linear(129, 1)
            self.never = torch.nn.Linear(3, 3)
        for number, module in enumerate(self.children()):
            module.to(dtypes[number % len(dtypes)])
        self.poison: float | None = None

    def forward(self, x: torch.Tensor, further: bool = False) -> torch.Tensor:
        x = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        if self.poison is not None:
            x.register_hook(lambda grad, value=self.poison: torch.full_like(grad, value))
        x = torch.tanh(self.second(x.to(self.second.weight.dtype)))
        if self.empty is not None:
            x = x + self.empty.sum()
        found = self.last(x.to(self.last.weight.dtype))
        if further:
            found = found + self.sometimes(x.to(self.sometimes.weight.dtype))
        return found.float().square().mean()


class Passes:
    """How many passes over gradients, each a launch, are made inside `counting`."""

    def __init__(self) -> None:
        self.made = 0
        self.gathered = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        whole, part, finish = unscale._run, CheckInParts._launch, CheckInParts.finish

        def run(*arguments: Any) -> Any:
            self.made += 1
            return whole(*arguments)

        def launch(*arguments: Any) -> Any:
            self.made += 1
            return part(*arguments)

        def gather(*arguments: Any, **options: Any) -> Any:
            self.gathered += 1
            return finish(*arguments, **options)

        unscale._run, CheckInParts._launch, CheckInParts.finish = run, launch, gather  # type: ignore[method-assign]
        try:
            yield
        finally:
            unscale._run, CheckInParts._launch, CheckInParts.finish = whole, part, finish  # type: ignore[method-assign]


def batch(step: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    return torch.randn(16, 7, generator=generator)


Tamper = Callable[[DistributedDataParallel, torch.optim.Optimizer, Any, torch.Tensor], None]


def train(
    kind: str,
    group: Any,
    *,
    steps: int = 6,
    hook: Any = "none",
    state: Any = None,
    bad: tuple[int, ...] = (2,),
    clip: str = "scaler",
    micro: int = 1,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    optional: bool = False,
    to_none: bool = True,
    early_zero: bool = False,
    optimizers: int = 1,
    late: bool = False,
    tamper: Tamper | None = None,
    discard: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train; what came of it, every number by its bits, and how many passes over gradients each step made.

    Args:
        kind: "bare" without a hook, "hook" with the hook alone, or "overlap".
        bad: steps in which rank 1 sends infinite gradients back through a part of the model.
        clip: by "scaler", by "optimizer", or "" for no one.
        micro: backwards per step, all but the last in `no_sync`.
        early_zero: zero the gradients between forward and backward.
        optimizers: over which the parameters are spread, in an order that is not the model's.
        late: make the optimizers after the first backward.
        tamper: what is done between backward and step.
        discard: a step whose gradients are infinite and thrown away before any step sees them.
    """
    net = Net(dtypes, optional)
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.003, **options)
    scaler = halfstep.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    if kind == "hook":
        model.register_comm_hook(group if state is None else state, ddp.HOOKS[hook] if isinstance(hook, str) else hook)
    elif kind == "overlap":
        ddp.overlap_overflow_check(model, scaler, hook=hook, state=state)
    made: list[torch.optim.Optimizer] = []

    def make() -> None:
        parameters = list(net.parameters())
        limit = 0.05 if clip == "optimizer" else None
        shuffled = [parameters[index] for index in torch.randperm(len(parameters)).tolist()]
        for number in range(optimizers):
            made.append(halfstep.AdamW(shuffled[number::optimizers], lr=1e-2, eps=1e-4, max_grad_norm=limit))

    if not late:
        make()
    found: dict[str, Any] = {"losses": [], "norms": [], "scales": [], "skipped": [], "passes": [], "gathered": []}
    for step in range(steps):
        if not early_zero:
            model.zero_grad(set_to_none=to_none)
        losses = []
        for number in range(micro):
            last = number == micro - 1
            with nullcontext() if last else model.no_sync():
                broken = (step in bad or step == discard) and dist.get_rank() == 1
                net.poison = float("inf") if broken and last else None
                extra = {"further": True} if optional and (dist.get_rank() == 0 or step % 2 == 0) and step != 3 else {}
                loss = model(batch(step, number), **extra)
                if early_zero and number == 0:
                    model.zero_grad(set_to_none=to_none)
                scaler.scale(loss).backward(retain_graph=tamper is not None)
                losses.append(loss.detach())
        if step == discard:
            continue
        if late and not made:
            make()
        if tamper is not None:
            tamper(model, made[0], scaler, loss)
        passes = Passes()
        with passes.counting():
            for optimizer in made:
                if clip == "scaler":
                    found["norms"].append(scaler.clip_grad_norm_(optimizer, 0.05).clone())
                scaler.step(optimizer)
            scaler.update()
        found["losses"] += losses
        found["scales"].append(scaler.get_scale())
        found["skipped"].append(scaler.last_step_skipped())
        found["passes"].append(passes.made)
        found["gathered"].append(passes.gathered)
    report = scaler.overflow_report(net.named_parameters())
    found["report"] = sorted((one.name, one.inf_steps, one.nan_steps, one.first_step) for one in report.parameters)
    found["weights"] = [parameter.detach().clone() for parameter in net.parameters()]
    found["states"] = [
        value.clone() for optimizer in made for state in optimizer.state.values() for value in state.values()
    ]
    del model
    return found


def assert_same_training(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Losses, norms, scales, skipped steps, the report, weights and the optimizer's states, to the last bit."""
    for key in ("scales", "skipped", "report"):
        assert one[key] == other[key], key
    for key in ("losses", "norms", "weights", "states"):
        assert len(one[key]) == len(other[key]) > 0 or key == "norms"
        for index, (a, b) in enumerate(zip(one[key], other[key], strict=True)):
            assert a.dtype == b.dtype
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), (key, index)


# ------------------------------------------------------------------------------------------- between backward and step


def multiply(model: Any, optimizer: Any, scaler: Any, loss: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def replace(model: Any, optimizer: Any, scaler: Any, loss: Any) -> None:
    parameter = model.module.first.weight
    for _ in range(3):  # more than once, so that memory of the first may be used again
        parameter.grad = parameter.grad * 2


def to_nan(model: Any, optimizer: Any, scaler: Any, loss: Any) -> None:
    model.module.last.bias.grad.fill_(float("nan"))


def to_none(model: Any, optimizer: Any, scaler: Any, loss: Any) -> None:
    model.module.first.weight.grad = None


def again(model: Any, optimizer: Any, scaler: Any, loss: Any) -> None:
    scaler.scale(loss).backward()  # DistributedDataParallel does not reduce it


def locally(model: Any, optimizer: Any, scaler: Any, loss: Any) -> None:
    with model.no_sync():
        scaler.scale(model(batch(77))).backward()


def rescale(model: Any, optimizer: Any, scaler: Any, loss: Any) -> None:
    scaler._scale.mul_(2.0)


def clip_by_torch(model: Any, optimizer: Any, scaler: Any, loss: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)


def unscale_by_hand(model: Any, optimizer: Any, scaler: Any, loss: Any) -> None:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


TAMPERS: dict[str, Tamper] = {
    "multiplied": multiply,
    "replaced": replace,
    "made NaN": to_nan,
    "set to None": to_none,
    "a second backward": again,
    "a backward in no_sync": locally,
    "another scale": rescale,
    "clipped by torch": clip_by_torch,
    "unscaled and clipped": unscale_by_hand,
}

MIXED = (torch.float32, torch.bfloat16, torch.float16)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"steps": 30, "bad": (7, 8, 20)},
    "clipped by the optimizer": {"clip": "optimizer"},
    "not clipped": {"clip": ""},
    "views of buckets": {"gradient_as_bucket_view": True, "steps": 10},
    "views of buckets, kept": {"gradient_as_bucket_view": True, "to_none": False},
    "gradients kept": {"to_none": False},
    "three micro-batches": {"micro": 3},
    "three micro-batches, views": {"micro": 3, "gradient_as_bucket_view": True},
    "unused parameters": {"optional": True, "find_unused_parameters": True, "steps": 8},
    "unused parameters, kept": {"optional": True, "find_unused_parameters": True, "to_none": False, "steps": 8},
    "unused parameters, views": {
        "optional": True,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "steps": 8,
    },
    "static graph": {"static_graph": True},
    "static graph, views": {"static_graph": True, "gradient_as_bucket_view": True},
    "three dtypes": {"dtypes": MIXED},
    "two optimizers": {"optimizers": 2},
    "optimizer made late": {"late": True},
    "a backward discarded": {"discard": 3},
    "a backward discarded, kept": {"discard": 3, "to_none": False},
}


def of_two(group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        found[name] = {kind: train(kind, group, **setting) for kind in ("bare", "overlap")}
    found["plain"]["hook"] = train("hook", group, **SETTINGS["plain"])
    for hook in ("fp16", "bf16"):
        setting = {"hook": hook, "steps": 10}
        found[hook] = {kind: train(kind, group, **setting) for kind in ("hook", "overlap")}
    own = {"hook": elsewhere_hook, "state": group, "steps": 5}
    found["a hook of one's own"] = {kind: train(kind, group, **own) for kind in ("hook", "overlap")}
    own["gradient_as_bucket_view"] = True
    found["a hook of one's own, views"] = {kind: train(kind, group, **own) for kind in ("hook", "overlap")}
    for name, tamper in TAMPERS.items():
        for view in (False, True):
            setting = {"tamper": tamper, "steps": 4, "gradient_as_bucket_view": view}
            found[f"{name}, views {view}"] = {kind: train(kind, group, **setting) for kind in ("bare", "overlap")}
    found["joined"] = {kind: joined(kind, group) for kind in ("bare", "overlap")}
    found["hostile"] = hostile(group)
    found["traffic"] = traffic(group)
    found["errors"] = errors(group)
    return found


def joined(kind: str, group: Any) -> list[torch.Tensor]:
    """Ranks with more and with fewer batches; those that have none left send zeros. What is trained."""
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.003)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    if kind == "overlap":
        ddp.overlap_overflow_check(model, scaler)
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            scaler.scale(model(batch(step))).backward()
            scaler.clip_grad_norm_(optimizer, 0.05)
            scaler.step(optimizer)
            scaler.update()
    return [parameter.detach().clone() for parameter in model.parameters()]


def elsewhere_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP would want types, not their names
    """Leaves the bucket as it is and returns the mean in new memory."""
    fresh = bucket.buffer() / state.size()
    return dist.all_reduce(fresh, group=state, async_op=True).get_future().then(lambda done: done.value()[0])


def of_three() -> dict[str, Any]:
    """Where a division and a multiplication by the reciprocal differ."""
    found = {}
    for view in (False, True):
        for to_none in (False, True):
            for early_zero in (False, True):
                setting = {"gradient_as_bucket_view": view, "to_none": to_none, "early_zero": early_zero, "steps": 5}
                name = f"views {view}, to_none {to_none}, early_zero {early_zero}"
                found[name] = {kind: train(kind, None, **setting) for kind in ("bare", "overlap")}
    return found


class Given(torch.nn.Module):
    """Whose gradient is what it is given."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def hostile(group: Any) -> dict[str, Any]:
    """Gradients of two ranks that some hooks lose."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    inf, nan = float("inf"), float("nan")
    mine = torch.tensor([[70000.0, 6e-8, 1.0, inf, nan, 3.4e38], [0.0, 6e-8, 3.0, -inf, 1.0, 0.0]])[dist.get_rank()]
    found = {}
    for name, hook in {**ddp.HOOKS, "torch": default_hooks.fp16_compress_hook}.items():
        model = DistributedDataParallel(Given(len(mine)), process_group=group)
        model.register_comm_hook(group, hook)
        model(mine).backward()
        found[name] = model.module.weight.grad.clone()
    return found


def traffic(group: Any) -> dict[str, list[int]]:
    """How often each gradient is read and written after the backward, as Triton's interpreter sees it."""
    import pytest
    from traffic import recording

    found = {}
    for kind in ("bare", "overlap"):
        model = DistributedDataParallel(torch.nn.Linear(9, 33), process_group=group)
        scaler = halfstep.GradScaler("cpu", init_scale=8.0)
        optimizer = halfstep.AdamW(model.parameters(), max_grad_norm=1.0)
        if kind == "overlap":
            ddp.overlap_overflow_check(model, scaler)
        with halfstep.backend("triton"):
            for last in (False, True):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 9)).square().sum()).backward()
                patch = pytest.MonkeyPatch()
                with recording(patch) if last else nullcontext() as seen:
                    scaler.step(optimizer)
                    scaler.update()
        reads, writes = set(), set()
        for parameter in model.parameters():
            reads |= set(seen.counts(seen.loaded, parameter.grad).tolist())
            writes |= set(seen.counts(seen.stored, parameter.grad).tolist())
        found[kind] = [sorted(reads), sorted(writes)]
    return found


def errors(group: Any) -> dict[str, str]:
    net, scaler = torch.nn.Linear(2, 2), halfstep.GradScaler("cpu")
    used = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    ddp.overlap_overflow_check(used, scaler)
    fresh = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    calls: dict[str, Callable[[], None]] = {
        "no model of theirs": lambda: ddp.overlap_overflow_check(net, scaler),  # type: ignore[arg-type]
        "twice": lambda: ddp.overlap_overflow_check(used, scaler),
        "their scaler": lambda: ddp.overlap_overflow_check(fresh, torch.amp.GradScaler("cpu")),  # type: ignore[arg-type]
        "a name": lambda: ddp.overlap_overflow_check(fresh, scaler, hook="fp8"),  # type: ignore[arg-type]
        "a number": lambda: ddp.overlap_overflow_check(fresh, scaler, hook=3),  # type: ignore[arg-type]
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = ""
        except (TypeError, ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    ddp.overlap_overflow_check(fresh, scaler)  # none of the refused calls has left anything
    return found


def run(rank: int) -> dict[str, Any]:
    pair = dist.new_group([0, 1])
    found = of_two(pair) if rank < 2 else {}
    return {**found, "three ranks": of_three()}
