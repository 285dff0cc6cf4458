"""Statistics: every count against rounding in float64 and against halfstep.cast, for every format and scale."""

import json
import math
from pathlib import Path
from typing import Any

import falling
import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.numerics.formats.table import UnknownFormat, formats
from halfstep.numerics.statistics.counts import KINDS, statistics

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on overflow and NaN

NAMES = ["fp32", "tf32", "fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz", "e3m2fn", "e2m1fn", "e5m7"]
INF, NAN = math.inf, math.nan


def expect(found: Any, values: np.ndarray, scale: float, format: str) -> None:
    """A row's counts against each element rounded in float64."""
    fallen = falling.fall(values, scale, formats[format])
    assert {kind: getattr(found, kind) for kind in KINDS} == {kind: getattr(fallen, kind) for kind in KINDS}
    assert found.elements == values.size


def edges(format: str) -> np.ndarray:
    """Where what becomes of a number changes, with the fp32 numbers on both sides, both signs; and all specials."""
    form = formats[format]
    points = [form.min_subnormal / 2, form.min_subnormal, form.min_normal, form.max, form.overflow]
    points += [point * 2.0**shift for point in points for shift in (-30, -1, 1, 30)]
    exact = np.array(points).astype(np.float32)
    near = np.concatenate([exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(INF))])
    return np.concatenate([near, -near, oracles.specials()])


@pytest.mark.parametrize("name", NAMES)
def test_every_format_at_its_edges(name: str) -> None:
    """At no scale, and at those that are multiplied in fp32."""
    values = edges(name)
    for scale in (1.0, 0.1, 7e-30, 1e37):
        expect(statistics(torch.from_numpy(values), name, scale)[0], values, float(np.float32(scale)), name)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn", "e2m1fn"])
def test_every_power_of_two_counted_anew_and_moved(name: str) -> None:
    values = edges(name)
    tensor = torch.from_numpy(values)
    once = statistics(tensor, name)
    for exponent in range(-40, 41):
        scale = 2.0**exponent
        anew, moved = statistics(tensor, name, scale), once.at(scale)
        expect(anew[0], values, scale, name)
        expect(moved[0], values, scale, name)
        assert moved.scale == anew.scale == scale
        assert moved[0].exponents == anew[0].exponents
        assert moved[0].errors is None
    assert once.at(2.0**126).at(2.0**-126)[0].overflow >= once.at(2.0**126)[0].exponents[128], (
        "what left does not return"
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=40),
    st.sampled_from([name for name in NAMES if name != "fp32"]),
    st.integers(-60, 60),
)
def test_fp64_loses_nothing_on_its_way(numbers: list[float], name: str, exponent: int) -> None:
    form = formats[name]
    middle = [form.overflow, form.min_subnormal / 2, form.min_normal]
    values = np.array([*numbers, *(np.nextafter(edge, way) * 2.0**-exponent for edge in middle for way in (0, INF))])
    found = statistics(torch.from_numpy(values), name, 2.0**exponent)[0]
    expect(found, values, 2.0**exponent, name)
    fallen = falling.fall(values, 2.0**exponent, form)
    if fallen.errors.size:
        assert found.largest_error == pytest.approx(float(fallen.errors.max()), abs=2.0**-22)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn"])
def test_quantiles_hold_those_of_the_sorted_errors(name: str) -> None:
    values = (torch.randn(3001, generator=torch.Generator().manual_seed(2)) * 1e-3).numpy()
    found = statistics(torch.from_numpy(values), name, 2.0**-6)[0]
    errors = np.sort(falling.fall(values, 2.0**-6, formats[name]).errors)
    assert found.largest_error == errors[-1]
    for q in (0.0, 0.001, 0.3, 0.5, 0.9, 0.99, 0.9999, 1.0):
        truth = float(errors[max(1, math.ceil(q * errors.size)) - 1])
        low, high = found.error_quantile(q)
        assert low <= truth < high or low == truth == high
        assert high <= 1.125 * low
    assert statistics(torch.tensor([1.0, 2.0, 0.0]), name)[0].error_quantile(1.0) == (0.0, 0.0)
    assert statistics(torch.tensor([1.0, 1e-30]), name, 2.0**-60)[0].error_quantile(1.0) == (1.0, 1.0)
    assert all(map(math.isnan, statistics(torch.zeros(3), name)[0].error_quantile(0.5)))


