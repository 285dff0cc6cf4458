"""Verdicts on gradients, over all devices and ranks in one pass, and decisions: what a step does about them.

A `Checker` belongs to one optimizer and makes a `Verdict` on its gradients in each step: whether they are finite, and
their norm. It owns what the verdicts of successive steps share: the tensors they are written to, the counts of
non-finite gradients, and the topology of the parameters. fp32, fp16 and bf16 gradients are checked by
kernels/unscale.py, shards where they are. The flag and the sum of squares are then combined by one packed sum over all
ranks that hold any part of the optimizer's parameters. Copies on several ranks are counted once.

A `Decision` is a verdict and what follows from it: the scale to divide by, the norm to clip to, and whether to skip. A
scaler, a step in the backward or a trainer passes it to the optimizer by `StepsOnVerdict.apply` or
`StepsOnVerdict.decide`. Otherwise the optimizer decides by itself.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from halfstep.kernels.multi_tensor import DTYPE_CODES, all_have_memory, are_usual
from halfstep.kernels.optimizer.layout import Control
from halfstep.kernels.streams import all_to_device, capturing, to_device
from halfstep.kernels.unscale import Factor, PartialCheck, Tally, Verdict, check, check_part, finish_parts
from halfstep.numerics.scaling.early_checks import early_checks, handed_over
from halfstep.numerics.scaling.options import MAX_NORM
from halfstep.numerics.scaling.sharding import NOWHERE, Topology, in_process_group, local, settle_gradients, topology_of
from halfstep.numerics.scaling.stand_ins import is_freed, is_stand_in, refuse_freed

# Gradients that are checked together: on one device, with one sharding, and whether kernels support their dtypes.
Key = tuple[torch.device, int, bool]


class Batch(NamedTuple):
    values: list[torch.Tensor]  # the local ones of gradients
    slots: Sequence[int]  # of their parameters
    in_memory: bool


_gradient, _of_group = attrgetter("grad"), itemgetter("params")


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """All parameters of an optimizer, in its order."""
    return list(chain.from_iterable(map(_of_group, optimizer.param_groups)))


def norm_of(verdict: Verdict) -> torch.Tensor:
    """The 2-norm of the gradients of a verdict, 0-dim fp32."""
    return verdict.sum_of_squares.sqrt().float()


def _on_device(device: torch.device, factor: Factor, step: torch.Tensor | None) -> tuple[Factor, torch.Tensor | None]:
    """The factor and the number of steps on a device. The host waits once if the CPU needs numbers of a GPU."""
    numbers: list[Any] = all_to_device([factor.value, step], device)
    return Factor(numbers[0], factor.inverted), numbers[1]


class Combination:
    """Combines the verdicts on several batches of gradients and of several ranks. It reuses its memory."""

    def __init__(self) -> None:
        # The two fp64 numbers to sum over ranks, flag and sum of squares, and the verdict made from them.
        self._tensors: dict[torch.device, tuple[torch.Tensor, Verdict]] = {}

    def combine(self, topology: Topology, flags: list[torch.Tensor], squares: list[torch.Tensor]) -> Verdict:
        """The verdict of all ranks of a topology, from the flags of this rank and the squares that it adds.

        All of them must call this.
        """
        present = [*flags, *map(local, topology.parameters[:1])]
        home = present[0].device if present else torch.device("cpu")
        device = topology.device_for(present[-1].device if present else home)  # the same on all ranks
        kept = {} if capturing(device) else self._tensors
        if device not in kept:
            numbers = torch.zeros(2, dtype=torch.float64, device=device)
            kept[device] = numbers, Verdict.empty(0, device)._replace(sum_of_squares=numbers[1])
        numbers, verdict = kept[device]
        numbers.zero_()
        for index, value in enumerate(all_to_device([*flags, *squares], device)):
            numbers[int(index >= len(flags))].add_(value)
        topology.sum_over_ranks(numbers)
        torch.gt(numbers[0], 0, out=verdict.found_inf)
        return verdict if home == device or not present else Verdict(*all_to_device(verdict, home))


class _Part(NamedTuple):
    """The check of one gradient, its batch, and the stream of a GPU that ran it."""

    check: PartialCheck
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
        if self.topology is not NOWHERE or in_process_group():
            self.find_topology(parameters)
        if not self.topology.settled:
            settle_gradients(parameters)
        grads = list(map(_gradient, parameters))
        slots: Sequence[int] = range(len(grads))
        if type(None) in set(map(type, grads)):
            slots = [slot for slot, grad in enumerate(grads) if grad is not None]
            grads = [grads[slot] for slot in slots]
        batches = self._batches(parameters, grads, slots, scales=step is not None)
        numbers = dict.fromkeys(map(itemgetter(0), batches), (factor, step))
        for device in numbers if factor is not None else ():  # before the first check: the CPU would wait for that, too
            if factor.value.device != device:  # type: ignore[union-attr]
                numbers[device] = _on_device(device, factor, step)  # type: ignore[arg-type]
        verdicts, count = {}, len(parameters)
        for key, (values, of_values, in_memory) in batches.items():
            device = key[0]
            recording = capturing(device)
            kept = {} if recording or not keep else self._verdicts
            if key not in kept or kept[key].flags.numel() != count:
                kept[key] = Verdict.empty(count, device)
            factor, step = numbers[device]
            tally = None if step is None else self._tally(count, device, step, recording)
            options: Any = {
                "write": write,
                "out": kept[key],
                "tally": tally,
                "slots": of_values,
                "in_memory": in_memory,
            }
            if handed_over.data and in_memory and not (write or recording):
                options["parts"] = early_checks(parameters, of_values, factor)
            verdicts[key] = check(values, factor, **options)
        if len(verdicts) == 1 and not self.topology.groups:
            return verdicts[key]
        return self._combined(verdicts, self._combination if keep else Combination())

    def _combined(self, verdicts: dict[Key, Verdict], combination: Combination) -> Verdict | None:
        topology = self.topology
        if not topology.groups and len(verdicts) < 2:
            return next(iter(verdicts.values()), None)
        flags = [verdict.found_inf for verdict in verdicts.values()]
        squares = [verdict.sum_of_squares for key, verdict in verdicts.items() if topology.counted[key[1]]]
        return combination.combine(topology, flags, squares)

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
        for key, (grads, of_grads, in_memory) in batches.items():
            device = key[0]
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            on_device = None if factor is None else _on_device(device, factor, None)[0]
            checks = check_part(grads, on_device, in_memory=in_memory)
            self._parts.update((slot, _Part(part, key, stream)) for slot, part in zip(of_grads, checks, strict=True))

    def end_parts(self, step: torch.Tensor | None = None) -> Verdict | None:
        """The verdict on the gradients of all parts, with the bits of `verdict`; `step` is as there.

        All ranks of the topology must call this.
        """
        slots_of: dict[Key, list[int]] = {}
        for slot in sorted(self._parts):
            slots_of.setdefault(self._parts[slot].key, []).append(slot)
        verdicts = {key: self._of_parts(key[0], slots, step) for key, slots in slots_of.items()}
        self._parts = {}
        return self._combined(verdicts, Combination())

    def _of_parts(self, device: torch.device, slots: list[int], step: torch.Tensor | None) -> Verdict:
        count = len(self._slots)
        tally = None if step is None else self._tally(count, device, to_device(step, device), False)
        parts = list(map(self._parts.__getitem__, slots))
        current: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
        streams: set[Any] = {part.stream for part in parts} - {current}
        for stream in streams:
            current.wait_stream(stream)
        verdict = finish_parts([part.check for part in parts], slots, Verdict.empty(count, device), tally)
        for stream in streams:  # they reuse the memory of the sums
            stream.wait_stream(current)
        return verdict

    def _batches(
        self, parameters: list[torch.Tensor], grads: list[torch.Tensor], slots: Sequence[int], scales: bool = False
    ) -> Mapping[Key, Batch]:
        """The gradients that are checked together. If a scaler asks, which must have all, one that was freed raises."""
        number_of = self.topology.number_of
        if number_of is None and grads and are_usual(grads):
            return {(grads[0].device, 0, True): Batch(grads, slots, True)}
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
        return {key: Batch(*batch, key[2] and all_have_memory(batch[0])) for key, batch in batches.items()}

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


# ----------------------------------------------------------------------------------------------------------- decisions

LARGEST_NORM = torch.finfo(torch.float32).max  # clips nothing: the factor is 1, and gradients times 1 keep their bits


def skipping_zeros(control: Control, verdict: Verdict) -> Control:
    """The same control, except that the step is skipped if the gradients of all ranks are 0. Step counts stay too.

    Without L2 decay the step would change no moments, and with eps = 0 the update would be 0 / 0.
    """
    # The sum is 0 only if all elements are: chunks are scaled before they are squared, so none underflows completely.
    nothing = (verdict.sum_of_squares == 0).float()
    if control.found_inf is not None:
        found_inf = control.found_inf.reshape(()).to(device=nothing.device, dtype=torch.float32)
        nothing = torch.maximum(nothing, found_inf)
    return Control(control.grad_scale, nothing, control.sum_of_squares)


class Decision(NamedTuple):
    """The decision about one step of an optimizer: that of a scaler, or of a step in the backward."""

    verdict: Verdict  # on the unscaled gradients
    scale: torch.Tensor | None  # 0-dim fp32, divides the gradients; None if they were unscaled before, and may differ
    max_norm: float | None  # to which `step` clips, using the verdict's norm; None: no limit but the optimizer's own
    skips: bool = True  # whether the step is skipped if the verdict found non-finite numbers, as with a scaler


class StepsOnVerdict:
    """Base of optimizers that unscale, clip and skip inside their step, as a `Decision` says: those of halfstep.

    Attributes:
        max_grad_norm: the 2-norm to which each step clips, or None.
        backward_handle: what steps parts of the parameters in the backward (integrations/release.py), or None.
    """

    step: Callable[..., Any]
    max_grad_norm: float | None
    backward_handle: Any = None
    # torch's scalers then unscale in place, reduce their flag where they can, and do not call step() after an overflow,
    # on which Accelerate relies. With True, ShardedGradScaler would not reduce it, and Lightning would not clip.
    _step_supports_amp_scaling = False
    _checker: Checker | None = None
    _last_verdict: Verdict | None = None
    _squares: torch.Tensor | None = None  # of the last step that clipped
    _decision: Decision | None = None  # about the present or the next step
    _lasts = False  # whether the decision stays when a step has been taken

    @property
    def checker(self) -> Checker:
        """The checker of this optimizer's gradients where no scaler checks them."""
        if self._checker is None:
            self._checker = Checker(self)
        return self._checker

    @property
    def last_verdict(self) -> Verdict | None:
        """The verdict by which the last step was taken; None if nothing checked its gradients."""
        return self._last_verdict

    def apply(self, decision: Decision, step: Callable[[], Any] | None = None) -> Any:
        """Take a step that unscales, clips and skips as decided elsewhere, by a loss scaler for example.

        `step` is what to call, by default ``self.step``: the step of a wrapper calls that of this optimizer. Returns
        what it returns.
        """
        self._decision, self._lasts = decision, True
        try:
            return self.step() if step is None else step()
        finally:
            self._decision, self._lasts = None, False

    def decide(self, decision: Decision | None) -> None:
        """Make the next step unscale, clip and skip as `decision` says, or as without one; later steps do not."""
        self._decision, self._lasts = decision, False

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The 2-norm of the unscaled gradients before clipping in the last step that clipped: 0-dim, on the device."""
        return None if self._squares is None else self._squares.sqrt().float()

    @torch._disable_dynamo
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip all gradients together to a 2-norm in the next step, without a scaler; nothing is written.

        The gradients are read once, for the norm, and must not change before the step, which an overflow does not skip.
        If the backward has stepped, it has clipped to ``max_grad_norm``, which must be `max_norm` then.

        Args:
            max_norm: a number above 0. Infinity only computes the norm.

        Returns:
            The norm before clipping, over all ranks: 0-dim fp32, on the device of the gradients. NaN if it is not
            known, since the backward has stepped without clipping.

        Raises:
            ValueError: `max_norm` is not above 0.
            RuntimeError: the backward has stepped without clipping, or has clipped to another norm.
        """
        only_norm = max_norm == math.inf
        max_norm = LARGEST_NORM if only_norm else MAX_NORM.checked("max_norm", max_norm)
        if self.backward_handle is not None:
            return self.backward_handle.norm(None if only_norm else max_norm)
        parameters = parameters_of(self)
        if only_norm and any(is_freed(parameter.grad) for parameter in parameters):
            return torch.full((), math.nan, dtype=torch.float32, device="cpu")
        refuse_freed(parameters, "clipping")
        verdict = self.checker.verdict()
        if verdict is None:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        self.decide(Decision(verdict, None, max_norm, skips=False))
        return norm_of(verdict)

    def _limit(self) -> float | None:
        """The 2-norm to which the next step clips: the smaller of the scaler's and the optimizer's own, or None."""
        limit, decision = self.max_grad_norm, self._decision
        if decision is None or decision.max_norm is None:
            return limit
        return decision.max_norm if limit is None else min(limit, decision.max_norm)

    def _control(self, limit: float | None) -> Control:
        """Scale, flag and norm of this step, as decided elsewhere or, if clipping needs it, checked here."""
        decision, squares = self._decision, None
        self._last_verdict = None if decision is None else decision.verdict
        if decision is None:  # torch's scalers set these attributes on optimizers whose step() unscales
            scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        else:
            scale, found_inf = decision.scale, decision.verdict.found_inf if decision.skips else None
            # Gradients that were unscaled in place may have changed since, so their sum is computed again.
            if decision.scale is not None or decision.max_norm is not None:
                squares = decision.verdict.sum_of_squares
        if limit is None:
            return Control(scale, found_inf)
        if squares is None:
            factor = None if scale is None else Factor(scale.float().reshape(()), inverted=True)
            verdict = self.checker.verdict(factor)
            squares = None if verdict is None else verdict.sum_of_squares
            self._last_verdict = verdict if decision is None else decision.verdict
        self._squares = squares
        return Control(scale, found_inf, squares)
