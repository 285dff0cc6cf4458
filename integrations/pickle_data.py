"""Pickles read as data: nothing that they name is looked up, imported or called.

A pickle is a program for a stack machine. This one knows the opcodes that torch's checkpoints are written with, and a
table, given by the caller, of the names that they may use. A name means what the table says: a value, a `Function` of
ours, or a `Class`, whose objects become a `Node` with the state that was saved. Everything else is an error.

Memory is in proportion to the pickle: the memo is a dict, so its numbers reserve nothing, and no length in the file is
believed before the bytes are there. Keys are small, and `settled` refuses a few bytes that stand for a giant tree.

Source of the opcodes: https://docs.python.org/3/library/pickletools.html.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

LARGEST = 1 << 30  # bytes of a pickle
DEEPEST = 100  # containers in containers
MOST = 10_000_000  # values that containers which stand in several places may add up to, beyond the bytes they take
# A key's parts: as many are hashed and compared each time, and each level of them is a call in C that nothing counts.
_LARGEST_KEY = 1000
_PLAIN_KEYS = {str, int, float, bool, bytes, complex, type(None), torch.dtype, torch.device}
_NESTED_KEYS = {tuple, frozenset, torch.Size}


class PickleError(ValueError):
    """A pickle that is damaged, or asks for what no checkpoint needs."""


class Function(NamedTuple):
    """What a name stands for that is called: this function of ours."""

    call: Callable[..., Any]


class Class(NamedTuple):
    """What a name stands for that is made an object of: a `Node` of this kind."""

    kind: str


class Node:
    """An object of a `Class`, as data."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind, self.state = kind, None


Table = Mapping[tuple[str, str], Any]


def check_keys(keys: Iterable[Any]) -> None:
    """Raise unless all may be keys of a dict or elements of a set."""
    for key in keys:
        if type(key) in _PLAIN_KEYS or type(key) is Node:
            continue
        left, seen = [key], 0
        while left:
            part = left.pop()
            seen += 1
            if type(part) in _NESTED_KEYS and seen + len(left) + len(part) <= _LARGEST_KEY:
                left.extend(part)
            elif type(part) not in _PLAIN_KEYS:
                raise PickleError(f"a key is made of a {type(part).__name__}, or of more than {_LARGEST_KEY} parts")


def read(data: bytes, table: Table, persistent: Callable[[Any], Any] | None = None) -> Any:
    """What a pickle says.

    Args:
        data: the pickle.
        table: what (module, name) stands for.
        persistent: what a persistent id stands for; None: there must be none.

    Raises:
        PickleError: it is damaged, or asks for a name or an opcode that is not known.
    """
    if len(data) > LARGEST:
        raise PickleError(f"it has {len(data):,} bytes; allowed are {LARGEST:,}")
    try:
        return _Machine(data, table, persistent).run()
    except PickleError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error) as error:
        raise PickleError(f"it is damaged: {error}") from error


_OPCODES: dict[int, Callable[[_Machine], None]] = {}


def _opcode(*codes: bytes) -> Callable[[Callable[[_Machine], None]], Callable[[_Machine], None]]:
    def noted(function: Callable[[_Machine], None]) -> Callable[[_Machine], None]:
        _OPCODES.update({code[0]: function for code in codes})
        return function

    return noted


class _Stop(Exception):
    pass