@pytest.mark.parametrize("dtype", [oracles.E4M3, oracles.E5M2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_fp8_is_decoded(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    expect(statistics(codes, "e2m3fn")[0], codes.float().numpy(), 1.0, "e2m3fn")


# ------------------------------------------------------------------------------------------------------------- inputs


def test_modules_dicts_lists_and_pairs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    assert statistics(model).names == statistics(model.named_parameters()).names == names
    assert statistics(model, of="gradients").names == ()
    model[0](torch.ones(1, 3)).sum().backward()
    gradients = statistics(model, of="gradients")
    assert gradients.names == names[:2] and gradients["0.bias"].normal == 2
    assert statistics([torch.ones(1), torch.ones(2)]).names == ("0", "1")
    nested = {"model": {"a": torch.ones(1), "b": {"c": torch.ones(2)}}, "d": torch.ones(3)}
    assert [(row.name, row.elements) for row in statistics(nested)] == [("model.a", 1), ("model.b.c", 2), ("d", 3)]
    assert statistics(torch.ones(2, 2)).names == ("tensor",)
    assert statistics({}).total.elements == statistics({}).total.share("zero") == 0 and "total" in str(statistics({}))


def test_sparse_strided_and_scalar_tensors_are_counted() -> None:
    indices, values = torch.tensor([[0, 0, 4]]), torch.tensor([2.0**-26, 2.0**-26, 1.0])
    row = statistics(torch.sparse_coo_tensor(indices, values, (9,), check_invariants=True))[0]
    # The duplicates are one element, which is not flushed.
    assert (row.elements, row.flushed, row.subnormal, row.normal) == (2, 1, 0, 1)
    assert statistics(torch.arange(12.0).view(3, 4).t()[1:])[0].elements == 9
    assert statistics(torch.tensor(5.0))[0].exponents == {2: 1}
    assert statistics(torch.tensor([2.0**-149, -(2.0**-140), 3e38]))[0].exponents == {-149: 1, -140: 1, 127: 1}


class NoWaiting(TorchDispatchMode):
    """Fails on what would wait for a GPU: a number or a copy fetched to the host."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(function)
        assert not (str(function).startswith("aten._to_copy") and args[0].device.type != "cpu")
        return function(*args, **(kwargs or {}))


def test_counting_does_not_wait_until_results_are_read() -> None:
    scale, named = torch.tensor(65536.0), {"a": torch.ones(5), "b": torch.ones(3, dtype=torch.float16)}
    statistics(named, "fp16", scale)  # makes the table of addresses, on the host
    with NoWaiting():
        found = statistics(named, "fp16", scale)
        assert repr(found) == "<Statistics of 2 tensors in fp16>"
        assert len(found) == 2
        with pytest.raises(AssertionError):
            found.read()
    scale.fill_(1.0)  # the scaler moves on: what was counted is what was
    assert found.read() is found
    assert found.scale == 65536
    assert found["a"].overflow == 5


# ------------------------------------------------------------------------------------------------------------ results


def test_rows_total_and_sums() -> None:
    first = statistics({"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1e-9, 1e6])})
    second = statistics({"b": torch.tensor([1.1]), "c": torch.tensor([NAN, INF, -INF])})
    both = first + second
    assert both.names == ("a", "b", "c")
    assert [row.elements for row in both] == [2, 3, 3]
    assert both["b"].flushed == both["b"].overflow == both["b"].normal == 1
    assert both["b"].lost == 2 / 3
    assert both["b"].largest_error == 1.0
    assert second["b"].largest_error == pytest.approx(abs(float(np.float16(1.1)) / float(np.float32(1.1)) - 1))
    total = both.total
    assert {kind: getattr(total, kind) for kind in KINDS} == {
        "zero": 1, "flushed": 1, "subnormal": 0, "normal": 2, "overflow": 1, "infinite": 2, "nan": 1,
    }  # fmt: skip
    assert total.share("infinite") == 0.25
    assert total.largest_error == 1.0
    assert [row.name for row in both.worst(1)] == ["b"]
    assert both[-1].name == "c"
    assert [row.name for row in both[:2]] == ["a", "b"]
    for row, name in zip(both, both.names, strict=True):
        assert row.name == name


def test_as_dict_is_json() -> None:
    found = statistics({"a": torch.tensor([1.5, 1e-9, NAN]), "b": torch.zeros(2)}, "fp16", 2.0)
    read = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert (read["format"], read["scale"], read["total"]["elements"]) == ("fp16", 2.0, 5)
    assert read["tensors"][0]["exponents"] == {"1": 1, "-29": 1}
    assert read["tensors"][1]["error_quantiles"] == {"0.5": None, "0.9": None, "0.99": None}
    assert "errors" not in statistics(torch.ones(1), errors=False).as_dict()["total"]


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    named = {"a": torch.randn(100) * 1e-6, "b": torch.zeros(3), "c": torch.tensor([NAN, 1e9])}
    for number, (tensors, name, scale) in enumerate(
        [(named, "fp16", 2.0**10), (named, "e4m3fn", 1000.0), ({}, "bf16", 1.0)]
    ):
        path = tmp_path / f"{number}.png"
        statistics(tensors, name, scale).picture(path)
        assert path.read_bytes()[:4] == b"\x89PNG"


# ------------------------------------------------------------------------------------------------------------- errors


A_SCALE = r"Expected scale to be a number from 2\^-126 to 2\^126, or a tensor of"
ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("tensors", "arguments", "error", "message"),
    [
        (ONE, {"format": "fp17"}, UnknownFormat, "unknown format 'fp17'; did you mean 'fp16'"),
        *(
            (ONE, {"format": name}, ValueError, f"with 1 to 23 mantissa bits, such as .*, but got '{name}'")
            for name in ("fp64", "e8m0fnu")
        ),
        (ONE, {"format": "e9m5"}, ValueError, r"Expected format to be within fp32's range, 2\^-149 to 2\^127, but got"),
        *((ONE, {"scale": scale}, ValueError, A_SCALE) for scale in (0, NAN, 2.0**127, True, "2")),
        (ONE, {"scale": torch.ones(2)}, ValueError, r"Expected scale to be one number, but got shape \(2,\)"),
        (ONE, {"scale": torch.tensor(0.0)}, ValueError, A_SCALE),
        ({"x": ONE.long()}, {}, TypeError, "Expected x to have dtype float64, float32, float16, bfloat16 or float8,"),
        ({"x": ONE.double()}, {"format": "fp32"}, TypeError, "Expected a format of up to 21 mantissa bits for x of"),
        ({"x": ONE.to("meta")}, {}, TypeError, r"x is on the meta device and has no values; load it first"),
        ({"x": torch.eye(2).to_sparse_csr()}, {}, TypeError, r"Expected x to be a dense or COO tensor, but got layout"),
        ({"y": 3}, {}, TypeError, r"Expected tensors\['y'\] to be a tensor, but got a int"),
        (2.0, {}, TypeError, "Expected tensors to be a tensor, a module, a dict, or a list of tensors or"),
        ([("a", ONE), ("a", ONE)], {}, ValueError, r"Expected the names in tensors to be distinct, but got 'a' twice"),
        (ONE, {"of": "grad"}, ValueError, r"Expected of to be 'parameters' \(the tensors themselves\) or"),
    ],
)
def test_errors_name_the_argument(tensors: Any, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        statistics(tensors, **arguments).read()


def test_errors_of_queries_name_the_argument() -> None:
    found = statistics(ONE, errors=False)
    for ask, error, message in (
        (lambda: found[0].error_quantile(0.5), ValueError, "errors were not counted; count them with halfstep."),
        (lambda: found[0].error_quantile(2), ValueError, "Expected q to be a number from 0 to 1, but got 2"),
        (lambda: found[0].share("zeros"), ValueError, "Expected kind to be one of 'zero', .* but got 'zeros'"),
        (lambda: found["b"], KeyError, "no tensor is called 'b'"),
        (lambda: found.at(3), ValueError, "Expected scale to be 1.0 times a power of two, but got 3: count again"),
        (lambda: found + statistics(ONE, "bf16", errors=False), ValueError, "of the same format, .*, but got bf16 at"),
    ):
        with pytest.raises(error, match=message):
            ask()
