"""Archives in the format of `torch.save`, written and read without executing code from the file.

**Format.** An uncompressed zip file with ``data.pkl``, a pickle in which storages are persistent ids, and the bytes of
each storage as ``data/KEY``, at offsets that are multiples of 64. ``torch.load(weights_only=True)`` can read it.

**Content.** Types are checked when an archive is written: values that `read` could not restore are refused, by name.
Arrays and scalars of numpy are stored as ``{"halfstep.numpy": "array", "values": tensor}`` (or ``"scalar"``).

**Reading** treats the pickle as data (pickle_data.py), trusts no size that exceeds the file, and allows no tensor to
extend beyond its storage. torch's own writer is not used, because a KeyboardInterrupt in the Python file that it calls
aborts the process.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import io
import math
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import torch

from halfstep.integrations import interrupts, pickle_data
from halfstep.integrations.pickle_data import DEEPEST, MOST, Function, PickleError, damaged

NUMPY, VALUES = "halfstep.numpy", "values"
ALIGNMENT = 64
PART = 16 << 20  # bytes between two checks for an interrupt

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128, "ComplexFloatStorage": torch.complex64, "UntypedStorage": torch.uint8,
    "QInt8Storage": torch.int8, "QUInt8Storage": torch.uint8, "QInt32Storage": torch.int32,
    "QUInt4x2Storage": torch.uint8, "QUInt2x4Storage": torch.uint8,
}  # fmt: skip
_NUMPY = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"}


class ArchiveError(PickleError):
    """A value that cannot be written or restored, or an archive that cannot be read."""


def parts(data: Any) -> Iterator[memoryview]:
    """Bytes in pieces, between which a held interrupt is delivered."""
    view = memoryview(data)
    if view.nbytes:
        view = view.cast("B")
    for begin in range(0, len(view), PART):
        interrupts.poll()
        yield view[begin : begin + PART]


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage on the CPU, without a copy."""
    return memoryview(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy())  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- values that can be written

_PLAIN = {type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size}
_ADVICE: tuple[tuple[type, str], ...] = (
    (enum.Enum, ".value"), (os.PathLike, "str(...)"), (datetime.date, ".isoformat()"), (datetime.time, ".isoformat()"),
    (datetime.timedelta, ".total_seconds()"), (deque, "list(...)"), (torch.Generator, ".get_state()"),
    (np.random.Generator, ".bit_generator.state"), (np.random.RandomState, ".get_state()"), (np.generic, ".item()"),
    (np.ndarray, "numpy.array(...)"), (dict, "dict(...)"), (list, "list(...)"), (tuple, "tuple(...)"),
    (str, "str(...)"), (bytes, "bytes(...)"), (int, "int(...)"), (float, "float(...)"), (set, "set(...)"),
)  # fmt: skip


def _refuse(where: str, what: str, remedy: str) -> ArchiveError:
    return ArchiveError(
        f"Expected {where} to be a tensor, a numpy array or scalar, a number, a string, bytes, None, or a list, tuple, "
        f"dict or set of these, but got {what}, which load could not restore: {remedy}"
    )


