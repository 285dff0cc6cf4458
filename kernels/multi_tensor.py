"""The device table: where many tensors lie, so that one launch can walk them all.

A table has one column per tensor and these int64 rows: the number of elements, the index of its first chunk, then one
row of addresses per operand (a gradient, a moment, ...). Beside it stands, per chunk, the number of the tensor it
belongs to. A program (or a CPU thread) takes a chunk, looks up its tensor, and works on at most `chunk` elements of it.

The table is built once per set of tensors and refreshed in place: only rows whose addresses moved are written again.
Each belongs to one stream, and one that is made while a CUDA graph is captured to that graph, which fills it again at
each replay: streams.py has the rules.

Every address that a kernel is given is taken here, and refused where it would be none: a wrapper subclass, a fake
tensor and a freed storage answer ``data_ptr()`` with 0, or with their offset from 0.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from operator import attrgetter
from typing import Any

import torch

from halfstep.kernels.streams import capturing, current_stream, upload

# Codes by which C++ knows a dtype (native.h).
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

FLOATS = tuple(DTYPE_CODES)

NUMEL, FIRST_CHUNK, ADDRESSES = 0, 1, 2  # rows

PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}

_address = torch.Tensor.data_ptr
# No offset from 0 reaches this address. Lower addresses may be real or offsets and are examined further.
_BEYOND_OFFSETS = 2**40
_FAKE_MODE = torch._C._TorchDispatchModeKey.FAKE


def _is_nowhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements and its address is an offset from 0."""
    return tensor.numel() > 0 and _address(tensor) == tensor.storage_offset() * tensor.element_size()


def _no_memory(tensor: torch.Tensor) -> TypeError:
    return TypeError(
        f"Expected a tensor with memory of its own, but got a {type(tensor).__name__} of shape {tuple(tensor.shape)} "
        "and "
        f"dtype {tensor.dtype} without: pass the tensors inside a wrapper subclass, real tensors instead of fake ones, "
        "and no tensor whose storage was freed"
    )


def address(tensor: torch.Tensor) -> int:
    """Where the elements of a tensor begin.

    Raises:
        TypeError: it has elements, and they are nowhere.
    """
    found: int = _address(tensor)
    if found < _BEYOND_OFFSETS and _is_nowhere(tensor):
        raise _no_memory(tensor)
    return found