class _Machine:
    def __init__(self, data: bytes, table: Table, persistent: Callable[[Any], Any] | None) -> None:
        self.data, self.table, self.persistent = data, table, persistent
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under the marks
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, opcodes = self.data, _OPCODES
        while True:
            if self.at >= len(data):
                raise PickleError("it was cut off")
            code = data[self.at]
            self.at += 1
            known = opcodes.get(code)
            if known is None:
                raise PickleError(f"it has the opcode {bytes([code])!r}, which no checkpoint needs")
            try:
                known(self)
            except _Stop:
                if self.below or len(self.stack) != 1:
                    raise PickleError("it is damaged: it ends with something left over") from None
                return self.stack[0]

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise PickleError("it was cut off")
        self.at += size
        return self.data[self.at - size : self.at]

    def unsigned(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at, self.at + 1000)
        return str(self.take(end + 1 - self.at)[:-1], "utf-8")

    def since_mark(self) -> list[Any]:
        found = self.stack
        self.stack = self.below.pop()
        return found

    def named(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise PickleError("it is damaged: a name is no text")
        if (module, name) not in self.table:
            raise PickleError(f"it asks for {module}.{name}, which no checkpoint needs")
        return self.table[module, name]

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise PickleError("it is damaged: items for what is no dict")
        keys = pairs[::2]
        check_keys(keys)
        target.update(zip(keys, pairs[1::2], strict=True))


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


for _code, _value in ((b"N", None), (b"\x88", True), (b"\x89", False), (b")", ())):
    _OPCODES[_code[0]] = _constant(_value)


def _number(size: int, form: str) -> Callable[[_Machine], None]:
    unpack = struct.Struct(form).unpack
    return lambda m: m.stack.append(unpack(m.take(size))[0])


for _code, _size, _form in ((b"J", 4, "<i"), (b"K", 1, "<B"), (b"M", 2, "<H"), (b"G", 8, ">d")):
    _OPCODES[_code[0]] = _number(_size, _form)


def _sized(length: int, made: Callable[[bytes], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(made(m.take(m.unsigned(length))))


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


for _code, _size, _made in (
    (b"\x8a", 1, lambda data: int.from_bytes(data, "little", signed=True)),
    *((b"\x8c", 1, _text), (b"X", 4, _text), (b"\x8d", 8, _text)),
    (b"\x8b", 4, lambda data: int.from_bytes(data, "little", signed=True)),
    *((b"C", 1, bytes), (b"B", 4, bytes), (b"\x8e", 8, bytes), (b"\x96", 8, bytearray)),
):
    _OPCODES[_code[0]] = _sized(_size, _made)


@_opcode(b"\x80")
def _protocol(m: _Machine) -> None:
    if m.unsigned(1) > 5:
        raise PickleError("its pickle protocol is not known")


@_opcode(b"\x95")
def _frame(m: _Machine) -> None:
    if m.unsigned(8) > len(m.data) - m.at:
        raise PickleError("it was cut off")


@_opcode(b".")
def _stop(m: _Machine) -> None:
    raise _Stop


@_opcode(b"(")
def _mark(m: _Machine) -> None:
    m.below.append(m.stack)
    m.stack = []


@_opcode(b"}")
def _dict(m: _Machine) -> None:
    m.stack.append({})


@_opcode(b"]")
def _list(m: _Machine) -> None:
    m.stack.append([])


@_opcode(b"\x8f")
def _set(m: _Machine) -> None:
    m.stack.append(set())


@_opcode(b"t")
def _tuple(m: _Machine) -> None:
    found = tuple(m.since_mark())
    m.stack.append(found)


@_opcode(b"\x85")
def _tuple1(m: _Machine) -> None:
    m.stack.append((m.stack.pop(),))


@_opcode(b"\x86")
def _tuple2(m: _Machine) -> None:
    second, first = m.stack.pop(), m.stack.pop()
    m.stack.append((first, second))


@_opcode(b"\x87")
def _tuple3(m: _Machine) -> None:
    third, second, first = m.stack.pop(), m.stack.pop(), m.stack.pop()
    m.stack.append((first, second, third))


@_opcode(b"a", b"e")
def _append(m: _Machine) -> None:
    several = m.data[m.at - 1] == ord("e")
    found = m.since_mark() if several else [m.stack.pop()]
    if type(m.stack[-1]) is not list:
        raise PickleError("it is damaged: elements for what is no list")
    m.stack[-1].extend(found)


@_opcode(b"s")
def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items([key, value])


@_opcode(b"u")
def _set_items(m: _Machine) -> None:
    m.set_items(m.since_mark())


@_opcode(b"\x90")
def _add_items(m: _Machine) -> None:
    found = m.since_mark()
    check_keys(found)
    if type(m.stack[-1]) is not set:
        raise PickleError("it is damaged: elements for what is no set")
    m.stack[-1].update(found)


@_opcode(b"\x91")
def _frozenset(m: _Machine) -> None:
    found = m.since_mark()
    check_keys(found)
    m.stack.append(frozenset(found))


@_opcode(b"\x94")
def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


@_opcode(b"q")
def _put(m: _Machine) -> None:
    m.memo[m.unsigned(1)] = m.stack[-1]


@_opcode(b"r")
def _long_put(m: _Machine) -> None:
    m.memo[m.unsigned(4)] = m.stack[-1]


@_opcode(b"h")
def _get(m: _Machine) -> None:
    m.stack.append(m.memo[m.unsigned(1)])


@_opcode(b"j")
def _long_get(m: _Machine) -> None:
    m.stack.append(m.memo[m.unsigned(4)])


@_opcode(b"c")
def _global(m: _Machine) -> None:
    module = m.line()
    m.stack.append(m.named(module, m.line()))


@_opcode(b"\x93")
def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.stack.append(m.named(module, name))


@_opcode(b"R")
def _reduce(m: _Machine) -> None:
    arguments, function = m.stack.pop(), m.stack.pop()
    if not isinstance(function, Function) or type(arguments) is not tuple:
        raise PickleError("it is damaged: it calls what is no function")
    m.stack.append(function.call(*arguments))


@_opcode(b"\x81")
def _new(m: _Machine) -> None:
    arguments, kind = m.stack.pop(), m.stack.pop()
    if not isinstance(kind, Class) or type(arguments) is not tuple or arguments:
        raise PickleError("it is damaged: it makes an object of what is no class")
    m.stack.append(Node(kind.kind))


@_opcode(b"b")
def _build(m: _Machine) -> None:
    state, node = m.stack.pop(), m.stack[-1]
    if type(node) is not Node or node.state is not None:
        raise PickleError("it is damaged: it gives a state to what has none")
    node.state = state


@_opcode(b"Q")
def _persistent(m: _Machine) -> None:
    if m.persistent is None:
        raise PickleError("it has a persistent id, which only tensors have")
    m.stack.append(m.persistent(m.stack.pop()))


def settled(value: Any, leaf: Callable[[Any], Any], largest: int) -> Any:
    """`value` with `leaf` of everything in it that is no list or tuple, and of each dict once it is settled.

    Lists and dicts are changed in place. Whoever walks the result meets at most `largest` values, however few bytes
    they were, and never goes deeper than `DEEPEST`.

    Raises:
        PickleError: it is larger or deeper, or contains itself.
    """
    known: dict[int, tuple[Any, Any, int]] = {}  # by id: the value, which must stay alive, what it became, its size

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
            raise PickleError(f"it stands for more than {largest:,} values")
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
