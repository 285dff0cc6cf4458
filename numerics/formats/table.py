"""Number formats: one row each, and everything that follows from it, exactly.

A row says how many bits hold the exponent and the mantissa, the bias, and what the codes at the ends mean. With
exponent field E and mantissa field T of m bits,

    E > 0   (-1)^s * 2^(E - bias)     * (1 + T / 2^m)      normal
    E = 0   (-1)^s * 2^(1 - bias)     * (T / 2^m)          zero and subnormal

Every finite value of every format here is a float64 value too, so all figures are exact as Python floats.

Needs no torch and no numpy: the lookup starts at once.

Sources: IEEE 754-2019 (binary16, 32, 64; clause 3.4); OCP 8-bit floating point specification (OFP8) 1.0, 2023 (E4M3,
E5M2); OCP Microscaling formats (MX) specification 1.0, 2023 (E2M3, E3M2, E2M1, E8M0); Noune et al. 2022,
arXiv:2206.02915 (the FNUZ formats); NVIDIA A100 whitepaper, 2020 (TF32). Hardware: the makers' whitepapers and
instruction set manuals (Volta to Blackwell, CDNA 1 to 4; Jouppi et al. 2017 and 2020 and Google's of 2025 for TPUs).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Kind = Literal["ieee", "fn", "fnuz", "finite", "scale", "integer"]
FORMAT_KINDS: dict[str, str] = {
    "ieee": "the largest exponent is kept for infinity and NaN",
    "fn": "no infinity; NaN is the code of all ones, with either sign",
    "fnuz": "no infinity and no negative zero, whose code is the only NaN",
    "finite": "no infinity, no NaN",
    "scale": "powers of two without sign and zero; NaN is the code of all ones",
    "integer": "two's complement integers",
}


@dataclass(frozen=True)
class Format:
    """A number format of up to 64 bits.

    Args:
        name: short name, unique.
        title: what it is called where it is specified.
        exponent: bits of the exponent field.
        mantissa: bits of the mantissa field, without the implicit one; of `integer`, bits beside the sign.
        bias: subtracted from the exponent field.
        kind: a key of `FORMAT_KINDS`: what the codes at the ends mean.
        aliases: other names, as people write them.
        torch, numpy, ml_dtypes: names of the dtype there; None where there is none.
        hardware: matrix units that multiply it: the first data-centre generation of NVIDIA, AMD and Google each.
        container: bits it takes in memory; None if as many as it has.
    """

    name: str
    title: str
    exponent: int
    mantissa: int
    bias: int
    kind: Kind = "ieee"
    aliases: tuple[str, ...] = ()
    torch: str | None = None
    numpy: str | None = None
    ml_dtypes: str | None = None
    hardware: tuple[str, ...] = ()
    container: int | None = field(default=None, repr=False)

    # ------------------------------------------------------------------------------------------------------ fields

    @property
    def signed(self) -> bool:
        """Whether it has a sign bit."""
        return self.kind != "scale"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.signed + self.exponent + self.mantissa

    @property
    def bytes(self) -> float:
        """Bytes of one number in memory, packed: 4 for TF32, whose 19 bits stand in an fp32; 0.5 for E2M1."""
        return (self.container or self.bits) / 8

    @property
    def precision(self) -> int:
        """Significant bits p: those of the mantissa field and the implicit one."""
        return self.mantissa if self.kind == "integer" else self.mantissa + 1

    # ------------------------------------------------------------------------------------------------------- codes

    @property
    def codes(self) -> int:
        """Number of codes, 2^bits."""
        return 1 << self.bits

    @property
    def sign_bit(self) -> int:
        """The sign bit of a code; 0 in a format without."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def largest_code(self) -> int:
        """Code of `max`."""
        all_ones = (1 << (self.bits - self.signed)) - 1
        if self.kind == "ieee":
            return self.infinity_code - 1  # type: ignore[operator]
        return all_ones - 1 if self.kind in ("fn", "scale") else all_ones

    @property
    def infinity_code(self) -> int | None:
        """Code of positive infinity; None in a format without."""
        return ((1 << self.exponent) - 1) << self.mantissa if self.kind == "ieee" else None

    @property
    def nan_code(self) -> int | None:
        """Code of the canonical NaN, positive and quiet where there is a choice; None in a format without."""
        if self.kind == "ieee":
            # With one mantissa bit or none there is no more than the one NaN, or none at all.
            return None if self.mantissa == 0 else self.largest_code + 1 + (1 << (self.mantissa - 1))
        if self.kind == "fnuz":
            return self.sign_bit
        return self.largest_code + 1 if self.kind in ("fn", "scale") else None

    @property
    def nans(self) -> int:
        """Number of codes that mean NaN."""
        return {"ieee": 2 * ((1 << self.mantissa) - 1), "fn": 2, "fnuz": 1, "scale": 1}.get(self.kind, 0)

    @property
    def has_infinity(self) -> bool:
        return self.kind == "ieee"

    @property
    def has_nan(self) -> bool:
        return self.nans > 0

    @property
    def has_negative_zero(self) -> bool:
        return self.kind in ("ieee", "fn", "finite")

    @property
    def has_zero(self) -> bool:
        return self.kind != "scale"

    @property
    def has_subnormals(self) -> bool:
        return self.kind not in ("scale", "integer") and self.mantissa > 0

    @property
    def values(self) -> int:
        """Number of distinct values: infinities count, NaNs do not, and both zeros are one."""
        return self.codes - self.nans - self.has_negative_zero

    # ----------------------------------------------------------------------------------------------------- figures

    @property
    def emin(self) -> int:
        """Exponent of `min_normal`."""
        if self.kind == "integer":
            return 0
        return (0 if self.kind == "scale" else 1) - self.bias

    @property
    def emax(self) -> int:
        """Exponent of `max`."""
        return self.mantissa - 1 if self.kind == "integer" else (self.largest_code >> self.mantissa) - self.bias

    @cached_property
    def max(self) -> float:
        """Largest finite number."""
        if self.kind == "integer":
            return float(self.largest_code)
        fraction = self.largest_code & ((1 << self.mantissa) - 1)
        return math.ldexp((1 << self.mantissa) + fraction, self.emax - self.mantissa)

    @property
    def lowest(self) -> float:
        """Smallest number, that is, the most negative finite one: `-max`, but -128 of int8 and 2^-127 of E8M0."""
        if self.kind == "integer":
            return -self.max - 1
        return self.min_normal if self.kind == "scale" else -self.max

    @property
    def min_normal(self) -> float:
        """Smallest positive number with full precision, 2^emin."""
        return math.ldexp(1.0, self.emin)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number; `min_normal` in a format without subnormals."""
        return math.ldexp(1.0, self.emin - self.mantissa) if self.has_subnormals else self.min_normal

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger number, 2^-mantissa."""
        return 1.0 if self.kind == "integer" else math.ldexp(1.0, -self.mantissa)

    @property
    def overflow(self) -> float:
        """Magnitude from which rounding to nearest, ties to even, gives more than `max`: half a step beyond it.

        65520 in fp16. A tie goes to the even code, so where `max` has an even code (E4M3FN: 464) the number itself
        still rounds to `max`. `math.inf` where the threshold is no float64 number: in fp64 it is 2^1024 (1 - 2^-54).
        """
        if self.kind == "scale":
            return 1.5 * self.max
        return self.max + self.ulp(self.max) / 2

    def ulp(self, x: float) -> float:
        """Unit in the last place of `x`: the distance of the numbers around it, as if the exponent had no upper end.

        At a power of two the one above; 0 and subnormals have that of `min_normal`. The definition of Goldberg 1991.

        Returns:
            A power of two; NaN of NaN, infinity of infinities.
        """
        if math.isnan(x) or math.isinf(x):
            return abs(x)
        if self.kind == "integer":
            return 1.0
        exponent = math.frexp(x)[1] - 1 if x else self.emin
        return math.ldexp(1.0, max(exponent, self.emin) - self.mantissa)

    @property
    def integer_range(self) -> int:
        """Largest n for which every integer from 0 to n is a number of the format; 0 if 0 or 1 is not."""
        if self.kind == "integer":
            return int(self.max)
        if self.kind == "scale" or self.max < 1 or self.min_subnormal > 1:
            return 0
        return int(min(math.ldexp(1.0, self.precision), self.max))

    @property
    def digits10(self) -> int:
        """Decimal digits that survive decimal -> format -> decimal, floor((p - 1) log10 2), as in C's FLT_DIG."""
        binary = self.precision if self.kind == "integer" else self.precision - 1
        return len(str(1 << binary)) - 1

    @property
    def max_digits10(self) -> int:
        """Decimal digits that tell any two numbers apart, ceil(1 + p log10 2), as in C's FLT_DECIMAL_DIG."""
        return len(str(1 << self.precision)) + (self.kind != "integer")

    @property
    def decimal_digits(self) -> float:
        """p log10 2: the precision in decimal digits, which is neither of the two above."""
        return self.precision * math.log10(2)

    def as_dict(self) -> dict[str, Any]:
        """The row and all figures, for JSON."""
        names = ("name", "title", "kind", "exponent", "mantissa", "bias", "bits", "bytes", "precision", "emin", "emax")
        figures = ("max", "lowest", "min_normal", "min_subnormal", "eps", "overflow", "integer_range")
        digits = ("digits10", "max_digits10", "decimal_digits", "codes", "values", "nans")
        special = ("infinity_code", "nan_code", "largest_code", "signed")
        flags = ("has_infinity", "has_nan", "has_negative_zero", "has_zero", "has_subnormals")
        elsewhere = ("torch", "numpy", "ml_dtypes")
        row = {key: getattr(self, key) for key in (*names, *figures, *digits, *special, *flags, *elsewhere)}
        row["overflow"] = None if math.isinf(self.overflow) else self.overflow  # JSON has no infinity
        return {**row, "aliases": list(self.aliases), "hardware": list(self.hardware)}


