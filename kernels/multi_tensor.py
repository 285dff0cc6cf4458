"""Device tables: the addresses of many tensors, so that one launch can process all of them.

A table has one column per tensor and these int64 rows: the number of elements, the index of the tensor's first chunk,
and for each operand (a gradient, a moment, ...) a row of addresses. A second array holds, for each chunk, the index of
its tensor. A program of a GPU, or a thread of a CPU, takes a chunk, looks up its tensor and processes at most `chunk`
elements.

A table is built once for a set of tensors and then updated in place: only rows whose addresses have changed are written
again. A table belongs to one stream; if it is built during the capture of a CUDA graph, it belongs to that graph, which
writes it again in each replay. The rules are in streams.py.

All addresses that kernels receive are taken here, where invalid ones are refused: wrapper subclasses, fake tensors and
tensors with a freed storage return 0, or their storage offset, from ``data_ptr()``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import Any

import torch

from halfstep.kernels.backend import jit, tl
from halfstep.kernels.formats import TABLE
from halfstep.kernels.streams import current_stream, upload

DTYPE_CODES = {form.dtype: form.code for form in TABLE if form.bits >= 16}
FLOATS = tuple(DTYPE_CODES)

NUMEL, FIRST_CHUNK, ADDRESSES = 0, 1, 2  # rows of a table; those from ADDRESSES on hold the operands

PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}

_address = torch.Tensor.data_ptr
# No storage offset is as large as this address. Lower addresses may be offsets and are examined further.
_BEYOND_OFFSETS = 2**40
_FAKE_MODE = torch._C._TorchDispatchModeKey.FAKE


def _is_nowhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements but no memory: its address is then its storage offset."""
    return tensor.numel() > 0 and _address(tensor) == tensor.storage_offset() * tensor.element_size()


def address(tensor: torch.Tensor) -> int:
    """The address of the first element of a tensor; a TypeError if it has elements but no memory."""
    pointer: int = _address(tensor)
    if pointer < _BEYOND_OFFSETS and _is_nowhere(tensor):
        raise TypeError(
            f"Expected a tensor with memory of its own, but got a {type(tensor).__name__} of shape "
            f"{tuple(tensor.shape)} and dtype {tensor.dtype} without: pass the tensors inside a wrapper subclass, real "
            "tensors instead of fake ones, and no tensor whose storage was freed"
        )
    return pointer


def check_addresses(*tensors: torch.Tensor | None) -> None:
    """Raise as `address` does for tensors that are passed to Triton; None is skipped."""
    checked_addresses([tensor for tensor in tensors if tensor is not None])


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether kernels may read and write the elements of a tensor at its address.

    They may not for subclasses with a ``__torch_dispatch__`` of their own, which define what their elements are, for
    fake and meta tensors, inside a transform of `torch.func`, and after the storage was freed. Under FakeTensorMode
    they may not for any tensor, since the outputs would be fake.
    """
    if tensor.is_meta or _dispatches(type(tensor)) or torch._C._get_dispatch_mode(_FAKE_MODE) is not None:
        return False
    try:
        return not _is_nowhere(tensor)
    except (RuntimeError, ValueError):  # the tensor has no storage, or no shape yet
        return False


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether operations on a tensor compute. On fake and meta tensors, and under FakeTensorMode, they do not."""
    fake = hasattr(tensor, "fake_mode") or torch._C._get_dispatch_mode(_FAKE_MODE) is not None
    return not (tensor.is_meta or fake)


def _dispatches(cls: type[Any]) -> bool:
    return cls.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def own_operations(tensors: list[torch.Tensor]) -> AbstractContextManager[Any]:
    """A context for operations of torch on tensors of which some have no memory: new tensors are fake if those are.

    Raises a TypeError if one without memory is neither meta nor of a subclass with operations of its own.
    """
    for tensor in tensors:
        if not tensor.is_meta and not _dispatches(type(tensor)):
            address(tensor)
    return next(filter(None, (getattr(tensor, "fake_mode", None) for tensor in tensors)), nullcontext())


