"""The device table: where many tensors lie, so that one launch can walk them all.

A table has one column per tensor and these int64 rows: the number of elements, the index of its first chunk, then one
row of addresses per operand (a gradient, a moment, ...). Beside it stands, per chunk, the number of the tensor it
belongs to. A program (or a CPU thread) takes a chunk, looks up its tensor, and works on at most `chunk` elements of it.

The table is built once per set of tensors and refreshed in place: only rows whose addresses moved are written again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter

import torch

# Codes by which C++ knows a dtype (native.h).
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

FLOATS = tuple(DTYPE_CODES)

NUMEL, FIRST_CHUNK, ADDRESSES = 0, 1, 2  # rows


class TensorTable:
    """Addresses of `operands` lists of tensors that agree in sizes, on one device.

    Attributes:
        rows: int64, shape ``(2 + operands, tensors)``; see the module's docstring.
        chunk_tensor: int32, shape ``(chunks,)``: the tensor of each chunk.
        tensors, chunks, chunk: how many of each, and elements per chunk.
    """

    def __init__(self, numels: Sequence[int], operands: int, chunk: int, device: torch.device) -> None:
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
                f"{self.chunks} chunks of {chunk} elements; at most 2^31 - 1 fit one launch: split the list"
            )
        host = torch.zeros(ADDRESSES + operands, self.tensors, dtype=torch.int64, device="cpu")
        host[NUMEL] = sizes
        host[FIRST_CHUNK] = ends - counts
        owner = torch.repeat_interleave(torch.arange(self.tensors, dtype=torch.int32, device="cpu"), counts)
        self._known: list[list[int] | None] = [None] * operands
        self._copied: list[torch.Tensor] = []
        self.rows = host.to(device)
        self.chunk_tensor = owner.to(device)

    def known(self, operand: int) -> list[int] | None:
        """The addresses of one operand that the table holds; None before the first `refresh`."""
        return self._known[operand]

    def refresh(self, operand: int, addresses: list[int]) -> None:
        """Write the addresses of one operand, unless they are what the table holds.

        On a GPU the copy goes through pinned memory and does not wait for the device.
        """
        if self._known[operand] == addresses:
            return
        self._known[operand] = addresses
        fresh = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        if self.device.type == "cpu":
            self.rows[ADDRESSES + operand] = fresh
            return
        fresh = fresh.pin_memory()
        if capturing(self.device):
            self._copied.append(fresh)  # a replay reads it again
        self.rows[ADDRESSES + operand].copy_(fresh, non_blocking=True)


def capturing(device: torch.device) -> bool:
    """Whether launches on the current stream of `device` are recorded into a CUDA graph and not run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class TableCache(threading.local):
    """The last few tables of one kernel family, so that the same tensors step after step build and send nothing.

    Each thread has its own: while one runs a kernel over a table, with Python's lock released, another must not refresh
    it. A table that a CUDA graph has recorded is set aside for good: the graph reads it at every replay, so nobody may
    write or free it.
    """

    def __init__(self, operands: int, chunk: int, capacity: int = 8) -> None:
        self._operands, self._chunk, self._capacity = operands, chunk, capacity
        self._tables: OrderedDict[tuple[object, ...], TensorTable] = OrderedDict()
        self._recorded: dict[tuple[object, ...], list[TensorTable]] = {}

    def table(self, *operands: Sequence[torch.Tensor], numbers: Sequence[list[int]] = ()) -> TensorTable:
        """The table of these tensors: `operands` lists of equal length, sizes equal across lists, one device.

        Args:
            operands: what the first rows hold the addresses of.
            numbers: what the rows after them hold, one number per tensor.
        """
        device = operands[0][0].device
        numels = list(map(torch.Tensor.numel, operands[0]))
        contents = [list(map(torch.Tensor.data_ptr, tensors)) for tensors in operands]
        contents += numbers
        key = (device, tuple(numels))
        recording = capturing(device)
        for table in self._recorded.get(key, ()) if recording else ():
            if all(table.known(row) == content for row, content in enumerate(contents)):
                return table
        found = self._tables.pop(key, None)
        table = TensorTable(numels, self._operands, self._chunk, device) if found is None else found
        if recording:
            self._recorded.setdefault(key, []).append(table)
        else:
            self._tables[key] = table
        while len(self._tables) > self._capacity:
            self._tables.popitem(last=False)
        for row, content in enumerate(contents):
            table.refresh(row, content)
        return table


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gaps or overlaps, in whatever order of dimensions.

    A lazy negation (``x.conj().imag``) is not: its memory holds the opposite numbers.
    """
    dense: bool = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return dense and not tensor.is_neg()


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it `is_flat`, else a row-major copy of its values."""
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
        raise TypeError(f"{name} is a {type(tensor).__name__}; allowed are torch tensors")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; allowed are dense tensors: use .to_dense()")
    if tensor.dtype not in dtypes:
        allowed = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        raise TypeError(
            f"{name} has dtype {tensor.dtype}; allowed are {', '.join(allowed[:-1])} and {allowed[-1]}: "
            "convert it with .to() or leave it out"
        )


def check_tensor_list(
    tensors: Sequence[torch.Tensor], argument: str, dtypes: Sequence[torch.dtype] = FLOATS
) -> list[torch.Tensor]:
    """Validate a list of tensors for a one-launch function.

    Returns:
        The tensors as a list.

    Raises:
        TypeError: something is not a tensor, not dense, or not of one of `dtypes`.
        ValueError: the tensors are on different devices.
    """
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{argument} is one tensor; allowed is a list of tensors: pass [{argument}]")
    listed = list(tensors)
    # The usual case, at the speed of C: with thousands of tensors the loop below takes longer than the kernels.
    if (
        set(map(type, listed)) <= {torch.Tensor, torch.nn.Parameter}
        and set(map(attrgetter("layout"), listed)) <= {torch.strided}
        and set(map(attrgetter("dtype"), listed)) <= set(dtypes)
        and len(set(map(attrgetter("device"), listed))) <= 1
    ):
        return listed
    for index, tensor in enumerate(listed):
        check_tensor(tensor, f"{argument}[{index}]", dtypes)
        if tensor.device != listed[0].device:
            raise ValueError(
                f"{argument}[{index}] is on {tensor.device}, {argument}[0] on {listed[0].device}; "
                "allowed is one device per call: call once per device"
            )
    return listed
