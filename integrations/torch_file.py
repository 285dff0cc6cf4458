"""Files of `torch.save`, in both of its formats: what they hold, and their tensors, mapped into memory.

Since torch 1.6 such a file is a zip archive without compression: ``data.pkl`` and the bytes of each storage. Before, it
was five pickles (a magic number, a version, the machine, the content, the storages' keys) and then, for each storage,
eight bytes with its number of elements and its bytes. Nothing in either is trusted: every place, size and stride is
checked against the file before memory is asked for.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.integrations import checkpoint_files
from halfstep.integrations.torch_pickle import (
    Damaged,
    Dense,
    Limited,
    Meta,
    Sparse,
    Storage,
    Unsuitable,
    described,
    read,
)

_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_END = b"PK\x05\x06"  # of an archive: this and 18 bytes, with nothing behind it in torch's
_END_LENGTH = 22
_LARGEST = 2**63
_ALIGNED = 16  # bytes: the largest element

Storages = Callable[[Storage], torch.Tensor]


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, Storages]]:
    """The content of the file, with `Dense`, `Sparse` and `Meta` in the place of tensors, and the bytes of a storage.

    Raises:
        Damaged, Refused, Unsuitable: see `torch_pickle`; a damaged file may raise anything else too.
    """
    with open(path, "rb") as file:
        if file.read(4) == b"PK\x03\x04":
            yield _archive(path, file)
        else:
            yield _sequence(path, file)


def _storages(path: Path, place: Callable[[str], slice]) -> Storages:
    """The bytes of storages, each mapped or, where vector instructions could not read it, copied once."""
    # Written to, a page becomes a copy of its own, so torch does not warn of memory that must not be written.
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
        raise Damaged("the end of its archive is missing: it was cut off")
    if end + _END_LENGTH < len(last):  # more than torch writes, so it is one of ours, with a checksum
        complaint = checkpoint_files.complaint(path)
        if complaint is not None:
            raise Unsuitable(f"is damaged: {complaint}")
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
    if min((entry.header_offset for entry in entries.values()), default=0):
        raise Unsuitable("has something before its archive, as shards have; give a whole checkpoint in one file")
    (main,) = [name for name in entries if name.endswith("data.pkl") and name.count("/") == 1]
    prefix = main.removesuffix("data.pkl")
    if f"{prefix}constants.pkl" in entries:
        raise Unsuitable("is a TorchScript archive, which is a program; save a state_dict instead")

    def place(name: str) -> slice:
        entry = entries.get(prefix + name)
        if entry is None or entry.compress_type:
            raise Damaged(f"{name[:100]!r} is missing in its archive, or compressed")
        file.seek(entry.header_offset + 26)
        lengths = file.read(4)
        start = entry.header_offset + 30 + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
        if start + entry.file_size > size:
            raise Damaged(f"{name[:100]!r} in its archive lies outside of the file")
        return slice(start, start + entry.file_size)

    def record(name: str) -> bytes:
        lies = place(name)
        file.seek(lies.start)
        return bytes(file.read(lies.stop - lies.start))

    if f"{prefix}byteorder" in entries and record("byteorder") != b"little":
        raise Unsuitable("was written by a big-endian machine; load it there and save it as safetensors")
    return read(Limited(io.BytesIO(record("data.pkl")))), _storages(path, lambda key: place(f"data/{key}"))


def _sequence(path: Path, file: Any) -> tuple[Any, Storages]:
    file.seek(0)
    named: dict[str, Storage] = {}
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pickles:
        source = Limited(pickles)
        if (read(source), read(source)) != (_MAGIC, _VERSION):
            raise Damaged("it does not begin as torch.save's files do")
        if read(source).get("little_endian") is not True:
            raise Unsuitable("was written by a big-endian machine; load it there and save it as safetensors")
        content, keys, start = read(source, named), read(source), source.tell()
    size, places = os.fstat(file.fileno()).st_size, {}
    for key in keys:
        if key not in named:
            raise Damaged(f"it has a storage {described(key)} that no tensor lies in")
        end = start + 8 + named[key].elements * named[key].dtype.itemsize
        if end > size:
            raise Damaged(f"its storage {key[:100]!r} ends at byte {end:,}, and the file at {size:,}: it was cut off")
        places[key] = slice(start + 8, end)
        start = end
    return content, _storages(path, places.__getitem__)


def tensor(found: Dense | Sparse | Meta, storages: Storages) -> torch.Tensor:
    """The tensor that is described, with the file for its memory.

    Raises:
        Damaged: it does not lie within its storage.
        Unsuitable: its layout is none that can be read.
    """
    if isinstance(found, Dense):
        return _dense(found, storages)
    if isinstance(found, Meta):
        _size(found.size)
        return torch.empty(found.size, dtype=found.dtype, device="meta")
    if found.layout not in (None, "torch.sparse_coo"):
        raise Unsuitable(
            f"has a tensor of layout {described(found.layout)}; allowed are dense and COO tensors: save its .to_dense()"
        )
    indices, values, size, *_ = found.data
    _size(size)
    return torch.sparse_coo_tensor(tensor(indices, storages), tensor(values, storages), size, check_invariants=True)


def _numbers(given: Any, what: str) -> None:
    """Complain unless it is a tuple of whole numbers of up to 63 bits."""
    if not isinstance(given, tuple) or not all(type(n) is int and 0 <= n < _LARGEST for n in given):
        raise Damaged(f"a tensor's {what} is no tuple of whole numbers")


def _size(given: Any) -> None:
    """Complain unless it is a size that torch takes."""
    _numbers(given, "size")
    if len(given) > 64 or math.prod(n or 1 for n in given) >= _LARGEST:
        raise Damaged(f"a tensor's size is {str(given)[:100]}, which is too large")


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
        raise Damaged(
            f"a tensor of size {found.size} ends at byte {end:,} of a storage of {len(held):,}: it was changed"
        )
    made = held[first:end].view(found.dtype).as_strided(found.size, found.stride)
    made = made.conj() if found.conjugate else made
    return made.neg() if found.negative else made
