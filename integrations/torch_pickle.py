"""The pickles in a file of `torch.save`, read instruction by instruction instead of unpickled.

Nothing that a file names is imported or called: what `torch.save` writes for tensors and containers is known by name
and becomes a description; everything else is refused. No instruction copies what an earlier one made, so memory and
time are in proportion to the file.
"""

from __future__ import annotations

import pickletools
from typing import Any, NamedTuple

import torch

LONGEST = 1 << 24  # bytes of one string
_LINE = 1000  # bytes of one line: a module and a name, or a number

STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128, "ComplexFloatStorage": torch.complex64, "UntypedStorage": torch.uint8,
    "QInt8Storage": torch.int8, "QUInt8Storage": torch.uint8, "QInt32Storage": torch.int32,
    "QUInt4x2Storage": torch.uint8, "QUInt2x4Storage": torch.uint8,
}  # fmt: skip

_LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
# Objects without tensors, which are nobody's concern here.
_VALUES = {
    ("torch", "device"), ("torch.serialization", "_get_layout"), ("builtins", "complex"), ("__builtin__", "complex"),
    ("builtins", "bytearray"), ("__builtin__", "bytearray"), ("_codecs", "encode"),
    ("numpy", "dtype"), ("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar"),
}  # fmt: skip
# Containers, and what stands for them: the one that they are made of.
_CONTAINERS: dict[tuple[str, str], type] = {
    ("collections", "OrderedDict"): dict, ("collections", "Counter"): dict, ("torch", "Size"): tuple,
    **{(module, name): list for module in ("builtins", "__builtin__") for name in ("set", "frozenset")},
}  # fmt: skip


class Damaged(ValueError):
    """A pickle that `torch.save` does not write. The text says what is wrong, after the file's name and a colon."""


class Refused(ValueError):
    """A pickle with an object beside tensors and containers; the text is its class or function."""


class Unsuitable(ValueError):
    """A file that may be whole and is not read all the same. The text goes on from the file's name."""


def described(value: Any) -> str:
    """A value in a few characters; only the type of one that may be without end."""
    if isinstance(value, Global):
        return f"{value.module}.{value.name}"[:100]
    return repr(value)[:100] if isinstance(value, (str, int, float)) else type(value).__name__


class Global(NamedTuple):
    """A class or function by name. It is never looked up."""

    module: str
    name: str


class Storage(NamedTuple):
    """Where a tensor's elements lie: which storage of the file, of what, and from which element on."""

    key: str
    dtype: torch.dtype
    elements: int
    first: int = 0


class Dense(NamedTuple):
    """A tensor: `torch._utils._rebuild_tensor_v2`'s arguments."""

    storage: Storage
    dtype: torch.dtype
    offset: Any
    size: Any
    stride: Any
    conjugate: bool = False
    negative: bool = False


class Sparse(NamedTuple):
    """A sparse tensor: its layout by name, and `torch._utils._rebuild_sparse_tensor`'s data."""

    layout: Any
    data: Any


class Meta(NamedTuple):
    """A tensor without values."""

    dtype: torch.dtype
    size: Any


