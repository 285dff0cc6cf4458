"""Verdicts on gradients: whether they are finite, and their norm, over all devices and ranks, in one pass.

A `Checker` belongs to one optimizer and makes a `Verdict` on its gradients in each step. It owns what the verdicts of
successive steps share: the tensors they are written to, the counts of non-finite gradients, and the topology of the
parameters. fp32, fp16 and bf16 gradients are checked by kernels/unscale.py. Shards of DTensor and FSDP1 parameters are
checked where they are. The flag and the sum of squares are then combined by one packed sum over all ranks that hold any
part of the optimizer's parameters. Copies on several ranks are counted once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch

from halfstep.kernels.multi_tensor import DTYPE_CODES, all_have_memory
from halfstep.kernels.streams import all_to_device, capturing, to_device
from halfstep.kernels.unscale import Factor, PartialCheck, Tally, Verdict, check, check_part, finish_parts
from halfstep.numerics.scaling.sharding import local, settle_gradients
from halfstep.numerics.scaling.stand_ins import StandIn, is_stand_in, refuse_freed
from halfstep.numerics.scaling.topology import NOWHERE, Topology, topology_of

Kind = tuple[torch.device, int, bool]

_gradient, _of_group = attrgetter("grad"), itemgetter("params")


class Decision(NamedTuple):
    """The decision about one step of an optimizer: that of a scaler, or of a step in the backward.

    Attributes:
        verdict: the verdict on the unscaled gradients.
        scale: 0-dim fp32, by which `step` divides the gradients; None if they were unscaled before, and may differ now.
        max_norm: the norm to which `step` clips, using that of the verdict; None for no limit but the optimizer's own.
        skips: whether the step is skipped if the verdict found non-finite numbers, as with a scaler.
    """

    verdict: Verdict
    scale: torch.Tensor | None
    max_norm: float | None
    skips: bool = True


class StepsOnVerdict:
    """Base of optimizers that unscale, clip and skip inside their step: those of halfstep."""

    _decision: Decision | None = None  # about the present step, while it was made elsewhere

    @functools.cached_property
    def _checker(self) -> Checker:
        """The checker for steps without a decision of a scaler."""
        return Checker(self, is_part=True)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """All parameters of an optimizer, in its order."""
    return list(chain.from_iterable(map(_of_group, optimizer.param_groups)))


def _on_device(
    device: torch.device, factor: Factor | None, step: torch.Tensor | None
) -> tuple[Factor | None, torch.Tensor | None]:
    """The factor and the number of steps on a device. The host waits once if the CPU needs numbers of a GPU."""
    value = factor.value if factor is not None and isinstance(factor.value, torch.Tensor) else None
    if (value is None or value.device == device) and (step is None or step.device == device):
        return factor, step
    value, step = all_to_device([value, step], device)
    return (factor if factor is None or value is None else Factor(value, factor.inverted)), step


class Combination:
    """Combines the verdicts on several kinds of gradients and of several ranks. It reuses its memory."""

    def __init__(self) -> None:
        self._kept: dict[torch.device, tuple[torch.Tensor, Verdict]] = {}

    def combine(self, topology: Topology, found: list[torch.Tensor], squares: list[torch.Tensor]) -> Verdict:
        """The verdict of all ranks of a topology, from the flags of this rank and the squares that it adds.

        All of them must call this.
        """
        held = [*found, *map(local, topology.parameters[:1])]
        home = held[0].device if held else torch.device("cpu")
        device = topology.device_for(home)
        numbers, verdict = self._on(device)
        values = all_to_device([*found, *squares], device)
        numbers.zero_()
        for index, value in enumerate(values):
            numbers[int(index >= len(found))].add_(value)
        topology.sum_over_ranks(numbers)
        torch.gt(numbers[0], 0, out=verdict.found_inf)
        return verdict if home == device or not held else Verdict(*all_to_device(verdict, home))

    def _on(self, device: torch.device) -> tuple[torch.Tensor, Verdict]:
        """The two fp64 numbers to sum over ranks, flag and sum of squares, and the verdict made from them."""
        if device in self._kept and not capturing(device):
            return self._kept[device]
        numbers = torch.zeros(2, dtype=torch.float64, device=device)
        tensors = numbers, Verdict.empty(0, device)._replace(sum_of_squares=numbers[1])
        if not capturing(device):
            self._kept[device] = tensors
        return tensors


class Checker:
    """Makes the verdicts on the gradients of one optimizer, which it does not keep alive.

    Checks in a CUDA graph write to verdicts of their own. They count non-finite gradients in the same `counts` as eager
    checks, if there was an eager check before. `process_group` has ranks with other plain tensors of the same model.
    With `is_part`, the optimizer may be the local part of a `ZeroRedundancyOptimizer`, whose ranks must agree.

    Attributes:
        topology: the topology of its parameters in the last verdict.
        counts: for each device `Tally.counts`, with a row for each parameter of the optimizer in its order.
    """

    def __init__(self, optimizer: Any, process_group: Any = None, is_part: bool = False) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.topology: Topology = NOWHERE
        self.counts: dict[torch.device, torch.Tensor] = {}
        self._recorded: dict[int, torch.Tensor] = {}  # counts that CUDA graphs write to
        self._kept: dict[Kind, Verdict] = {}
        self._combination = Combination()
        self._process_group, self._is_part = process_group, is_part
        self._places: dict[int, int] = {}  # in the optimizer, by the parameter's id, for a verdict in parts
        # By the parameter's place: the check of its gradient, its index there, its kind, and the stream.
        self._parts: dict[int, tuple[PartialCheck, int, Kind, torch.cuda.Stream | None]] = {}

    def find_topology(self, parameters: list[torch.Tensor]) -> Topology:
        """The present topology of `parameters`, which are all parameters of the optimizer."""
        owner = self.optimizer() if self._is_part else None
        self.topology = topology_of(parameters, self.topology, self._process_group, owner)
        return self.topology

    def verdict(
        self,
        factor: Factor | None = None,
        *,
        write: bool = False,
        step: torch.Tensor | None = None,
        keep: bool = True,
    ) -> Verdict | None:
        """Check the optimizer's gradients times a factor and, with `write`, unscale them in place.

        All ranks of the topology must call this, including those without a gradient. With `step`, the number of steps
        before this one (int64), non-finite gradients are counted in `counts`. With `keep`, the verdict overwrites the
        last one. It is on the device of the first gradient; None if there are neither gradients nor other ranks.
        """
        parameters = parameters_of(self.optimizer())
        topology = self.find_topology(parameters)
        if not topology.settled:
            settle_gradients(parameters)
        grads = list(map(_gradient, parameters))
        places: Sequence[int] = range(len(grads))
        if any(map(is_, grads, repeat(None))):
            places = [place for place, grad in enumerate(grads) if grad is not None]
            grads = [grads[place] for place in places]
        kinds = self._by_kind(parameters, grads, places, scales=step is not None)
        # Before the first check: the CPU would wait for that, too.
        numbers = {device: _on_device(device, factor, step) for device in dict.fromkeys(kind[0] for kind in kinds)}
        verdicts = {
            kind: self._of_kind(kind, tensors, where, len(parameters), *numbers[kind[0]], write, keep)
            for kind, (tensors, where) in kinds.items()
        }
        return self._combined(verdicts, keep)

    def _combined(self, verdicts: dict[Kind, Verdict], keep: bool) -> Verdict | None:
        """The verdict on the gradients of all kinds and ranks."""
        topology = self.topology
        if not topology.groups and len(verdicts) < 2:
            return next(iter(verdicts.values()), None)
        found = [one.found_inf for one in verdicts.values()]
        squares = [one.sum_of_squares for kind, one in verdicts.items() if topology.counted[kind[1]]]
        combination = self._combination if keep else Combination()
        return combination.combine(topology, found, squares)

    # ------------------------------------------------------------------------------------------------------ in parts

    def begin_parts(self) -> None:
        """Begin a verdict whose gradients need not exist at the same time."""
        self._parts = {}
        parameters = parameters_of(self.optimizer())
        self.find_topology(parameters)
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}

    def add_part(self, parameters: list[torch.Tensor], factor: Factor | None = None) -> None:
        """Check the gradients of some parameters times a factor. The gradients are not needed afterwards."""
        if not self.topology.settled:
            settle_gradients(parameters)
        places = [self._places[id(parameter)] for parameter in parameters]
        kinds = self._by_kind(parameters_of(self.optimizer()), list(map(_gradient, parameters)), places)
        for kind, (tensors, where) in kinds.items():
            device, _, known = kind
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            part = check_part(
                tensors, _on_device(device, factor, None)[0], in_memory=known and all_have_memory(tensors)
            )
            self._parts.update((place, (part, index, kind, stream)) for index, place in enumerate(where))

    def end_parts(self, step: torch.Tensor | None = None) -> Verdict | None:
        """The verdict on the gradients of all parts, with the bits of `verdict`; `step` is as there.

        All ranks of the topology must call this.
        """
        kinds: dict[Kind, list[int]] = {}
        for place in sorted(self._parts):
            kinds.setdefault(self._parts[place][2], []).append(place)
        verdicts = {kind: self._of_parts(kind[0], places, step) for kind, places in kinds.items()}
        self._parts = {}
        return self._combined(verdicts, keep=False)

    def _of_parts(self, device: torch.device, places: list[int], step: torch.Tensor | None) -> Verdict:
        slots = len(self._places)
        tally = None if step is None else self._tally(slots, device, to_device(step, device), False)
        parts, indices, _, streams = zip(*map(self._parts.__getitem__, places), strict=True)
        others = set(streams) - {None}
        if others:
            now = torch.cuda.current_stream(device)
            others.discard(now)
            for other in others:
                now.wait_stream(other)
        whole = PartialCheck(
            [part.dtypes[index] for part, index in zip(parts, indices, strict=True)],
            [part.sums[index] for part, index in zip(parts, indices, strict=True)],
            [part.flags[index] for part, index in zip(parts, indices, strict=True)],
            all(part.in_memory for part in parts),
        )
        verdict = finish_parts(whole, places, Verdict.empty(slots, device), tally)
        for other in others:  # they reuse the memory of the sums
            other.wait_stream(now)
        return verdict

    def _by_kind(
        self, parameters: list[torch.Tensor], grads: list[torch.Tensor], places: Sequence[int], scales: bool = False
    ) -> Mapping[Kind, tuple[list[torch.Tensor], Sequence[int]]]:
        """Local values of the gradients and their places among `parameters`, by device, kind in the topology, and
        whether kernels support them. If a scaler asks, which must have all, one that was freed raises an error."""
        number_of = self.topology.number_of
        # The usual case needs no loop in Python, which for thousands of tensors takes longer than the step.
        if (
            number_of is None
            and set(map(type, grads)) == {torch.Tensor}
            and set(map(attrgetter("layout"), grads)) == {torch.strided}
        ):
            devices = set(map(attrgetter("device"), grads))
            if len(devices) == 1 and DTYPE_CODES.keys() >= set(map(attrgetter("dtype"), grads)):
                return {(devices.pop(), 0, True): (grads, places)}
        kinds: dict[Kind, tuple[list[torch.Tensor], list[int]]] = {}
        for grad, place in zip(grads, places, strict=True):
            if is_stand_in(grad):
                elsewhere = grad.gradient() if isinstance(grad, StandIn) else None
                if elsewhere is None:
                    if scales:
                        refuse_freed(parameters, "a scaler")
                    continue
                grad = elsewhere
            if grad.is_sparse:
                if not grad.is_coalesced():  # the optimizer adds duplicates, and their sum may overflow
                    parameters[place].grad = grad = grad.coalesce()
                values = grad._values()
            else:
                values = local(grad)
            kind = values.device, 0 if number_of is None else number_of[place], values.dtype in DTYPE_CODES
            of_kind, where = kinds.setdefault(kind, ([], []))
            of_kind.append(values)
            where.append(place)
        return kinds

    def _of_kind(
        self,
        kind: Kind,
        tensors: list[torch.Tensor],
        where: Sequence[int],
        slots: int,
        factor: Factor | None,
        step: torch.Tensor | None,
        write: bool,
        keep: bool,
    ) -> Verdict:
        device, _, known = kind
        recording = capturing(device)
        out = self._kept.get(kind) if keep and not recording else None
        if out is None or out.flags.numel() != slots:
            out = Verdict.empty(slots, device)
            if keep and not recording:
                self._kept[kind] = out
        tally = None if step is None else self._tally(slots, device, step, recording)
        in_memory = None if known else False
        return check(tensors, factor, write=write, out=out, tally=tally, places=where, in_memory=in_memory)

    def _tally(self, slots: int, device: torch.device, step: torch.Tensor, recording: bool) -> Tally | None:
        """Where to count non-finite gradients; None if a graph is captured and there are no counts yet."""
        counts = self.counts.get(device)
        if recording:
            if counts is None or counts.shape[0] < slots:  # each replay would set new ones to 0
                return None
            self._recorded[id(counts)] = counts
        if counts is None or counts.shape[0] < slots:
            grown = torch.zeros(slots, 4, dtype=torch.int32, device=device)
            if counts is not None:
                grown[: counts.shape[0]] = counts
            counts = self.counts[device] = grown
        return Tally(counts if counts.shape[0] == slots else counts[:slots], step)
