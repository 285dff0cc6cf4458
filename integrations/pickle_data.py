"""Read pickles as data: nothing that they name is looked up, imported or called.

A pickle is a program for a stack machine. This machine implements the opcodes that torch writes in checkpoints,
including those of Python 2. The caller passes a table of the names that a pickle may use. The table maps each name to a
value or to a `Function` of ours; any other name is an error.

Memory and time are proportional to the size of the pickle. The memo is a dict, so a large index allocates nothing. A
length is compared with the remaining bytes before anything is allocated, and the values that functions copy are
counted. The size of keys is limited, and `resolved` refuses a few bytes that expand to a huge tree.

Source of the opcodes: https://docs.python.org/3/library/pickletools.html.
"""

from __future__ import annotations

import codecs
import mmap
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

LARGEST = 1 << 30  # bytes of a pickle
DEEPEST = 100  # levels of nested containers
# A container that occurs several times counts each time. This many values are allowed in addition to the bytes read.
MOST = 10_000_000
_LINE = 1000  # bytes of a line with a module, a name or a number
# The largest number of parts of a key. Each lookup hashes and compares all of them, in C, where no limit applies.
_LARGEST_KEY = 1000
_PLAIN_KEYS = {str, int, float, bool, bytes, complex, type(None), torch.dtype, torch.device}
_NESTED_KEYS = {tuple, frozenset, torch.Size}
_SIZED = {str, bytes, bytearray, list, tuple, dict, OrderedDict, set, frozenset}


class PickleError(ValueError):
    """A pickle that is damaged, or uses a name or an instruction that no checkpoint needs."""


def damaged(what: str) -> PickleError:
    """The error for a part of a file that does not have the expected structure."""
    return PickleError(f"it is damaged: {what} is malformed")


def described(value: Any) -> str:
    """A short text for an error message: the value, or only its type if its text might be very long."""
    small = isinstance(value, int) and -(2**64) < value < 2**64
    return repr(value)[:100] if small or isinstance(value, (str, float, torch.dtype)) else type(value).__name__


class Function(NamedTuple):
    """The function of ours that replaces a function or class named in a pickle."""

    call: Callable[..., Any]


