"""The table of formats against enumeration by rational numbers, and against finfo of torch and ml_dtypes.

The oracle (tests/support/codec_oracle.py) has the fields written down again and derives everything by counting.
"""

import itertools
import math
from fractions import Fraction

import codec_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
import torch
from errors import refuses

from halfstep.numerics.formats.table import FORMAT_KINDS, UnknownFormat, custom, formats

ALL = tuple(formats)


@pytest.mark.parametrize("name", ALL)
def test_fields_codes_and_digits(name: str) -> None:
    form, spec = formats[name], oracle.SPECS[name]
    fields = (form.exponent, form.mantissa, form.bias, form.signed, form.bits, form.has_infinity)
    assert fields == (spec.exponent, spec.mantissa, spec.bias, spec.signed, spec.bits, spec.infinities)
    assert form.codes == 2**spec.bits and form.sign_bit == (spec.sign if spec.signed else 0)
    assert form.nan_code == oracle.canonical_nan(name)
    if form.infinity_code is not None:
        assert oracle.value_of(form.infinity_code, name) == math.inf
    assert oracle.value_of(form.largest_code, name) == Fraction(form.max)
    assert form.kind in FORMAT_KINDS and form.title
    p, integer = form.precision, name == "int8"  # digits are counted, not computed from logarithms of floats
    assert form.digits10 == max(n for n in range(20) if 10**n <= 2 ** (p if integer else p - 1))
    assert form.max_digits10 == min(n for n in range(1, 20) if 10 ** (n if integer else n - 1) > 2**p)
    assert form.decimal_digits == pytest.approx(p * 0.30102999566398120, rel=1e-15)