def are_usual(tensors: list[torch.Tensor], dtypes: Collection[torch.dtype] = DTYPE_CODES) -> bool:
    """Whether all tensors are plain and dense, in memory of one device, and of some dtypes. If so, this takes no loop
    in Python, which for thousands of tensors takes longer than the kernels. A freed storage among them is found when
    its address is taken.
    """
    return (
        set(map(type, tensors)) <= PLAIN_TYPES
        and set(map(attrgetter("layout"), tensors)) <= {torch.strided}
        and set(map(attrgetter("dtype"), tensors)).issubset(dtypes)
        and len(set(map(attrgetter("device"), tensors))) <= 1
        and not any(map(attrgetter("is_meta"), tensors[:1]))
        and torch._C._get_dispatch_mode(_FAKE_MODE) is None
    )


def all_have_memory(tensors: list[torch.Tensor]) -> bool:
    """Whether `has_memory` holds for all tensors of a list."""
    return are_usual(tensors) or all(map(has_memory, tensors))


@jit
def locate(rows, chunk_tensor, tensors, CHUNK: tl.constexpr):
    """The column of the table of this program's tensor; the start and the number (int32) of the elements of its chunk.

    `rows`, `chunk_tensor` and `tensors` are `TensorTable.operands`, CHUNK is `TensorTable.chunk`.
    """
    chunk = tl.program_id(0)
    column = rows + tl.load(chunk_tensor + chunk)
    start = (chunk - tl.load(column + tensors)) * CHUNK
    return column, start, tl.minimum(tl.load(column) - start, CHUNK).to(tl.int32)


class TensorTable:
    """The table of `operands` lists of tensors with the same sizes, on one device.

    Attributes:
        rows: int64 of shape ``(2 + operands, tensors)``; see the module's docstring.
        chunk_tensor: int32 of shape ``(chunks,)``, the index of the tensor of each chunk.
        tensors, chunks, chunk: numbers of tensors in each list, of chunks, and of elements per chunk.
        operands, addresses: the first arguments of kernels, and of functions of C++.
        scratch: memory of the family, which calls with this table reuse.
    """

    def __init__(
        self,
        numels: Sequence[int],
        operands: int,
        chunk: int,
        device: torch.device,
        contents: Sequence[list[int] | None] = (),
    ) -> None:
        """`contents` are the rows of the operands, with None for those that `point` or `write` write later."""
        # Tensors of the host name their device, since `torch.set_default_device` may have set another one.
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
        if device.type == "cuda":  # computed on the GPU, which saves a transfer of four bytes per chunk
            numbered = torch.arange(self.chunks, dtype=torch.int64, device=device)
            self.chunk_tensor = torch.searchsorted(self.rows[FIRST_CHUNK], numbered, right=True, out_int32=True).sub_(1)
        else:
            owner = torch.arange(self.tensors, dtype=torch.int32, device="cpu")
            self.chunk_tensor = torch.repeat_interleave(owner, counts).to(device)
        self.operands = self.rows, self.chunk_tensor, self.tensors
        self.scratch: Any = None
        self.written: list[list[int] | None] = [*contents, *[None] * (operands - len(contents))]
        self.addresses = address(self.rows), address(self.chunk_tensor), self.tensors, self.chunks

    def point(self, operand: int, tensors: Sequence[torch.Tensor]) -> None:
        """Write the `address` of each tensor of one operand, if they differ from those in the table."""
        addresses = list(map(_address, tensors))
        if self.written[operand] != addresses:
            if min(addresses, default=_BEYOND_OFFSETS) < _BEYOND_OFFSETS:
                checked_addresses(tensors)
            self.write(operand, addresses)

    def write(self, operand: int, numbers: list[int]) -> None:
        """Write the row of one operand. For addresses, use `point`."""
        self.written[operand] = None  # unknown until the upload has ended without an error or an interrupt
        upload(torch.tensor(numbers, dtype=torch.int64, device="cpu"), self.device, out=self.rows[ADDRESSES + operand])
        self.written[operand] = numbers


