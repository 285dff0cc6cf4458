"""Translate PTX to the arrays that the machine runs (machine.h): instructions, registers, constants, parameters."""

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

LANES = 32
OPERANDS = 8
INSTRUCTION = np.dtype(
    [("operation", "i4"), ("predicate", "i4"), ("negated", "i4"), ("operands", "i4", OPERANDS)]
    + [(name, "i4") for name in ("values", "bytes", "wide", "offset", "target")]
)
CONSTANT = np.dtype([("place", "i4"), ("bytes", "i4"), ("value", "u8")])
SPECIALS = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%ntid.x", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid")

# What only caches, the memory model's scope and the scheduler hear.
_UNHEARD = re.compile(r"\.(?:L[12]::\w+|gpu|sys|cta|acq_rel|acquire|release|relaxed|weak|volatile|nc|uni)(?=\.|$)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]+);")
_PARAMETER = re.compile(r"\.param\s+\.(\w+)(?:\s+\.ptr[^,\s]*(?:\s+\.\w+)*(?:\s+\d+)?)?\s+(\w+)")
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]")
_BYTES = {"pred": 1, "8": 1, "16": 2, "32": 4, "64": 8}

# (name) -> index of the operation and the bytes of its operands, or None if the machine does not know it.
Find = Callable[[str], "tuple[int, list[int]] | None"]


class UnknownPTX(Exception):
    """An instruction, or a form of one, that the machine does not support."""


class _Flat(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_void_p),
        ("length", ctypes.c_int32),
        ("register_bytes", ctypes.c_int32),
        ("constants", ctypes.c_void_p),
        ("constant_count", ctypes.c_int32),
        ("specials", ctypes.c_void_p),
        ("special_count", ctypes.c_int32),
    ]


@dataclass
class Assembly:
    """A kernel that the machine can run."""

    name: str
    code: NDArray[np.void]  # an `INSTRUCTION` each
    opcodes: list[str]  # what each is called in the assembly
    lines: list[int]  # where each stands in the assembly
    sources: list[str]  # the ``file:line`` of the source that it came from

    line: ClassVar[str] = "line"  # what `where` calls one

    def where(self, index: int) -> str:
        """A description of an instruction: kernel, line of the assembly, line of the source."""
        return f"{self.name}, {self.line} {self.lines[index]} ({self.sources[index]}, {self.opcodes[index]})"


@dataclass
class Program(Assembly):
    """A kernel of PTX."""

    register_bytes: int  # of one warp
    constants: NDArray[np.void]  # a `CONSTANT` each
    specials: NDArray[np.int32]  # pairs of an index into `SPECIALS` and a place
    parameters: list[int]  # bytes of each
    # Places that parameters are loaded to: (parameter, bytes, whether signed, bytes of the register, place).
    loaded: list[tuple[int, int, bool, int, int]]

    line: ClassVar[str] = "PTX line"
    lanes: ClassVar[int] = LANES  # of a warp

    def run(self, machine: Any, arguments: int, *launch: Any) -> bytes | None:
        """Run the kernel with the driver's array of arguments at `arguments`. Returns the error, if there is one."""
        constants = self._launched_with(arguments)
        flat = _Flat(
            *(self.code.ctypes.data, len(self.code), self.register_bytes),
            *(constants.ctypes.data, len(constants), self.specials.ctypes.data, len(self.specials)),
        )
        failed: bytes | None = machine.run(ctypes.byref(flat), *launch)
        return failed

    def _launched_with(self, arguments: int) -> NDArray[np.void]:
        """The constants of a launch: those of the program, and the parameters in the driver's array at `arguments`."""
        places = (ctypes.c_void_p * len(self.parameters)).from_address(arguments)
        rows = []
        for parameter, size, signed, wide, place in self.loaded:
            value = int.from_bytes(ctypes.string_at(places[parameter], size), "little", signed=signed)
            rows.append((place, wide, value % 2 ** (8 * wide)))
        return np.concatenate([self.constants, np.array(rows, CONSTANT)])


