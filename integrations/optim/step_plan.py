"""The plan of a step: which launches update which parameters. It is kept for as long as it matches them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from halfstep.integrations.optim.checkpoints import CanonicalState
from halfstep.integrations.optim.options import LAYOUT_OPTIONS, check_parameter, layout_of, options_of
from halfstep.integrations.optim.state import (
    SCALES,
    Agreed,
    as_written,
    entries,
    is_complete,
    like,
    scales_like,
    shape_of,
    state_keys,
    version_of,
)
from halfstep.kernels import adam
from halfstep.kernels.block_codes import SPAN, rows_and_columns
from halfstep.kernels.multi_tensor import (
    DTYPE_CODES,
    TensorTable,
    checked_addresses,
    has_memory,
    has_numbers,
    is_flat,
)
from halfstep.kernels.streams import all_to_device, upload
from halfstep.numerics.scaling.sharding import Sharding, is_sharded, local
from halfstep.numerics.scaling.verdict import parameters_of

Group = dict[str, Any]
_layout_options = itemgetter(*LAYOUT_OPTIONS, "amsgrad", "decoupled_weight_decay", "seed")
_address = torch.Tensor.data_ptr


def all_contiguous(tensors: list[torch.Tensor]) -> bool:
    try:
        return all(map(torch.Tensor.is_contiguous, tensors)) and not any(map(torch.Tensor.is_neg, tensors))
    except RuntimeError:  # raised by some sparse layouts
        return False


def dense(values: torch.Tensor, layout: adam.Layout) -> torch.Tensor:
    """A parameter's local values in an order that kernels can process, or a copy in that order.

    A copy is needed for tensors with gaps, for lazy negations, whose memory holds the negated numbers, and, where
    random bits or blocks depend on the order, for any but the row-major one.
    """
    keep = is_flat(values) and (values.is_contiguous() or not (layout.stochastic or layout.coded))
    return values if keep else values.resolve_neg().contiguous()


def in_same_order(values: torch.Tensor, order: torch.Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order in memory."""
    return values.stride() == order.stride() or (values.is_contiguous() and order.is_contiguous())


def check_blocks(parameter: torch.Tensor, where: str) -> None:
    """Raise if a shard of a parameter, which messages call `where`, would cut blocks of 8-bit codes."""
    remedy = (
        "use fully_shard, which shards by rows, or state_dtype=torch.bfloat16 or torch.float32 in a parameter group of "
        "its own"
    )
    sharding = Sharding(parameter)
    if sharding.is_flat:
        raise ValueError(
            f"Expected state_dtype to be torch.float32 or torch.bfloat16 for {where}, which FullyShardedDataParallel "
            f"has flattened, but got '8bit', whose blocks lie within the rows of a matrix: {remedy}"
        )
    if not sharding.keeps_blocks(SPAN):
        raise ValueError(
            f"Expected {where} to be sharded by rows, or in dimension 1 at multiples of {SPAN} elements of a row, with "
            f"state_dtype='8bit', but got shape {tuple(parameter.shape)} and {sharding}: {remedy}"
        )


