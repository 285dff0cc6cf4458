"""The content of files of `torch.save`, in both of its formats, with tensors mapped into memory.

Since torch 1.6 such a file is an uncompressed zip archive: ``data.pkl`` and the bytes of each storage. Before, it was
five pickles (a magic number, a version, the machine, the content, the keys of the storages), followed for each storage
by eight bytes with the number of elements, and its bytes. Nothing in a file is trusted: pickle_data.py reads the
pickles as data, with a description of each tensor, and every offset, size and stride is checked against the file before
memory is allocated.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from halfstep.integrations import checkpoint_files, pickle_data
from halfstep.integrations.archive import NAMES, Entries
from halfstep.integrations.pickle_data import Function, Node, PickleError, described

_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_END = b"PK\x05\x06"  # starts the last 22 bytes of an archive; nothing follows in torch's files
_END_LENGTH = 22
_LARGEST = 2**63
_ALIGNED = 16  # bytes: the size of the largest element


class Refused(PickleError):
    """The file contains an object other than tensors and containers. The text is its class or function."""


class Unsuitable(ValueError):
    """The file may be undamaged but cannot be read. The text continues a sentence that starts with its name."""


class Storage(NamedTuple):
    """The location of a tensor's elements: a storage of the file, its dtype and size, and the first element."""

    key: str
    dtype: torch.dtype
    elements: int
    first: int = 0


class Dense(NamedTuple):
    """A dense tensor: the arguments of `torch._utils._rebuild_tensor_v2`."""

    storage: Storage
    dtype: torch.dtype
    offset: Any
    size: Any
    stride: Any
    conjugate: bool = False
    negative: bool = False


class Sparse(NamedTuple):
    """A sparse tensor: the arguments of `torch._utils._rebuild_sparse_tensor`."""

    layout: Any
    data: Any


class Meta(NamedTuple):
    """A tensor without values."""

    dtype: torch.dtype
    size: Any


Storages = Callable[[Storage], torch.Tensor]

# ---------------------------------------------------------------------------------------------------------- the pickles


def _storage(given: Any) -> Storage:
    """The storage that a persistent id names."""
    kind, dtype, key, _, elements, *view = given[:6]
    known = kind == "storage" and isinstance(dtype, torch.dtype) and isinstance(key, str)
    if not known or type(elements) is not int or elements < 0:
        raise PickleError(f"a storage is {', '.join(map(described, given[:6]))}")
    first = view[0][1] if view and view[0] is not None else 0
    if type(first) is not int or first < 0:
        raise PickleError(f"a storage begins at {described(first)}")
    return Storage(key, dtype, elements, first)


def _built(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> Dense:
    if not isinstance(storage, Storage):
        raise PickleError(f"a tensor's storage is a {type(storage).__name__}")
    bits = more[-1] if len(more) > 2 and isinstance(more[-1], dict) else {}
    return Dense(storage, storage.dtype, offset, size, stride, bits.get("conj") is True, bits.get("neg") is True)


def _built_as(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *bits: Any) -> Any:
    return _built(storage, offset, size, stride, grad, hooks, *bits)._replace(dtype=_dtype(dtype))


def _dtype(given: Any) -> torch.dtype:
    if not isinstance(given, torch.dtype):
        raise PickleError(f"a tensor's dtype is {described(given)}")
    return given


def _typed(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    if function in _NAMES.values() and function.call not in _REBUILDS.values():
        raise PickleError("it creates a tensor with a function that does not create tensors")
    return function.call(*arguments)


def _container(source: type, result: type, values: Any = ()) -> Any:
    if values and not isinstance(values, source):
        raise PickleError(f"it creates a {result.__name__} from a {type(values).__name__}")
    return result(values)


def _refused(name: str, *arguments: Any) -> Any:
    raise Refused(name)


class _Names(dict[tuple[str, str], Any]):
    """The meaning of names. An unknown name may be a value in the file, but calling it is an error."""

    def __missing__(self, name: tuple[str, str]) -> Any:
        return Function(partial(_refused, ".".join(name)[:200]))


_REBUILDS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_qtensor"), _built),
    "_rebuild_tensor_v3": _built_as,
    "_rebuild_sparse_tensor": Sparse,
    "_rebuild_meta_tensor_no_storage": lambda dtype, size, *more: Meta(_dtype(dtype), size),
    **dict.fromkeys(("_rebuild_parameter", "_rebuild_parameter_with_state"), lambda data, *more: data),
}
_NAMES = _Names(NAMES | {("torch._utils", name): Function(made) for name, made in _REBUILDS.items()})
_NAMES["torch._tensor", "_rebuild_from_type_v2"] = Function(_typed)
_NAMES["torch.serialization", "_get_layout"] = Function(lambda name: name)
_NAMES["collections", "Counter"] = Function(partial(_container, dict, dict))
for _module in ("builtins", "__builtin__"):  # sets may contain tensors, whose descriptions are not hashable
    _NAMES[_module, "set"] = Function(partial(_container, list, list))
    _NAMES[_module, "frozenset"] = Function(partial(_container, list, tuple))
# Objects that contain no tensors. Their values are not needed.
_NAMES |= dict.fromkeys(
    (
        *(("torch", "device"), ("builtins", "complex"), ("__builtin__", "complex"), ("_codecs", "encode")),
        *(("builtins", "bytearray"), ("__builtin__", "bytearray"), ("numpy", "dtype")),
        *(("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar")),
    ),
    Function(lambda *arguments: Node("value")),
)


# ------------------------------------------------------------------------------------------------------------ the files


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, Storages]]:
    """The content of a file, with `Dense`, `Sparse` and `Meta` in place of tensors, and the bytes of its storages.

    Raises:
        PickleError: the file is damaged.
        Unsuitable: the file cannot be read.
        Exception: any other exception may be raised for a damaged file.
    """
    with open(path, "rb") as file:
        if file.read(4) == b"PK\x03\x04":
            yield _archive(path, file)
        else:
            yield _sequence(path, file)