@pytest.mark.parametrize("name", oracle.PARAMETERS)
def test_figures_by_enumeration(name: str) -> None:
    form = formats[name]
    values = [oracle.value_of(code, name) for code in range(form.codes)]
    finite = [Fraction(value) for value in values if math.isfinite(value)]
    positive = sorted(value for value in finite if value > 0)
    assert form.max == max(finite) and form.lowest == min(finite)
    assert form.min_subnormal == positive[0]
    assert form.has_zero == (0 in finite)
    assert form.eps == min(value for value in positive if value > 1) - 1
    assert form.nans == sum(value != value for value in values) and form.has_nan == (form.nans > 0)
    assert form.has_negative_zero == any(value == 0 and isinstance(value, float) for value in values)
    assert form.values == len(set(finite)) + sum(isinstance(value, float) and math.isinf(value) for value in values)
    every = set(finite)
    assert form.integer_range == next(n for n in itertools.count() if 0 not in every or n + 1 not in every)
    gaps = {low: high - low for low, high in itertools.pairwise(positive)}
    if form.has_subnormals:
        subnormal = [value for value in positive if value < form.min_normal]
        assert len(subnormal) == 2**form.mantissa - 1 and {gaps[value] for value in subnormal} == {positive[0]}
    for low, gap in [*gaps.items()][:: max(1, len(gaps) // 2000)]:
        assert form.ulp(float(low)) == gap == form.ulp(-float(low)) == form.ulp(float(low + gap / 3))
    assert form.ulp(0.0) == gaps[positive[0]]
    assert math.log2(form.min_normal) == form.emin and 2.0**form.emax <= form.max < 2.0 ** (form.emax + 1)
    assert Fraction(form.overflow) == sum(oracle.extended(name)[-2:]) / 2


@pytest.mark.parametrize("name", ("fp64", "fp32", "tf32"))
def test_figures_of_the_wide_formats(name: str) -> None:
    form, m = formats[name], oracle.SPECS[name].mantissa
    top = (2**form.exponent - 1) * 2**m  # codes below infinity, those of positive numbers and zero
    assert form.values == 2 * (top - 1) + 1 + 2 and form.nans == form.codes - form.values - 1
    assert form.eps == 2.0**-m and form.integer_range == 2 ** (m + 1) and form.lowest == -form.max
    assert form.ulp(1.0) == form.eps and form.ulp(2.0) == 2 * form.eps and form.ulp(0.0) == form.min_subnormal
    assert form.overflow == (math.inf if name == "fp64" else form.max + 2.0**127 * form.eps / 2)


@pytest.mark.parametrize("name", [name for name in ALL if formats[name].torch and name not in ("int8", "e2m1fn")])
def test_against_torch_finfo(name: str) -> None:
    form, info = formats[name], torch.finfo(getattr(torch, formats[name].torch))
    assert (info.bits, info.max, info.min, info.tiny) == (form.bits, form.max, form.lowest, form.min_normal)
    if name != "e5m2fnuz":  # of which torch before 2.15 says 0.125, where its own codes 0x40 and 0x41 are 1 and 1.25
        assert info.eps == form.eps


OF_ML_DTYPES = ["bfloat16", *(name for name in dir(ml_dtypes) if name.startswith("float"))]


@pytest.mark.parametrize("dtype", OF_ML_DTYPES)
def test_against_ml_dtypes_finfo(dtype: str) -> None:
    """Of e3m4, e4m3 and e4m3b11fnuz too, which have no row of their own."""
    form, info = formats[getattr(ml_dtypes, dtype)], ml_dtypes.finfo(getattr(ml_dtypes, dtype))
    assert info.bits == form.bits and float(info.eps) == form.eps
    assert (float(info.max), float(info.min)) == (form.max, form.lowest)
    assert (float(info.smallest_normal), float(info.smallest_subnormal)) == (form.min_normal, form.min_subnormal)


@pytest.mark.parametrize("name", ALL)
def test_dtypes_exist_and_are_found_again(name: str) -> None:
    form = formats[name]
    for module, attribute in ((torch, form.torch), (np, form.numpy), (ml_dtypes, form.ml_dtypes)):
        if attribute:
            dtype = getattr(module, attribute)
            assert formats[dtype] is form
            assert formats[str(dtype)] is form if module is torch else formats[np.dtype(dtype)] is form


NAMES = {
    "fp64": ("float64", "double", "FP64", "binary64", "f64", "torch.double", float),
    "fp32": ("float32", "single", "float", "Float32", "torch.float32"),
    "tf32": ("TF32", "TensorFloat-32"),
    "fp16": ("half", "float16", "HALF", "binary16", "torch.half", "np.float16", "f16", (5, 10), "e5m10"),
    "bf16": ("bfloat16", "BF16", "bfloat", "b_float_16", (8, 7)),
    "e4m3fn": ("E4M3", "E4M3FN", "fp8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"),
    "e5m2": ("E5M2", "float8_e5m2", "fp8_e5m2"),
    "e2m3fn": ("e2m3", "fp6_e2m3", "float6_e2m3fn"),
    "e2m1fn": ("fp4", "e2m1", "float4_e2m1fn", "torch.float4_e2m1fn_x2"),
    "int8": ("INT8", "i8", "torch.int8"),
}


@pytest.mark.parametrize("name", NAMES)
def test_aliases_find_their_format(name: str) -> None:
    for alias in NAMES[name]:
        assert formats[alias] is formats[name], alias
    # e4m3 without a suffix is OCP's; as fields it is the IEEE format of ml_dtypes' float8_e4m3.
    assert formats["float8_e4m3"] == formats[(4, 3)] and formats[(4, 3)].name == "e4m3ieee"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp8", "format 'fp8' is ambiguous: choose 'e4m3fn', 'e5m2', 'e4m3fnuz' or 'e5m2fnuz'"),
        ("flaot16", "unknown format 'flaot16'; did you mean 'fp16'? Choose from fp64, fp32, tf32"),
        ("", "unknown format ''; choose from fp64"),
        (int, "unknown format 'int'"),
    ],
    ids=str,
)
def test_unknown_names_get_suggestions(name: object, message: str) -> None:
    with pytest.raises(UnknownFormat) as error:
        formats[name]
    assert message in str(error.value)
    assert name not in formats and isinstance(error.value, KeyError)


@pytest.mark.parametrize("kind", ["ieee", "fn", "fnuz", "finite"])
@pytest.mark.parametrize(("exponent", "mantissa"), [(2, 1), (3, 5), (6, 2)])
def test_custom_formats_count_right(exponent: int, mantissa: int, kind: str) -> None:
    form = custom(exponent, mantissa, kind)  # type: ignore[arg-type]
    nans = {"ieee": 2 * (2**mantissa - 1), "fn": 2, "fnuz": 1, "finite": 0}[kind]
    assert form.nans == nans and form.bits == 1 + exponent + mantissa
    assert form.values == 2**form.bits - nans - (kind != "fnuz")
    top = {"ieee": (2**exponent - 2, 2**mantissa - 1), "fn": (2**exponent - 1, 2**mantissa - 2)}
    field, rest = top.get(kind, (2**exponent - 1, 2**mantissa - 1))
    assert Fraction(form.max) == Fraction(2) ** (field - form.bias) * (1 + Fraction(rest, 2**mantissa))
    again = formats[form.name]  # the row, where there is one of these fields
    assert (again.exponent, again.mantissa, again.bias, again.kind) == (exponent, mantissa, form.bias, kind)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((12, 3), {}, ValueError, "Expected exponent to be from 1 to 11 bits, so that float64 holds every value, but"),
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
def test_refused_custom_formats(arguments: tuple, options: dict, error: type, message: str) -> None:
    refuses(error, message, lambda: custom(*arguments, **options))
