"""The plan of a step: which launches update which parameters. It is kept for as long as it matches them."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter, is_
from typing import Any

import torch

from halfstep.integrations.optim.batches import LaunchGroup, OperationsGroup, check_blocks, dense, place_of
from halfstep.integrations.optim.options import check_parameter, layout_of, options_of
from halfstep.integrations.optim.state import (
    CANONICAL_KEYS,
    DTYPES_OF_SCALES,
    SCALES,
    OptimizerState,
    is_complete,
    like,
    scales_like,
    state_keys,
)
from halfstep.kernels import adam
from halfstep.kernels.block_codes import blocks_per_row, rows_and_columns
from halfstep.kernels.multi_tensor import DTYPE_CODES, has_memory, has_numbers
from halfstep.kernels.streams import all_to_device, upload
from halfstep.numerics.scaling.topology import local
from halfstep.numerics.scaling.verdict import parameters_of

Group = dict[str, Any]


class StepPlan:
    """The launches that update some parameters of an optimizer.

    Args:
        optimizer: the optimizer. Missing entries of its state are created.
        parameters: the parameters to update.
        grads: their gradients.
        recording: whether the step is captured in a CUDA graph. State is then neither created nor changed.

    Attributes:
        parameters: the parameters.
        batches: for each launch, what it updates and the indices of its parameters in `parameters`.
        limit: the 2-norm to which the last step clipped, or None.

    Raises:
        RuntimeError: a gradient is sparse, or a step is captured for a parameter without state.
        TypeError, ValueError: a parameter, a gradient or a state tensor is not supported.
    """

    def __init__(
        self,
        optimizer: OptimizerState,
        parameters: list[torch.Tensor],
        grads: list[torch.Tensor],
        recording: bool = False,
    ) -> None:
        self.parameters = parameters
        self.batches = _batches(optimizer, parameters, grads, recording)
        self.limit: float | None = None
        self._layouts = _layouts(optimizer.param_groups)
        self._grads = _kinds(grads)
        # Other code may clear or replace the state to start again.
        self._state, self._entries = optimizer.state, len(optimizer.state)
        self._options: list[tuple[Any, ...]] = []
        self.knows_options = False  # whether a step was taken with this plan
        self._changeable = False
        self._tables: dict[torch.device, tuple[list[list[float]] | None, torch.Tensor]] = {}

    def options_may_differ(self, groups: list[Group], limit: float | None) -> bool:
        """Whether an option of any group may have changed since the last step.

        Options are compared by identity, which compares no tensors. Options that can change in place count as changed.
        """
        if self._changeable or len(groups) != len(self._options) or limit != self.limit:
            return True
        for group, known in zip(groups, self._options, strict=True):
            if not all(map(is_, options_of(group), known)):
                return True
        return False

    def describes(
        self, optimizer: OptimizerState, parameters: list[torch.Tensor], grads: list[torch.Tensor], contiguous: bool
    ) -> bool:
        """Whether this plan matches a step of `parameters`. `contiguous` says whether all gradients are contiguous."""
        return (
            len(parameters) == len(self.parameters)
            and all(map(is_, parameters, self.parameters))
            and _kinds(grads) == self._grads
            and optimizer.state is self._state
            and len(self._state) == self._entries
            # Sparse gradients are never contiguous.
            and (contiguous or all(grad.layout == torch.strided for grad in grads))
            and all([batch.still_describes() for batch, _ in self.batches])
        )

    def has_layouts_of(self, groups: list[Group]) -> bool:
        """Whether the launches are compiled for the options of these groups."""
        return _layouts(groups) == self._layouts

    def group_table(
        self, device: torch.device, groups: list[Group], limit: float | None, changed: bool
    ) -> torch.Tensor:
        """The hyperparameters of all groups on a device. The table is only written if one has `changed`."""
        known, table = self._tables.get(device, (None, None))
        if table is not None and not changed:
            return table
        values: list[list[float]] = []
        late: list[tuple[int, int, torch.Tensor]] = []
        for row, group in enumerate(groups):
            columns = [0.0] * adam.GROUP_COLUMNS
            options = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            for column, value in zip((adam.LR, adam.BETA1, adam.BETA2, adam.EPS, adam.DECAY), options, strict=True):
                if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                    late.append((row, column, value))
                else:
                    columns[column] = float(value)
            columns[adam.MAXIMIZE] = float(bool(group["maximize"]))
            columns[adam.DECOUPLED] = float(bool(group["decoupled_weight_decay"]))
            columns[adam.MAX_NORM] = 0.0 if limit is None else float(limit)
            values.append(columns)
        if known != values or table is None:
            if table is not None:
                self._tables[device] = (None, table)  # content unknown until the upload has ended
            table = upload(torch.tensor(values, dtype=torch.float64, device="cpu"), device, out=table)
            self._tables[device] = (values, table)
        on_device = all_to_device([value.reshape(()) for _, _, value in late], device)
        for (row, column, _), value in zip(late, on_device, strict=True):
            table[row, column].copy_(value)
        return table

    def stepped(self, groups: list[Group], limit: float | None) -> None:
        """Store the options of the step that was taken."""
        self._options, self.limit = list(map(options_of, groups)), limit
        self.knows_options, self._changeable = True, any(map(_can_change, self._options))


def _can_change(options: tuple[Any, ...]) -> bool:
    """Whether an option can change without becoming another object."""
    lr, betas, eps, weight_decay, *_ = options
    return type(betas) is not tuple or not {float, int}.issuperset(map(type, (lr, *betas, eps, weight_decay)))


def _kinds(grads: list[torch.Tensor]) -> tuple[list[torch.dtype], set[type]]:
    return list(map(attrgetter("dtype"), grads)), set(map(type, grads))


def _layouts(groups: list[Group]) -> list[tuple[Any, ...]]:
    """For each group, the options that its launches are compiled for, and the seed, which is in their tables."""
    return [
        (
            *(group["amsgrad"], group["decoupled_weight_decay"], bool(group["weight_decay"] != 0)),
            *(group["master_weights"], group["state_dtype"], group["rounding"], group["seed"]),
        )
        for group in groups
    ]


def _batches(
    optimizer: OptimizerState, parameters: list[torch.Tensor], grads: list[torch.Tensor], recording: bool
) -> list[tuple[LaunchGroup, list[int]]]:
    """The parameters by bucket, device and layout, after checking that each of them can be updated."""
    optimizer._note_agreed()
    row_of = {id(p): row for row, group in enumerate(optimizer.param_groups) for p in group["params"]}
    rows = [row_of[id(parameter)] for parameter in parameters]
    stream_of = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
    kinds: dict[tuple[Any, ...], list[int]] = {}
    names: dict[int, tuple[int, ...]] = {}
    seen: set[int] = set()
    for index, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        if id(parameter) in seen:  # torch has warned; two updates of a parameter in one launch would race
            continue
        seen.add(id(parameter))
        group = optimizer.param_groups[rows[index]]
        where = f"parameter {index} with a gradient (group {rows[index]})"
        _check_tensors(where, parameter, grad, group)
        if recording:
            known = optimizer.state.get(parameter)
            if known is None or not is_complete(known, parameter, group):
                raise RuntimeError(
                    f"Expected {where} to have its state before a step is captured in a CUDA graph, but got none, "
                    "which each replay would create again: take a step with the same parameters and options before "
                    "the capture"
                )
        layout = layout_of(parameter, grad.dtype, group)
        if group["state_dtype"] == "8bit" and (layout.coded or parameter.dim() == 1):
            check_blocks(parameter, where)
        state = optimizer._complete_state(parameter, group)
        tensors = (parameter, grad, *map(state.__getitem__, state_keys(layout).values()))
        addressable = all(map(has_memory, map(local, tensors)))
        for key, value in state.items():
            if key in CANONICAL_KEYS or key in SCALES.values():
                ordered = _fitting(where, key, value, parameter, group, layout, addressable, recording)
                if ordered is not value:
                    state[key] = ordered
        if layout.stochastic and not addressable:
            if has_numbers(local(parameter)):
                rounding = group["rounding"]
                remedy = ", which is stochastic with state_dtype='8bit': use state_dtype=torch.float32"
                raise TypeError(
                    f"Expected rounding to be 'nearest' for {where}, a {type(local(parameter)).__name__} without "
                    f"memory of its own, but got {rounding!r}{remedy * (rounding == 'auto')}"
                )
            layout = replace(layout, stochastic=False)
        if layout.stochastic:
            names[index] = (stream_of[id(parameter)], *place_of(parameter, where), group["seed"])
        kind = optimizer._bucket_number(parameter), local(parameter).device, layout, addressable
        kinds.setdefault(kind, []).append(index)
    optimizer._take_outside_writes(recording)
    batches: list[tuple[LaunchGroup, list[int]]] = []
    for (_, _, layout, addressable), indices in kinds.items():
        members = [parameters[index] for index in indices]
        states = [optimizer.state[parameter] for parameter in members]
        groups = [rows[index] for index in indices]
        if not addressable:
            batches.append((OperationsGroup(layout, members, states, groups), indices))
            continue
        named = list(zip(*(names[index] for index in indices), strict=True)) if layout.stochastic else []
        further = {adam.STREAM + row: list(values) for row, values in enumerate(named)}
        if layout.coded:
            further[adam.COLUMNS] = [rows_and_columns(local(parameter).shape)[1] for parameter in members]
        batches.append((LaunchGroup(layout, members, states, groups, further), indices))
    return batches


def _check_tensors(where: str, parameter: torch.Tensor, grad: torch.Tensor, group: Group) -> None:
    """Raise unless a parameter can be updated with its gradient."""
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"Expected {where} to have a dense gradient, but got layout {grad.layout}: use torch.optim.SparseAdam, or "
            "sparse=False in the embedding"
        )
    check_parameter(parameter, where, group["master_weights"])
    if grad.dtype not in DTYPE_CODES:
        raise TypeError(
            f"Expected {where} to have a gradient of dtype float32, float16 or bfloat16, but got {grad.dtype}"
        )


def _fitting(
    where: str,
    key: str,
    value: Any,
    parameter: torch.Tensor,
    group: Group,
    layout: adam.Layout,
    addressable: bool,
    recording: bool,
) -> torch.Tensor:
    """A state tensor after checking it, or a copy of it in the memory order of its parameter."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"Expected state {key!r} of {where} to be a tensor, but got a {type(value).__name__}")
    held, own = local(value), local(parameter)
    master = adam.REMAINDERS.get(layout.master, torch.float32)
    dtype = {"step": torch.float32, "master": master, **DTYPES_OF_SCALES}.get(key, layout.state)
    shape = () if key == "step" else tuple(own.shape)
    if key in SCALES.values():
        rows, columns = rows_and_columns(own.shape)
        shape = (rows, blocks_per_row(columns))
    fits = held.numel() == 1 if key == "step" else held.shape == shape
    if held.dtype != dtype or held.device != own.device or not fits:
        raise ValueError(
            f"Expected state {key!r} of {where} to be {shape} {dtype} on {own.device}, but got {tuple(held.shape)} "
            f"{held.dtype} on {held.device}: move it back, or load it with load_state_dict"
        )
    if not addressable or key == "step" or (key in SCALES.values() and held.is_contiguous()):
        return value
    if key in SCALES.values():
        return scales_like(parameter, held.contiguous())
    like_this = dense(own, layout)
    if held.stride() == like_this.stride() or (held.is_contiguous() and like_this.is_contiguous()):
        return value
    if recording:
        raise RuntimeError(
            f"Expected state {key!r} of {where} to have the strides of the parameter when a step is captured in a CUDA "
            "graph, but got others: take a step before the capture"
        )
    # The kernels process the state in the memory order of the parameter.
    copy = torch.empty_strided(like_this.shape, like_this.stride(), dtype=held.dtype, device=held.device)
    return like(parameter, copy.copy_(held))
