"""The plan of a step: which launches update which parameters. It is kept for as long as it matches them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, repeat
from operator import attrgetter, is_, itemgetter, methodcaller
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from halfstep.integrations.interrupts import USUAL, held
from halfstep.integrations.optim.options import LAYOUT_OPTIONS, Group, check_parameter
from halfstep.integrations.optim.state import (
    Agreements,
    Written,
    fitted_state,
    like,
    scales_like,
    version_of,
    written_last,
)
from halfstep.kernels.block_codes import SPAN, rows_and_columns
from halfstep.kernels.multi_tensor import (
    DTYPE_CODES,
    TensorTable,
    all_contiguous,
    checked_addresses,
    has_memory,
    has_numbers,
    is_flat,
)
from halfstep.kernels.streams import all_to_device, upload
from halfstep.numerics.owners import in_parts
from halfstep.numerics.scaling.decision import parameters_of
from halfstep.numerics.scaling.sharding import Sharding, is_sharded, local
from halfstep.numerics.state_layout import SCALE_KEYS, StateLayout, shape_of

if TYPE_CHECKING:
    from halfstep.integrations.optim.classes import LayoutOptimizer, Rule
    from halfstep.kernels import adam

WHOLE = -1  # the part of a step that has all parameters
_address = torch.Tensor.data_ptr
_dtype, _layout, _still_describes = attrgetter("dtype"), attrgetter("layout"), methodcaller("still_describes")


_function = attrgetter("func")
_IN_PYTHON = {FunctionType, MethodType}


def apply(calls: Sequence[partial[Any]]) -> None:
    """Run calls one after the other. An interrupt that arrives meanwhile is raised afterwards.

    No Python code runs between the calls. If any of them is a Python function or method, such as a Triton launch or the
    reference, Ctrl-C and SIGTERM are delayed explicitly. Only errors of the calls themselves, and exceptions that a
    debugger or another thread injects into such a function (``PyThreadState_SetAsyncExc``), interrupt the sequence.
    """
    if not _IN_PYTHON.isdisjoint(map(type, map(_function, calls))):
        with held(USUAL):
            deque(map(partial.__call__, calls), maxlen=0)
    else:
        deque(map(partial.__call__, calls), maxlen=0)


def each(function: Callable[..., Any], *columns: Iterable[Any]) -> partial[Any]:
    """A call that applies a function to each row of some columns without running Python bytecode in between."""
    return partial(deque, map(function, *columns), 0)


def dense(values: torch.Tensor, layout: adam.Layout) -> torch.Tensor:
    """A parameter's local values in an order that kernels can process, or a copy in that order.

    A copy is needed for tensors with gaps, for lazy negations, whose memory holds the negated numbers, and, where
    random bits or blocks depend on the order, for any but the row-major one.
    """
    keep = is_flat(values) and (values.is_contiguous() or not layout.in_rows)
    return values if keep else values.resolve_neg().contiguous()


def in_same_order(values: torch.Tensor, order: torch.Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order in memory."""
    return values.stride() == order.stride() or (values.is_contiguous() and order.is_contiguous())


@dataclass
class StepPlans:
    """What an optimizer keeps from one step to the next. Pickles and copies of the optimizer do not contain it.

    Attributes:
        of_part: the plans of the last step, of all parameters (`WHOLE`) and of each part that is stepped on its own.
        agreed: when targets and their full masters last held the same weights.
        recorded: state tensors that CUDA graphs write to, by their id.
        stepped_without_gradients: whether a step found no gradient.
        scratch: memory that launches use one after another, by device and stream.
        exchanged: what `Rule.complete` keeps.
        turns: numbers of launches that use one of two such memories in turn.
    """

    of_part: dict[int, StepPlan] = field(default_factory=dict)
    agreed: Agreements = field(default_factory=Agreements)
    recorded: dict[int, torch.Tensor] = field(default_factory=dict)
    stepped_without_gradients: bool = False
    scratch: dict[Any, torch.Tensor] = field(default_factory=dict)
    exchanged: Any = None
    turns: Iterator[int] = field(default_factory=count)


class Member(NamedTuple):
    """A parameter in a launch."""

    position: int  # among the parameters of the step
    parameter: torch.Tensor
    target: torch.Tensor  # which is stepped: the parameter, or its copy on the host
    state: dict[str, Any]
    row: int  # in the table of groups of its rule
    noise: tuple[int, ...]  # what names its random bits: `STREAM` and the rows after it