class LaunchGroup:
    """The parameters of one launch, their state, and the table of their addresses. Full masters must round to them.

    `rows` are the parameters' groups and `names` more rows of the table, by their number in the kernel.
    """

    def __init__(
        self,
        layout: adam.Layout,
        parameters: list[torch.Tensor],
        states: list[dict[str, Any]],
        rows: list[int],
        names: dict[int, list[int]],
    ) -> None:
        self.parameters, self.states, self.keys = parameters, states, state_keys(layout)
        self.sharded = any(map(is_sharded, parameters))
        self.held = [local(parameter.detach()) for parameter in parameters]
        self.device = self.held[0].device
        lists: list[list[torch.Tensor]] = [[] for _ in range(adam.CODED_OPERANDS)]
        for operand in self.keys:
            lists[operand] = self._state(operand)
        hyper = torch.empty(len(rows), adam.HYPER_COLUMNS, dtype=torch.float32, device=self.device)
        row_of = upload(torch.tensor(rows, dtype=torch.int64, device="cpu"), self.device)
        self.batch = adam.Batch(layout, None, lists, row_of, hyper)
        self.versions = self._versions()
        self._point(names)

    def _point(self, names: dict[int, list[int]]) -> None:
        """Take the addresses of parameters and state."""
        layout, lists = self.batch.layout, self.batch.lists
        self.dense = lists[adam.PARAM] = [dense(one, layout) for one in self.held]
        self.copied = [(one, copy) for one, copy in zip(self.held, self.dense, strict=True) if one is not copy]
        self.addresses = list(map(_address, self.held))
        self.contiguous = all(map(torch.Tensor.is_contiguous, self.dense))
        # All rows except that of the gradients, which are known when the table is built.
        self._contents: list[list[int] | None] = [names.get(row) for row in range(layout.operands)]
        for operand in (adam.PARAM, *self.keys):
            self._contents[operand] = checked_addresses(lists[operand])

    def _versions(self) -> list[int]:
        return list(map(version_of if self.sharded else attrgetter("_version"), self.parameters))

    def agreed(self) -> dict[int, Agreed]:
        """By the parameter's id, the version and address that its full master was last compared with."""
        if self.batch.layout.master != adam.FULL_MASTER:
            return {}
        dtype = self.batch.layout.param
        entries = [Agreed(*known, dtype) for known in zip(self.versions, self.addresses, strict=True)]
        return dict(zip(map(id, self.parameters), entries, strict=True))

    def _state(self, operand: int) -> list[torch.Tensor]:
        tensors = list(map(itemgetter(self.keys[operand]), self.states))
        return list(map(local, tensors)) if self.sharded else tensors

    def still_describes(self) -> bool:
        """Whether the addresses of parameters and state are those in the table."""
        held = list(map(local, self.parameters)) if self.sharded else self.parameters
        if list(map(_address, held)) != self.addresses:
            return False
        for operand in self.keys:
            now = self._state(operand)
            # Plain tensors must be the same objects. `local` makes new objects of shards, so only addresses are
            # compared.
            if not self.sharded and not all(map(is_, now, self.batch.lists[operand])):
                return False
            if list(map(_address, now)) != self._contents[operand]:
                return False
        return True

    def take_outside_writes(self) -> None:
        """Update the full masters of parameters that other code wrote. Split masters need no update."""
        if self.batch.layout.master != adam.FULL_MASTER:
            return
        now = self._versions()
        for value, master, before, after in zip(
            self.held, self.batch.lists[adam.EXTRA], self.versions, now, strict=True
        ):
            if before != after:
                master.copy_(as_written(value, master))
        self.versions = now

    def _in_order(
        self, gradients: list[torch.Tensor], contiguous: bool
    ) -> tuple[list[torch.Tensor], list[partial[Any]]]:
        """The gradients in the memory order of the parameters, and the calls that copy those that autograd left in
        another order. They may still be arriving."""
        if self.contiguous and contiguous:
            return gradients, []
        ordered, copies = [], []
        for grad, dense in zip(gradients, self.dense, strict=True):
            if grad.is_neg() or not in_same_order(grad, dense):
                copy = torch.empty_strided(grad.shape, dense.stride(), dtype=grad.dtype, device=grad.device)
                copies.append(partial(copy.copy_, grad))
                grad = copy
            ordered.append(grad)
        return ordered, copies

    def prepare(
        self, grads: list[torch.Tensor], contiguous: bool, groups: torch.Tensor, control: adam.Control
    ) -> list[partial[Any]]:
        """Do everything in a step that can fail or take long. Returns the calls that update parameters and state.

        The calls hold addresses, not tensors. `contiguous` says whether all gradients are contiguous; `control` is on
        this device.
        """
        if self.sharded:
            grads = list(map(local, grads))
            contiguous = all_contiguous(grads)
        gradients, copies = self._in_order(grads, contiguous)
        self.take_outside_writes()
        self.batch.lists[adam.GRAD] = gradients
        if self.batch.table is None:
            contents = list(self._contents)
            contents[adam.GRAD] = checked_addresses(gradients)
            sizes = self.batch.layout.sizes([one.shape for one in self.held])
            self.batch.table = TensorTable(sizes, len(contents), self.batch.layout.chunk, self.device, contents)
        else:
            self.batch.table.point(adam.GRAD, gradients)
        back = [partial(parameter.copy_, copy) for parameter, copy in self.copied]
        there = [partial(copy.copy_, parameter) for parameter, copy in self.copied]
        return [*copies, *there, adam.launch(self.batch, groups, control), *back]

    def finish(self) -> None:
        """Release the gradients and record the update. Must run after the calls that `prepare` returned."""
        self.batch.lists[adam.GRAD] = []  # zero_grad must be able to free them
        # The kernels write to addresses, which autograd does not notice.
        torch.autograd.graph.increment_version(self.parameters)
        if self.batch.layout.master == adam.FULL_MASTER:
            self.versions = self._versions()


class OperationsGroup(LaunchGroup):
    """Parameters that kernels cannot read (wrapper subclasses, fake and meta tensors). The reference updates them."""

    def _point(self, names: dict[int, list[int]]) -> None:
        self.known = list(map(local, self.parameters))
        self.addresses = [0] * len(self.parameters)
        self.batch.hyper.zero_()

    def still_describes(self) -> bool:
        return all(map(is_, map(local, self.parameters), self.known)) and all(
            all(map(is_, self._state(operand), self.batch.lists[operand])) for operand in self.keys
        )

    def prepare(
        self, grads: list[torch.Tensor], contiguous: bool, groups: torch.Tensor, control: adam.Control
    ) -> list[partial[Any]]:
        # `parameter.data` may have been replaced.
        self.held = self.batch.lists[adam.PARAM] = [local(parameter.detach()) for parameter in self.parameters]
        self.take_outside_writes()
        self.batch.lists[adam.GRAD] = list(map(local, grads))
        return [adam.launch(self.batch, groups, control)]


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
    return [(*_layout_options(group), bool(group["weight_decay"] != 0)) for group in groups]


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
            names[index] = (stream_of[id(parameter)], *Sharding(parameter).elements(where), group["seed"])
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
