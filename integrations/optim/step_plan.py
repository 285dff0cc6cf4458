"""The plan of a step: which launches update which parameters. It is kept for as long as it matches them."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter, is_
from typing import Any

import torch

from halfstep.integrations.optim.batches import (
    LaunchGroup,
    OperationsGroup,
    check_blocks,
    dense,
    in_same_order,
    place_of,
)
from halfstep.integrations.optim.checkpoints import CanonicalState
from halfstep.integrations.optim.options import check_parameter, layout_of, options_of
from halfstep.integrations.optim.state import SCALES, entries, is_complete, like, scales_like, shape_of, state_keys
from halfstep.kernels import adam
from halfstep.kernels.block_codes import rows_and_columns
from halfstep.kernels.multi_tensor import DTYPE_CODES, has_memory, has_numbers
from halfstep.kernels.streams import all_to_device, upload
from halfstep.numerics.scaling.topology import local
from halfstep.numerics.scaling.verdict import parameters_of

Group = dict[str, Any]


class StepPlan:
    """The launches that update some parameters of an optimizer. Missing entries of its state are created.

    With `recording`, for a step that is captured in a CUDA graph, state is neither created nor changed.

    Attributes:
        batches: for each launch, what it updates and the indices of its parameters in `parameters`.
        limit: the 2-norm to which the last step clipped, or None.

    Raises:
        RuntimeError: a gradient is sparse, or a step is captured for a parameter without state.
        TypeError, ValueError: a parameter, a gradient or a state tensor is not supported.
    """

    def __init__(
        self,
        optimizer: CanonicalState,
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
        return not all(
            all(map(is_, options_of(group), known)) for group, known in zip(groups, self._options, strict=True)
        )

    def describes(
        self, optimizer: CanonicalState, parameters: list[torch.Tensor], grads: list[torch.Tensor], contiguous: bool
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
    optimizer: CanonicalState, parameters: list[torch.Tensor], grads: list[torch.Tensor], recording: bool
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
        if recording and not is_complete(optimizer.state.get(parameter) or {}, parameter, group):
            raise RuntimeError(
                f"Expected {where} to have its state before a step is captured in a CUDA graph, but got none, which "
                "each replay would create again: take a step with the same parameters and options before the capture"
            )
        layout = layout_of(parameter, grad.dtype, group)
        if group["state_dtype"] == "8bit" and (layout.coded or parameter.dim() == 1):
            check_blocks(parameter, where)
        state = optimizer._complete_state(parameter, group)
        tensors = (parameter, grad, *map(state.__getitem__, state_keys(layout).values()))
        addressable = all(map(has_memory, map(local, tensors)))
        order = dense(local(parameter), layout) if addressable else None
        for key, dtype in entries(parameter, group).items():
            _check_entry(where, key, state[key], dtype, parameter)
            if order is not None and key != "step":
                _set_in_order(state, key, parameter, order, where, recording)
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
        kind = optimizer._bucket_of.get(id(parameter)), local(parameter).device, layout, addressable
        kinds.setdefault(kind, []).append(index)
    optimizer._take_outside_writes(recording)
    batches: list[tuple[LaunchGroup, list[int]]] = []
    for (_, _, layout, addressable), indices in kinds.items():
        members = [parameters[index] for index in indices]
        states = [optimizer.state[parameter] for parameter in members]
        groups = [rows[index] for index in indices]
        if not addressable:
            batches.append((OperationsGroup(layout, members, states, groups, {}), indices))
            continue
        named = zip(*(names[index] for index in indices), strict=True) if layout.stochastic else ()
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


def _check_entry(where: str, key: str, value: Any, dtype: torch.dtype, parameter: torch.Tensor) -> None:
    """Raise unless an entry of a parameter's state is as its layout needs it."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"Expected state {key!r} of {where} to be a tensor, but got a {type(value).__name__}")
    values, device, shape = local(value), local(parameter).device, shape_of(key, local(parameter).shape)
    fits = values.numel() == 1 if key == "step" else values.shape == shape
    if values.dtype != dtype or values.device != device or not fits:
        raise ValueError(
            f"Expected state {key!r} of {where} to be {tuple(shape)} {dtype} on {device}, but got "
            f"{tuple(values.shape)} {values.dtype} on {values.device}: move it back, or load it with load_state_dict"
        )


def _set_in_order(
    state: dict[str, Any], key: str, parameter: torch.Tensor, order: torch.Tensor, where: str, recording: bool
) -> None:
    """Replace a state tensor by a copy if its memory order is not that of its parameter, in which kernels process it.

    The order of scales is row-major.
    """
    values, scales = local(state[key]), key in SCALES.values()
    if values.is_contiguous() if scales else in_same_order(values, order):
        return
    if recording:
        raise RuntimeError(
            f"Expected state {key!r} of {where} to have the strides of the parameter when a step is captured in a CUDA "
            "graph, but got others: take a step before the capture"
        )
    if scales:
        state[key] = scales_like(parameter, values.contiguous())
    else:
        copy = torch.empty_strided(order.shape, order.stride(), dtype=values.dtype, device=values.device)
        state[key] = like(parameter, copy.copy_(values))