class LaunchGroup:
    """The parameters of one launch, their state, and the table of their addresses. Full masters must round to them.
    `ranks` is the group of those that exchange parts of the parameters, or None."""

    def __init__(
        self, plans: StepPlans, rule: Rule, layout: StateLayout, variant: Any, ranks: Any, members: list[Member]
    ) -> None:
        kernels = rule.kernels
        self.plans, self.rule, self.kernels, self.ranks = plans, rule, kernels, ranks
        columns = map(list, zip(*members, strict=True))
        self.indices, self.parameters, self.targets, self.states, rows, noise = columns
        self.full = variant.master == kernels.FULL_MASTER
        self.sharded = any(map(is_sharded, self.targets))
        self.weights = [local(target.detach()) for target in self.targets]
        self.device = self.weights[0].device
        moments = dict(enumerate(layout.moments, kernels.M))
        keys = {kernels.STEP: "step", **moments}
        if layout.master is not None:
            keys[kernels.EXTRA] = "master"
        if layout.coded:
            keys |= {kernels.SCALES_OF[operand]: f"{moment}_scale" for operand, moment in moments.items()}
        self.state_of = {operand: itemgetter(key) for operand, key in keys.items()}
        lists: list[list[torch.Tensor]] = [[] for _ in range(kernels.CODED_OPERANDS)]
        for operand, state_of in self.state_of.items():
            lists[operand] = list(map(local, map(state_of, self.states)))
        hyper = torch.empty(len(members), kernels.FAMILY.hyper_columns, dtype=torch.float32, device=self.device)
        numbers = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self.batch = kernels.Batch(variant, None, lists, upload(numbers, self.device), hyper)
        self._point(noise)

    def _point(self, noise: list[tuple[int, ...]]) -> None:
        kernels, layout, lists = self.kernels, self.batch.layout, self.batch.lists
        self.dense = lists[kernels.PARAM] = [dense(weight, layout) for weight in self.weights]
        pairs = zip(self.weights, self.dense, strict=True)
        self.copied = [(weight, copy) for weight, copy in pairs if weight is not copy]
        self.addresses = list(map(_address, self.weights))
        self.contiguous = all(map(torch.Tensor.is_contiguous, self.dense))
        # All rows of the table except that of the gradients, which are known when it is built.
        self._contents: list[list[int] | None] = [None] * layout.operands
        for operand in (kernels.PARAM, *self.state_of):
            self._contents[operand] = checked_addresses(lists[operand])
        for row, column in enumerate(zip(*noise, strict=True), kernels.STREAM):
            self._contents[row] = list(column)
        if layout.coded:
            self._contents[kernels.COLUMNS] = [rows_and_columns(weight.shape)[1] for weight in self.weights]

    def _written_last(self) -> list[Written]:
        """That of each target, without a loop in Python."""
        versions = map(version_of if self.sharded else attrgetter("_version"), self.targets)
        return list(zip(versions, self.addresses, repeat(self.batch.layout.param), strict=False))

    def still_describes(self) -> bool:
        """Whether the addresses of parameters and state are those in the table."""
        weights = list(map(local, self.targets)) if self.sharded else self.targets
        if list(map(_address, weights)) != self.addresses:
            return False
        for operand, state_of in self.state_of.items():
            tensors = list(map(state_of, self.states))
            # Plain tensors must be the same objects. `local` makes new objects of shards, so only addresses are
            # compared.
            if self.sharded:
                tensors = list(map(local, tensors))
            elif not all(map(is_, tensors, self.batch.lists[operand])):
                return False
            if list(map(_address, tensors)) != self._contents[operand]:
                return False
        return True

    def take_outside_writes(self) -> None:
        """Update the full masters of parameters that other code wrote. Split masters need no update."""
        agreed, masters = self.plans.agreed, self.batch.lists[self.kernels.EXTRA]
        if list(map(agreed.get, map(id, self.targets))) == self._written_last():
            return
        for target, master in zip(self.targets, masters, strict=True):
            written = agreed.written(target, master)
            if written is not None:
                master.copy_(written)

    def _in_order(self, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[partial[Any]]]:
        """The gradients in the memory order of the parameters, and the calls that copy those that autograd left in
        another order. They may still be arriving."""
        ordered, copies = [], []
        for grad, dense in zip(grads, self.dense, strict=True):
            if grad.is_neg() or not in_same_order(grad, dense):
                copy = torch.empty_strided(grad.shape, dense.stride(), dtype=grad.dtype, device=grad.device)
                copies.append(partial(copy.copy_, grad))
                grad = copy
            ordered.append(grad)
        return ordered, copies

    def prepare(self, grads: list[torch.Tensor], groups: torch.Tensor, control: adam.Control) -> list[partial[Any]]:
        """Do everything in a step that can fail or take long. Returns the calls that update parameters and state.

        The calls hold addresses, not tensors. `control` is on this device.
        """
        if self.sharded:
            grads = list(map(local, grads))
        calls: list[partial[Any]] = []
        if not (self.contiguous and all_contiguous(grads)):
            grads, calls = self._in_order(grads)
        if self.full:
            self.take_outside_writes()
        self.batch.lists[self.kernels.GRAD] = grads
        for weight, copy in self.copied:
            calls.append(partial(copy.copy_, weight))
        calls += self._launches(grads, groups, control)
        for weight, copy in self.copied:
            calls.append(partial(weight.copy_, copy))
        return calls

    def _launches(self, grads: list[torch.Tensor], groups: torch.Tensor, control: adam.Control) -> list[partial[Any]]:
        """The calls that update the dense weights with gradients in their order."""
        batch, row = self.batch, self.kernels.GRAD
        if batch.table is None:
            contents = list(self._contents)
            contents[row] = checked_addresses(grads)
            sizes = batch.layout.sizes([weight.shape for weight in self.weights])
            batch.table = TensorTable(sizes, len(contents), batch.layout.chunk, self.device, contents)
        else:
            batch.table.point(row, grads)
        return [self.kernels.launch(batch, groups, control)]

    def finish(self) -> None:
        """Release the gradients and record the update. Must run after the calls that `prepare` returned."""
        self.batch.lists[self.kernels.GRAD] = []  # zero_grad must be able to free them
        # The kernels write to addresses, which autograd does not notice.
        torch.autograd.graph.increment_version(self.targets)
        if self.full:
            self.plans.agreed.update(zip(map(id, self.targets), self._written_last(), strict=True))


