"""What the scaler and the optimizers ask of gradients: are all finite, and what is their norm, whatever shards them.

The kernels see local tensors on one device. Here gradients are grouped by device and by where their parameters lie
(`halfstep.numerics.scaling.topology`), checked with one pass each, and the answers combined: flag and sum of squares in
one packed sum over all ranks that hold anything of the same optimizer, what there are several copies of counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from halfstep.kernels.multi_tensor import DTYPE_CODES
from halfstep.kernels.streams import capturing
from halfstep.kernels.unscale import (
    HAS_INF,
    HAS_NAN,
    Check,
    Tally,
    foreach_check,
    foreach_unscale_and_check_,
    note,
)
from halfstep.numerics.scaling.topology import NOWHERE, Topology


class GradientCheck(NamedTuple):
    """Over all gradients of an optimizer, on all devices and ranks.

    Attributes:
        found_inf: 0-dim fp32, 1.0 if any is non-finite, else 0.0.
        sum_of_squares: 0-dim fp64; of what was checked.
    """

    found_inf: torch.Tensor
    sum_of_squares: torch.Tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds: all of a plain tensor."""
    shard: Any = getattr(tensor, "_local_tensor", tensor)
    # A collective may still be filling the shard.
    return shard.wait() if hasattr(shard, "wait") else shard


def _values(grad: torch.Tensor) -> torch.Tensor:
    """The stored values of a gradient; duplicates of a sparse one must have been summed before."""
    return grad._values() if grad.is_sparse else local(grad)


def _check_in_torch(
    tensors: list[torch.Tensor], inv_scale: torch.Tensor | None, write: bool, out: Check, places: Sequence[int]
) -> None:
    """The same for dtypes that the kernels do not know (fp64), which optimizers of others may hold.

    Answers are added to plain tensors in place, so that of a subclass that holds several tensors each adds its own.
    """
    out.flags.zero_()
    out.sum_of_squares.zero_()
    for place, tensor in zip(places, tensors, strict=True):
        value = tensor if inv_scale is None else tensor * inv_scale
        if write:
            tensor.copy_(value)
        out.flags[place].bitwise_or_(value.isinf().any().int() * HAS_INF)
        out.flags[place].bitwise_or_(value.isnan().any().int() * HAS_NAN)
        out.sum_of_squares.add_(value.abs().double().square().sum())
    out.found_inf.copy_(out.flags.any())


def _new_answer(slots: int, device: torch.device) -> Check:
    return Check(
        torch.empty((), dtype=torch.float32, device=device),
        torch.empty((), dtype=torch.float64, device=device),
        torch.empty(slots, dtype=torch.int32, device=device),
    )


Kind = tuple[torch.device, int, bool]
Found = dict[Kind, tuple[list[torch.Tensor], Sequence[int]]]
# (places, values, out, tally) to whether the answer was written.
Early = Callable[[Sequence[int], list[torch.Tensor], Check, Tally | None], bool]


def _by_kind(grads: list[torch.Tensor], places: Sequence[int], topology: Topology) -> Found:
    """Gradients by (device, kind in the topology, whether the kernels know the dtype): local values and places."""
    # The common case, told in four passes at the speed of C: with thousands of tensors a loop costs more than the step.
    if (
        topology.kind_of is None
        and set(map(type, grads)) == {torch.Tensor}
        and set(map(attrgetter("layout"), grads)) == {torch.strided}
    ):
        devices = set(map(attrgetter("device"), grads))
        if len(devices) == 1 and DTYPE_CODES.keys() >= set(map(attrgetter("dtype"), grads)):
            return {(devices.pop(), 0, True): (grads, places)}
    kinds: dict[Kind, tuple[list[torch.Tensor], list[int]]] = {}
    for grad, place in zip(grads, places, strict=True):
        values = _values(grad)
        lies = 0 if topology.kind_of is None else topology.kind_of[place]
        of_kind, where = kinds.setdefault((values.device, lies, values.dtype in DTYPE_CODES), ([], []))
        of_kind.append(values)
        where.append(place)
    return {kind: found for kind, found in kinds.items()}


class Packed(NamedTuple):
    """What is summed over all ranks, and where the flag goes that comes of it.

    Attributes:
        numbers: fp64 (2,): flag and sum of squares.
        flag, squares: its elements.
        found_inf: 0-dim fp32.
    """

    numbers: torch.Tensor
    flag: torch.Tensor
    squares: torch.Tensor
    found_inf: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> Packed:
        numbers = torch.zeros(2, dtype=torch.float64, device=device)
        return cls(numbers, numbers[0], numbers[1], torch.zeros((), dtype=torch.float32, device=device))


class CheckMemory:
    """What the checks of one optimizer's gradients leave for the next: where answers go, and which gradients were bad.

    A check that a CUDA graph records has an answer of its own. Bad gradients it notes where eager checks do, if one was
    made before.

    Attributes:
        counts: by device, `Tally.counts` with a row per parameter of the optimizer, in its order.
    """

    def __init__(self) -> None:
        self.counts: dict[torch.device, torch.Tensor] = {}
        self._recorded: dict[int, torch.Tensor] = {}  # counts that graphs write to
        self._answers: dict[Kind, Check] = {}
        self._packed: dict[torch.device, Packed] = {}

    def packed(self, device: torch.device) -> Packed:
        """What to reduce in, the same each time."""
        if capturing(device):
            return Packed.on(device)
        known = self._packed.get(device)
        if known is None:
            known = self._packed[device] = Packed.on(device)
        return known

    def answer(self, kind: Kind, slots: int, device: torch.device) -> Check:
        """Where to write, the same each time for the same kind of gradients."""
        if capturing(device):
            return _new_answer(slots, device)
        known = self._answers.get(kind)
        if known is None or known.flags.numel() != slots:
            known = self._answers[kind] = _new_answer(slots, device)
        return known

    def tally(self, slots: int, device: torch.device, step: torch.Tensor) -> Tally | None:
        """Where to note bad gradients, None if nowhere yet and a graph is captured; `step`: how many came before."""
        counts = self.counts.get(device)
        if capturing(device):
            if counts is None or counts.shape[0] < slots:  # made now, they would be 0 again at each replay
                return None
            self._recorded[id(counts)] = counts
        if counts is None or counts.shape[0] < slots:
            grown = torch.zeros(slots, 4, dtype=torch.int32, device=device)
            if counts is not None:
                grown[: counts.shape[0]] = counts
            counts = self.counts[device] = grown
        return Tally(counts[:slots], step.to(device, non_blocking=True))