@dataclass
class _Reader:
    find: Find
    widths: dict[str, int] = field(default_factory=dict)  # of registers, by what their names begin with
    places: dict[object, int] = field(default_factory=dict)
    constants: list[tuple[int, int, int]] = field(default_factory=list)
    specials: list[tuple[int, int]] = field(default_factory=list)
    loaded: list[tuple[int, int, bool, int, int]] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    parameter_bytes: list[int] = field(default_factory=list)
    used: int = 0

    def width(self, register: str) -> int:
        return self.widths[register.rstrip("0123456789")]

    def place(self, key: object, width: int) -> int:
        """The offset of a value of all lanes in the registers of a warp, which is allocated at the first call."""
        if key not in self.places:
            self.places[key] = self.used
            self.used += LANES * width
        return self.places[key]

    def operand(self, text: str, width: int) -> int:
        """The offset of a register, a special register or a number of `width` bytes."""
        if text in SPECIALS:
            fresh = text not in self.places
            place = self.place(text, 4)
            if fresh:
                self.specials.append((SPECIALS.index(text), place))
            return place
        if text.startswith("%"):
            if self.width(text) != width:
                raise UnknownPTX(f"{text} has {self.width(text)} bytes where the operation takes {width}")
            return self.place(text, width)
        if text == "_":
            return self.place(("discarded", width), width)
        value = self.number(text, width)
        fresh = (value, width) not in self.places
        place = self.place((value, width), width)
        if fresh:
            self.constants.append((place, width, value))
        return place

    def number(self, text: str, width: int) -> int:
        if text.startswith(("0f", "0F", "0d", "0D")):
            return int(text[2:], 16)
        if text == "global_smem":
            return 0  # the block's shared memory begins there
        if re.fullmatch(r"-?\d+\.\d+", text):
            return int(np.array(float(text), np.float32 if width == 4 else np.float64).view(f"u{width}"))
        value = int(text.rstrip("U"), 0)
        return int(value != 0) if width == 1 else value % 2 ** (8 * width)

    def parameter(self, text: str, kind: str, wide: int) -> int:
        found = _ADDRESS.fullmatch(text)
        if not found or found[1] not in self.parameters or int(found[2] or 0):
            raise UnknownPTX(f"{text} is no parameter")
        number, size = self.parameters[found[1]], _BYTES[kind[1:]]
        fresh = ("parameter", number, kind, wide) not in self.places
        place = self.place(("parameter", number, kind, wide), wide)
        if fresh:
            self.loaded.append((number, size, kind[0] == "s", wide, place))
        return place


def _split(operands: str) -> list[str]:
    """Split operands. Text in brackets or braces is one operand, `p|q` are two."""
    parts = re.findall(r"\[[^]]*\]|\{[^}]*\}|[^,\s|]+", operands)
    return [part.strip() for part in parts]


