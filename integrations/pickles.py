"""Pickles of torch as data: which names they ask for is decided here, and memory and time are bounded by their size.

torch's own reader of archives, ``torch.load(weights_only=True)``, imports only names that it knows, but builds what a
pickle says: sparse tensors of any size, and keys that take years to hash. Therefore `load` first walks through the
pickle with nothing but stand-ins. The unpickler is that of the standard library in Python, because the one in C
allocates 2 GB for ten bytes (an index of its memo).
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

# What torch's picklers write, in protocols 2 to 5.
_OPCODES = b"".join(
    (
        *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
        *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.BINBYTES),
        *(pickle.SHORT_BINBYTES, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.EMPTY_DICT, pickle.EMPTY_LIST),
        *(pickle.EMPTY_TUPLE, pickle.EMPTY_SET, pickle.MARK, pickle.APPEND, pickle.APPENDS, pickle.SETITEM),
        *(pickle.SETITEMS, pickle.ADDITEMS, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
        *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.MEMOIZE, pickle.GLOBAL),
        *(pickle.STACK_GLOBAL, pickle.REDUCE, pickle.BUILD, pickle.NEWOBJ, pickle.BINPERSID),
    )
)
_PLAIN = (str, int, float, bool, bytes, complex, type(None), torch.dtype)


DEEPEST = 100


class PickleError(ValueError):
    """A pickle that is damaged, or asks for something that no checkpoint needs."""


class Record:
    """An instance of a class that is only a name here; ``state`` is what the pickle gives it."""

    kind = ""
    state: Any = None

    def __hash__(self) -> int:
        return hash(self.kind)


_Pickle: Any = pickle._Unpickler


class Unpickler(_Pickle):  # type: ignore[misc]
    """Reads a pickle whose names are those of a table."""

    dispatch: ClassVar[dict[int, Any]] = {code: step for code, step in _Pickle.dispatch.items() if code in _OPCODES}

    def __init__(self, data: bytes, names: Callable[[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))  # a length in the pickle reads no more than there is
        self.find_class = names

    def persistent_load(self, pid: Any) -> Any:
        return Record()

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state

    def _setitem(self) -> None:
        _check_keys(self.stack[-2:-1])
        self.load_setitem()

    def _setitems(self) -> None:
        _check_keys(self.stack[::2])
        self.load_setitems()

    def _additems(self) -> None:
        _check_keys(self.stack)
        self.load_additems()

    dispatch |= {pickle.BUILD[0]: _build, pickle.SETITEM[0]: _setitem}
    dispatch |= {pickle.SETITEMS[0]: _setitems, pickle.ADDITEMS[0]: _additems}


def _check_keys(keys: list[Any]) -> None:
    """Refuse keys whose hash could take longer than reading them: tuples of tuples of tuples."""
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        if not all(isinstance(part, (*_PLAIN, Record)) for part in parts):
            raise PickleError(f"it has a {type(key).__name__} of other containers for a key")


def read(data: bytes, names: Callable[[str, str], Any]) -> Any:
    """The content of a pickle.

    Args:
        data: the pickle.
        names: returns what a module and a name stand for, or raises PickleError.

    Raises:
        PickleError: the pickle is damaged, or `names` refuses a name.
    """
    try:
        return Unpickler(data, names).load()
    except PickleError:
        raise
    except Exception as error:  # of a damaged pickle, anything
        raise PickleError(f"it is not a pickle, or is damaged ({type(error).__name__}: {str(error)[:100]})") from error


def table(names: Mapping[tuple[str, str], Any]) -> Callable[[str, str], Any]:
    """For `read`: the names of a table, and dtypes."""

    def find(module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in names:
            raise PickleError(f"it asks for {module[:100]}.{name[:100]}, which no checkpoint needs")
        return names[module, name]

    return find


# ---------------------------------------------------------------------------------------------- archives of torch.save

_STAND_INS: dict[tuple[str, str], Any] = {
    **{
        name: lambda *arguments: Record()
        for name in (
            ("torch._utils", "_rebuild_tensor"), ("torch._utils", "_rebuild_tensor_v2"),
            ("torch._utils", "_rebuild_tensor_v3"), ("torch._utils", "_rebuild_parameter"),
            ("torch._utils", "_rebuild_parameter_with_state"), ("torch._utils", "_rebuild_meta_tensor_no_storage"),
            ("torch.serialization", "_get_layout"),
            ("torch", "device"), ("torch", "Size"), ("_codecs", "encode"), ("builtins", "complex"),
            ("collections", "Counter"),
        )
    },
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): lambda *arguments: set(),
    **{("torch.storage", name): Record for name in ("UntypedStorage", "TypedStorage")},
    **{
        ("torch", f"{name}Storage"): Record
        for name in (
            "Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexDouble",
            "ComplexFloat", "Untyped",
        )
    },
}  # fmt: skip
_REMEDIES = {
    "_rebuild_sparse_tensor": "a sparse tensor: save its to_dense(), or its indices() and values()",
    "_rebuild_qtensor": "a quantized tensor: save its int_repr() and its scales",
}


class Refused(PickleError):
    """Objects of other code."""


def _stand_in(module: str, name: str) -> Any:
    module = "builtins" if module == "__builtin__" else module  # in protocol 2
    if name in _REMEDIES:
        raise Refused(_REMEDIES[name])
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    if (module, name) not in _STAND_INS:
        raise Refused(f"an object of {module[:100]}.{name[:100]}: save a state_dict")
    return _STAND_INS[module, name]


def _check_expansion(content: Any, most: int) -> None:
    """Refuse containers that hold one another so often, or so deep, that looking at all values would take too long.

    Raises:
        PickleError: they expand to more than `most` values, contain themselves, or are nested more than 100 deep.
    """
    counts: dict[int, float] = {}  # of the values in each container

    def count(value: Any, depth: int) -> float:
        if not isinstance(value, dict | list | tuple):
            return 1
        if id(value) not in counts:
            if depth > DEEPEST:
                raise PickleError(f"it nests containers more than {DEEPEST} deep")
            counts[id(value)] = math.inf  # while it is being counted
            parts = value.values() if isinstance(value, dict) else value
            counts[id(value)] = 1 + sum(count(part, depth + 1) for part in parts)
        return counts[id(value)]

    if count(content, 0) > most:
        raise PickleError("it has containers that contain themselves, or one another too often")


def load(file: str | BinaryIO, size: int) -> Any:
    """The content of an archive of `torch.save`, on the CPU; a path is mapped into memory.

    Args:
        file: the path, or an open file.
        size: its length in bytes.

    Raises:
        PickleError: it is damaged, or not such an archive, or holds other objects than tensors and plain values.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if any(one.compress_type for one in entries) or sum(one.file_size for one in entries) > size:
                raise PickleError("it is compressed, or larger inside than outside")
            pickled = [one for one in entries if one.filename.rpartition("/")[2] == "data.pkl"]
            if len(pickled) != 1 or len({one.filename for one in entries}) != len(entries):
                raise PickleError("it does not have one pickle")
            data = archive.read(pickled[0])
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, PickleError):
            raise
        raise PickleError(f"it is not an archive of torch.save, or is damaged ({error})") from error
    _check_expansion(read(data, _stand_in), 1000 + 16 * size)
    try:
        if not isinstance(file, str):
            file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, str))
    except Exception as error:  # of a damaged archive, anything
        raise PickleError(
            f"it is damaged: {str(error).splitlines()[0][:200] if str(error) else type(error)}"
        ) from error