def check_addresses(*tensors: torch.Tensor | None) -> None:
    """`address` of tensors, or None, that go to Triton as they are."""
    for tensor in tensors:
        if tensor is not None:
            address(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is of no subclass but a parameter. torch 2.8 compiles this; a type looked up in a set it does not."""
    return type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether kernels may read and write a tensor at its address: its elements lie there, and nobody watches.

    False for subclasses with a ``__torch_dispatch__`` of their own, whose elements are what their operations say, for
    fake and meta tensors, for those inside a transform of `torch.func`, for a freed storage, and, as what a kernel
    writes to would be fake, for all under FakeTensorMode.
    """
    if tensor.is_meta or _dispatches(type(tensor)) or torch._C._get_dispatch_mode(_FAKE_MODE) is not None:
        return False
    try:
        return not _is_nowhere(tensor)
    except (RuntimeError, ValueError):  # it has no storage, or no shape yet
        return False


def _dispatches(kind: type[Any]) -> bool:
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def own_operations(tensors: list[torch.Tensor]) -> AbstractContextManager[Any]:
    """Around plain torch on tensors some of which have no memory: what is made beside fake ones is fake too.

    Raises:
        TypeError: a tensor has neither memory nor operations of its own.
    """
    for tensor in tensors:
        if not tensor.is_meta and not _dispatches(type(tensor)):
            address(tensor)
    return next(filter(None, (getattr(tensor, "fake_mode", None) for tensor in tensors)), nullcontext())


def all_have_memory(tensors: list[torch.Tensor]) -> bool:
    """`has_memory` of a list on one device.

    Of plain tensors it is told by their type, at the speed of C: a freed storage among them is found and refused when
    its address is taken.
    """
    if not tensors:
        return True
    if set(map(type, tensors)) <= PLAIN_TYPES:
        return _plain_have_memory(tensors)
    return all(map(has_memory, tensors))


def _plain_have_memory(tensors: list[torch.Tensor]) -> bool:
    return not tensors[0].is_meta and torch._C._get_dispatch_mode(_FAKE_MODE) is None


class TensorTable:
    """Addresses of `operands` lists of tensors that agree in sizes, on one device.

    Attributes:
        rows: int64, shape ``(2 + operands, tensors)``; see the module's docstring.
        chunk_tensor: int32, shape ``(chunks,)``: the tensor of each chunk.
        places: the addresses of both, for C++.
        tensors, chunks, chunk: how many of each, and elements per chunk.
    """

    def __init__(
        self,
        numels: Sequence[int],
        operands: int,
        chunk: int,
        device: torch.device,
        contents: Sequence[list[int] | None] = (),
    ) -> None:
        """`contents` are rows of operands, as `refresh` would write them, None for those that come later."""
        # The host's part is made on the CPU by name: `torch.set_default_device` must not move it.
        sizes = torch.tensor(numels, dtype=torch.int64, device="cpu")
        counts = (sizes + (chunk - 1)) // chunk
        ends = counts.cumsum(0)
        self.device = device
        self.chunk = chunk
        self.tensors = len(numels)
        self.chunks = int(ends[-1]) if self.tensors else 0
        if self.chunks >= 2**31:
            raise ValueError(
                f"Expected at most 2^31 - 1 chunks of {chunk} elements for one launch, but got {self.chunks}: "
                "split the list"
            )
        host = torch.zeros(ADDRESSES + operands, self.tensors, dtype=torch.int64, device="cpu")
        host[NUMEL] = sizes
        host[FIRST_CHUNK] = ends - counts
        for operand, numbers in enumerate(contents):
            if numbers is not None:
                host[ADDRESSES + operand] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self.rows = upload(host, device)
        if device.type == "cuda":  # four bytes per chunk need not cross the bus
            numbered = torch.arange(self.chunks, dtype=torch.int64, device=device)
            self.chunk_tensor = torch.searchsorted(self.rows[FIRST_CHUNK], numbered, right=True, out_int32=True).sub_(1)
        else:
            owner = torch.arange(self.tensors, dtype=torch.int32, device="cpu")
            self.chunk_tensor = torch.repeat_interleave(owner, counts).to(device)
        self._known: list[list[int] | None] = [*contents, *[None] * (operands - len(contents))]
        self.places = address(self.rows), address(self.chunk_tensor)

    def known(self, operand: int) -> list[int] | None:
        """What the table holds of one operand; None before it was first written."""
        return self._known[operand]

    def point(self, operand: int, tensors: Sequence[torch.Tensor], addresses: list[int] | None = None) -> None:
        """Write where the tensors of one operand lie, unless that is what the table holds.

        Args:
            operand: which.
            tensors: one per column.
            addresses: theirs, if they were asked for already.

        Raises:
            TypeError: a tensor has elements, and they are nowhere.
        """
        if addresses is None:
            addresses = list(map(_address, tensors))
        if self._known[operand] != addresses:
            _check_addresses(tensors, addresses)
            self.refresh(operand, addresses)

    def refresh(self, operand: int, numbers: list[int]) -> None:
        """Write the row of one operand, unless it is what the table holds. Addresses of tensors: `point`."""
        if self._known[operand] == numbers:
            return
        self._known[operand] = None  # what an interrupt or an error from here on leaves is not known
        upload(torch.tensor(numbers, dtype=torch.int64, device="cpu"), self.device, out=self.rows[ADDRESSES + operand])
        self._known[operand] = numbers


def _check_addresses(tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
    """Raise if a tensor has elements, and they are nowhere."""
    if min(addresses, default=_BEYOND_OFFSETS) < _BEYOND_OFFSETS:
        for tensor in filter(_is_nowhere, compress(tensors, map(_BEYOND_OFFSETS.__gt__, addresses))):
            raise _no_memory(tensor)


def checked_addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`address` of each."""
    addresses = list(map(_address, tensors))
    _check_addresses(tensors, addresses)
    return addresses


def addresses_of(*tensors: torch.Tensor | None) -> list[int | None]:
    """`address` of each that is not None."""
    found = iter(checked_addresses([tensor for tensor in tensors if tensor is not None]))
    return [None if tensor is None else next(found) for tensor in tensors]


class TableCache(threading.local):
    """The last few tables of one kernel family, so that the same tensors step after step build and send nothing.

    Each thread and each stream has its own: while one runs a kernel over a table, another must not refresh it. What a
    CUDA graph records gets a table of its own, which is not kept here.
    """

    def __init__(self, operands: int, chunk: int, capacity: int = 8) -> None:
        self._operands, self._chunk, self._capacity = operands, chunk, capacity
        self._tables: OrderedDict[tuple[object, ...], TensorTable] = OrderedDict()

    def table(self, *operands: Sequence[torch.Tensor], numbers: Sequence[list[int]] = ()) -> TensorTable:
        """The table of these tensors: `operands` lists of equal length, sizes equal across lists, one device.

        Args:
            operands: what the first rows hold the addresses of.
            numbers: what the rows after them hold, one number per tensor.
        """
        device = operands[0][0].device
        numels = list(map(torch.Tensor.numel, operands[0]))
        recording = capturing(device)
        key = (device, current_stream(device), tuple(numels))
        found = None if recording else self._tables.pop(key, None)
        if found is None:
            contents = [*map(checked_addresses, operands), *numbers]
            found = TensorTable(numels, self._operands, self._chunk, device, contents)
            if recording:
                return found
        else:
            for row, tensors in enumerate(operands):
                found.point(row, tensors)
            for row, content in enumerate(numbers, len(operands)):
                found.refresh(row, content)
        self._tables[key] = found
        while len(self._tables) > self._capacity:
            self._tables.popitem(last=False)
        return found


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gaps or overlaps, in whatever order of dimensions.

    A lazy negation (``x.conj().imag``) is not: its memory holds the opposite numbers.
    """
    dense: bool = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return dense and not tensor.is_neg()


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it `is_flat`, otherwise a row-major copy of its values."""
    return tensor if is_flat(tensor) else tensor.resolve_neg().contiguous()


def all_flattened(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """`flattened` of each; the list itself if nothing needs a copy, which is told without a loop in Python."""
    if all(map(torch.Tensor.is_contiguous, tensors)) and not any(map(torch.Tensor.is_neg, tensors)):
        return tensors
    return list(map(flattened, tensors))


def check_tensor(tensor: object, name: str, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """Validate one tensor for the kernels.

    Raises:
        TypeError: not a tensor, not dense, or not of one of `dtypes`.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"Expected {name} to be a tensor, but got a {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"Expected {name} to be a dense tensor, but got layout {tensor.layout}: use .to_dense()")
    if tensor.dtype not in dtypes:
        allowed = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        raise TypeError(
            f"Expected {name} to have dtype {', '.join(allowed[:-1])} or {allowed[-1]}, but got {tensor.dtype}: "
            "convert it with .to() or leave it out"
        )


def check_tensor_list(
    tensors: Sequence[torch.Tensor], argument: str, dtypes: Sequence[torch.dtype] = FLOATS
) -> tuple[list[torch.Tensor], bool]:
    """Validate a list of tensors for a one-launch function.

    Returns:
        The tensors as a list, and `all_have_memory` of them: without, only their own operations can be used.

    Raises:
        TypeError: something is not a tensor, not dense, or not of one of `dtypes`.
        ValueError: the tensors are on different devices.
    """
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"Expected {argument} to be a list of tensors, but got one tensor: pass [{argument}]")
    listed = list(tensors)
    # The usual case, at the speed of C: with thousands of tensors the loop below takes longer than the kernels.
    if (
        set(map(type, listed)) <= PLAIN_TYPES
        and set(map(attrgetter("layout"), listed)) <= {torch.strided}
        and set(map(attrgetter("dtype"), listed)) <= set(dtypes)
        and len(set(map(attrgetter("device"), listed))) <= 1
    ):
        return listed, not listed or _plain_have_memory(listed)
    for index, tensor in enumerate(listed):
        check_tensor(tensor, f"{argument}[{index}]", dtypes)
        if tensor.device != listed[0].device:
            raise ValueError(
                f"Expected {argument}[{index}] to be on the device of {argument}[0], {listed[0].device}, but got "
                f"{tensor.device}: call once per device"
            )
    return listed, all_have_memory(listed)