def checked_addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    addresses = list(map(_address, tensors))
    if min(addresses, default=_BEYOND_OFFSETS) < _BEYOND_OFFSETS:
        list(map(address, tensors))
    return addresses


def alignments(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The bytes by which the `address` of each tensor lies beyond a multiple of 16."""
    return tuple(map((16).__rmod__, checked_addresses(tensors)))


class TableCache(threading.local):
    """The most recently used tables of one kernel family, for each thread and each stream (streams.py). Steps with the
    same tensors build and transfer nothing.
    """

    def __init__(self, operands: int, chunk: int, capacity: int = 8) -> None:
        self._operands, self._chunk, self._capacity = operands, chunk, capacity
        self._tables: OrderedDict[tuple[object, ...], TensorTable] = OrderedDict()

    def table(self, *operands: Sequence[torch.Tensor], numbers: Sequence[list[int]] = ()) -> TensorTable:
        """The table of lists of tensors with the same sizes on one device, new or from the cache.

        Their addresses are in the first rows, the `numbers`, one per tensor, in the rows after these.
        """
        device = operands[0][0].device
        numels = list(map(torch.Tensor.numel, operands[0]))
        stream = current_stream(device)
        key = (device, stream, tuple(numels))
        table = None if stream is None else self._tables.pop(key, None)
        if table is None:
            contents = [*map(checked_addresses, operands), *numbers]
            table = TensorTable(numels, self._operands, self._chunk, device, contents)
            if stream is None:
                return table
        else:
            for row, tensors in enumerate(operands):
                table.point(row, tensors)
            for row, content in enumerate(numbers, len(operands)):
                if table.written[row] != content:
                    table.write(row, content)
        self._tables[key] = table
        while len(self._tables) > self._capacity:
            self._tables.popitem(last=False)
        return table


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory without gaps or overlaps, in any order of dimensions.

    This is false for a lazy negation (``x.conj().imag``), whose memory holds the negated numbers.
    """
    dense: bool = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return dense and not tensor.is_neg()


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it `is_flat`, otherwise a row-major copy of its values."""
    return tensor if is_flat(tensor) else tensor.resolve_neg().contiguous()


def all_contiguous(tensors: list[torch.Tensor]) -> bool:
    return all(map(torch.Tensor.is_contiguous, tensors)) and not any(map(torch.Tensor.is_neg, tensors))


def all_flattened(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """`flattened` of each tensor; the list itself, decided without a loop in Python, if none needs a copy."""
    return tensors if all_contiguous(tensors) else list(map(flattened, tensors))


def by_dtype(tensors: Sequence[torch.Tensor], *columns: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Each dtype, with the list of its tensors and those of their entries in `columns`, which have one per tensor."""
    dtypes = list(map(attrgetter("dtype"), tensors))
    distinct = dict.fromkeys(dtypes)
    for dtype in distinct:
        lists: list[Any] = [tensors, *columns]
        if len(distinct) > 1:
            members = list(map(is_, dtypes, repeat(dtype)))
            lists = [compress(column, members) for column in lists]
        yield dtype, *map(list, lists)


def check_tensor(tensor: object, name: str, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """Raise a TypeError if `tensor` is not a tensor, not dense, or has none of `dtypes`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"Expected {name} to be a tensor, but got a {type(tensor).__name__}: use torch.as_tensor() or leave it out"
        )
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
    """Validate a list of tensors for a function that processes all of them in one launch, each as by `check_tensor`.

    Returns:
        The tensors as a list, and whether all of them have memory. If not, only operations of torch can be used.

    Raises:
        ValueError: the tensors are on different devices.
    """
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"Expected {argument} to be a list of tensors, but got one tensor: pass [{argument}]")
    listed = list(tensors)
    if are_usual(listed, dtypes):
        return listed, True
    for index, tensor in enumerate(listed):
        check_tensor(tensor, f"{argument}[{index}]", dtypes)
        if tensor.device != listed[0].device:
            raise ValueError(
                f"Expected {argument}[{index}] to be on the device of {argument}[0], {listed[0].device}, but got "
                f"{tensor.device}: call once per device"
            )
    return listed, all(map(has_memory, listed))
