"""The launch of a step: choose the implementation of a family and pass it a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int64
from functools import partial
from types import ModuleType

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import EXACT, launch_kernel, resolve
from halfstep.kernels.multi_tensor import alignments, checked_addresses
from halfstep.kernels.optimizer import reference
from halfstep.kernels.optimizer.layout import Batch, Control

LANES = 256  # tensors per program of the prepare kernel


class Family:
    """The implementations of an optimizer's step.

    Args:
        name: the function in C++ is ``halfstep_<name>``, and the Triton kernel ``<name>_kernel``.
        rule: ``rule(layout, w, grad, moments, hyper, largest second moment, second moment as it is stored)``: the new
            weight and moments. All tensors are fp32.
        specification: the module with `Group`, the columns of the table of groups, `Hyper`, the hyper numbers of a
            tensor, and ``numbers(group, count, gscale)``, which computes these in fp64.
        kernels: the module with the Triton kernels. Its `prepare_kernel` advances the step counts and fills
            `Batch.hyper`.
        library: the C++ file; by default that of `name`.
        prepares: whether a launch does that too. Another family has done it otherwise.
    """

    def __init__(
        self,
        name: str,
        rule: Callable[..., Sequence[torch.Tensor]],
        specification: ModuleType,
        kernels: ModuleType,
        library: str | None = None,
        prepares: bool = True,
    ) -> None:
        self.name, self.rule, self.numbers = name, rule, specification.numbers
        self.library, self.prepares = library or name, prepares
        self.group, self.hyper = specification.Group, specification.Hyper
        self.group_columns, self.hyper_columns = len(self.group._fields), 1 + len(self.hyper._fields)
        self.prepare_kernel, self.kernel = kernels.prepare_kernel, getattr(kernels, f"{name}_kernel")

    def launch(self, batch: Batch, groups: torch.Tensor, control: Control) -> partial[None]:
        """One optimizer step over the tensors of a batch, in place, ready to be called.

        On the CPU it then runs no Python, so no exception can be raised in the middle. It holds addresses: arguments
        must live until then. `groups` is fp64, of shape ``(groups, group columns of the family)``.
        """
        if batch.table is None:
            return partial(reference.own_operations_step, self, batch, groups, control)
        implementation = resolve(batch.hyper.device, self.library)
        if implementation == "native":
            tensors = [batch.groups, groups, batch.hyper]
            for scalar in control:
                tensors.append(batch.hyper if scalar is None else scalar)
            addresses = checked_addresses(tensors)
            for row, scalar in enumerate(control, 3):
                addresses[row] = 0 if scalar is None else addresses[row]
            arguments = *batch.table.addresses, *addresses, *batch.codes, native.threads()
            function = getattr(native.library(self.library), f"halfstep_{self.name}")
            return partial(function, (c_int64 * len(arguments))(*arguments))
        if implementation == "reference":
            return partial(reference.step, self, batch, groups, control)
        return partial(self._triton_step, batch, groups, control)

    def step(self, batch: Batch, groups: torch.Tensor, control: Control) -> None:
        """`launch`, and call what it returns."""
        self.launch(batch, groups, control)()

    def _triton_step(self, batch: Batch, groups: torch.Tensor, control: Control) -> None:
        table, hyper, device = batch.table, batch.hyper, batch.hyper.device
        assert table is not None
        tensors = [batch.groups, groups, hyper]
        scalars = tuple(hyper if scalar is None else scalar for scalar in control)
        offsets = alignments([*tensors, *scalars])
        programs, operands = (table.tensors + LANES - 1) // LANES, (table.rows, table.tensors, *tensors, scalars)
        constants = {"FLAGS": tuple(scalar is not None for scalar in control), "LANES": LANES, **EXACT}
        if self.prepares:
            launch_kernel(self.prepare_kernel, device, programs, operands, constants, offsets)
        if table.chunks:
            operands = (table.rows, table.chunk_tensor, table.tensors, hyper)
            launch_kernel(self.kernel, device, table.chunks, operands, batch.constants, offsets[2])
