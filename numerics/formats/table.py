"""The table of number formats, and the exact properties that follow from each row.

A row defines the bits of the exponent and the mantissa, the bias, and the meaning of the largest codes. With exponent
field E and mantissa field T of m bits, the value of a code is

    E > 0   (-1)^s * 2^(E - bias)     * (1 + T / 2^m)      normal
    E = 0   (-1)^s * 2^(1 - bias)     * (T / 2^m)          zero and subnormal

float64 represents every finite value of every format, so all properties are exact as Python floats.

This module imports neither torch nor numpy, so that the commands of the lookup start at once.

Sources: IEEE 754-2019 (binary16, 32, 64; clause 3.4); OCP 8-bit floating point specification (OFP8) 1.0, 2023 (E4M3,
E5M2); OCP Microscaling formats (MX) specification 1.0, 2023 (E2M3, E3M2, E2M1, E8M0); Noune et al. 2022,
arXiv:2206.02915 (the FNUZ formats); NVIDIA A100 whitepaper, 2020 (TF32). Hardware: the makers' whitepapers and
instruction set manuals (Volta to Blackwell, CDNA 1 to 4); for TPUs Jouppi et al. 2017 and 2020, and Google 2025.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

from halfstep.kernels.formats import BLOCKS, SCALE_RULES, BlockRow, block_row
from halfstep.kernels.formats import BY_NAME as KERNEL_FORMATS

Kind = Literal["ieee", "fn", "fnuz", "finite", "scale", "integer"]
FORMAT_KINDS: dict[str, str] = {
    "ieee": "the largest exponent is reserved for infinity and NaN",
    "fn": "no infinity; NaN is the code of all ones, with either sign",
    "fnuz": "no infinity and no negative zero, whose code is the only NaN",
    "finite": "no infinity, no NaN",
    "scale": "powers of two without sign and zero; NaN is the code of all ones",
    "integer": "two's complement integers",
}


_derived = partial(field, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Format:
    """A number format of up to 64 bits."""

    name: str  # short, unique
    title: str  # name in the specification
    exponent: int  # bits of the exponent field
    mantissa: int  # bits of the mantissa field, without the implicit bit; for `integer`, all bits but the sign
    bias: int  # subtracted from the exponent field
    kind: Kind = "ieee"  # a key of `FORMAT_KINDS`, the meaning of the largest codes
    aliases: tuple[str, ...] = ()  # other names
    torch: str | None = None  # name of the dtype in this library and in the next two; None if there is none
    numpy: str | None = None
    ml_dtypes: str | None = None
    # The first data center generations of NVIDIA, AMD and Google whose matrix units multiply the format.
    hardware: tuple[str, ...] = ()
    container: int | None = field(default=None, repr=False)  # bits of a number in memory; None for `bits`

    # What follows from the fields, computed once: the lookup reads it hundreds of times for an answer.
    signed: bool = _derived()
    bits: int = _derived()  # of a code
    bytes: float = _derived()  # of a number in packed memory: 0.5 for E2M1; 4 for TF32, which is stored as fp32
    precision: int = _derived()  # significant bits p: those of the mantissa field and the implicit one
    codes: int = _derived()  # 2^bits
    sign_bit: int = _derived()  # of a code; 0 in a format without sign
    largest_code: int = _derived()  # the code of `max`
    infinity_code: int | None = _derived()  # of positive infinity
    nan_code: int | None = _derived()  # of the canonical NaN, positive and quiet if there are several
    nans: int = _derived()  # codes that are NaN
    has_infinity: bool = _derived()
    has_nan: bool = _derived()
    has_negative_zero: bool = _derived()
    has_zero: bool = _derived()
    has_subnormals: bool = _derived()
    values: int = _derived()  # distinct ones: infinities count, NaNs do not, and both zeros count as one
    emin: int = _derived()  # the exponent of `min_normal`
    emax: int = _derived()  # the exponent of `max`
    max: float = _derived()  # the largest finite number
    lowest: float = _derived()  # the lowest finite number: `-max`, except -128 for int8 and 2^-127 for E8M0
    min_normal: float = _derived()  # the smallest positive number with full precision, 2^emin
    min_subnormal: float = _derived()  # the smallest positive number; `min_normal` in a format without subnormals
    eps: float = _derived()  # the distance from 1 to the next larger number, 2^-mantissa
    # The magnitude from which rounding to nearest overflows: half an ulp above `max`, 65520 in fp16. Ties go to the
    # even code: if that of `max` is even, as in E4M3FN with its threshold 464, the threshold itself still rounds to
    # `max`. It is `math.inf` in fp64, whose threshold 2^1024 (1 - 2^-54) no float represents.
    overflow: float = _derived()
    integer_range: int = _derived()  # the largest n such that the format has all integers from 0 to n; 0 without 0 or 1
    digits10: int = _derived()  # decimal digits that survive a round trip: floor((p - 1) log10 2), as C's FLT_DIG
    max_digits10: int = _derived()  # that distinguish any two numbers: ceil(1 + p log10 2), as C's FLT_DECIMAL_DIG
    decimal_digits: float = _derived()  # p log10 2, which differs from both

    def __post_init__(self) -> None:
        kind, mantissa, power = self.kind, self.mantissa, math.ldexp
        ieee, integer, scale = kind == "ieee", kind == "integer", kind == "scale"
        signed, negative_zero, precision = not scale, kind in ("ieee", "fn", "finite"), mantissa + (not integer)
        bits = signed + self.exponent + mantissa
        codes, sign_bit = 1 << bits, 1 << (bits - 1) if signed else 0
        nans = {"ieee": 2 * ((1 << mantissa) - 1), "fn": 2, "fnuz": 1, "scale": 1}.get(kind, 0)
        infinity = ((1 << self.exponent) - 1) << mantissa if ieee else None
        last = (1 << (bits - signed)) - 1 - (kind in ("fn", "scale")) if infinity is None else infinity - 1
        nan = sign_bit if kind == "fnuz" else last + 1 + ((1 << mantissa) // 2 if ieee else 0)
        emin = 0 if integer else signed - self.bias
        emax = mantissa - 1 if integer else (last >> mantissa) - self.bias
        largest = float(last) if integer else power((1 << mantissa) + last % (1 << mantissa), emax - mantissa)
        subnormals, normal = not scale and not integer and mantissa > 0, power(1.0, emin)
        least = power(1.0, emin - mantissa) if subnormals else normal
        whole = int(min(power(1.0, precision), largest)) if not scale and least <= 1 <= largest else 0
        vars(self).update(
            signed=signed, bits=bits, bytes=(self.container or bits) / 8, precision=precision, codes=codes,
            sign_bit=sign_bit, largest_code=last, infinity_code=infinity, nan_code=nan if nans else None, nans=nans,
            has_infinity=ieee, has_nan=nans > 0, has_negative_zero=negative_zero, has_zero=signed,
            has_subnormals=subnormals, values=codes - nans - negative_zero, emin=emin, emax=emax, max=largest,
            lowest=normal if scale else -largest - integer, min_normal=normal, min_subnormal=least,
            eps=1.0 if integer else power(1.0, -mantissa), integer_range=whole,
            digits10=len(str(1 << (precision - (not integer)))) - 1,
            max_digits10=len(str(1 << precision)) + (not integer), decimal_digits=precision * math.log10(2),
        )  # fmt: skip
        vars(self)["overflow"] = largest + self.ulp(largest) / 2

    def ulp(self, x: float) -> float:
        """The unit in the last place: the distance between the numbers around `x`, as defined by Goldberg 1991.

        The exponent is treated as if it had no upper limit. At a power of two it is the distance to the next larger
        number; 0 and subnormals have the ulp of `min_normal`.

        Returns:
            A power of two; NaN for NaN, infinity for infinities.
        """
        if math.isnan(x) or math.isinf(x):
            return abs(x)
        if self.kind == "integer":
            return 1.0
        exponent = math.frexp(x)[1] - 1 if x else self.emin
        return math.ldexp(1.0, max(exponent, self.emin) - self.mantissa)

    def as_dict(self) -> dict[str, Any]:
        """The row and all properties, for JSON."""
        row = {name: getattr(self, name) for name in _JSON.split()}
        row["overflow"] = None if math.isinf(self.overflow) else self.overflow  # JSON has no infinity
        return {**row, "aliases": list(self.aliases), "hardware": list(self.hardware)}


_JSON = """name title kind exponent mantissa bias bits bytes precision emin emax max lowest min_normal min_subnormal eps
overflow integer_range digits10 max_digits10 decimal_digits codes values nans infinity_code nan_code largest_code signed
has_infinity has_nan has_negative_zero has_zero has_subnormals torch numpy ml_dtypes"""


@dataclass(frozen=True)
class BlockFormat:
    """A format of blocks: elements of one format, and a scale for each block."""

    name: str  # short, unique; it ends in the rule unless that is ``"floor"``
    title: str  # name in the specification
    element: Format  # of elements
    scale: Format  # of scales
    size: int  # elements of a block
    rule: str = SCALE_RULES[0]  # how the scale is chosen; see `halfstep.numerics.formats.blocks`
    has_global_scale: bool = False  # whether a number of fp32, one for all blocks, multiplies all scales
    aliases: tuple[str, ...] = ()  # other names

    @property
    def bits(self) -> float:
        """Bits of an element and its share of the scale of the block: 8.25 in MXFP8, 4.5 in NVFP4."""
        return self.element.bits + self.scale.bits / self.size

    @property
    def largest(self) -> float:
        """The largest number of an element times the largest scale."""
        return self.element.max * self.scale.max

    def as_dict(self) -> dict[str, Any]:
        """The row and `bits`, for JSON, with the names of the formats."""
        names = {"name": self.name, "title": self.title, "element": self.element.name, "scale": self.scale.name}
        figures = {"size": self.size, "rule": self.rule, "has_global_scale": self.has_global_scale, "bits": self.bits}
        return {**names, **figures, "aliases": list(self.aliases)}


def custom(exponent: int, mantissa: int, kind: Kind = "ieee", *, bias: int | None = None) -> Format:
    """A format of your own.

    Args:
        exponent: bits of the exponent field, 1 to 11.
        mantissa: bits of the mantissa field, 0 to 52; at least 1 for `fn`, whose code of all ones is NaN.
        kind: ``"ieee"``, ``"fn"``, ``"fnuz"`` or ``"finite"``; see `FORMAT_KINDS`.
        bias: None for 2^(exponent - 1) - 1, or one more for ``"fnuz"``.

    Raises:
        ValueError: an argument is out of its range, or float64 cannot represent all values of the format.
    """
    if kind not in ("ieee", "fn", "fnuz", "finite"):
        raise ValueError(f"Expected kind to be 'ieee', 'fn', 'fnuz' or 'finite', but got {kind!r}")
    limits: list[tuple[str, int, float, float]] = [("exponent", exponent, 1, 11)]
    limits += [("mantissa", mantissa, int(kind == "fn"), 52)]
    limits += [] if bias is None else [("bias", bias, -math.inf, math.inf)]
    for name, value, low, high in limits:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"Expected {name} to be an integer, but got {value!r}")
        if not low <= value <= high:
            raise ValueError(
                f"Expected {name} to be from {low} to {high} bits, so that float64 holds every value, but got {value}"
            )
    if kind == "ieee" and exponent == 1:
        raise ValueError(
            "Expected exponent to be 2 bits or more with kind='ieee', but got 1: one bit leaves no normal numbers"
        )
    usual = (1 << (exponent - 1)) - (kind != "fnuz")
    bias = usual if bias is None else bias
    name = f"e{exponent}m{mantissa}" + ("" if bias == usual else f"b{bias}") + ("" if kind == "ieee" else kind)
    if name in ("e4m3", "e2m3", "e3m2", "e2m1"):  # names of OCP's formats, whose largest exponent is not reserved
        name += kind
    if name in ("e2m3fn", "e3m2fn", "e2m1fn"):  # names in ml_dtypes of OCP's formats without NaN
        name += "-nan"
    title = f"{1 + exponent + mantissa}-bit format of your own: {FORMAT_KINDS[kind]}"
    emax = (1 << exponent) - 1 - (kind == "ieee") - bias
    if 1 - bias - mantissa < -1074 or emax > 1023:
        raise ValueError(
            f"Expected values within float64's range, 2^-1074 to 2^1023, but got 2^{1 - bias - mantissa} to "
            f"2^{emax}: choose a smaller exponent or another bias than {bias}"
        )
    return Format(name, title, exponent, mantissa, bias, kind)


def _row(
    name: str, title: str, fields: tuple[Any, ...] | None, aliases: str, dtypes: str, hardware: str, container: int = 0
) -> Format:
    torch, numpy, ml_dtypes = (None if dtype == "-" else dtype for dtype in dtypes.split())
    if fields is None:  # the bits and torch's dtype are in the table of the kernels
        row = KERNEL_FORMATS[name]
        fields, torch = (row.exponent, row.mantissa, row.bias, row.kind), row.torch
    exponent, mantissa, bias, kind = fields
    names = (tuple(aliases.split()), torch, numpy, ml_dtypes, tuple(hardware.split(", ")))
    return Format(name, title, exponent, mantissa, bias, kind, *names, container or None)


# Name, title, bits of exponent and mantissa, bias and kind, aliases, dtypes of torch, numpy and ml_dtypes, hardware.
_HOPPER, _BLACKWELL = "NVIDIA H100, AMD MI350, Google TPU v7", "NVIDIA B200, AMD MI350"
_ROWS = (
    _row("fp64", "IEEE 754 binary64, double precision", (11, 52, 1023, "ieee"), "float64 double binary64 f64",
         "float64 float64 -", "NVIDIA A100, AMD MI200"),
    _row("fp32", "IEEE 754 binary32, single precision", None, "float32 single float binary32 f32", "- float32 -",
         "AMD MI100"),
    _row("tf32", "TensorFloat-32", (8, 10, 127, "ieee"), "tensorfloat32", "- - -", "NVIDIA A100, AMD MI300", 32),
    _row("fp16", "IEEE 754 binary16, half precision", None, "float16 half binary16 f16", "- float16 -",
         "NVIDIA V100, AMD MI100"),
    _row("bf16", "bfloat16", None, "bfloat16 bfloat brainfloat16", "- - bfloat16",
         "Google TPU v2, NVIDIA A100, AMD MI100"),
    _row("e4m3fn", "OCP FP8 E4M3", None, "float8_e4m3fn fp8_e4m3fn fp8_e4m3 e4m3", "- - float8_e4m3fn", _HOPPER),
    _row("e5m2", "OCP FP8 E5M2", None, "float8_e5m2 fp8_e5m2", "- - float8_e5m2", _HOPPER),
    _row("e4m3fnuz", "FP8 E4M3 without infinity and negative zero", (4, 3, 8, "fnuz"), "float8_e4m3fnuz fp8_e4m3fnuz",
         "float8_e4m3fnuz - float8_e4m3fnuz", "AMD MI300"),
    _row("e5m2fnuz", "FP8 E5M2 without infinity and negative zero", (5, 2, 16, "fnuz"), "float8_e5m2fnuz fp8_e5m2fnuz",
         "float8_e5m2fnuz - float8_e5m2fnuz", "AMD MI300"),
    _row("e8m0fnu", "OCP MX scale E8M0", (8, 0, 127, "scale"), "float8_e8m0fnu e8m0",
         "float8_e8m0fnu - float8_e8m0fnu", _BLACKWELL),
    _row("e2m3fn", "OCP MX FP6 E2M3", (2, 3, 1, "finite"), "float6_e2m3fn fp6_e2m3fn fp6_e2m3 e2m3",
         "- - float6_e2m3fn", _BLACKWELL),
    _row("e3m2fn", "OCP MX FP6 E3M2", (3, 2, 3, "finite"), "float6_e3m2fn fp6_e3m2fn fp6_e3m2 e3m2",
         "- - float6_e3m2fn", _BLACKWELL),
    _row("e2m1fn", "OCP MX FP4 E2M1", (2, 1, 1, "finite"),
         "float4_e2m1fn float4_e2m1fn_x2 fp4_e2m1fn fp4_e2m1 e2m1 fp4 float4",
         "float4_e2m1fn_x2 - float4_e2m1fn", _BLACKWELL),
    _row("int8", "8-bit integer, two's complement", (0, 7, 0, "integer"), "i8 s8", "int8 int8 -",
         "Google TPU v1, NVIDIA T4, AMD MI100"),
)  # fmt: skip

_FP8, _FP6 = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"), ("e2m3fn", "e3m2fn")
# Names that several formats share.
AMBIGUOUS = {"fp8": _FP8, "float8": _FP8, "fp6": _FP6, "float6": _FP6, "mxfp6": ("mxfp6_e2m3", "mxfp6_e3m2")}


class UnknownFormat(KeyError, ValueError):
    """The name of no format. The message lists the formats and suggests the nearest name."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError shows the repr of a text


