"""A training with occasional faults on one rank, and checks of the reaction of all ranks."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import topologies
import torch
import torch.distributed as dist
from topologies import Make, Spread

import halfstep

VALUES = (float("inf"), float("-inf"), float("nan"))
GROWTH = 6
MAX_NORM = 0.05
OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}  # an eps at which rounding noise does not decide on a sign
SLOTS = 12  # parameters of a rank at most


def ours(groups: Any) -> Any:
    return halfstep.AdamW(groups, **OPTIONS)


def clipping_itself(groups: Any) -> Any:
    return halfstep.AdamW(groups, max_grad_norm=MAX_NORM, **OPTIONS)


def unfused(groups: Any) -> Any:
    return torch.optim.AdamW(groups, foreach=False, **OPTIONS)


def fused(groups: Any) -> Any:
    """torch's fused AdamW, with a parameter group for each mesh, as its kernel requires."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for parameter in (one for group in groups for one in (group["params"] if isinstance(group, dict) else [group])):
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW([{"params": own} for own in by_mesh.values()], fused=True, **OPTIONS)


STEPS = 24  # of one training, few enough for its scale to stay in range
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "halfstep.AdamW": ours,
    "halfstep.AdamW(max_grad_norm=)": clipping_itself,
    "torch.optim.AdamW": unfused,
    "torch.optim.AdamW(fused=True)": fused,
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KEPT = 20  # complaints per topology


class Fault(NamedTuple):
    """A fault, the same on all ranks."""

    rank: int  # with the fault
    value: float  # Inf, -Inf or NaN
    early: bool  # whether before the reduction, in the gradient of an activation; otherwise in the reduced gradient
    choice: int  # selects the parameter and the element


class Walk:
    """A model in training. Counts its `steps` and `faults`, and collects `complaints` of any rank."""

    def __init__(self, name: str, dtype: torch.dtype, make: Make = ours, of_torch: bool = False) -> None:
        self.name, self.dtype = name, dtype
        self.spread: Spread = topologies.TOPOLOGIES[name](dtype)
        self.optimizer = self.spread.optimizer_of(make)
        options: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": GROWTH}
        self.scaler: Any = torch.amp.GradScaler("cpu", **options)
        if not of_torch:
            self.scaler = halfstep.GradScaler("cpu", **options, process_group=self.spread.process_group)
        self.steps = self.faults = self.clean = self.since = 0
        self.clipped: list[bool] = []
        self.expected_scale = 2.0**10
        self.complaints: list[str] = []

    def step(self, fault: Fault | None, clip: bool) -> float:
        """Try a step. Returns the norm before clipping, or NaN without clipping."""
        rank = dist.get_rank()
        self.optimizer.zero_grad()
        broken = fault is not None
        if fault is not None and not self.spread.breaks_shards:
            fault = fault._replace(early=True)
        self.spread.net.poison = fault.value if fault is not None and fault.early and fault.rank == rank else None
        self.spread.backward(self.scaler, self.clean, self.dtype)
        self.spread.net.poison = None
        if fault is not None and not fault.early:
            mine = fault.rank == rank and topologies.break_shard(self.optimizer, fault.choice, fault.value)
            broken = _any_rank(mine)  # a rank that holds nothing cannot be broken
        before = topologies.held(self.optimizer)
        norm = self._clip() if clip else torch.tensor(float("nan"))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        after = topologies.held(self.optimizer)
        self.steps += 1
        self.faults += broken
        self._expect(broken)
        told = []
        if broken and not topologies.unchanged(before, after):
            told.append("changed by a step that was to be skipped")
        has = any(p.grad is not None for p in topologies.parameters_of(self.optimizer))
        if not broken and after == before and has:
            told.append("not changed by a clean step")
        skipped = getattr(self.scaler, "last_step_skipped", lambda: broken)()
        if skipped is not broken:
            told.append(f"skipped: {skipped} with a fault: {broken}")
        if self.scaler.get_scale() != self.expected_scale:
            told.append(f"scale {self.scaler.get_scale()} instead of {self.expected_scale}")
        if not broken:
            self.clipped.append(clip)
            if clip and not norm.isfinite():
                told.append(f"norm {norm.item()} of a clean step")
        self.complaints += [f"{self.name}, step {self.steps}, rank {rank}, {fault}: {one}" for one in told]
        self._compare(bool(told), norm)
        return float(norm)

    def _clip(self) -> torch.Tensor:
        if hasattr(self.scaler, "clip_grad_norm_"):
            norm: torch.Tensor = self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
            return norm
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(topologies.parameters_of(self.optimizer), MAX_NORM)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _expect(self, broken: bool) -> None:
        self.clean += not broken
        self.since = 0 if broken else self.since + 1
        if broken:
            self.expected_scale /= 2
        elif self.since == GROWTH:
            self.since = 0
            self.expected_scale *= 2

    def _compare(self, complained: bool, norm: torch.Tensor) -> None:
        """Exchange checksums. All copies of a shard must have the same bits."""
        found = topologies.copies(self.spread, self.optimizer)
        scale = torch.tensor(self.scaler.get_scale())
        numbers = [complained, int(norm.float().view(torch.int32)), int(scale.view(torch.int32))]
        numbers += [number for pair in found.items() for number in pair]
        mine = torch.full((3 + 2 * SLOTS,), -1)
        mine[: len(numbers)] = torch.tensor(numbers)
        theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(theirs, mine)
        known: dict[int, int] = {}
        for rank, vector in enumerate(theirs):
            values = vector.tolist()
            if values[0] and rank != dist.get_rank():
                self.complaints.append(f"{self.name}, step {self.steps}: rank {rank} complained")
            if values[1:3] != theirs[0].tolist()[1:3] and not norm.isnan():
                self.complaints.append(f"{self.name}, step {self.steps}: rank {rank} has another norm or scale than 0")
            for key, value in zip(values[3::2], values[4::2], strict=True):
                if key >= 0 and known.setdefault(key, value) != value:
                    self.complaints.append(f"{self.name}, step {self.steps}: rank {rank} holds another copy")


def _any_rank(here: bool) -> bool:
    flag = torch.tensor([float(here)])
    dist.all_reduce(flag)
    return bool(flag.item())


def random_fault(source: random.Random) -> Fault:
    return Fault(
        source.randrange(topologies.WORLD), source.choice(VALUES), source.random() < 0.5, source.randrange(10**6)
    )


def random_faults(
    names: list[str], faults: int, seed: int, of_torch: bool, tell: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """The same on all ranks: faults, steps, steps skipped and complaints by topology."""
    source = random.Random(seed)
    found: dict[str, Any] = {name: {"faults": 0, "steps": 0, "complaints": []} for name in names}
    optimizers = list(OPTIMIZERS)[2:] if of_torch else list(OPTIMIZERS)
    done = 0
    while done < faults:
        for name in names:
            make, dtype = OPTIMIZERS[source.choice(optimizers)], source.choice(DTYPES)
            # torch's scaler refuses fp16 gradients, and its optimizers keep fp16 moments, which overflow by themselves.
            if dtype == torch.float16 and make not in (ours, clipping_itself):
                dtype = torch.float32
            walk = Walk(name, dtype, make, of_torch)
            for _ in range(STEPS):
                fault = random_fault(source) if source.random() < 0.5 else None
                walk.step(fault, clip=source.random() < 0.5)
                if done + walk.faults >= faults:
                    break
            done += walk.faults
            own = found[name]
            own["faults"] += walk.faults
            own["steps"] += walk.steps
            own["complaints"] = (own["complaints"] + walk.complaints)[:KEPT]
            tell(done)
            if done >= faults:
                break
    return found