def _refuse_type(where: str, value: Any) -> ArchiveError:
    kind = type(value)
    remedy = "save its parts"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        remedy = "save dataclasses.asdict(...)"
    else:
        for base, advice in _ADVICE:
            if isinstance(value, base):
                remedy = f"save its {advice[1:]}" if advice.startswith(".") else f"save {advice} of it"
                break
    return _refuse(where, f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", ""), remedy)


def writable(value: Any, where: str) -> Any:
    """`value` as it is written: with copied containers, tensors without Python attributes, and numpy values as dicts.

    Raises:
        ArchiveError: a part of it could not be restored. The message names it, as in ``where['key'][0]``.
    """
    # By id: the value (to keep it alive), its replacement, and the number of values that it contains (0: unknown yet).
    known: dict[int, tuple[Any, Any, int]] = {}

    def container(value: Any, where: str, depth: int) -> tuple[Any, int]:
        if depth == DEEPEST:
            raise _refuse(where, f"a value nested more than {DEEPEST} deep", "flatten it")
        kind = type(value)
        known[id(value)] = value, None, 0
        if isinstance(value, dict):
            check(value, where)
            if NUMPY in value:
                raise _refuse(where, f"a dict with the key {NUMPY!r}", "use another key")
            found = [walk(one, f"{where}[{key!r}]", depth + 1) for key, one in value.items()]
            items = dict(zip(value, (one for one, _ in found), strict=True))
            became: Any = items if kind is dict else kind(items)
        else:
            found = [walk(one, f"{where}[{place}]", depth + 1) for place, one in enumerate(value)]
            became = kind([one for one, _ in found])
        size = 1 + sum(own for _, own in found)
        if size > MOST + len(known) + len(found):
            raise _refuse(where, f"a container that expands to {size:,} values", "save repeated values once")
        return became, size

    def check(keys: Any, where: str) -> None:
        try:
            pickle_data.check_keys(keys)
        except PickleError as error:
            raise _refuse(where, f"a {type(keys).__name__} of which {error}", "use strings or numbers") from error

    def walk(value: Any, where: str, depth: int) -> tuple[Any, int]:
        kind = type(value)
        if kind in _PLAIN:
            return value, 1
        if kind in (set, frozenset):
            check(value, where)
            return value, 1
        if id(value) in known:
            _, became, size = known[id(value)]
            if not size:
                raise _refuse(where, "a container that contains itself", "save a copy without the cycle")
            return became, size
        size = 1
        if kind in (dict, OrderedDict, Counter, list, tuple):
            became, size = container(value, where, depth)
        elif kind in (torch.Tensor, torch.nn.Parameter):
            became = _tensor(value, where)
        elif isinstance(value, torch.Tensor):
            raise _refuse_tensor(where, f"a {kind.__module__}.{kind.__qualname__}")
        elif (isinstance(value, np.generic) or kind is np.ndarray) and value.dtype.str[1:] in _NUMPY:
            native = np.array(value, dtype=value.dtype.str[1:], order="C")
            became = {NUMPY: "array" if kind is np.ndarray else "scalar", VALUES: torch.from_numpy(native)}
        elif kind is np.ndarray:
            raise _refuse(where, f"a numpy array of dtype {value.dtype}", "save its .tolist()")
        else:
            raise _refuse_type(where, value)
        known[id(value)] = value, became, size
        return became, size

    return walk(value, where, 0)[0]


def _refuse_tensor(where: str, what: str) -> ArchiveError:
    return ArchiveError(
        f"Expected {where} to be a dense or COO tensor, but got {what}, which load could not restore: save its "
        "full_tensor(), to_dense(), dequantize() or its parts"
    )


def _tensor(value: torch.Tensor, where: str) -> torch.Tensor:
    sparse = value.layout is torch.sparse_coo and type(value) is torch.Tensor and not value.is_meta
    if sparse:
        return value.detach().cpu().requires_grad_(value.requires_grad)
    if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
        raise _refuse_tensor(where, f"a tensor of layout {value.layout} and dtype {value.dtype} on {value.device}")
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    if type(value) is torch.nn.Parameter:
        return torch.nn.Parameter(plain, value.requires_grad)
    return plain.requires_grad_(value.requires_grad)


# -------------------------------------------------------------------------------------------------------------- writing


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=2)  # as torch.save
        self.storages: list[torch.UntypedStorage] = []
        self._keys: dict[tuple[int, torch.dtype], int] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):
            storage, dtype = value._untyped_storage, value.dtype
            name = next((name for name, one in STORAGES.items() if one is dtype), None)
            if name is None:
                raise ArchiveError(
                    f"Expected tensors of dtypes of whole bytes that are not quantized, but got {dtype}, which load "
                    "could not restore: save it as .view(torch.uint8), and view that as the dtype after loading"
                )
            kind = getattr(torch, name)
            numbers = storage.nbytes() // dtype.itemsize
        elif isinstance(value, torch.UntypedStorage):
            storage, dtype, kind, numbers = value, torch.uint8, torch.UntypedStorage, value.nbytes()
        else:
            return None
        key = self._keys.setdefault((storage._cdata, dtype), len(self.storages))
        if key == len(self.storages):
            self.storages.append(storage)
        return "storage", kind, str(key), "cpu", numbers