def custom(exponent: int, mantissa: int, kind: Kind = "ieee", *, bias: int | None = None) -> Format:
    """A format of your own.

    Args:
        exponent: bits of the exponent field, 1 to 11.
        mantissa: bits of the mantissa field, 0 to 52 (from 1 for `fn`, whose code of all ones is NaN).
        kind: ``"ieee"``, ``"fn"``, ``"fnuz"`` or ``"finite"``; see `FORMAT_KINDS`.
        bias: 2^(exponent - 1) - 1 if None, and one more for ``"fnuz"``.

    Raises:
        ValueError: beyond these ranges, or if a value of the format is no float64 value.
    """
    if kind not in ("ieee", "fn", "fnuz", "finite"):
        raise ValueError(f"Expected kind to be 'ieee', 'fn', 'fnuz' or 'finite', but got {kind!r}")
    for name, value, low, high in (("exponent", exponent, 1, 11), ("mantissa", mantissa, int(kind == "fn"), 52)):
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
    chosen = usual if bias is None else bias
    if isinstance(chosen, bool) or not isinstance(chosen, int):
        raise TypeError(f"Expected bias to be an integer, but got {bias!r}")
    name = f"e{exponent}m{mantissa}" + ("" if chosen == usual else f"b{chosen}") + ("" if kind == "ieee" else kind)
    if name in ("e4m3", "e2m3", "e3m2", "e2m1"):  # as OCP's formats are called, which are no IEEE formats
        name += kind
    if name in ("e2m3fn", "e3m2fn", "e2m1fn"):  # as OCP's formats without NaN are called in ml_dtypes
        name += "-nan"
    title = f"{1 + exponent + mantissa}-bit format of your own: {FORMAT_KINDS[kind]}"
    made = Format(name, title, exponent, mantissa, chosen, kind)
    if made.emin - mantissa < -1074 or made.emax > 1023:
        least, most = 1 - chosen - mantissa, made.emax
        raise ValueError(
            f"Expected values within float64's range, 2^-1074 to 2^1023, but got 2^{least} to 2^{most}: choose a "
            f"smaller exponent or another bias than {chosen}"
        )
    return made