def _storages(path: Path, place: Callable[[str], slice]) -> Storages:
    """The bytes of storages, mapped into memory; a storage that is not aligned for its elements is copied once."""
    # Copy-on-write: writes do not reach the file, and torch does not warn about read-only memory.
    data = torch.from_numpy(np.memmap(path, np.uint8, "c"))
    held: dict[str, torch.Tensor] = {}

    def storage_of(storage: Storage) -> torch.Tensor:
        if storage.key not in held:
            piece = data[place(storage.key)]
            held[storage.key] = piece.clone() if piece.data_ptr() % _ALIGNED else piece
        return held[storage.key]

    return storage_of


def _archive(path: Path, file: Any) -> tuple[Any, Storages]:
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - 2**16 - _END_LENGTH))
    last = file.read()
    end = last.rfind(_END)
    if end < 0:
        raise PickleError("the end of its archive is missing: it was cut off")
    if end + _END_LENGTH < len(last):  # more than torch writes: the checksum of a file written by halfstep
        complaint = checkpoint_files.complaint(path)
        if complaint is not None:
            raise Unsuitable(f"is damaged: {complaint}")
    entries = Entries(file, 0, size)
    if min(entry.header_offset for entry in entries.infos.values()):
        raise Unsuitable("has data before its archive, as shards have; give a complete checkpoint in one file")
    if "constants.pkl" in entries.infos:
        raise Unsuitable("is a TorchScript archive, which is a program; save a state_dict instead")
    if "byteorder" in entries.infos and entries.read("byteorder").numpy().tobytes() != b"little":
        raise Unsuitable("was written by a big-endian machine; load it there and save it as safetensors")
    content = pickle_data.read(entries.read("data.pkl").numpy().tobytes(), _NAMES, _storage)
    return content, _storages(path, lambda key: entries.place(f"data/{key}"))


def _sequence(path: Path, file: Any) -> tuple[Any, Storages]:
    named: dict[str, Storage] = {}

    def persistent(given: Any) -> Storage:
        storage = _storage(given)
        named.setdefault(storage.key, storage)
        return storage

    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        pickles = pickle_data.sequence(data, _NAMES, persistent)
        if (next(pickles)[0], next(pickles)[0]) != (_MAGIC, _VERSION):
            raise PickleError("it does not begin as torch.save's files do")
        if next(pickles)[0].get("little_endian") is not True:
            raise Unsuitable("was written by a big-endian machine; load it there and save it as safetensors")
        content, (keys, start) = next(pickles)[0], next(pickles)
    size, places = os.fstat(file.fileno()).st_size, {}
    for key in keys:
        if key not in named:
            raise PickleError(f"it has a storage {described(key)} that no tensor uses")
        end = start + 8 + named[key].elements * named[key].dtype.itemsize
        if end > size:
            raise PickleError(
                f"its storage {key[:100]!r} ends at byte {end:,}, and the file at {size:,}: it was cut off"
            )
        places[key] = slice(start + 8, end)
        start = end
    return content, _storages(path, places.__getitem__)


def tensor(found: Dense | Sparse | Meta, storages: Storages) -> torch.Tensor:
    """The described tensor, as a view of its storage.

    Raises:
        PickleError: the tensor extends beyond its storage.
        Unsuitable: its layout is not supported.
    """
    if isinstance(found, Dense):
        return _dense(found, storages)
    if isinstance(found, Meta):
        _size(found.size)
        return torch.empty(found.size, dtype=found.dtype, device="meta")
    if found.layout not in (None, "torch.sparse_coo"):
        raise Unsuitable(
            f"has a tensor of layout {described(found.layout)}, expected a dense or COO tensor: save its .to_dense()"
        )
    indices, values, size, *_ = found.data
    _size(size)
    return torch.sparse_coo_tensor(tensor(indices, storages), tensor(values, storages), size, check_invariants=True)


def _numbers(given: Any, what: str) -> None:
    """Raise unless `given` is a tuple of integers in [0, 2^63)."""
    if not isinstance(given, tuple) or not all(type(n) is int and 0 <= n < _LARGEST for n in given):
        raise PickleError(f"a tensor's {what} is not a tuple of integers")


def _size(given: Any) -> None:
    """Raise unless `given` is a size that torch accepts."""
    _numbers(given, "size")
    if len(given) > 64 or math.prod(n or 1 for n in given) >= _LARGEST:
        raise PickleError(f"a tensor's size is {str(given)[:100]}, which is too large")


def _dense(found: Dense, storages: Storages) -> torch.Tensor:
    _size(found.size)
    if not math.prod(found.size):
        return torch.empty(found.size, dtype=found.dtype, device="cpu")
    _numbers(found.stride, "stride")
    _numbers((found.offset,), "offset")
    held, itemsize = storages(found.storage), found.dtype.itemsize
    first = found.storage.first * found.storage.dtype.itemsize + found.offset * itemsize
    reach = 1 + sum((n - 1) * step for n, step in zip(found.size, found.stride, strict=True))
    end = first + reach * itemsize
    if end > len(held):
        raise PickleError(
            f"a tensor of size {found.size} ends at byte {end:,} of a storage of {len(held):,}: it was changed"
        )
    values = held[first:end].view(found.dtype).as_strided(found.size, found.stride)
    values = values.conj() if found.conjugate else values
    return values.neg() if found.negative else values
