"""The memory of the model of a GPU (stream_model.py): addresses from which tensors are made, and who freed them.

A block that the host frees is poisoned in the order of its stream and reused by the next allocation of that stream, as
in PyTorch's caching allocator. Work of another stream or of a graph that still uses it therefore reads wrong data.
Memory allocated during a capture belongs to the graph and is not reused.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

POISON = 0xA7
LINE = 512  # bytes; what addresses of blocks are multiples of


class Memory:
    """One range of `size` bytes.

    `freed` is called with (pool, offset, size) when the host frees a block; it calls `give` when that may be reused.
    """

    def __init__(self, size: int, freed: Callable[[Any, int, int], None]) -> None:
        raw = np.empty(size + LINE, dtype=np.uint8)
        start = -raw.ctypes.data % LINE
        self._bytes = raw[start : start + size]
        self.start, self.end = self._bytes.ctypes.data, self._bytes.ctypes.data + size
        self._whole = torch.from_numpy(self._bytes).untyped_storage()
        self._next = 0
        self._free: dict[tuple[Any, int], list[int]] = {}
        self._freed = freed
        self.used = self.peak = 0  # bytes of blocks that the host has not freed, and their most so far

    def __contains__(self, address: int) -> bool:
        return self.start <= address < self.end

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this memory."""
        return tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self

    def new(self, pool: Any, shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in newly allocated, uninitialized memory."""
        strides = torch.empty(shape, device="meta").stride() if strides is None else strides
        extent = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        size = 0 if 0 in shape else extent * dtype.itemsize
        size = max(LINE, -(-size // LINE) * LINE)
        known = self._free.get((pool, size))
        if known:
            offset = known.pop()
        else:
            offset, self._next = self._next, self._next + size
            if self._next > len(self._bytes):
                raise MemoryError(f"the model's memory of {len(self._bytes)} bytes is full")
            self._bytes[offset : offset + size] = POISON
        view = self._bytes[offset : offset + size]
        self.used += size
        self.peak = max(self.peak, self.used)
        weakref.finalize(view, self._free_block, pool, offset, size).atexit = False
        storage = torch.from_numpy(view).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(strides))

    def _free_block(self, pool: Any, offset: int, size: int) -> None:
        self.used -= size
        self._freed(pool, offset, size)

    def give(self, pool: Any, offset: int, size: int) -> None:
        """Return a block to its pool, for the next allocation of its size."""
        self._free.setdefault((pool, size), []).append(offset)

    def poison(self, offset: int, size: int) -> None:
        """Overwrite the content of a block."""
        self._bytes[offset : offset + size] = POISON

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements by address only. Like a queued launch, it does not keep the memory allocated."""
        if not tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        place = (tensor.data_ptr() - self.start) // tensor.dtype.itemsize
        return torch.empty(0, dtype=tensor.dtype).set_(self._whole, place, tensor.shape, tensor.stride())

    def numbers(self, address: int, count: int, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
        """The numbers at an address, which must be in this memory."""
        end = address + count * np.dtype(dtype).itemsize
        assert self.start <= address <= end <= self.end, f"{address:#x} is no address of the device"
        return self._bytes[address - self.start : end - self.start].view(dtype)