_ROWS = (
    Format(
        "fp64", "IEEE 754 binary64, double precision", 11, 52, 1023, "ieee", ("float64", "double", "binary64", "f64"),
        "float64", "float64", None, ("NVIDIA A100", "AMD MI200"),
    ),
    Format(
        "fp32", "IEEE 754 binary32, single precision", 8, 23, 127, "ieee",
        ("float32", "single", "float", "binary32", "f32"), "float32", "float32", None, ("AMD MI100",),
    ),
    Format(
        "tf32", "TensorFloat-32", 8, 10, 127, "ieee", ("tensorfloat32",), None, None, None,
        ("NVIDIA A100", "AMD MI300"), container=32,
    ),
    Format(
        "fp16", "IEEE 754 binary16, half precision", 5, 10, 15, "ieee", ("float16", "half", "binary16", "f16"),
        "float16", "float16", None, ("NVIDIA V100", "AMD MI100"),
    ),
    Format(
        "bf16", "bfloat16", 8, 7, 127, "ieee", ("bfloat16", "bfloat", "brainfloat16"), "bfloat16", None, "bfloat16",
        ("Google TPU v2", "NVIDIA A100", "AMD MI100"),
    ),
    Format(
        "e4m3fn", "OCP FP8 E4M3", 4, 3, 7, "fn", ("float8_e4m3fn", "fp8_e4m3fn", "fp8_e4m3", "e4m3"),
        "float8_e4m3fn", None, "float8_e4m3fn", ("NVIDIA H100", "AMD MI350", "Google TPU v7"),
    ),
    Format(
        "e5m2", "OCP FP8 E5M2", 5, 2, 15, "ieee", ("float8_e5m2", "fp8_e5m2"),
        "float8_e5m2", None, "float8_e5m2", ("NVIDIA H100", "AMD MI350", "Google TPU v7"),
    ),
    Format(
        "e4m3fnuz", "FP8 E4M3 without infinity and negative zero", 4, 3, 8, "fnuz",
        ("float8_e4m3fnuz", "fp8_e4m3fnuz"), "float8_e4m3fnuz", None, "float8_e4m3fnuz", ("AMD MI300",),
    ),
    Format(
        "e5m2fnuz", "FP8 E5M2 without infinity and negative zero", 5, 2, 16, "fnuz",
        ("float8_e5m2fnuz", "fp8_e5m2fnuz"), "float8_e5m2fnuz", None, "float8_e5m2fnuz", ("AMD MI300",),
    ),
    Format(
        "e8m0fnu", "OCP MX scale E8M0", 8, 0, 127, "scale", ("float8_e8m0fnu", "e8m0"),
        "float8_e8m0fnu", None, "float8_e8m0fnu", ("NVIDIA B200", "AMD MI350"),
    ),
    Format(
        "e2m3fn", "OCP MX FP6 E2M3", 2, 3, 1, "finite", ("float6_e2m3fn", "fp6_e2m3fn", "fp6_e2m3", "e2m3"),
        None, None, "float6_e2m3fn", ("NVIDIA B200", "AMD MI350"),
    ),
    Format(
        "e3m2fn", "OCP MX FP6 E3M2", 3, 2, 3, "finite", ("float6_e3m2fn", "fp6_e3m2fn", "fp6_e3m2", "e3m2"),
        None, None, "float6_e3m2fn", ("NVIDIA B200", "AMD MI350"),
    ),
    Format(
        "e2m1fn", "OCP MX FP4 E2M1", 2, 1, 1, "finite",
        ("float4_e2m1fn", "float4_e2m1fn_x2", "fp4_e2m1fn", "fp4_e2m1", "e2m1", "fp4", "float4", "nvfp4"),
        "float4_e2m1fn_x2", None, "float4_e2m1fn", ("NVIDIA B200", "AMD MI350"),
    ),
    Format(
        "int8", "8-bit integer, two's complement", 0, 7, 0, "integer", ("i8", "s8"), "int8", "int8", None,
        ("Google TPU v1", "NVIDIA T4", "AMD MI100"),
    ),
)  # fmt: skip