class _Formats(Mapping[str, Format]):
    """All formats by name. Aliases in upper or lower case and fields such as ``"e5m7"`` are accepted too.

    Formats of blocks have names too, but iteration gives the formats of single numbers only.

    Examples:
        >>> fp16 = halfstep.formats["fp16"]  # also "half", "float16", torch.float16 and "e5m10"
        >>> fp16.max, fp16.eps, fp16.min_subnormal
        (65504.0, 0.0009765625, 5.960464477539063e-08)
        >>> halfstep.formats["e5m7"].bits  # a format of your own
        13
        >>> mxfp8 = halfstep.formats["mxfp8_rceil"]  # a `BlockFormat`; the scale follows the rule rceil
        >>> mxfp8.element.name, mxfp8.scale.name, mxfp8.size
        ('e4m3fn', 'e8m0fnu', 32)
    """

    def __init__(self, rows: tuple[Format, ...]) -> None:
        self._rows = {row.name: row for row in rows}
        self._names = {_plain(name): row for row in rows for name in (row.name, *row.aliases)}
        self._by_fields = {(row.exponent, row.mantissa, row.bias, row.kind): row for row in rows}

    def __getitem__(self, name: object) -> Any:
        """The format of a name, an alias, a pair ``(exponent, mantissa)``, or a dtype of numpy, ml_dtypes or torch.

        Returns:
            A `Format`, or a `BlockFormat` for the name of one.

        Raises:
            UnknownFormat: there is no such format.
        """
        return self._block(name) or self.element(name)

    def _block(self, name: object) -> BlockFormat | None:
        if not isinstance(name, str) or _plain(name) in self._names:
            return name if isinstance(name, BlockFormat) else None
        row = block_row(name)
        return None if row is None else _block_formats(*row)

    def element(self, name: object) -> Format:
        """The format of single numbers of a name, as `formats` takes it. Others raise `UnknownFormat`."""
        if isinstance(name, Format):
            return name
        if block := self._block(name):
            raise UnknownFormat(
                f"Expected a format of single numbers, but got {block.name!r}, one of blocks: choose that of its "
                f"elements, {block.element.name!r}, or of its scales, {block.scale.name!r}"
            )
        if name is float:
            return self._rows["fp64"]  # Python's float; the name "float" means fp32, as in C and torch
        if isinstance(name, tuple) and len(name) == 2:
            result = custom(*name)
        else:
            text = name if isinstance(name, str) else getattr(name, "name", None) or getattr(name, "__name__", name)
            plain = _plain(str(text))
            if plain in self._names:
                return self._names[plain]
            match = re.fullmatch(r"(?:float[0-9]+)?e([0-9]+)m([0-9]+)(?:b([0-9]+))?(ieee|fn|fnuz|finite)?(nan)?", plain)
            if not match or (match[5] and match[4] != "fn"):
                raise UnknownFormat(self._unknown(str(text), plain))
            kind: Any = match[4] or "ieee"
            result = custom(int(match[1]), int(match[2]), kind, bias=int(match[3]) if match[3] else None)
        return self._by_fields.get((result.exponent, result.mantissa, result.bias, result.kind), result)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        try:
            return bool(self[name])
        except (KeyError, ValueError):
            return False

    def _unknown(self, text: str, plain: str) -> str:
        if plain in AMBIGUOUS:
            *names, last = map(repr, AMBIGUOUS[plain])
            return f"format {text!r} is ambiguous: choose {', '.join(names)} or {last}"
        full_names = {name: row.name for name, row in self._names.items()}
        full_names |= {_plain(name): name for row in BLOCKS for name in (row.name, *row.aliases)}
        near = difflib.get_close_matches(plain, full_names, n=1, cutoff=0.6)
        hint = f"did you mean {full_names[near[0]]!r}? C" if near else "c"
        return (
            f"unknown format {text!r}; {hint}hoose from {', '.join(self._rows)}, their aliases, fields of your own "
            f"such as 'e5m7', and {', '.join(row.name for row in BLOCKS)} of blocks"
        )


def _plain(name: str) -> str:
    """A name in lower case, without separators and without the name of the package."""
    return re.sub(r"[\s_-]", "", name.strip().lower().removeprefix("torch.").removeprefix("np."))


formats = _Formats(_ROWS)


@lru_cache
def _block_formats(row: BlockRow, rule: str) -> BlockFormat:
    parts = formats.element(row.element), formats.element(row.scale), row.size, rule, row.has_global_scale
    full_name = row.name if rule == SCALE_RULES[0] else f"{row.name}_{rule}"
    return BlockFormat(full_name, row.title, *parts, row.aliases)