class Node:
    """An object read as data: its kind, and the state that was saved."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None


_DAMAGED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error)
Table = Mapping[tuple[str, str], Any]
Persistent = Callable[[Any], Any]


def check_keys(keys: Iterable[Any]) -> None:
    """Raise unless all values are allowed as keys of a dict or elements of a set."""
    for key in keys:
        if isinstance(key, Node) or (type(key) is str and len(key) <= _LARGEST_KEY):
            continue
        pending, cost = [key], 0
        while pending:
            part = pending.pop()
            cost += 1
            if type(part) is int:  # hashed at every lookup; long strings are compared
                cost += part.bit_length() // 64
            elif type(part) in (str, bytes):
                cost += len(part) // 1024
            if type(part) in _NESTED_KEYS and cost + len(pending) + len(part) <= _LARGEST_KEY:
                pending.extend(part)
            elif type(part) not in _PLAIN_KEYS or cost > _LARGEST_KEY:
                raise PickleError(f"a key contains a {type(part).__name__}, or more than {_LARGEST_KEY} parts")


def read(data: bytes, table: Table, persistent: Persistent | None = None) -> Any:
    """Returns the value of a pickle.

    Args:
        data: the pickle.
        table: the value or `Function` for each (module, name).
        persistent: returns the value for a persistent id; None if the pickle must not contain any.

    Raises:
        PickleError: the pickle is damaged, or uses an unknown name or opcode.
    """
    return next(sequence(data, table, persistent))[0]


def sequence(data: bytes | mmap.mmap, table: Table, persistent: Persistent | None = None) -> Iterator[tuple[Any, int]]:
    """Yields the value and the end offset of each of several consecutive pickles; see `read`."""
    machine = _Machine(data, table, persistent)
    while True:
        try:
            value = machine.run()
        except PickleError:
            raise
        except _DAMAGED as error:
            raise PickleError(f"it cannot be decoded ({type(error).__name__})") from error
        yield value, machine.at


_INSTRUCTIONS = {ord(one.code): one.name for one in pickletools.opcodes}
_STOP = ord(".")


class _Machine:
    def __init__(self, data: bytes | mmap.mmap, table: Table, persistent: Persistent | None) -> None:
        self.data, self.table, self.persistent = data, table, persistent
        self.at = 0

    def run(self) -> Any:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks below the marks
        self.memo: dict[int, Any] = {}
        self.end = min(len(self.data), self.at + LARGEST)
        self.copies = MOST + self.end - self.at  # values and bytes that functions may still copy
        while True:
            if self.at >= self.end:
                raise PickleError(f"it was cut off, or has more than {LARGEST:,} bytes")
            code = self.data[self.at]
            self.at += 1
            if code in _PUSHED:
                value = _PUSHED[code](self)  # may replace self.stack
                self.stack.append(value)
            elif code in _DONE:
                _DONE[code](self)
            elif code == _STOP:
                return self.stack.pop()
            else:
                name = _INSTRUCTIONS[code]
                raise PickleError(f"its pickle has the instruction {name}, which torch.save does not write")

    def take(self, size: int) -> bytes:
        if size > self.end - self.at:
            raise PickleError("it was cut off")
        self.at += size
        return self.data[self.at - size : self.at]

    def unsigned(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def string(self, length: int) -> bytes:
        """A string of bytes, preceded by its size in `length` bytes."""
        size, remaining = self.unsigned(length), self.end - self.at
        if size > remaining:
            raise PickleError(f"a string in it is {size:,} bytes long, but only {remaining:,} bytes follow")
        return self.take(size)

    def line(self) -> bytes:
        line, _ = self.data[self.at : min(self.at + _LINE, self.end)].split(b"\n", 1)
        self.at += len(line) + 1
        return line

    def since_mark(self) -> list[Any]:
        found = self.stack
        self.stack = self.below.pop()
        return found

    def last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise PickleError("it removes more values from its stack than the stack holds")
        found = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return found

    def named(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise PickleError("a name in it is not a string")
        try:
            return self.table[module, name]
        except KeyError:
            raise PickleError(f"it asks for {module}.{name}, which no checkpoint needs") from None

    def called(self, function: Any, arguments: Any) -> Any:
        if type(function) is not Function or type(arguments) is not tuple:
            raise PickleError("it calls something that is not a function")
        self.copies -= len(arguments) + sum(len(one) for one in arguments if type(one) in _SIZED)
        if self.copies < 0:
            raise PickleError(f"it copies more than {MOST:,} values")
        return function.call(*arguments)

    def put_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise PickleError(f"it adds a key to a {type(target).__name__}")
        keys = pairs[::2]
        check_keys(keys)
        target.update(zip(keys, pairs[1::2], strict=True))

    def put_elements(self, elements: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(elements)
        elif type(target) is set:
            check_keys(elements)
            target.update(elements)
        else:
            raise PickleError(f"it adds elements to a {type(target).__name__}")

    def put_into_memo(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def build(self) -> None:
        node, state = self.last(2)
        self.stack.append(node)
        if type(node) is Node and node.state is None:
            node.state = state
        elif type(node) is not OrderedDict:  # torch stores the versions of modules in attributes of one
            raise PickleError("it sets the state of a value that has none")

    def persistent_value(self) -> Any:
        if self.persistent is None:
            raise PickleError("it has a persistent id, which only tensors have")
        return self.persistent(self.stack.pop())

    def mapping(self) -> Any:
        pairs = self.since_mark()
        self.stack.append({})
        self.put_items(pairs)
        return self.stack.pop()

    def protocol(self) -> None:
        if self.unsigned(1) > 5:
            raise PickleError("its pickle protocol is not known")

    def frame(self) -> None:
        if self.unsigned(8) > self.end - self.at:
            raise PickleError("it was cut off")


def _number(form: str) -> Callable[[_Machine], Any]:
    binary = struct.Struct(form)
    return lambda m: binary.unpack(m.take(binary.size))[0]


def _sized(length: int, decode: Callable[[bytes], Any]) -> Callable[[_Machine], Any]:
    return lambda m: decode(m.string(length))


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _latin(data: bytes) -> str:
    return str(data, "latin-1")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _decimal(line: bytes) -> int | bool:
    return line == b"01" if line in (b"00", b"01") else int(line.removesuffix(b"L"))


_Opcodes = dict[bytes, Callable[[_Machine], Any]]
_pushed: _Opcodes = {
    **{b"N": lambda m: None, b"\x88": lambda m: True, b"\x89": lambda m: False},
    **{b")": lambda m: (), b"}": lambda m: {}, b"]": lambda m: []},
    **{b"J": _number("<i"), b"K": _number("<B"), b"M": _number("<H"), b"G": _number(">d")},
    **{b"\x8a": _sized(1, _integer), b"\x8b": _sized(4, _integer)},
    **{b"I": lambda m: _decimal(m.line()), b"L": lambda m: _decimal(m.line()), b"F": lambda m: float(m.line())},
    **{b"\x8c": _sized(1, _text), b"X": _sized(4, _text), b"\x8d": _sized(8, _text)},
    **{b"U": _sized(1, _latin), b"T": _sized(4, _latin), b"V": lambda m: str(m.line(), "raw-unicode-escape")},
    b"S": lambda m: _latin(codecs.escape_decode(m.line().strip()[1:-1])[0]),
    **{b"C": _sized(1, bytes), b"B": _sized(4, bytes), b"\x8e": _sized(8, bytes), b"\x96": _sized(8, bytearray)},
    **{b"t": lambda m: tuple(m.since_mark()), b"l": lambda m: m.since_mark(), b"d": _Machine.mapping},
    **{b"\x85": lambda m: tuple(m.last(1)), b"\x86": lambda m: tuple(m.last(2)), b"\x87": lambda m: tuple(m.last(3))},
    b"\x8f": lambda m: m.called(m.named("builtins", "set"), ()),
    b"\x91": lambda m: m.called(m.named("builtins", "frozenset"), (m.since_mark(),)),
    **{
        b"h": lambda m: m.memo[m.unsigned(1)],
        b"j": lambda m: m.memo[m.unsigned(4)],
        b"g": lambda m: m.memo[int(m.line())],
    },
    b"c": lambda m: m.named(_text(m.line()), _text(m.line())),
    b"\x93": lambda m: m.named(*m.last(2)),
    **{code: lambda m: m.called(*m.last(2)) for code in (b"R", b"\x81")},
    **{b"Q": _Machine.persistent_value, b"2": lambda m: m.stack[-1]},
}
_done: _Opcodes = {
    **{b"(": _Machine.mark, b"0": lambda m: m.last(1), b"1": _Machine.since_mark, b"b": _Machine.build},
    **{b"\x80": _Machine.protocol, b"\x95": _Machine.frame},
    **{b"a": lambda m: m.put_elements(m.last(1)), b"s": lambda m: m.put_items(m.last(2))},
    **{code: lambda m: m.put_elements(m.since_mark()) for code in (b"e", b"\x90")},
    **{b"u": lambda m: m.put_items(m.since_mark()), b"\x94": lambda m: m.put_into_memo(len(m.memo))},
    **{b"q": lambda m: m.put_into_memo(m.unsigned(1)), b"r": lambda m: m.put_into_memo(m.unsigned(4))},
    b"p": lambda m: m.put_into_memo(int(m.line())),
}
_PUSHED, _DONE = ({ord(code): function for code, function in some.items()} for some in (_pushed, _done))


def resolved(value: Any, leaf: Callable[[Any], Any], largest: int) -> Any:
    """Replaces each value inside `value` by `leaf` of it, except lists and tuples; a dict after its own values.

    Lists and dicts are changed in place. A traversal of the result visits at most `largest` values, no matter how few
    bytes encode them, and at most `DEEPEST` levels.

    Raises:
        PickleError: `value` is larger or deeper, or contains itself.
    """
    # By id: the value (to keep it alive), its replacement, and the number of values that it contains (0: unknown yet).
    known: dict[int, tuple[Any, Any, int]] = {}

    def walk(value: Any, depth: int) -> tuple[Any, int]:
        kind = type(value)
        if kind not in (list, tuple) and not isinstance(value, dict):
            return leaf(value), 1
        if id(value) in known:
            _, became, size = known[id(value)]
            if size == 0:
                raise PickleError("it contains itself")
            return became, size
        if depth == DEEPEST:
            raise PickleError(f"it is nested more than {DEEPEST} deep")
        known[id(value)] = value, None, 0
        keys = list(value) if isinstance(value, dict) else range(len(value))
        found = [walk(value[key], depth + 1) for key in keys]
        size = 1 + sum(own for _, own in found)
        if size > largest:
            raise PickleError(f"it expands to more than {largest:,} values")
        became = value
        if kind is tuple:
            became = tuple(one for one, _ in found)
        else:
            for key, (one, _) in zip(keys, found, strict=True):
                value[key] = one
            if kind is not list:
                became = leaf(value)
        known[id(value)] = value, became, size
        return became, size

    return walk(value, 0)[0]
