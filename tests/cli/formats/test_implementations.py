"""What libraries store: the table's rules against the installed torch, ml_dtypes and numpy."""

from __future__ import annotations

import math
import random
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
BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}


def by_torch(values: list[float], row: Format) -> list[float]:
    cast = torch.tensor(values, dtype=torch.float64).to(getattr(torch, row.torch or ""))
    return cast.to(torch.float32 if row.bits < 64 else torch.float64).double().tolist()


def by_numpy(values: list[float], row: Format) -> list[float]:
    return np.array(values).astype(row.numpy).astype(np.float64).tolist()


def by_ml_dtypes(values: list[float], row: Format) -> list[float]:
    return np.array(values).astype(getattr(ml_dtypes, row.ml_dtypes or "")).astype(np.float64).tolist()


INSTALLED: dict[str, Callable[[list[float], Format], list[float]]] = {
    "torch 2.12 and later" if NEW_TORCH else "torch before 2.12": by_torch,
    "numpy": by_numpy,
    "ml_dtypes": by_ml_dtypes,
}


def telling(row: Format) -> list[float]:
    """Numbers, halfway points, what lies beside these in fp64 and fp32, both ends, and anything."""
    drawn = random.Random(row.name)
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e300, -1e300, 5e-324, 1 + 2**-11 + 2**-40, 2.7, -2.7]
    codes = range(row.codes) if row.bits <= 8 else [drawn.randrange(row.codes) for _ in range(40)]
    codes = [*codes, row.largest_code, row.largest_code | row.sign_bit, 0, 1, 2]
    for code in codes:
        value = decode_exact(code, row)
        if finite(value) and math.isfinite(row.max * 2):
            number = float(value)
            half = number + math.copysign(row.ulp(number) / 2, number)
            values += [number, half, math.nextafter(half, math.inf), math.nextafter(half, -math.inf)]
            single = np.float32(half)
            values += [float(np.nextafter(single, np.float32(side))) for side in (math.inf, -math.inf)]
    return values + [drawn.uniform(-2, 2) * 2.0 ** drawn.randint(-152, 130) for _ in range(60)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "format"), [(name, format) for name in INSTALLED for format in BY_NAME[name].formats], ids=str
)
def test_the_rules_match_installed_libraries(name: str, format: str) -> None:
    row, values = formats[format], telling(formats[format])
    for value, result in zip(values, INSTALLED[name](values, row), strict=True):
        rule = BY_NAME[name].cast(exact(value), row)
        assert rule is None or same(rule, result), (value.hex(), result, rule)


def same(rule: Number, result: float) -> bool:
    return str(float(rule)) == str(result)  # the sign of zero too


def stored(number: str, format: str, *options: str) -> dict[str, list[str]]:
    """Who stores what, by the values' decimals, according to the command."""
    (result,) = results("encode", number, "-f", format, *options)
    return {"undefined" if row["value"] is None else row["value"]["decimal"]: row["who"] for row in result["elsewhere"]}


TORCH = ["torch 2.12 and later", "torch before 2.12"]


def test_differing_conversions_are_listed_by_library() -> None:
    for number in ("465", "inf"):
        assert stored(number, "e4m3") == {
            "448": ["torch 2.12 and later", "OCP saturating"],
            "nan": ["torch before 2.12", "ml_dtypes", "OCP non-saturating"],
        }
    assert stored("1e9", "e5m2") == {"inf": [*TORCH, "ml_dtypes", "OCP non-saturating"], "57344": ["OCP saturating"]}
    assert stored("1 + 2^-11 + 2^-40", "fp16") == {"1": TORCH, "1.0009765625": ["numpy"]}
    assert stored("-3", "e8m0") == {"4": TORCH, "nan": ["ml_dtypes"]}
    assert stored("nan", "e2m1") == {"-0": ["ml_dtypes"]}
    assert stored("2.7", "int8") == {"2": [*TORCH, "numpy"]} and stored("300", "int8") == {
        "undefined": [*TORCH, "numpy"]
    }
    shown = lines("encode", "500", "-3", "-f", "e4m3", "e8m0")
    assert "e4m3fn  448  torch 2.12 and later, OCP saturating" in shown
    assert "e8m0fnu  4    torch" in shown, "both torches are one where they agree"


def test_no_library_is_listed_if_all_agree_or_options_differ() -> None:
    assert conversions(Fraction(5, 2), formats["fp16"]) == []
    assert stored("464", "e4m3") == stored("1e9", "fp16") == stored("1.25 * 2^-126", "e8m0") == {}
    assert stored("1e9", "e4m3", "--overflow", "saturate") == stored("1e9", "e4m3", "--rounding", "up") == {}
