"""Masters by parameter, and detection of parameters that other code has written since their full master."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from halfstep.integrations.optim.state import rows_of_a_piece
from halfstep.kernels.multi_tensor import has_memory
from halfstep.numerics.scaling.sharding import is_sharded, local
from halfstep.numerics.scaling.verdict import parameters_of

if TYPE_CHECKING:
    from halfstep.integrations.optim.classes import LayoutOptimizer


def version_of(parameter: torch.Tensor) -> int:
    """A number that grows with every write to a parameter, through its DTensor or its local tensor."""
    return parameter._version + parameter._local_tensor._version if is_sharded(parameter) else parameter._version  # type: ignore[attr-defined]


def as_written(parameter: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """A full master, replaced by the parameter wherever it does not round to it. Does not wait for the device."""
    return torch.where(parameter != master.to(parameter.dtype), parameter.float(), master)


Written = tuple[int, int, torch.dtype]


def written_last(parameter: torch.Tensor) -> Written:
    """The version, address and dtype of a parameter, at least one of which changes when other code writes it."""
    shard = local(parameter)
    return version_of(parameter), shard.data_ptr() if has_memory(shard) else 0, parameter.dtype


class Agreements(dict[int, Written]):
    """The values of `written_last` when parameters and their full masters last agreed, by the parameter's id."""

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that parameters and their masters agree now."""
        self.update((id(parameter), written_last(parameter)) for parameter in parameters)

    def written(self, parameter: torch.Tensor, master: torch.Tensor, compare: bool = False) -> torch.Tensor | None:
        """The updated local values of a full master if other code has written its parameter since; otherwise None.

        A change of dtype does not count. With `compare`, also None if the master still rounds to the parameter, which
        makes the host wait.
        """
        weight, master, agreed = local(parameter.detach()), local(master), self.get(id(parameter))
        comparable = weight.device == master.device and weight.shape == master.shape
        if agreed is None or not comparable or parameter.dtype != agreed[-1] or agreed == written_last(parameter):
            return None
        return None if compare and has_memory(weight) and _rounds_to(master, weight) else as_written(weight, master)


def _rounds_to(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a master rounds to its weight everywhere. Allocates memory only for a few rows at a time."""
    rows = rows_of_a_piece(weight)
    pairs = zip(torch.atleast_1d(master).split(rows), torch.atleast_1d(weight).split(rows), strict=True)
    return all(torch.equal(values.to(rounded.dtype), rounded) for values, rounded in pairs)


class Masters(Mapping[torch.Tensor, torch.Tensor]):
    """The masters of an optimizer by parameter. A split master is assembled when it is looked up."""

    def __init__(self, optimizer: LayoutOptimizer) -> None:
        self._optimizer = optimizer
        self._parameters = dict.fromkeys(parameters_of(optimizer))

    @torch.no_grad()
    def __getitem__(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self._parameters:
            raise KeyError("not a parameter of this optimizer")
        master = self._optimizer._master(parameter)
        return self._optimizer._target(parameter).detach().float() if master is None else master

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
