"""Gradients checked while the backward still runs, for the scaler to ask at `step`.

`EarlyCheck` keeps, for one model, what was found in which gradient, and the tensor and version in which it was found.
The scaler takes the answer only if it covers every gradient of the optimizer as it is now: the same tensors, not
written since, under the same scale. Else it makes its usual pass, which costs time and changes no bit.

What cannot be seen are writes that PyTorch does not count as writes: through ``grad.data``, numpy arrays or addresses.
After such a write call ``scaler.unscale_(optimizer)``, which reads the gradients again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter, is_

import torch

from halfstep.kernels.multi_tensor import DTYPE_CODES, is_flat
from halfstep.kernels.streams import capturing
from halfstep.kernels.unscale import Check, CheckInParts, Tally
from halfstep.numerics.scaling.gradients import local
from halfstep.numerics.scaling.scaler import GradScaler


def in_backward() -> bool:
    """Whether this thread is in a backward, or in what follows it, so that a callback can wait for its end."""
    return bool(torch._C._current_graph_task_id() != -1)


def checked_scaler(scaler: object) -> GradScaler:
    """The scaler, if it is one that can be told.

    Raises:
        TypeError: it is another one.
    """
    if not isinstance(scaler, GradScaler):
        raise TypeError(
            f"scaler is a {type(scaler).__module__}.{type(scaler).__qualname__}; allowed is halfstep.GradScaler, which "
            "takes the same arguments"
        )
    return scaler


class EarlyCheck:
    """What backwards have found in the gradients of one model.

    Args:
        scaler: by whose scale gradients are divided; it is told of this and keeps no reference that holds it.
        parameters: of the model.
        threads: of the CPU for the checks, as `CheckInParts` has it.
    """

    def __init__(self, scaler: GradScaler, parameters: Iterable[torch.Tensor], threads: int | None = None) -> None:
        self.scaler = scaler
        self._threads = threads
        self._parameters = list(parameters)
        self._slots = {id(parameter): slot for slot, parameter in enumerate(self._parameters)}
        self._parts: dict[torch.device, CheckInParts] = {}
        self._making = threading.Lock()  # buckets come from the threads of the communication library
        self._scale: tuple[torch.Tensor | None, int] = (None, -1)
        count = len(self._parameters)
        # By slot: the gradient that was checked and its local values, held so that no other can take their place.
        self._grads: list[torch.Tensor | None] = [None] * count
        self._values: list[torch.Tensor | None] = [None] * count
        self._grad_versions, self._value_versions = [0] * count, [0] * count
        scaler._early_checks.append(weakref.ref(self))

    def covers(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of the model's."""
        return id(parameter) in self._slots

    def forget(self) -> None:
        """Hold no gradient any longer; the scaler makes its usual pass unless they are checked again."""
        count = len(self._parameters)
        self._grads, self._values = [None] * count, [None] * count

    def can_check(self, like: torch.Tensor) -> bool:
        """Whether gradients on the device, of the dtype and of the layout of this one can be checked now."""
        if self.scaler._scale is None or not self.scaler.is_enabled():
            return False
        return like.dtype in DTYPE_CODES and like.layout == torch.strided and not capturing(like.device)

    def check(self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
        """Check the local values of the gradients of some parameters.

        Args:
            parameters: of the model.
            values: a tensor each, with the numbers that its gradient will have: `seal` says when it has them.

        Returns:
            Whether they were checked. They are not if they lie on several devices or have other sizes than their
            parameters, or if there is no kernel for a dtype.
        """
        slots = [slot for slot in map(self._slots.get, map(id, parameters)) if slot is not None]
        scale = self.scaler._scale
        if not values or scale is None or len(slots) != len(values) or not self.can_check(values[0]):
            return False
        parts = self._parts_on(values[0].device)
        if [parts.numels[slot] for slot in slots] != list(map(torch.Tensor.numel, values)):
            return False
        if len(set(map(attrgetter("device"), values))) > 1 or not all(value.dtype in DTYPE_CODES for value in values):
            return False
        if self._scale[0] is not scale or self._scale[1] != scale._version:
            self.forget()
            self._scale = (scale, scale._version)
        parts.add(slots, values, scale=scale.to(parts.device, non_blocking=True))
        return True

    def _parts_on(self, device: torch.device) -> CheckInParts:
        with self._making:
            parts = self._parts.get(device)
            if parts is None:
                numels = [local(parameter.detach()).numel() for parameter in self._parameters]
                parts = self._parts[device] = CheckInParts(numels, device, self._threads)
            return parts

    def seal(self, parameter: torch.Tensor) -> None:
        """Say that a parameter's gradient, as it is now, is what `check` has read."""
        slot, grad = self._slots[id(parameter)], parameter.grad
        if grad is None:
            return
        values = local(grad)
        self._grads[slot], self._values[slot] = grad, values
        self._grad_versions[slot], self._value_versions[slot] = grad._version, values._version

    def answer(
        self,
        parameters: Sequence[torch.Tensor],
        places: Sequence[int],
        values: Sequence[torch.Tensor],
        out: Check,
        tally: Tally | None,
    ) -> bool:
        """Write the answer about some gradients of an optimizer, if all of them were checked as they are now.

        Args:
            parameters: all of the optimizer's.
            places: of the parameters whose gradients are asked for.
            values: their local values.
            out, tally: where to write, as in `foreach_check`, with a flag and a row for each of `parameters`.

        Returns:
            Whether it was written. The answer is then used up.
        """
        parts, scale = self._parts.get(out.flags.device), self.scaler._scale
        if parts is None or scale is None or self._scale[0] is not scale or self._scale[1] != scale._version:
            return False
        asked = parameters if len(places) == len(parameters) else [parameters[place] for place in places]
        found = list(map(self._slots.get, map(id, asked)))
        slots = [slot for slot in found if slot is not None]
        if len(slots) != len(found) or len(set(slots)) != len(slots) or not self._unchanged(asked, slots, values):
            return False
        rows = slots
        if len(places) != len(parameters):
            rows = [-1] * len(parameters)
            for place, slot in zip(places, slots, strict=True):
                rows[place] = slot
        parts.finish(rows, out=out, tally=tally)
        for slot in slots:
            self._grads[slot] = self._values[slot] = None
        return True

    def _unchanged(
        self, parameters: Sequence[torch.Tensor], slots: Sequence[int], values: Sequence[torch.Tensor]
    ) -> bool:
        """Whether these gradients are what was sealed. With maps: there may be thousands."""
        grads: list[torch.Tensor] = list(map(attrgetter("grad"), parameters))
        version = attrgetter("_version")
        return (
            all(map(is_, values, map(self._values.__getitem__, slots)))
            and all(map(is_, grads, map(self._grads.__getitem__, slots)))
            and list(map(version, values)) == list(map(self._value_versions.__getitem__, slots))
            and list(map(version, grads)) == list(map(self._grad_versions.__getitem__, slots))
        )


def same_order(parameter: torch.Tensor, grad: torch.Tensor) -> bool:
    """Whether a gradient's elements lie in memory as DistributedDataParallel lays them out in its buckets.

    That is as the parameter's do, or row-major if those have gaps.
    """
    if grad.is_contiguous() and parameter.is_contiguous():
        return True
    return grad.stride() == parameter.stride() if is_flat(parameter) else grad.is_contiguous()