def _braced(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{} ").split(",")]


def _decode(reader: _Reader, opcode: str, operands: list[str], labels: dict[str, int]) -> dict[str, object]:
    """The fields of an instruction, except its predicate."""
    name = _UNHEARD.sub("", opcode)
    parts = name.split(".")
    fields: dict[str, object] = {"target": -1}
    if parts[:2] == ["ld", "param"]:
        wide = reader.width(operands[0])
        source = reader.parameter(operands[1], parts[2], wide)
        return fields | _plain(reader, f"mov.b{8 * wide}", [operands[0]], [source])
    if parts[0] in ("ld", "st", "ldmatrix", "stmatrix"):
        return fields | _memory(reader, parts, operands)
    if parts[0] == "bra":
        return fields | _found(reader, "bra") | {"target": labels[operands[0]]}
    if parts[0] == "ret":
        return fields | _found(reader, "ret") | {"target": 0}
    if name == "bar.warp.sync":
        if operands not in (["-1"], ["0xffffffff"]):
            raise UnknownPTX(f"{opcode} {operands}: only of the whole warp")
        return fields | _found(reader, name) | {"target": 0}
    if parts[0] in ("bar", "barrier"):
        if operands != ["0"]:
            raise UnknownPTX(f"{opcode} {operands}: only barrier 0 of all warps")
        return fields | _found(reader, "bar.sync") | {"target": 0}
    if parts[0] == "mov" and any(operand.startswith("{") for operand in operands):
        unpacking = operands[0].startswith("{")
        flat = [part for operand in operands for part in (_braced(operand) if operand[0] == "{" else [operand])]
        name += f".{'unpack' if unpacking else 'pack'}{'4' if len(flat) == 5 else ''}"
        return fields | _plain(reader, name, flat)
    if parts[0] == "atom":
        address = _ADDRESS.fullmatch(operands[1])
        if not address:
            raise UnknownPTX(f"{opcode} {operands}")
        return fields | _plain(reader, name, [operands[0], address[1], operands[2]]) | {"offset": int(address[2] or 0)}
    if parts[0] in ("max", "min") and len(operands) == 4:
        name = f"{name}.of3"
    if (
        parts[0] == "cvt"
        and parts[-1] in ("s8", "u8", "s16", "u16", "s32", "u32")
        and reader.width(operands[1]) > _BYTES[parts[-1][1:]]
    ):
        name += f".of{8 * reader.width(operands[1])}"
    return fields | _plain(reader, name, operands)


def _found(reader: _Reader, name: str) -> dict[str, object]:
    found = reader.find(name)
    if found is None:
        raise UnknownPTX(f"the machine does not know {name}")
    return {"operation": found[0]}


def _plain(reader: _Reader, name: str, operands: list[str], more: list[int] | None = None) -> dict[str, object]:
    found = reader.find(name)
    if found is None:
        raise UnknownPTX(f"the machine does not know {name}")
    number, widths = found
    if len(widths) != len(operands) + len(more or []):
        raise UnknownPTX(f"{name} takes {len(widths)} operands, not {operands}")
    return {
        "operation": number,
        "operands": [reader.operand(text, width) for text, width in zip(operands, widths, strict=False)] + (more or []),
    }


def _memory(reader: _Reader, parts: list[str], operands: list[str]) -> dict[str, object]:
    loads = parts[0] in ("ld", "ldmatrix")
    at, held = (1, 0) if loads else (0, 1)
    address = _ADDRESS.fullmatch(operands[at])
    if not address:
        raise UnknownPTX(f"{parts} {operands}")
    values = _braced(operands[held])
    matrix = parts[0].endswith("matrix")
    size = 2 if matrix else _BYTES[parts[-1][1:]]
    wide = 4 if matrix else next((reader.width(value) for value in values if value.startswith("%")), size)
    shared = "shared" in parts
    places = [reader.operand(value, wide) for value in values]
    base = reader.operand(address[1], 4 if shared else 8)
    return _found(reader, parts[0] if matrix else f"{parts[0]}.{'shared' if shared else 'global'}") | {
        "operands": [*places, base] if loads else [base, *places],
        "values": len(values),
        "bytes": size,
        "wide": int("trans" in parts) if matrix else wide,
        "offset": int(address[2] or 0),
    }


def read(text: str, find: Find) -> Program:
    """Parse the PTX of one kernel.

    Raises:
        UnknownPTX: it holds something that the machine does not know; says what and on which line.
    """
    lines = text.splitlines()
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"[^"]*?([^"/]+)"', text, re.MULTILINE))
    entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)", text, re.DOTALL)
    if entry is None:
        raise UnknownPTX("no kernel in this PTX")
    reader = _Reader(find)
    for kind, name in _PARAMETER.findall(entry[2]):
        reader.parameters[name] = len(reader.parameters)
        reader.parameter_bytes.append(_BYTES[kind[1:]])
    # Inline assembly declares single registers of its own, always of the same type under a name.
    for kind, names in _REGISTERS.findall(text):
        for name in names.split(","):
            begins = name.strip().partition("<")[0].rstrip("0123456789")
            width = 1 if kind == "pred" else _BYTES[kind[1:]]
            if reader.widths.setdefault(begins, width) != width:
                raise UnknownPTX(f"registers {begins} of {reader.widths[begins]} and of {width} bytes")

    first = text[: entry.end()].count("\n") + 1
    statements: list[tuple[int, str, str]] = []  # line, source, statement
    labels: dict[str, int] = {}
    source, depth = "?", 0
    for number, line in enumerate(lines[first:], first + 1):
        line = line.partition("//")[0].strip()
        depth += (line == "{") - (line == "}")  # inline assembly has blocks of its own
        if line == "}" and not depth:
            break
        if found := re.match(r"\.loc\s+(\d+)\s+(\d+)", line):
            source = f"{files.get(found[1], '?')}:{found[2]}"
        elif found := re.fullmatch(r"([$\w]+):", line):
            labels[found[1]] = len(statements)
        elif line and not line.startswith((".", "{", "}")):
            statements += [(number, source, part.strip()) for part in line.split(";") if part.strip()]

    code = np.zeros(len(statements), INSTRUCTION)
    opcodes = []
    for index, (number, _, statement) in enumerate(statements):
        found = _STATEMENT.fullmatch(statement)
        if not found:
            raise UnknownPTX(f"PTX line {number}: {statement!r}")
        row = code[index]
        row["predicate"] = -1
        try:
            if found[2]:
                row["predicate"], row["negated"] = reader.operand(found[2], 1), bool(found[1])
            for key, value in _decode(reader, found[3], _split(found[4]), labels).items():
                if key == "operands":
                    row[key][: len(value)] = value  # type: ignore[arg-type]
                else:
                    row[key] = value
        except (UnknownPTX, KeyError, ValueError) as error:
            raise UnknownPTX(f"{entry[1]}, PTX line {number}: {statement!r}: {error}") from error
        opcodes.append(found[3])
    return Program(
        name=entry[1],
        code=code,
        opcodes=opcodes,
        lines=[number for number, _, _ in statements],
        sources=[source for _, source, _ in statements],
        register_bytes=-(-reader.used // 64) * 64,
        constants=np.array(reader.constants, CONSTANT),
        specials=np.array(reader.specials, np.int32).reshape(-1, 2),
        parameters=reader.parameter_bytes,
        loaded=reader.loaded,
    )
