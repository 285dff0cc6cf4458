"""Read torch's pickles as data: a table maps their names, and their size bounds the memory and time to read them.

``torch.load(weights_only=True)`` imports only allowed names, but builds whatever a pickle asks for: sparse tensors of
any size, and keys that take years to hash. Therefore `load` first reads the pickle with stand-ins only. The unpickler
is the one in Python, because the one in C allocates 2 GB for ten bytes (an index of its memo).
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, ClassVar

import torch

DEEPEST = 100  # maximum nesting of containers
# What torch's picklers write, in protocols 2 to 5.
_OPCODES = (
    "PROTO FRAME STOP NONE NEWTRUE NEWFALSE BINFLOAT BININT BININT1 BININT2 LONG1 LONG4 BINBYTES SHORT_BINBYTES "
    "BINUNICODE SHORT_BINUNICODE EMPTY_DICT EMPTY_LIST EMPTY_TUPLE EMPTY_SET MARK APPEND APPENDS SETITEM SETITEMS "
    "ADDITEMS TUPLE TUPLE1 TUPLE2 TUPLE3 BINPUT LONG_BINPUT BINGET LONG_BINGET MEMOIZE GLOBAL STACK_GLOBAL REDUCE "
    "BUILD NEWOBJ BINPERSID"
).split()
_REMEDIES = {
    "_rebuild_sparse_tensor": "a sparse tensor: save its to_dense(), or its indices() and values()",
    "_rebuild_qtensor": "a quantized tensor: save its int_repr() and its scales",
}


class PickleError(ValueError):
    """A pickle that is damaged, or asks for something that no checkpoint needs."""


class Refused(PickleError):
    """A pickle that contains objects of other code."""


class Record:
    """Stands in for an object of any class; ``state`` is the state that the pickle gives it."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        pass


_KEYS = (str, int, float, bool, bytes, complex, type(None), torch.dtype, Record)
_Pickle: Any = pickle._Unpickler


def _checking_keys(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """An instruction that refuses keys whose hash could take longer than reading them: tuples of tuples of tuples."""

    def checked(self: Any) -> None:
        for key in self.stack[keys]:
            items = key if type(key) is tuple else (key,)
            if not all(isinstance(item, _KEYS) for item in items):
                raise PickleError(f"it has a {type(key).__name__} that contains containers as a key")
        load(self)

    return checked


class _Unpickler(_Pickle):  # type: ignore[misc]
    """Reads a pickle, mapping its names by a table."""

    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: _Pickle.dispatch[code[0]] for code in (getattr(pickle, name) for name in _OPCODES)
    }

    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))  # reads no more than there is, whatever lengths the pickle claims
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module  # in protocol 2
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in self._names:
            raise Refused(_REMEDIES.get(name, f"an object of {module[:100]}.{name[:100]}: save a state_dict"))
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> Any:
        return Record()

    def _build(self) -> None:
        state, built = self.stack.pop(), self.stack[-1]
        if isinstance(built, Record):
            built.state = state

    dispatch |= {
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _checking_keys(_Pickle.load_setitem, slice(-2, -1)),
        pickle.SETITEMS[0]: _checking_keys(_Pickle.load_setitems, slice(0, None, 2)),
        pickle.ADDITEMS[0]: _checking_keys(_Pickle.load_additems, slice(None)),
    }


def read(data: bytes, names: Mapping[tuple[str, str], Any]) -> Any:
    """Unpickle `data`. `names` maps (module, name) pairs to the functions to call instead; other names are refused."""
    try:
        return _Unpickler(data, names).load()
    except PickleError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise PickleError(f"it is not a pickle, or is damaged ({type(error).__name__}: {str(error)[:100]})") from error


_STORAGES = "Double Float Half BFloat16 Long Int Short Char Byte Bool ComplexDouble ComplexFloat Untyped".split()
_REBUILT = "tensor tensor_v2 tensor_v3 parameter parameter_with_state meta_tensor_no_storage".split()
_RECORDS = {
    "torch._utils": [f"_rebuild_{name}" for name in _REBUILT],
    "torch.serialization": ["_get_layout"],
    "torch": ["device", "Size", *(f"{name}Storage" for name in _STORAGES)],
    "torch.storage": ["UntypedStorage", "TypedStorage"],
    "_codecs": ["encode"],
    "builtins": ["complex"],
    "collections": ["Counter"],
}
_STAND_INS: dict[tuple[str, str], Any] = {
    **{(module, name): Record for module, names in _RECORDS.items() for name in names},
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): lambda *arguments: set(),
}


def _check_expansion(content: Any, limit: int) -> None:
    """Refuse containers that expand to more than `limit` values, contain themselves, or are nested too deeply."""
    counts: dict[int, float] = {}  # number of values in each container

    def count(value: Any, depth: int) -> float:
        if not isinstance(value, dict | list | tuple):
            return 1
        if id(value) not in counts:
            if depth > DEEPEST:
                raise PickleError(f"it nests containers more than {DEEPEST} deep")
            counts[id(value)] = math.inf  # while it is being counted
            items = value.values() if isinstance(value, dict) else value
            counts[id(value)] = 1 + sum(count(item, depth + 1) for item in items)
        return counts[id(value)]

    if count(content, 0) > limit:
        raise PickleError("it has containers that contain themselves, or each other too often")


def load(file: str | BinaryIO, size: int) -> Any:
    """Load an archive of `torch.save` of `size` bytes on the CPU; a path is memory-mapped.

    Raises PickleError if it is damaged, no such archive, or contains objects other than tensors and plain values.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if any(entry.compress_type for entry in entries) or sum(entry.file_size for entry in entries) > size:
                raise PickleError("it is compressed, or its entries are larger than the file")
            pickled = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
            if len(pickled) != 1 or len({entry.filename for entry in entries}) != len(entries):
                raise PickleError("it does not have exactly one data.pkl, or has two entries of the same name")
            data = archive.read(pickled[0])
    except PickleError:
        raise
    except Exception as error:  # zipfile raises EOFError and others too
        raise PickleError(f"it is not an archive of torch.save, or is damaged ({error})") from error
    _check_expansion(read(data, _STAND_INS), 1000 + 16 * size)
    try:
        if not isinstance(file, str):
            file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, str))
    except Exception as error:  # a damaged archive may raise anything
        raise PickleError(f"it is damaged: {(str(error).splitlines() or [repr(error)])[0][:200]}") from error