class OperationsGroup(LaunchGroup):
    """Parameters that kernels cannot read (wrapper subclasses, fake and meta tensors). The reference updates them."""

    def _point(self, noise: list[tuple[int, ...]]) -> None:
        self._shards = list(map(local, self.targets))
        self.batch.hyper.zero_()

    def _written_last(self) -> list[Written]:
        return list(map(written_last, self.targets))

    def still_describes(self) -> bool:
        return all(map(is_, map(local, self.targets), self._shards)) and all(
            all(map(is_, map(local, map(state_of, self.states)), self.batch.lists[operand]))
            for operand, state_of in self.state_of.items()
        )

    def prepare(self, grads: list[torch.Tensor], groups: torch.Tensor, control: adam.Control) -> list[partial[Any]]:
        # `target.data` may have been replaced.
        self.batch.lists[self.kernels.PARAM] = [local(target.detach()) for target in self.targets]
        if self.full:
            self.take_outside_writes()
        self.batch.lists[self.kernels.GRAD] = list(map(local, grads))
        return [self.kernels.launch(self.batch, groups, control)]


class StepPlan:
    """The launches that update some parameters of an optimizer. Missing entries of its state are created.

    With `recording`, for a step that is captured in a CUDA graph, state is neither created nor changed.

    Raises:
        RuntimeError: a gradient is sparse, or a step is captured for a parameter without state.
        TypeError, ValueError: a parameter, a gradient or a state tensor is not supported.
    """

    def __init__(
        self, optimizer: LayoutOptimizer, targets: list[torch.Tensor], grads: list[torch.Tensor], recording: bool
    ) -> None:
        for group in optimizer.param_groups:
            optimizer._rule_of(group).check(group)
        self.targets = targets
        self.changed = True
        # By the kernels of a rule, its rows of the tables of groups: the number of a group, and a shape or None.
        self._rows: dict[Any, dict[tuple[int, torch.Size | None], int]] = {}
        launches = self._members(optimizer, grads, recording)
        self.launches = [
            (rule.launch_group if addressable else OperationsGroup)(
                optimizer._plans, rule, layout, variant, ranks, members
            )
            for (_, _, addressable, rule, layout, variant, ranks), members in _limited(launches)
        ]
        self.devices = {launch.device for launch in self.launches}
        self._compiled = _compiled_options(optimizer)
        self._options_of = itemgetter(*optimizer.defaults)
        self._dtypes, self._types = list(map(_dtype, grads)), set(map(type, grads))
        # Other code may clear or replace the state to start again.
        self._state, self._entries = optimizer.state, len(optimizer.state)
        # Of the tables: the options of all groups, whether they can change in place, and the norm to clip to.
        self._options: list[Any] = []
        self._changeable = True
        self._limit: float | None = None
        # By device and the kernels of a rule: its hyperparameters, and what they were when they were written.
        self.tables: dict[tuple[torch.device, Any], torch.Tensor] = {}
        self._written: dict[tuple[torch.device, Any], list[list[float]]] = {}

    def _members(
        self, optimizer: LayoutOptimizer, grads: list[torch.Tensor], recording: bool
    ) -> dict[tuple[Any, ...], list[Member]]:
        """The parameters, after checking that they can be updated, by launch: bucket, devices, whether kernels can
        read the tensors, rule, layout, variant, and the ranks that exchange parts."""
        launches: dict[tuple[Any, ...], list[Member]] = {}
        groups = optimizer.param_groups
        members = [(number, parameter) for number, group in enumerate(groups) for parameter in group["params"]]
        number_of = {id(target): number for number, target in enumerate(optimizer._targets(parameters_of(optimizer)))}
        stepped: set[int] = set()
        for index, (target, grad) in enumerate(zip(self.targets, grads, strict=True)):
            if id(target) in stepped:  # torch has warned; two updates of a parameter in one launch would race
                continue
            stepped.add(id(target))
            number = number_of[id(target)]
            group_number, parameter = members[number]
            group = groups[group_number]
            where = f"parameter {index} with a gradient (group {group_number})"
            rule = optimizer._rule_of(group)
            _check_tensors(where, target, grad, group)
            before = optimizer.state.get(parameter)
            layout = optimizer._layout(target, group)
            if recording and fitted_state(before or {}, target, layout, None)[0] is not before:
                raise RuntimeError(
                    f"Expected {where} to have its state before a step is captured in a CUDA graph, but got none, "
                    "which each replay would create again: take a step with the same parameters and options before the "
                    "capture"
                )
            if group["state_dtype"] == "8bit" and (layout.coded or target.dim() == 1):
                _check_blocks(target, where)
            state = optimizer._complete_state(parameter, group)
            addressable = all(map(has_memory, map(local, (target, grad, *map(state.__getitem__, layout.dtypes)))))
            if not addressable and rule.launch_group is not LaunchGroup:
                raise TypeError(
                    f"Expected {where} to have memory of its own for Muon, but got a {type(local(target)).__name__} on "
                    f"{local(target).device} without: put it into a group with algorithm='adamw'"
                )
            variant = layout.variant(rule.kernels.Layout, grad.dtype, **rule.variant(group))
            order = dense(local(target), variant) if addressable else None
            for key, dtype in layout.dtypes.items():
                _check_entry(where, key, state[key], dtype, target)
                if order is not None and key != "step":
                    _set_in_order(state, key, target, order, where, recording)
            if layout.stochastic and not addressable:
                if has_numbers(local(target)):
                    rounding = group["rounding"]
                    remedy = ", which is stochastic with state_dtype='8bit': use state_dtype=torch.float32"
                    raise TypeError(
                        f"Expected rounding to be 'nearest' for {where}, a {type(local(target)).__name__} without "
                        f"memory of its own, but got {rounding!r}{remedy * (rounding == 'auto')}"
                    )
                variant = replace(variant, stochastic=False)
            noise = (number, *Sharding(target).elements(where), group["seed"]) if variant.stochastic else ()
            rows = self._rows.setdefault(rule.kernels, {})
            row = rows.setdefault((group_number, target.shape if rule.by_shape else None), len(rows))
            ranks = rule.exchanging(target, group)
            devices = local(target).device, local(parameter).device
            launch = optimizer._bucket(parameter), devices, addressable, rule, layout, variant, ranks
            launches.setdefault(launch, []).append(Member(index, parameter, target, state, row, noise))
        return launches

    def describes(
        self, optimizer: LayoutOptimizer, targets: list[torch.Tensor], grads: list[torch.Tensor], limit: float | None
    ) -> bool:
        """Whether this plan matches a step of `targets`. Options are validated if they may have changed.

        Options are compared by identity, which compares no tensors. Options that can change in place count as changed.
        """
        options = list(chain.from_iterable(map(self._options_of, optimizer.param_groups)))
        same = len(options) == len(self._options) and all(map(is_, options, self._options))
        self.changed = self._changeable or not same or limit != self._limit
        for group in optimizer.param_groups if self.changed else ():
            optimizer._rule_of(group).check(group)
        return (
            len(targets) == len(self.targets)
            and all(map(is_, targets, self.targets))
            and list(map(_dtype, grads)) == self._dtypes
            and set(map(type, grads)) == self._types
            and set(map(_layout, grads)) == {torch.strided}
            and optimizer.state is self._state
            and len(self._state) == self._entries
            and not (self.changed and _compiled_options(optimizer) != self._compiled)
            and all(map(_still_describes, self.launches))
        )

    def write_tables(self, groups: list[Group], limit: float | None) -> None:
        """Write the hyperparameters of each rule to its table on each device, if they differ from those there."""
        rules = {(launch.device, launch.rule.kernels): launch.rule for launch in self.launches}
        for key, rule in rules.items():
            device, kernels = key
            values: list[list[float]] = []
            late: list[tuple[int, int, torch.Tensor]] = []
            for row, (number, shape) in enumerate(self._rows[kernels]):
                numbers = {**rule.numbers(groups[number], shape), "max_norm": limit or 0.0}
                columns = [numbers[name] for name in kernels.FAMILY.group._fields]
                for column, value in enumerate(columns):
                    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                        late.append((row, column, value))
                        columns[column] = 0.0
                values.append(list(map(float, columns)))
            if self._written.pop(key, None) != values:  # unknown until the upload has ended
                host = torch.tensor(values, dtype=torch.float64, device="cpu")
                self.tables[key] = upload(host, device, out=self.tables.get(key))
            self._written[key] = values
            on_device = all_to_device([value.reshape(()) for _, _, value in late], device)
            for (row, column, _), value in zip(late, on_device, strict=True):
                self.tables[key][row, column].copy_(value)
        self._options, self._limit = list(chain.from_iterable(map(self._options_of, groups))), limit
        self._changeable = not all(map(_is_constant, self._options))


