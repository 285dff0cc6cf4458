"""The table of formats against enumeration by rational numbers, and against finfo of torch, numpy and ml_dtypes.

The oracle (tests/support/codec_oracle.py) has the fields written down again and derives everything by counting.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import codec_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
import torch

from halfstep.numerics.formats.table import FORMAT_KINDS, UnknownFormat, custom, formats

ALL = tuple(formats)
FLOATS = tuple(name for name in ALL if name not in ("int8", "e8m0fnu"))


def test_the_rows_are_those_of_the_oracle() -> None:
    assert set(ALL) == set(oracle.SPECS)


@pytest.mark.parametrize("name", ALL)
def test_fields_and_codes(name: str) -> None:
    form, spec = formats[name], oracle.SPECS[name]
    assert (form.exponent, form.mantissa, form.bias, form.signed) == (
        spec.exponent,
        spec.mantissa,
        spec.bias,
        spec.signed,
    )
    assert form.bits == spec.bits and form.codes == 2**spec.bits
    assert form.sign_bit == (spec.sign if spec.signed else 0)
    assert form.nan_code == oracle.canonical_nan(name)
    assert form.has_infinity == spec.infinities
    if form.infinity_code is not None:
        assert oracle.value_of(form.infinity_code, name) == math.inf
    assert oracle.value_of(form.largest_code, name) == Fraction(form.max)
    assert form.kind in FORMAT_KINDS and form.title


@pytest.mark.parametrize("name", oracle.SMALL)
def test_figures_by_enumeration(name: str) -> None:
    form = formats[name]
    values = [oracle.value_of(code, name) for code in range(form.codes)]
    finite = [Fraction(v) for v in values if v == v and not (isinstance(v, float) and math.isinf(v))]
    positive = sorted(v for v in finite if v > 0)
    assert form.max == max(finite) and form.lowest == min(finite)
    assert form.min_subnormal == positive[0]
    assert form.has_zero == (0 in finite)
    assert form.eps == min(v for v in positive if v > 1) - 1
    assert form.nans == sum(v != v for v in values) and form.has_nan == (form.nans > 0)
    assert form.has_negative_zero == any(v == 0 and isinstance(v, float) for v in values)
    assert form.values == len(set(finite)) + sum(isinstance(v, float) and math.isinf(v) for v in values)
    whole, held = 0, set(finite)
    while Fraction(0) in held and Fraction(whole + 1) in held:
        whole += 1
    assert form.integer_range == whole
    gaps = {low: high - low for low, high in itertools.pairwise(positive)}
    if form.has_subnormals:
        subnormal = [v for v in positive if v < form.min_normal]
        assert len(subnormal) == 2**form.mantissa - 1 and {gaps[v] for v in subnormal} == {positive[0]}
    for low, gap in gaps.items():
        assert form.ulp(float(low)) == gap == form.ulp(-float(low))
        assert form.ulp(float(low + gap / 3)) == gap  # in between too
    assert form.ulp(0.0) == gaps[positive[0]]
    assert math.log2(form.min_normal) == form.emin
    assert 2.0**form.emax <= form.max < 2.0 ** (form.emax + 1)


@pytest.mark.parametrize("name", oracle.SMALL)
def test_where_overflow_begins(name: str) -> None:
    form = formats[name]
    tie = Fraction(form.overflow)
    step = oracle.extended(name)[-1] - oracle.extended(name)[-2]
    assert tie == Fraction(form.max) + step / 2
    largest = oracle.rounded(tie - Fraction(1, 10**9), name, "nearest")
    assert oracle.value_of(largest, name) == form.max
    over = oracle.rounded(tie + Fraction(1, 10**9), name, "nearest")
    at = oracle.rounded(tie, name, "nearest")
    assert at == (largest if name == "e4m3fn" else over)
    if form.has_infinity or form.has_nan:
        assert over != largest


@pytest.mark.parametrize("name", ("fp64", "fp32", "tf32"))
def test_figures_of_the_wide_formats(name: str) -> None:
    form, m = formats[name], oracle.SPECS[name].mantissa
    count = oracle.SPECS[name].bits
    top = (2**form.exponent - 1) * 2**m  # codes below infinity, those of positive numbers and zero
    assert form.values == 2 * (top - 1) + 1 + 2
    assert form.nans == 2**count - form.values - 1
    assert form.eps == 2.0**-m and form.integer_range == 2 ** (m + 1)
    assert form.lowest == -form.max
    assert form.ulp(1.0) == form.eps and form.ulp(2.0) == 2 * form.eps and form.ulp(0.0) == form.min_subnormal
    assert form.overflow == (math.inf if name == "fp64" else form.max + 2.0**127 * form.eps / 2)


@pytest.mark.parametrize("name", ALL)
def test_decimal_digits(name: str) -> None:
    """Counted, not computed from logarithms of floats."""
    form = formats[name]
    p, integer = form.precision, name == "int8"
    kept = 0
    while 10 ** (kept + 1) <= 2 ** (p if integer else p - 1):
        kept += 1
    assert form.digits10 == kept
    needed = 1
    while 10 ** (needed if integer else needed - 1) <= 2**p:
        needed += 1
    assert form.max_digits10 == needed
    assert form.decimal_digits == pytest.approx(p * 0.30102999566398120, rel=1e-15)


# ---------------------------------------------------------------------------------------------------- other libraries


@pytest.mark.parametrize("name", [name for name in FLOATS if formats[name].torch])
def test_against_torch_finfo(name: str) -> None:
    form = formats[name]
    if name == "e2m1fn":  # torch packs two in an element and has no finfo of it
        with pytest.raises((TypeError, NotImplementedError), match="Float4_e2m1fn_x2"):
            _ = torch.finfo(getattr(torch, form.torch)).max
        return
    info = torch.finfo(getattr(torch, form.torch))
    assert (info.bits, info.max, info.min) == (form.bits, form.max, form.lowest)
    assert info.tiny == info.smallest_normal == form.min_normal
    if name == "e5m2fnuz":
        # torch before 2.15 is wrong: the number after 1 is 1.25, as its own codes 0x40 and 0x41 say.
        one, after = torch.tensor([0x40, 0x41], dtype=torch.uint8).view(torch.float8_e5m2fnuz).float().tolist()
        assert info.eps in (0.125, 0.25) and after - one == form.eps == 0.25
    else:
        assert info.eps == form.eps


@pytest.mark.parametrize("name", [name for name in ALL if formats[name].ml_dtypes])
def test_against_ml_dtypes_finfo(name: str) -> None:
    form = formats[name]
    info = ml_dtypes.finfo(getattr(ml_dtypes, form.ml_dtypes))
    assert (float(info.max), float(info.min)) == (form.max, form.lowest)
    assert float(info.smallest_normal) == form.min_normal
    assert info.bits == form.bits and float(info.eps) == form.eps
    # ml_dtypes has a subnormal "least" of the scale too, by its own convention that of min_normal.
    assert float(info.smallest_subnormal) == form.min_subnormal


@pytest.mark.parametrize("name", ALL)
def test_dtypes_exist_and_are_found_again(name: str) -> None:
    form = formats[name]
    for module, attribute in ((torch, form.torch), (np, form.numpy), (ml_dtypes, form.ml_dtypes)):
        if attribute:
            dtype = getattr(module, attribute)
            assert formats[dtype] is form
            assert formats[str(dtype)] is form if module is torch else formats[np.dtype(dtype)] is form


# --------------------------------------------------------------------------------------------------------------- names

NAMES = {
    "fp64": ("float64", "double", "FP64", "binary64", "f64", "torch.double", float),
    "fp32": ("float32", "single", "float", "Float32", "torch.float32"),
    "tf32": ("TF32", "TensorFloat-32"),
    "fp16": ("half", "float16", "HALF", "binary16", "torch.half", "np.float16", "f16"),
    "bf16": ("bfloat16", "BF16", "bfloat", "b_float_16"),
    "e4m3fn": ("E4M3", "E4M3FN", "fp8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"),
    "e5m2": ("E5M2", "float8_e5m2", "fp8_e5m2"),
    "e4m3fnuz": ("float8_e4m3fnuz",),
    "e5m2fnuz": ("float8_e5m2fnuz",),
    "e8m0fnu": ("E8M0", "float8_e8m0fnu"),
    "e2m3fn": ("e2m3", "fp6_e2m3", "float6_e2m3fn"),
    "e3m2fn": ("e3m2", "fp6_e3m2", "float6_e3m2fn"),
    "e2m1fn": ("fp4", "e2m1", "nvfp4", "float4_e2m1fn", "torch.float4_e2m1fn_x2"),
    "int8": ("INT8", "i8", "torch.int8"),
}


@pytest.mark.parametrize("name", ALL)
def test_aliases(name: str) -> None:
    for alias in (name, name.upper(), *NAMES[name]):
        assert formats[alias] is formats[name], alias


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("fp8", "format 'fp8' is ambiguous: choose 'e4m3fn', 'e5m2', 'e4m3fnuz' or 'e5m2fnuz'"),
        ("float6", "format 'float6' is ambiguous: choose 'e2m3fn' or 'e3m2fn'"),
        ("flaot16", "unknown format 'flaot16'; did you mean 'fp16'? Choose from fp64, fp32, tf32"),
        ("", "unknown format ''; choose from fp64"),
        (7, "unknown format '7'"),
        (int, "unknown format 'int'"),
    ],
    ids=str,
)
def test_unknown_names(name: object, complaint: str) -> None:
    with pytest.raises(UnknownFormat) as error:
        formats[name]
    assert complaint in str(error.value)
    assert name not in formats and isinstance(error.value, KeyError)


# -------------------------------------------------------------------------------------------------- formats of your own


def test_a_custom_format_of_known_fields_is_the_known_one() -> None:
    for fields, name in (((5, 10), "fp16"), ((8, 7), "bf16"), ((8, 23), "fp32"), ((8, 10), "tf32"), ((5, 2), "e5m2")):
        assert formats[fields] is formats[name]
    assert formats["e5m10"] is formats["fp16"] and formats["e11m52"] is formats["fp64"]
    # e4m3 without a suffix is OCP's; as fields it is the IEEE format of ml_dtypes' float8_e4m3.
    ours, theirs = formats[(4, 3)], ml_dtypes.finfo(ml_dtypes.float8_e4m3)
    assert formats["float8_e4m3"] == ours == formats[ml_dtypes.float8_e4m3] and ours.name == "e4m3ieee"
    assert (ours.max, ours.min_subnormal) == (float(theirs.max), float(theirs.smallest_subnormal)) == (240.0, 2.0**-9)


@pytest.mark.parametrize("dtype", ["float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"])
def test_ml_dtypes_formats_without_a_row(dtype: str) -> None:
    form, info = formats[getattr(ml_dtypes, dtype)], ml_dtypes.finfo(getattr(ml_dtypes, dtype))
    assert (form.max, form.lowest, form.eps) == (float(info.max), float(info.min), float(info.eps))
    assert (form.min_normal, form.min_subnormal) == (float(info.smallest_normal), float(info.smallest_subnormal))


@pytest.mark.parametrize("kind", ["ieee", "fn", "fnuz", "finite"])
@pytest.mark.parametrize("exponent", [2, 3, 6])
@pytest.mark.parametrize("mantissa", [1, 2, 5])
def test_custom_formats_count_right(exponent: int, mantissa: int, kind: str) -> None:
    form = custom(exponent, mantissa, kind)  # type: ignore[arg-type]
    nans = {"ieee": 2 * (2**mantissa - 1), "fn": 2, "fnuz": 1, "finite": 0}[kind]
    assert form.nans == nans and form.bits == 1 + exponent + mantissa
    assert form.values == 2**form.bits - nans - (kind != "fnuz")
    top = {"ieee": (2**exponent - 2, 2**mantissa - 1), "fn": (2**exponent - 1, 2**mantissa - 2)}
    field, rest = top.get(kind, (2**exponent - 1, 2**mantissa - 1))
    assert Fraction(form.max) == Fraction(2) ** (field - form.bias) * (1 + Fraction(rest, 2**mantissa))
    found = formats[form.name]  # the row, where there is one of these fields
    assert (found.exponent, found.mantissa, found.bias, found.kind) == (exponent, mantissa, form.bias, kind)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "complaint"),
    [
        ((0, 3), {}, ValueError, "Expected exponent to be from 1 to 11 bits, so that float64 holds every value, but"),
        ((12, 3), {}, ValueError, "Expected exponent to be from 1 to 11 bits, so that float64 holds every value, but"),
        ((5, 53), {}, ValueError, "Expected mantissa to be from 0 to 52 bits, so that float64 holds every value, but"),
        ((5, 0), {"kind": "fn"}, ValueError, "Expected mantissa to be from 1 to 52 bits, so that float64 holds every"),
        ((1, 3), {}, ValueError, "Expected exponent to be 2 bits or more with kind='ieee', but got 1: one bit leaves"),
        ((5, 2), {"kind": "posit"}, ValueError, "Expected kind to be 'ieee', 'fn', 'fnuz' or 'finite', but got"),
        ((5.0, 2), {}, TypeError, "Expected exponent to be an integer, but got 5.0"),
        ((5, 2), {"bias": 1.5}, TypeError, "Expected bias to be an integer, but got 1.5"),
        ((5, 2), {"bias": 2000}, ValueError, "Expected values within float64's range, 2^-1074 to 2^1023, but got"),
        ((5, 2), {"bias": -2000}, ValueError, "Expected values within float64's range, 2^-1074 to 2^1023, but got"),
    ],
    ids=str,
)
def test_refused_custom_formats(arguments: tuple, options: dict, error: type, complaint: str) -> None:
    with pytest.raises(error) as raised:
        custom(*arguments, **options)
    assert complaint in str(raised.value)


# --------------------------------------------------------------------------------------------------------------- other