# Names of more than one format, and which.
_AMBIGUOUS = {
    "fp8": ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"),
    "float8": ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"),
    "fp6": ("e2m3fn", "e3m2fn"),
    "float6": ("e2m3fn", "e3m2fn"),
}


class UnknownFormat(KeyError):
    """A name that is no format's. Its text says which are, and which one may have been meant."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError shows the repr of a text


class _Formats(Mapping[str, Format]):
    """All formats by name. Any alias is understood too, in any case, and a format's own fields, as in ``"e5m7"``.

    Examples:
        >>> fp16 = halfstep.formats["fp16"]  # also "half", "float16", torch.float16 and "e5m10"
        >>> fp16.max, fp16.eps, fp16.min_subnormal
        (65504.0, 0.0009765625, 5.960464477539063e-08)
        >>> halfstep.formats["e5m7"].bits  # a format of your own
        13
    """

    def __init__(self, rows: tuple[Format, ...]) -> None:
        self._rows = {row.name: row for row in rows}
        self._names = {_plain(name): row for row in rows for name in (row.name, *row.aliases)}

    def __getitem__(self, name: object) -> Format:
        """The format of a name, alias, ``(exponent, mantissa)``, numpy, ml_dtypes or torch dtype.

        Raises:
            UnknownFormat: no such name; the text says what is allowed.
        """
        if isinstance(name, Format):
            return name
        if name is float:
            return self._rows["fp64"]  # Python's; the name "float" is C's and torch's
        if isinstance(name, tuple) and len(name) == 2:
            return self._known(custom(*name))
        text = name if isinstance(name, str) else getattr(name, "name", None) or getattr(name, "__name__", str(name))
        plain = _plain(str(text))
        if plain in self._names:
            return self._names[plain]
        fields = re.fullmatch(r"(?:float\d+)?e(\d+)m(\d+)(?:b(\d+))?(ieee|fn|fnuz|finite)?(nan)?", plain)
        if fields and (not fields[5] or fields[4] == "fn"):
            kind: Any = fields[4] or "ieee"
            return self._known(custom(int(fields[1]), int(fields[2]), kind, bias=int(fields[3]) if fields[3] else None))
        raise UnknownFormat(self._unknown(str(text), plain))

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        try:
            self[name]
        except (KeyError, ValueError):
            return False
        return True

    def _known(self, made: Format) -> Format:
        """The row of the same fields, if there is one."""
        same = (made.exponent, made.mantissa, made.bias, made.kind)
        return next(
            (row for row in self._rows.values() if (row.exponent, row.mantissa, row.bias, row.kind) == same), made
        )

    def _unknown(self, text: str, plain: str) -> str:
        for prefix, meant in _AMBIGUOUS.items():
            if plain == prefix:
                return f"format {text!r} is ambiguous: choose {_either(meant)}"
        near = difflib.get_close_matches(plain, self._names, n=1, cutoff=0.6)
        hint = f"did you mean {self._names[near[0]].name!r}? C" if near else "c"
        return (
            f"unknown format {text!r}; {hint}hoose from {', '.join(self._rows)}, their aliases, and fields of your "
            "own such as 'e5m7'"
        )


def _plain(name: str) -> str:
    """A name without case, separators and the package in front."""
    return re.sub(r"[\s_-]", "", name.strip().lower().removeprefix("torch.").removeprefix("np."))


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(repr(name) for name in names[:-1])} or {names[-1]!r}"


formats = _Formats(_ROWS)
