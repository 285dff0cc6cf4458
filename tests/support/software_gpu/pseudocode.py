"""Run the pseudocode in AMD's instruction set document, as extracted by tinygrad, for expected results.

It is turned into Python line by line; registers and values of its types are objects whose operators compute as it says.
Rounding is numpy's, that of a fused multiply-add comes from exact fractions. One lane at a time.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from types import CodeType
from typing import Any

import numpy as np

FLOATS = {16: (np.float16, 10), 32: (np.float32, 23), 64: (np.float64, 52)}
_TYPE = re.compile(r"([uifb])(\d+)")


class Value:
    """Bits of a kind (``U``, ``I``, ``F``, ``B``): a number, or a part of the register that it came from."""

    def __init__(self, bits: int, kind: str, width: int, register: Register | None = None, low: int = 0) -> None:
        vars(self).update(bits=bits % 2**width, kind=kind, width=width, register=register, low=low)

    def number(self) -> Any:
        """The number as a Python integer, or as a numpy fp16, fp32 or fp64 scalar."""
        if self.kind == "F":
            return np.array(self.bits, f"u{self.width // 8}").view(FLOATS[self.width][0])[()]
        return self.bits - 2**self.width if self.kind == "I" and self.bits >> (self.width - 1) else self.bits

    def __getattr__(self, name: str) -> Value:
        """The same bits as another type. A part of a register remains a part of it."""
        found = _TYPE.fullmatch(name)
        if found is None:
            raise AttributeError(name)
        width = int(found[2])
        bits = (
            self.bits if self.register is None else self.register.bits >> self.low & (2 ** min(width, self.width) - 1)
        )
        return Value(bits, found[1].upper(), width, self.register, self.low)

    def __setattr__(self, name: str, value: Any) -> None:
        kind, width = _TYPE.fullmatch(name).groups()  # type: ignore[union-attr]
        self.put(cast(min(int(width), self.width), kind.upper(), value).bits, self.low, min(int(width), self.width))

    def put(self, bits: int, low: int, width: int) -> None:
        if self.register is None:
            raise TypeError("a number cannot be assigned to")
        mask = (2**width - 1) << low
        self.register.bits = (self.register.bits & ~mask) | (bits << low & mask)

    def __getitem__(self, at: Any) -> Value:
        if isinstance(at, slice):
            high, low = int(at.start), int(at.stop)
            if high < low:  # turned round
                return Value(int(f"{self.bits:0{self.width}b}"[::-1], 2), "B", self.width)
            width = high - low + 1
            return Value(self.bits >> low, "B", width, self.register, self.low + low)
        return Value(self.bits >> int(at), "U", 1, self.register, self.low + int(at))

    def __setitem__(self, at: Any, value: Any) -> None:
        low, width = (int(at.stop), int(at.start) - int(at.stop) + 1) if isinstance(at, slice) else (int(at), 1)
        self.put(int(value), self.low + low, width)

    def __int__(self) -> int:
        return int(self.number())

    __index__ = __int__

    def __bool__(self) -> bool:
        return bool(self.number())

    __hash__ = None  # type: ignore[assignment]


def cast(width: int, kind: str, value: Any) -> Value:
    """A value as one of another type: rounded once; a NaN keeps whether it signals."""
    if isinstance(value, float):
        value = Value(int(np.array(value).view("u8")), "F", 64)
    if not isinstance(value, Value):
        return Value(int(value), kind, width)
    if kind == "F" and value.kind == "F" and width != value.width:
        if is_nan(value):
            fraction = value.bits & (2 ** FLOATS[value.width][1] - 1)
            fraction = fraction << FLOATS[width][1] >> FLOATS[value.width][1] or 1
            exponent = (2**width - 1 >> FLOATS[width][1] + 1) << FLOATS[width][1]
            return Value(sign(value) << (width - 1) | exponent | fraction, "F", width)
        with np.errstate(all="ignore"):
            return Value(int(FLOATS[width][0](value.number()).view(f"u{width // 8}")), "F", width)
    return Value(value.bits if "F" in (kind, value.kind) else int(value.number()), kind, width)


def _binary(compute: Callable[[Any, Any], Any], turned: bool = False) -> Callable[[Value, Any], Any]:
    def method(self: Value, other: Any) -> Any:
        a, b = (other, self) if turned else (self, other)
        kinds = [x for x in (a, b) if isinstance(x, Value)]
        if isinstance(a, float) or isinstance(b, float) or any(x.kind == "F" for x in kinds):
            width = max([x.width for x in kinds if x.kind == "F"], default=64)
            x, y = (
                cast(width, "F", v).number() if isinstance(v, (Value, float)) else FLOATS[width][0](v) for v in (a, b)
            )
            with np.errstate(all="ignore"):
                result = compute(x, y)
            if isinstance(result, (bool, np.bool_)):
                return bool(result)
            return Value(int(FLOATS[width][0](result).view(f"u{width // 8}")), "F", width)
        result = compute(*(x.number() if isinstance(x, Value) else int(x) for x in (a, b)))
        if isinstance(result, bool):
            return result
        signed = all(x.kind == "I" for x in kinds)
        return Value(result, "I" if signed else "U", max(x.width for x in kinds))

    return method


for _name in ("add", "sub", "mul", "and_", "or_", "xor", "eq", "ne", "lt", "le", "gt", "ge", "truediv"):
    _dunder = _name.strip("_")
    setattr(Value, f"__{_dunder}__", _binary(getattr(operator, _name)))
    if _dunder not in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Value, f"__r{_dunder}__", _binary(getattr(operator, _name), turned=True))
Value.__lshift__ = lambda self, by: Value(self.number() << int(by), self.kind, self.width)  # type: ignore[attr-defined]
Value.__rshift__ = lambda self, by: Value(self.number() >> int(by), self.kind, self.width)  # type: ignore[attr-defined]
Value.__rlshift__ = lambda self, other: Value(other << int(self), "I", 32)  # type: ignore[attr-defined]
Value.__invert__ = lambda self: Value(~self.bits, self.kind, self.width)  # type: ignore[attr-defined]
Value.__rpow__ = lambda self, base: float(base) ** int(self)  # type: ignore[attr-defined]
Value.__pos__ = lambda self: self  # type: ignore[attr-defined]
Value.__neg__ = lambda self: (  # type: ignore[attr-defined]
    Value(self.bits ^ 1 << (self.width - 1), "F", self.width)
    if self.kind == "F"
    else Value(-self.number(), self.kind, self.width)
)


class Register(Value):
    """A register of 128 bits, of which instructions read and write parts."""

    def __init__(self, bits: int = 0) -> None:
        super().__init__(bits, "B", 128, self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "bits":
            vars(self)["bits"] = value
        else:
            super().__setattr__(name, value)


def is_nan(x: Value) -> bool:
    return bool(np.isnan(x.number()))


def sign(x: Value) -> int:
    return x.bits >> (x.width - 1)


def _is_quiet(x: Value) -> bool:
    return is_nan(x) and bool(x.bits >> (FLOATS[x.width][1] - 1) & 1)


def _exponent(x: Value) -> int:
    return (x.bits & ~(1 << (x.width - 1))) >> FLOATS[x.width][1]


def _fma(a: Value, b: Value, c: Value) -> Value:
    x, y, z = (float(v.number()) for v in (a, b, c))
    if not math.isfinite(z) and math.isfinite(x) and math.isfinite(y):
        return c
    if not all(map(math.isfinite, (x, y, z))):
        with np.errstate(all="ignore"):
            return cast(a.width, "F", float(np.float64(x) * np.float64(y) + np.float64(z)))
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        return cast(a.width, "F", x * y + z)  # its sign
    kind, mantissa = FLOATS[a.width]
    info = np.finfo(kind)
    size = abs(exact)
    power = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, int(info.minexp))
    while size >= Fraction(2) ** (power + 1):
        power += 1
    unit = Fraction(2) ** (power - mantissa)
    rounded = round(exact / unit) * unit  # ties to even
    try:
        return cast(a.width, "F", float(rounded))
    except OverflowError:
        return cast(a.width, "F", math.inf if exact > 0 else -math.inf)


def _to_integer(kind: str) -> Callable[[Value], Value]:
    low, high = (-(2**31), 2**31 - 1) if kind == "I" else (0, 2**32 - 1)

    def convert(x: Value) -> Value:
        number = float(x.number())
        whole = 0 if math.isnan(number) else high if number >= high else low if number <= low else int(number)
        return Value(whole, kind, 32)

    return convert


def _of_float(function: Callable[[Any], Any]) -> Callable[[Value], Value]:
    def apply(x: Value) -> Value:
        with np.errstate(all="ignore"):
            return cast(x.width, "F", float(function(x.number())))

    return apply


def _constant(number: float) -> dict[str, Value]:
    return {str(width): cast(width, "F", number) for width in FLOATS}


_FUNCTIONS: dict[str, Any] = {
    "cast": cast,
    "isNAN": is_nan,
    "isSignalNAN": lambda x: is_nan(x) and not _is_quiet(x),
    "isQuietNAN": _is_quiet,
    "cvtToQuietNAN": lambda x: Value(x.bits | 1 << (FLOATS[x.width][1] - 1), "F", x.width),
    "sign": sign,
    "exponent": _exponent,
    "abs": lambda x: Value(x.bits & ~(1 << (x.width - 1)), "F", x.width),
    "fma": _fma,
    "trunc": _of_float(np.trunc),
    "sqrt": _of_float(np.sqrt),
    "signext": lambda x: Value(x.bits, "I", x.width),
    "signext_from_bit": lambda x, bit: Value(
        (x.bits & (2 ** int(bit) - 1)) - (2 ** int(bit) if int(bit) and x.bits >> (int(bit) - 1) & 1 else 0), "I", 32
    ),
    "joined": lambda high, low: Value(high.bits << 32 | low.bits, "U", 64),
    "f32_to_i32": _to_integer("I"),
    "f32_to_u32": _to_integer("U"),
    **{f"INF_{width}": value for width, value in _constant(math.inf).items()},
    **{
        f"{a}_to_{b}": lambda x, b=b: cast(int(b[1:]), "F", x)
        for a in ("f16", "f32", "f64")
        for b in ("f16", "f32", "f64")
    },
    **{f"{a}_to_f32": lambda x: cast(32, "F", float(np.float32(x.number()))) for a in ("i32", "u32")},
    "UNDERFLOW_F32": cast(32, "F", 0.0),
    "UNDERFLOW_F64": cast(64, "F", 0.0),
    "OVERFLOW_F32": cast(32, "F", math.inf),
    "OVERFLOW_F64": cast(64, "F", math.inf),
    "Register": Register,
}


def _expression(text: str) -> str:
    text = re.sub(r"(\d+)'([UIFB])\(", r'cast(\1, "\2", ', text)
    text = re.sub(r"\b\d+'(0x[0-9a-f]+|\d+)U?\b", r"\1", text)
    text = re.sub(r"\b(0x[0-9a-f]+|\d+\.?\d*)(?:ULL|LL|U|F)\b", r"\1", text)
    text = re.sub(r"\bINF(?:\.f(\d+))?\b", lambda found: f"INF_{found[1] or 64}", text)
    text = re.sub(r"\{ (S\d\.u32), (S\d\.u32) \}", r"joined(\1, \2)", text)
    text = re.sub(r"\[([^]:?]+?) : ([^]]+?)\]", r"[\1:\2]", text)
    text = re.sub(r"\[([^]]+) \? (\d+) : (\d+)\]", r"[\2 if \1 else \3]", text)
    text = re.sub(r"(S\d\.\w+) <> (S\d\.\w+)", r"(\1 < \2 or \1 > \2)", text)
    text = text.replace("&&", " and ").replace("||", " or ").replace("WAVE_MODE.IEEE", "True")
    text = re.sub(r"!(?!=)", " not ", text)
    if found := re.fullmatch(r"(.*?) \? (.*) : (.*)", text):
        text = f"({found[2]}) if ({found[1]}) else ({found[3]})"
    return text.strip()


@functools.cache
def translated(pseudocode: str) -> CodeType:
    """The pseudocode of one instruction as Python.

    Raises:
        SyntaxError: it holds what this module cannot read.
    """
    lines, depth = [], 0
    for line in re.sub(r"//[^\n]*", "", pseudocode).replace("{ D1.u1, D0.u64 }", "D0.u64").splitlines():
        line = line.strip().replace("{ D1.i1, D0.i64 }", "D0.i64").rstrip(";")
        if not line:
            continue
        if found := re.fullmatch(r"(if|elsif) (.*) then", line):
            depth -= found[1] == "elsif"
            lines.append("  " * depth + f"{'if' if found[1] == 'if' else 'elif'} {_expression(found[2])}:")
            depth += 1
        elif line == "else":
            lines.append("  " * (depth - 1) + "else:")
        elif line in ("endif", "endfor"):
            depth -= 1
        elif found := re.fullmatch(r"for (\w+) in (\d+) : (\d+) do", line):
            lines.append("  " * depth + f"for {found[1]} in range({found[2]}, {found[3]} + 1):")
            depth += 1
        elif found := re.fullmatch(r"declare (\w+) : .*", line):
            lines.append("  " * depth + f"{found[1]} = Register()")
        elif found := re.fullmatch(r"(.*?) (\+?-?=) (.*)", line):
            left = re.sub(r"\[(\w+) : (\w+)\]", r"[\1:\2]", found[1])
            if re.fullmatch(r"tmp\[.*|tmp\.\w+", left) and not any(
                known.strip().startswith("tmp =") for known in lines
            ):
                lines.append("  " * depth + "tmp = Register()")
            lines.append("  " * depth + f"{left} {found[2]} {_expression(found[3])}")
        else:
            raise SyntaxError(line)
    return compile("\n".join(lines), "pseudocode", "exec")


def evaluate(
    table: dict[str, str], name: str, sources: list[int], before: int, lane: int, vcc: int, scc: int
) -> tuple[int, int, int]:
    """Run an instruction of `table`, name to pseudocode, in one lane.

    Returns:
        (the bits of its result, VCC, SCC) after it.
    """
    names = dict(_FUNCTIONS, laneId=Value(lane, "U", 32), D0=Register(before), VCC=Register(vcc))
    names["SCC"] = Value(scc, "U", 1)
    names |= {f"S{at}": Register(bits) for at, bits in enumerate(sources)}
    for other in ("v_max_f32", "v_min_f32", "v_max_i32", "v_min_i32", "v_max_u32", "v_min_u32"):
        names[other] = functools.partial(_call, table, other)
    for other in ("v_max3_i32", "v_max3_u32"):
        names[other] = functools.partial(_call, table, other)
    exec(translated(table[name]), names)
    return names["D0"].bits, names["VCC"].bits, int(names["SCC"])


def _call(table: dict[str, str], name: str, *values: Value) -> Value:
    bits, _, _ = evaluate(table, name, [value.bits for value in values], 0, 0, 0, 0)
    return Value(bits, values[0].kind, values[0].width)
