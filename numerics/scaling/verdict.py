"""Verdicts on gradients: whether they are finite, and their norm, over all devices and ranks, in one pass.

A `Checker` belongs to one optimizer and makes a `Verdict` on its gradients in each step; decision.py has what follows.
It owns what the verdicts of successive steps share: the tensors they are written to, the counts of non-finite
gradients, and the topology of the parameters. fp32, fp16 and bf16 gradients are checked by kernels/unscale.py, shards
where they are. The flag and the sum of squares are then combined by one packed sum over all ranks that hold any part of
the optimizer's parameters. Copies on several ranks are counted once.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from halfstep.kernels.multi_tensor import DTYPE_CODES, all_have_memory
from halfstep.kernels.streams import all_to_device, capturing, to_device
from halfstep.kernels.unscale import Factor, PartialCheck, Tally, Verdict, check, check_part, finish_parts
from halfstep.numerics.scaling.sharding import local, settle_gradients
from halfstep.numerics.scaling.stand_ins import is_stand_in, refuse_freed
from halfstep.numerics.scaling.topology import NOWHERE, Topology, topology_of

# Gradients that are checked together: on one device, with one sharding, and whether kernels support their dtypes.
Key = tuple[torch.device, int, bool]
Batch = tuple[list[torch.Tensor], Sequence[int]]  # local values of gradients, and the slots of their parameters

_gradient, _of_group = attrgetter("grad"), itemgetter("params")


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """All parameters of an optimizer, in its order."""
    return list(chain.from_iterable(map(_of_group, optimizer.param_groups)))


def norm_of(verdict: Verdict) -> torch.Tensor:
    """The 2-norm of the gradients of a verdict, 0-dim fp32."""
    return verdict.sum_of_squares.sqrt().float()


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
    """Combines the verdicts on several batches of gradients and of several ranks. It reuses its memory."""

    def __init__(self) -> None:
        self._tensors: dict[torch.device, tuple[torch.Tensor, Verdict]] = {}

    def combine(self, topology: Topology, flags: list[torch.Tensor], squares: list[torch.Tensor]) -> Verdict:
        """The verdict of all ranks of a topology, from the flags of this rank and the squares that it adds.

        All of them must call this.
        """
        present = [*flags, *map(local, topology.parameters[:1])]
        home = present[0].device if present else torch.device("cpu")
        device = topology.device_for(present[-1].device if present else home)  # the same on all ranks
        numbers, verdict = self._on(device)
        numbers.zero_()
        for index, value in enumerate(all_to_device([*flags, *squares], device)):
            numbers[int(index >= len(flags))].add_(value)
        topology.sum_over_ranks(numbers)
        torch.gt(numbers[0], 0, out=verdict.found_inf)
        return verdict if home == device or not present else Verdict(*all_to_device(verdict, home))

    def _on(self, device: torch.device) -> tuple[torch.Tensor, Verdict]:
        """The two fp64 numbers to sum over ranks, flag and sum of squares, and the verdict made from them."""
        if device in self._tensors and not capturing(device):
            return self._tensors[device]
        numbers = torch.zeros(2, dtype=torch.float64, device=device)
        tensors = numbers, Verdict.empty(0, device)._replace(sum_of_squares=numbers[1])
        if not capturing(device):
            self._tensors[device] = tensors
        return tensors


class _Part(NamedTuple):
    """The check of one gradient: its position in `check`, its batch, and the stream of a GPU that ran it."""

    check: PartialCheck
    position: int
    key: Key
    stream: torch.cuda.Stream | None


class Checker:
    """Makes the verdicts on the gradients of one optimizer, which it does not keep alive.

    Checks in a CUDA graph write to verdicts of their own. They count non-finite gradients in the same `counts` as eager
    checks, if there was an eager check before. `process_group` has ranks with other plain tensors of the same model, as
    those of a `ZeroRedundancyOptimizer` have, whose local part the optimizer may be.

    Attributes:
        topology: the topology of its parameters in the last verdict.
        counts: for each device `Tally.counts`, with a row for each parameter of the optimizer, its slot.
    """

    def __init__(self, optimizer: Any, process_group: Any = None) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.topology: Topology = NOWHERE
        self.counts: dict[torch.device, torch.Tensor] = {}
        self._recorded: dict[int, torch.Tensor] = {}  # counts that CUDA graphs write to
        self._verdicts: dict[Key, Verdict] = {}
        self._combination = Combination()
        self._process_group = process_group
        self._slots: dict[int, int] = {}  # by the parameter's id, for a verdict in parts
        self._parts: dict[int, _Part] = {}  # by slot

    def find_topology(self, parameters: list[torch.Tensor]) -> Topology:
        """The present topology of `parameters`, which are all parameters of the optimizer."""
        self.topology = topology_of(parameters, self.topology, self._process_group, self.optimizer())
        return self.topology

    def verdict(
        self, factor: Factor | None = None, *, write: bool = False, step: torch.Tensor | None = None, keep: bool = True
    ) -> Verdict | None:
        """Check the optimizer's gradients times a factor and, with `write`, unscale them in place.

        All ranks of the topology must call this, including those without a gradient. With `step`, the number of steps
        before this one (int64), non-finite gradients are counted in `counts`. With `keep`, the verdict overwrites the
        last one. It is on the device of the first gradient; None if there are neither gradients nor other ranks.
        """
        parameters = parameters_of(self.optimizer())
        if not self.find_topology(parameters).settled:
            settle_gradients(parameters)
        grads = list(map(_gradient, parameters))
        slots: Sequence[int] = range(len(grads))
        if type(None) in set(map(type, grads)):
            slots = [slot for slot, grad in enumerate(grads) if grad is not None]
            grads = [grads[slot] for slot in slots]
        batches = self._batches(parameters, grads, slots, scales=step is not None)
        # Before the first check: the CPU would wait for that, too.
        numbers = {device: _on_device(device, factor, step) for device in dict.fromkeys(map(itemgetter(0), batches))}
        verdicts = {}
        for key, (values, of_values) in batches.items():
            device, _, supported = key
            recording = capturing(device)
            out = self._verdicts.get(key) if keep and not recording else None
            if out is None or out.flags.numel() != len(parameters):
                out = Verdict.empty(len(parameters), device)
                if keep and not recording:
                    self._verdicts[key] = out
            multiplier, count = numbers[device]
            tally = None if count is None else self._tally(len(parameters), device, count, recording)
            memory = None if supported else False
            verdicts[key] = check(
                values, multiplier, write=write, out=out, tally=tally, slots=of_values, in_memory=memory
            )
        return self._combined(verdicts, keep)

    def _combined(self, verdicts: dict[Key, Verdict], keep: bool) -> Verdict | None:
        topology = self.topology
        if not topology.groups and len(verdicts) < 2:
            return next(iter(verdicts.values()), None)
        flags = [verdict.found_inf for verdict in verdicts.values()]
        squares = [verdict.sum_of_squares for key, verdict in verdicts.items() if topology.counted[key[1]]]
        return (self._combination if keep else Combination()).combine(topology, flags, squares)

    # ------------------------------------------------------------------------------------------------------ in parts

    def begin_parts(self) -> None:
        """Begin a verdict whose gradients need not exist at the same time."""
        self._parts = {}
        parameters = parameters_of(self.optimizer())
        self.find_topology(parameters)
        self._slots = {id(parameter): slot for slot, parameter in enumerate(parameters)}

    def add_part(self, parameters: list[torch.Tensor], factor: Factor | None = None) -> None:
        """Check the gradients of some parameters times a factor. The gradients are not needed afterwards."""
        if not self.topology.settled:
            settle_gradients(parameters)
        slots = [self._slots[id(parameter)] for parameter in parameters]
        batches = self._batches(parameters_of(self.optimizer()), list(map(_gradient, parameters)), slots)
        for key, (grads, of_grads) in batches.items():
            device, _, supported = key
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            in_memory = supported and all_have_memory(grads)
            part = check_part(grads, _on_device(device, factor, None)[0], in_memory=in_memory)
            self._parts.update((slot, _Part(part, index, key, stream)) for index, slot in enumerate(of_grads))

    def end_parts(self, step: torch.Tensor | None = None) -> Verdict | None:
        """The verdict on the gradients of all parts, with the bits of `verdict`; `step` is as there.

        All ranks of the topology must call this.
        """
        slots_of: dict[Key, list[int]] = {}
        for slot in sorted(self._parts):
            slots_of.setdefault(self._parts[slot].key, []).append(slot)
        verdicts = {key: self._of_parts(key[0], slots, step) for key, slots in slots_of.items()}
        self._parts = {}
        return self._combined(verdicts, keep=False)

    def _of_parts(self, device: torch.device, slots: list[int], step: torch.Tensor | None) -> Verdict:
        count = len(self._slots)
        tally = None if step is None else self._tally(count, device, to_device(step, device), False)
        parts = list(map(self._parts.__getitem__, slots))
        current: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
        streams: set[Any] = {part.stream for part in parts} - {current}
        for stream in streams:
            current.wait_stream(stream)
        checks = [(part.check, part.position) for part in parts]
        whole = PartialCheck(
            [check.dtypes[index] for check, index in checks],
            [check.sums[index] for check, index in checks],
            [check.flags[index] for check, index in checks],
            all(check.in_memory for check, _ in checks),
        )
        verdict = finish_parts(whole, slots, Verdict.empty(count, device), tally)
        for stream in streams:  # they reuse the memory of the sums
            stream.wait_stream(current)
        return verdict

    def _batches(
        self, parameters: list[torch.Tensor], grads: list[torch.Tensor], slots: Sequence[int], scales: bool = False
    ) -> Mapping[Key, Batch]:
        """The gradients that are checked together. If a scaler asks, which must have all, one that was freed raises."""
        number_of = self.topology.number_of
        # The usual case needs no loop in Python, which for thousands of tensors takes longer than the step.
        if (
            number_of is None
            and set(map(type, grads)) == {torch.Tensor}
            and set(map(attrgetter("layout"), grads)) == {torch.strided}
        ):
            devices = set(map(attrgetter("device"), grads))
            if len(devices) == 1 and DTYPE_CODES.keys() >= set(map(attrgetter("dtype"), grads)):
                return {(devices.pop(), 0, True): (grads, slots)}
        batches: dict[Key, tuple[list[torch.Tensor], list[int]]] = {}
        for grad, slot in zip(grads, slots, strict=True):
            if is_stand_in(grad):
                elsewhere = local(grad).gradient()  # type: ignore[attr-defined]
                if elsewhere is None:
                    if scales:
                        refuse_freed(parameters, "a scaler")
                    continue
                grad = elsewhere
            if grad.is_sparse:
                if not grad.is_coalesced():  # the optimizer adds duplicates, and their sum may overflow
                    parameters[slot].grad = grad = grad.coalesce()
                values = grad._values()
            else:
                values = local(grad)
            key = values.device, 0 if number_of is None else number_of[slot], values.dtype in DTYPE_CODES
            batch = batches.setdefault(key, ([], []))
            batch[0].append(values)
            batch[1].append(slot)
        return batches

    def _tally(self, slots: int, device: torch.device, step: torch.Tensor, recording: bool) -> Tally | None:
        """Where to count non-finite gradients; None if a graph is captured and there are no counts yet."""
        counts = self.counts.get(device)
        if counts is None or counts.shape[0] < slots:
            if recording:  # each replay would set new ones to 0
                return None
            grown = torch.zeros(slots, 4, dtype=torch.int32, device=device)
            if counts is not None:
                grown[: counts.shape[0]] = counts
            counts = self.counts[device] = grown
        if recording:
            self._recorded[id(counts)] = counts
        return Tally(counts if counts.shape[0] == slots else counts[:slots], step)