def check_gradients(
    grads: Iterable[torch.Tensor],
    inv_scale: torch.Tensor | None,
    *,
    scale: torch.Tensor | None = None,
    write: bool = False,
    topology: Topology = NOWHERE,
    memory: CheckMemory | None = None,
    places: Sequence[int] | None = None,
    slots: int = 0,
    step: torch.Tensor | None = None,
    early: Early | None = None,
) -> GradientCheck | None:
    """Check gradients times `inv_scale`, wherever they are, and unscale them in place if asked to.

    Where the topology has ranks to agree with, all of them must call this, also those without a gradient.

    Args:
        grads: fp32, fp16 or bf16; dense, DTensor or coalesced sparse; on any devices; DTensors with the placements of
            their parameters (`settle_gradients`).
        inv_scale: 0-dim fp32, or None for 1.
        scale: 0-dim fp32, its reciprocal, instead of it.
        write: also multiply them in place.
        topology: of all the optimizer's parameters, those without a gradient included.
        memory: of earlier checks of the same optimizer: nothing is then allocated for the answer, which the next check
            overwrites, and bad gradients are noted in it.
        places: which of the optimizer's parameters each gradient belongs to (None: all, in order).
        slots, step: with `memory`: how many parameters the optimizer has, and the number of steps before this one,
            int64.
        early: asked first, with `memory`: writes the answer about gradients of one kind if the backward has found it.

    Returns:
        The combined answer on the first gradient's device, or None if there are no gradients and nobody to agree with.
    """
    listed = list(grads)
    kinds = _by_kind(listed, range(len(listed)) if places is None else places, topology)
    if not kinds and not topology.groups:
        return None
    found: list[torch.Tensor] = []
    squares: list[torch.Tensor] = []
    for kind, (tensors, where) in kinds.items():
        check = _check_kind(kind, tensors, where, inv_scale, scale, write, memory, slots, step, early)
        found.append(check.found_inf)
        if topology.counted[kind[1]]:
            squares.append(check.sum_of_squares)
    if topology.groups:
        return agree(topology, found, squares, memory)
    home = found[0].device
    flag = torch.stack([one.to(home, non_blocking=True) for one in found]).amax() if len(found) > 1 else found[0]
    return GradientCheck(flag, sum((one.to(home, non_blocking=True) for one in squares[1:]), start=squares[0]))


def agree(
    topology: Topology, found: list[torch.Tensor], squares: list[torch.Tensor], memory: CheckMemory | None
) -> GradientCheck:
    """The answer of all ranks, from this one's flags and the sums of squares that it has to add."""
    home = found[0].device if found else local(topology.parameters[0]).device if topology.parameters else None
    device = topology.device_for(torch.device("cpu") if home is None else home)
    packed = Packed.on(device) if memory is None else memory.packed(device)
    for total, own in ((packed.flag, found), (packed.squares, squares)):
        if not own:
            total.zero_()
        for index, one in enumerate(own):
            value = one.to(device, non_blocking=True)
            total.copy_(value) if index == 0 else total.add_(value)
    topology.sum_over_ranks(packed.numbers)
    torch.gt(packed.flag, 0, out=packed.found_inf)
    if home is None or home == device:
        return GradientCheck(packed.found_inf, packed.squares)
    return GradientCheck(packed.found_inf.to(home), packed.squares.to(home))


def _check_kind(
    kind: Kind,
    tensors: list[torch.Tensor],
    where: Sequence[int],
    inv_scale: torch.Tensor | None,
    scale: torch.Tensor | None,
    write: bool,
    memory: CheckMemory | None,
    slots: int,
    step: torch.Tensor | None,
    early: Early | None,
) -> Check:
    """One pass over gradients of one kind, or none if its answer is known."""
    device, _, ours = kind
    factor = scale if inv_scale is None else inv_scale
    factor = None if factor is None else factor.to(device, non_blocking=True)
    tally = None if memory is None or step is None else memory.tally(slots, device, step)
    if ours and not write:
        times, over = (None, factor) if inv_scale is None else (factor, None)
        if memory is None:
            return foreach_check(tensors, inv_scale=times, scale=over)
        out, rows = memory.answer(kind, slots, device), None if len(where) == slots else where
        if early is not None and early(where, tensors, out, tally):
            return out
        return foreach_check(tensors, inv_scale=times, scale=over, out=out, tally=tally, places=rows)
    if factor is not None and inv_scale is None:
        factor = factor.double().reciprocal().float()
    rows = range(len(tensors)) if memory is None else where
    out = _new_answer(len(tensors), device) if memory is None else memory.answer(kind, slots, device)
    if ours:
        return foreach_unscale_and_check_(tensors, factor, out=out, tally=tally, places=rows)
    _check_in_torch(tensors, factor, write, out, rows)
    if tally is not None:
        note(out.flags, tally)
    return out