class _Zip:
    """Writes a zip file sequentially, with 64-bit sizes in every entry."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.at = stream, 0
        self.directory: list[bytes] = []

    def _write(self, data: bytes | memoryview) -> None:
        self.stream.write(data)
        self.at += len(data)

    def add(self, name: str, data: Any) -> None:
        size, crc, begin, path = memoryview(data).nbytes, 0, self.at, f"archive/{name}".encode()
        for part in parts(data):
            crc = zlib.crc32(part, crc)
        # 45: the version of the format with 64-bit sizes. Then no flags, uncompressed, and 1980-01-01, the earliest
        # date that can be stored.
        common = struct.pack("<HHHHHLLLH", 45, 0, 0, 0, 0x21, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(path))
        front = 30 + len(path) + 20 + 4
        padding = struct.pack("<HH", 0x4246, -(begin + front) % ALIGNMENT)  # "FB" marks padding, as in torch's archives
        extra = struct.pack("<HHQQ", 1, 16, size, size) + padding + b"\0" * (-(begin + front) % ALIGNMENT)
        self._write(b"PK\x03\x04" + common + struct.pack("<H", len(extra)) + path + extra)
        for part in parts(data):
            self._write(part)
        extra = struct.pack("<HHQQQ", 1, 24, size, size, begin)
        self.directory.append(
            b"PK\x01\x02\x2d\x03" + common + struct.pack("<HHHHLL", len(extra), 0, 0, 0, 0, 0xFFFFFFFF) + path + extra
        )

    def finish(self) -> None:
        begin, count = self.at, len(self.directory)
        self._write(b"".join(self.directory))
        size, end = self.at - begin, self.at
        self._write(b"PK\x06\x06" + struct.pack("<QHHLLQQQQ", 44, 0x32D, 45, 0, 0, count, count, size, begin))
        self._write(b"PK\x06\x07" + struct.pack("<LQL", 0, end, 1))
        self._write(b"PK\x05\x06" + struct.pack("<HHHHLLH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))


def write(stream: Any, value: Any, where: str) -> None:
    """Write `value` to `stream`, sequentially, as an archive for `read` and `torch.load`.

    Args:
        stream: an object with a method ``write``.
        value: the value.
        where: the name of `value` in error messages.

    Raises:
        ArchiveError: a part of `value` could not be restored. Nothing was written.
    """
    value = writable(value, where)
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(value)
    target = _Zip(stream)
    # Not getbuffer(): an interrupt can leave its view in a traceback, and Python 3.12.1 crashes when the garbage
    # collector finds it there. getvalue() does not copy either.
    target.add("data.pkl", text.getvalue())
    target.add("byteorder", sys.byteorder.encode())
    for key, storage in enumerate(pickler.storages):
        target.add(f"data/{key}", bytes_of(storage))
    target.add("version", b"3\n")
    target.finish()


# -------------------------------------------------------------------------------------------------------------- reading


class _Slice(io.RawIOBase):
    """A part of a file, usable as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, place + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, target: Any) -> int:
        view = memoryview(target)[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return int(count)


class Entries:
    """The entries of an archive, by their names within its folder."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self.slice = _Slice(file, offset, length)
        with zipfile.ZipFile(self.slice) as archive:
            infos = archive.infolist()
        pickled = [info.filename for info in infos if info.filename.endswith("/data.pkl")]
        if len(pickled) != 1:
            raise ArchiveError("it does not have exactly one data.pkl")
        folder = pickled[0].removesuffix("data.pkl")
        self.infos = {info.filename.removeprefix(folder): info for info in infos}
        if len(self.infos) != len(infos):
            raise ArchiveError("two of its entries have the same name")
        self.length = length
        self._unread = length  # Overlapping entries could otherwise be read many times.

    def place(self, name: str) -> slice:
        """The byte range of an entry, within the archive."""
        if name not in self.infos:
            raise ArchiveError(f"its entry {name[:100]} is missing")
        info = self.infos[name]
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise ArchiveError(f"its entry {name} is compressed or encrypted")
        header = bytearray(30)
        self.slice.seek(info.header_offset)
        if self.slice.readinto(header) != 30 or header[:4] != b"PK\x03\x04":
            raise ArchiveError(f"its entry {name} does not begin at the offset that the directory gives")
        start = self.slice.tell() + sum(struct.unpack("<HH", header[26:]))
        if start + info.file_size > self.length:
            raise ArchiveError(f"its entry {name} has {info.file_size:,} bytes, which end beyond the archive")
        return slice(start, start + info.file_size)

    def read(self, name: str) -> torch.Tensor:
        """The bytes of an entry, copied into new memory."""
        place = self.place(name)
        size = place.stop - place.start
        if size > self._unread:
            raise ArchiveError(f"its entry {name} overlaps others")
        self._unread -= size
        self.slice.seek(place.start)
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        for part in parts(memory.numpy()):
            done = 0
            while done < len(part):
                count = self.slice.readinto(part[done:])
                if not count:
                    raise ArchiveError(f"its entry {name} was cut off")
                done += count
        return memory


class _Storage:
    def __init__(self, dtype: torch.dtype, memory: torch.Tensor) -> None:
        self.dtype, self.memory = dtype, memory


def _built_tensor(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, *rest: Any) -> torch.Tensor:
    """A view of a storage, as `torch._utils._rebuild_tensor_v2` creates it, and within the storage."""
    dtype = storage.dtype if type(storage) is _Storage else None
    if rest and isinstance(rest[0], torch.dtype):
        dtype, rest = rest[0], rest[1:]
    whole = [offset, *size, *stride] if type(size) is tuple and type(stride) is tuple else [None]
    if dtype is None or hooks or any(rest) or not all(type(one) is int and 0 <= one < 2**63 for one in whole):
        raise damaged("a tensor")
    count = math.prod(size)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if count else -1
    if count >= 2**63 or len(size) > 64 or (last + 1) * dtype.itemsize > storage.memory.numel():
        raise PickleError(f"a tensor of shape {list(size)} extends beyond its storage")
    view = torch.empty(0, dtype=dtype, device="cpu")
    view.set_(storage.memory.untyped_storage(), offset if count else 0, size, stride)
    return view.requires_grad_() if grad and (dtype.is_floating_point or dtype.is_complex) else view


def _built_parameter(data: Any, grad: Any, hooks: Any) -> torch.Tensor:
    if type(data) is not torch.Tensor or hooks:
        raise damaged("a parameter")
    return torch.nn.Parameter(data, bool(grad) and (data.is_floating_point() or data.is_complex()))


def _built_sparse(layout: Any, data: Any) -> torch.Tensor:
    if type(data) is not tuple or len(data) < 3 or not all(type(one) is torch.Tensor for one in data[:2]):
        raise damaged("a sparse tensor")
    indices, values, size = data[:3]
    made = torch.sparse_coo_tensor(
        indices, values, size, dtype=values.dtype, device="cpu", check_invariants=True, requires_grad=False
    )
    return made._coalesced_(len(data) > 3 and data[3] is True and made.coalesce()._nnz() == made._nnz())


def _layout(name: Any) -> None:
    if name != "torch.sparse_coo":
        raise PickleError(f"expected a dense or COO tensor, but got layout {pickle_data.described(name)}")


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise damaged("a bytes object")
    return text.encode("latin1")


def _bytearray(data: Any = b"") -> bytearray:
    if type(data) is not bytes:
        raise damaged("a bytearray")
    return bytearray(data)


def _collection(kind: type) -> Function:
    def made(values: Any = ()) -> Any:
        if type(values) not in (list, tuple, dict):
            raise damaged(f"a {kind.__name__}")
        pickle_data.check_keys(values)
        return kind(values)

    return Function(made)


def size_of(values: Any) -> torch.Size:
    """A `torch.Size` from a tuple of integers in [0, 2^63)."""
    if type(values) is not tuple or not all(type(one) is int and 0 <= one < 2**63 for one in values):
        raise damaged("a size")
    return torch.Size(values)


def _device(kind: Any, index: Any = None) -> torch.device:
    return torch.device(kind) if index is None else torch.device(kind, index)


NAMES: dict[tuple[str, str], Any] = {
    **{("torch", name): value for name, value in DTYPES.items()},
    **{(f"torch{module}", name): dtype for module in ("", ".cuda", ".storage") for name, dtype in STORAGES.items()},
    ("collections", "OrderedDict"): _collection(OrderedDict),
    ("torch", "Size"): Function(size_of),
}
_NAMES: dict[tuple[str, str], Any] = {
    **NAMES,
    ("torch._utils", "_rebuild_tensor_v2"): Function(_built_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Function(_built_tensor),
    ("torch._utils", "_rebuild_parameter"): Function(_built_parameter),
    ("torch._utils", "_rebuild_sparse_tensor"): Function(_built_sparse),
    ("torch.serialization", "_get_layout"): Function(_layout),
    ("torch", "device"): Function(_device),
    ("collections", "Counter"): _collection(Counter),
    ("_codecs", "encode"): Function(_encoded),
    **{
        (module, name): made
        for module in ("builtins", "__builtin__")
        for name, made in {
            "set": _collection(set),
            "frozenset": _collection(frozenset),
            "complex": Function(complex),
            "bytes": Function(lambda: b""),
            "bytearray": Function(_bytearray),
        }.items()
    },
}


def _leaf(value: Any) -> Any:
    """Numpy values converted back from dicts; other values unchanged."""
    if type(value) is dict and NUMPY in value:
        kind, values = value[NUMPY], value.get(VALUES)
        fits = type(values) is torch.Tensor and (kind == "array" or (kind == "scalar" and not values.dim()))
        if not fits or len(value) != 2:
            raise damaged("a numpy value")
        assert values is not None
        array = values.numpy()
        return array if kind == "array" else array[()]  # a numpy scalar
    if isinstance(value, (torch.Tensor, dict)) or type(value) in _PLAIN | {set, frozenset}:
        return value
    raise PickleError("it is damaged: it contains a function or a type as a value")


def read(file: BinaryIO, offset: int = 0, length: int | None = None) -> Any:
    """The value that an archive contains, on the CPU.

    Args:
        file: an open, seekable file.
        offset: the offset of the archive in the file, in bytes.
        length: the length of the archive, in bytes; None for all bytes from `offset` to the end of the file.

    Raises:
        ArchiveError: the archive is damaged, or contains something that no checkpoint needs.
        OSError: the file cannot be read.
    """
    if length is None:
        length = os.fstat(file.fileno()).st_size - offset
    try:
        entries = Entries(file, offset, length)
        if "byteorder" in entries.infos and entries.read("byteorder").numpy().tobytes() != sys.byteorder.encode():
            raise ArchiveError(f"its numbers are not {sys.byteorder}-endian, as this machine's are")
        storages: dict[str, torch.Tensor] = {}

        def persistent(named: Any) -> _Storage:
            tag, dtype, key, _, numbers = named
            if tag != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str:
                raise damaged("a storage")
            if key not in storages:
                storages[key] = entries.read(f"data/{key}")
            if type(numbers) is not int or numbers != storages[key].numel() // dtype.itemsize:
                raise PickleError(
                    f"its storage {key} has {storages[key].numel():,} bytes, not those of "
                    f"{pickle_data.described(numbers)} elements of {dtype}"
                )
            return _Storage(dtype, storages[key])

        pickled = entries.read("data.pkl").numpy().tobytes()
        value = pickle_data.read(pickled, _NAMES, persistent)
        return pickle_data.resolved(value, _leaf, MOST + len(pickled))
    except ArchiveError:
        raise
    except (zipfile.BadZipFile, struct.error, EOFError, RuntimeError, ArithmeticError) as error:
        raise ArchiveError(f"it is not an archive of torch.save, or is damaged: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArchiveError(str(error)) from error
