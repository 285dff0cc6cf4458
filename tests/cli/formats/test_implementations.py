"""Who stores what: the table's rules against the torch, ml_dtypes and numpy that are installed."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from lookup_run import lines, results

from halfstep.cli.formats.values import IMPLEMENTATIONS, conversions, finite
from halfstep.numerics.formats.exact import Number, decode_exact, exact
from halfstep.numerics.formats.table import Format, formats

NEW_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
BY_NAME = {one.name: one for one in IMPLEMENTATIONS}


def by_torch(values: list[float], row: Format) -> list[float]:
    cast = torch.tensor(values, dtype=torch.float64).to(getattr(torch, row.torch or ""))
    return [float(value) for value in cast.to(torch.float32 if row.bits < 64 else torch.float64).tolist()]


def by_numpy(values: list[float], row: Format) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [float(value) for value in np.array(values).astype(row.numpy).astype(np.float64).tolist()]


def by_ml_dtypes(values: list[float], row: Format) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [float(value) for value in np.array(values).astype(getattr(ml_dtypes, row.ml_dtypes or ""))]


INSTALLED: dict[str, Callable[[list[float], Format], list[float]]] = {
    "torch 2.12 and later" if NEW_TORCH else "torch before 2.12": by_torch,
    "numpy": by_numpy,
    "ml_dtypes": by_ml_dtypes,
}


def telling(row: Format) -> list[float]:
    """Numbers, halfway points, what lies beside these in fp64 and fp32, both ends, and anything."""
    drawn = random.Random(row.name)
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e300, -1e300, 5e-324, 1 + 2**-11 + 2**-40, 2.7, -2.7]
    codes = range(row.codes) if row.bits <= 8 else [drawn.randrange(row.codes) for _ in range(150)]
    codes = [*codes, row.largest_code, row.largest_code | row.sign_bit, 0, 1, 2]
    for code in codes:
        value = decode_exact(code, row)
        if finite(value) and math.isfinite(row.max * 2):
            number = float(value)
            half = number + math.copysign(row.ulp(number) / 2, number)
            values += [number, half, math.nextafter(half, math.inf), math.nextafter(half, -math.inf)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                single = np.float32(half)
                values += [float(np.nextafter(single, np.float32(side))) for side in (math.inf, -math.inf)]
    return values + [drawn.uniform(-2, 2) * 2.0 ** drawn.randint(-152, 130) for _ in range(300)]


@pytest.mark.parametrize(
    ("name", "format"), [(name, format) for name in INSTALLED for format in BY_NAME[name].formats], ids=str
)
def test_the_rules_are_what_is_installed(name: str, format: str) -> None:
    row, values = formats[format], telling(formats[format])
    told = [BY_NAME[name].cast(exact(value), row) for value in values]
    wrong = [
        (value.hex(), found, rule)
        for value, found, rule in zip(values, INSTALLED[name](values, row), told, strict=True)
        if rule is not None and not same(rule, found)
    ]
    assert wrong == []


def same(rule: Number, found: float) -> bool:
    if rule != rule or found != found:
        return rule != rule and found != found
    return rule == found and (rule != 0 or math.copysign(1.0, float(rule)) == math.copysign(1.0, found))


def told(number: str, format: str) -> dict[str, list[str]]:
    (found,) = results("encode", number, "-f", format)
    return {"undefined" if one["value"] is None else one["value"]["decimal"]: one["who"] for one in found["elsewhere"]}


def test_448_or_nan() -> None:
    for number in ("465", "1e9", "inf"):
        assert told(number, "e4m3") == {
            "448": ["torch 2.12 and later", "OCP saturating"],
            "nan": ["torch before 2.12", "ml_dtypes", "OCP non-saturating"],
        }
    assert told("464", "e4m3") == {}
    assert told("1e9", "e5m2") == {
        "inf": ["torch 2.12 and later", "torch before 2.12", "ml_dtypes", "OCP non-saturating"],
        "57344": ["OCP saturating"],
    }
    assert told("1e9", "fp16") == told("1e9", "e4m3fnuz") == {}


def test_others_that_differ() -> None:
    assert told("1 + 2^-11 + 2^-40", "fp16") == {
        "1": ["torch 2.12 and later", "torch before 2.12"],
        "1.0009765625": ["numpy"],
    }
    assert list(told("0", "e8m0")) == [
        results("decode", "0x00", "-f", "e8m0")[0]["value"]["decimal"],
        "nan",
    ]
    assert told("-3", "e8m0") == {"4": ["torch 2.12 and later", "torch before 2.12"], "nan": ["ml_dtypes"]}
    assert told("nan", "e2m1") == {"-0": ["ml_dtypes"]}
    assert told("2.7", "int8") == {"2": ["torch 2.12 and later", "torch before 2.12", "numpy"]}
    assert told("300", "int8") == {"undefined": ["torch 2.12 and later", "torch before 2.12", "numpy"]}


def test_e8m0_rounds_up_in_the_last_binade_elsewhere() -> None:
    """From 2^-127 to 2^-126 torch and ml_dtypes take the upper one for every number between."""
    assert list(told("1.25 * 2^-127", "e8m0")) == [results("decode", "0x01", "-f", "e8m0")[0]["value"]["decimal"]]
    assert told("1.25 * 2^-126", "e8m0") == {}


def test_nobody_is_named_where_all_agree_or_options_differ() -> None:
    assert conversions(Fraction(5, 2), formats["fp16"]) == []
    for options in (["--overflow", "saturate"], ["--rounding", "up"]):
        (found,) = results("encode", "1e9", "-f", "e4m3", *options)
        assert found["elsewhere"] == []


def test_both_torches_are_one_where_they_agree() -> None:
    shown = lines("encode", "500", "-3", "-f", "e4m3", "e8m0")
    assert "e4m3fn  448  torch 2.12 and later, OCP saturating" in shown
    assert "e8m0fnu  4    torch" in shown