def _is_constant(option: Any) -> bool:
    """Whether an option cannot change without becoming another object."""
    if type(option) is tuple:
        return all(map(_is_constant, option))
    return option is None or isinstance(option, (int, float, str, torch.dtype))


_layout_options = itemgetter(*LAYOUT_OPTIONS, "seed")


def _compiled_options(optimizer: LayoutOptimizer) -> list[tuple[Any, ...]]:
    """For each group, the options that its launches are compiled for, and the seed, which is in their tables."""
    rules = ((optimizer._rule_of(group), group) for group in optimizer.param_groups)
    return [(_layout_options(group), rule.moments_of(group), rule.variant(group)) for rule, group in rules]


def _limited(launches: dict[tuple[Any, ...], list[Member]]) -> Iterator[tuple[tuple[Any, ...], list[Member]]]:
    """The launches in the order of buckets, in parts of as many elements as their rules allow, but of a parameter for
    each rank at least. All ranks divide them alike."""
    for launch, members in sorted(launches.items(), key=lambda item: item[0][0]):
        rule, group = launch[3], launch[-1]
        ranks = 1 if group is None else group.size()
        sizes = [(member.target if group is not None else local(member.target)).numel() for member in members]
        for part in in_parts(sizes, rule.most * ranks, ranks):
            yield launch, members[part.start : part.stop]


def _check_tensors(where: str, parameter: torch.Tensor, grad: torch.Tensor, group: Group) -> None:
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


def _check_blocks(parameter: torch.Tensor, where: str) -> None:
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


def _check_entry(where: str, key: str, value: Any, dtype: torch.dtype, parameter: torch.Tensor) -> None:
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
    values, scales = local(state[key]), key in SCALE_KEYS
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