class Limited:
    """A file for `pickletools.genops` that gives neither more than is there nor lines and strings without end."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, length: int) -> bytes:
        if length > LONGEST:
            raise Damaged(f"a string in it is {length:,} bytes long")
        return bytes(self._file.read(length))

    def readline(self) -> bytes:
        start = self.tell()
        line = bytes(self._file.read(_LINE)).split(b"\n", 1)
        self._file.seek(start + len(line[0]) + len(line[1:]))
        return line[0] + b"\n" * len(line[1:])

    def tell(self) -> int:
        return int(self._file.tell())


def read(file: Limited, storages: dict[str, Storage] | None = None) -> Any:
    """The next pickle in `file`: dicts, lists, tuples, strings and numbers, `Dense`, `Sparse` and `Meta`.

    Args:
        file: at the pickle's beginning, and afterwards behind its end.
        storages: gets the storages that the pickle names, by key.

    Raises:
        Damaged, Refused: see there. What is damaged may raise any other exception too.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def from_mark() -> list[Any]:
        start = marks.pop()
        taken = stack[start:]
        del stack[start:]
        return taken

    def put_into(target: Any, items: list[Any]) -> None:
        if not isinstance(target, dict):
            raise Damaged(f"it puts a key into a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    argument: Any
    for instruction, argument, _ in pickletools.genops(file):  # type: ignore[arg-type]  # these methods are all it takes
        name = instruction.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            length = int(name[-1]) if name[-1].isdigit() else 0
            made = tuple(stack[len(stack) - length :])
            if len(made) != length:
                raise Damaged("it takes more from its stack than is there")
            del stack[len(stack) - length :]
            stack.append(made)
        elif name in ("TUPLE", "FROZENSET"):
            stack.append(tuple(from_mark()))
        elif name in ("EMPTY_LIST", "EMPTY_SET"):
            stack.append([])
        elif name == "LIST":
            stack.append(from_mark())
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            taken = [stack.pop()] if name == "APPEND" else from_mark()
            stack[-1].extend(taken)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "DICT":
            taken = from_mark()
            stack.append({})
            put_into(stack[-1], taken)
        elif name in ("SETITEM", "SETITEMS"):
            value = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else from_mark()
            put_into(stack[-1], value)
        elif name == "GLOBAL":
            stack.append(Global(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            last, first = stack.pop(), stack.pop()
            stack.append(Global(str(first), str(last)))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, what = stack.pop(), stack.pop()
            stack.append(_made(what, arguments))
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
            if storages is not None:
                storages.setdefault(stack[-1].key, stack[-1])
        elif name == "BUILD":
            stack.pop()  # attributes of what is none of our objects
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            from_mark()
        elif name == "STOP":
            break
        elif name not in ("PROTO", "FRAME"):
            raise Damaged(f"its pickle has the instruction {name}, which torch.save does not write")
    return stack.pop()


def _key(key: Any) -> Any:
    """A key that is hashed at once: a tuple of tuples of tuples … takes exponentially long."""
    parts = key if isinstance(key, tuple) else (key,)
    if not all(part is None or isinstance(part, (str, int, float, bytes)) for part in parts) or len(parts) > 100:
        raise Damaged(f"it has a dict with a {type(key).__name__} for a key")
    if any(isinstance(part, int) and abs(part) >= 2**64 for part in parts):
        raise Damaged("it has a dict with a whole number of more than 64 bits for a key")
    return key


def _made(what: Any, arguments: Any) -> Any:
    """What calling a class or function by that name gives, of those that `torch.save` writes."""
    if not isinstance(what, Global) or not isinstance(arguments, tuple):
        raise Damaged("it calls what is no function")
    if what in _VALUES:
        return None
    if what in _CONTAINERS:
        made = arguments[0] if arguments else _CONTAINERS[what]()
        if not isinstance(made, _CONTAINERS[what]):
            raise Damaged(f"it makes a {what.name} of a {type(made).__name__}")
        return made
    module, name = what
    if module == "torch._tensor" and name == "_rebuild_from_type_v2":
        return _made(arguments[0], arguments[2])
    if module != "torch._utils":
        raise Refused(f"{module}.{name}")
    if name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        return arguments[0]
    if name == "_rebuild_sparse_tensor":
        return Sparse(*arguments)
    if name == "_rebuild_meta_tensor_no_storage":
        return Meta(_dtype(arguments[0]), arguments[1])
    if name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"):
        storage, offset, size, stride, *more = arguments
        if not isinstance(storage, Storage):
            raise Damaged(f"a tensor's storage is a {type(storage).__name__}")
        dtype = _dtype(more[2]) if name == "_rebuild_tensor_v3" else storage.dtype
        bits = more[-1] if name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3") and isinstance(more[-1], dict) else {}
        return Dense(storage, dtype, offset, size, stride, bits.get("conj") is True, bits.get("neg") is True)
    raise Refused(f"{module}.{name}")


def _dtype(what: Any) -> torch.dtype:
    found = getattr(torch, what.name, None) if isinstance(what, Global) and what.module == "torch" else None
    if not isinstance(found, torch.dtype):
        raise Damaged(f"a tensor's dtype is {described(what)}")
    return found


def _storage(given: Any) -> Storage:
    """The storage that a persistent id names."""
    kind, what, key, _, elements, *view = given[:6]
    dtype = STORAGES.get(what.name) if isinstance(what, Global) else None
    if kind != "storage" or dtype is None or not isinstance(key, str) or type(elements) is not int or elements < 0:
        raise Damaged(f"a storage is {', '.join(map(described, given))}")
    first = view[0][1] if view and view[0] is not None else 0
    if type(first) is not int or first < 0:
        raise Damaged(f"a storage begins at {described(first)}")
    return Storage(key, dtype, elements, first)
