"""exp, log and the fused multiply-add: against float64, and the same bits in torch, in C++ and in kernels."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator
from typing import Any

import cpp
import pytest
import torch
from devices import WHERE, assert_same_bits, kernels_on, patterns
from tolerances import EXP_DEPTH, EXP_ULPS, LOG_ULPS

from halfstep.kernels import exponential
from halfstep.kernels.backend import EXACT, jit, tl

BLOCK = 8192
EXP, PRECISE_EXP, LOG, FMA, FUSED = range(5)
NAN, INF = math.nan, math.inf
BOUNDS = {EXP: EXP_ULPS[False], PRECISE_EXP: EXP_ULPS[True], LOG: LOG_ULPS}

# std::fma is the oracle of the torch code that emulates it.
SOURCE = """
#include "{header}"
using namespace halfstep;
extern "C" void run(const float* a, const float* b, const float* c, float* out, int64_t n, int what) {{
    for (int64_t i = 0; i < n; i += W) {{
        if (what < 2) put(out + i, what == 1 ? exponential<true>(get(a + i)) : exponential<false>(get(a + i)));
        else if (what == 4) put(out + i, fused(get(a + i), get(b + i), get(c + i)));
        else for (int64_t j = i; j < i + W; ++j) out[j] = what == 2 ? logarithm(a[j]) : std::fma(a[j], b[j], c[j]);
    }}
}}
"""


@pytest.fixture(scope="module", params=["tuned", "portable"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The C++ of exponential.h as a function of what to compute and its operands."""
    flags = cpp.PORTABLE if request.param == "portable" else None
    library = cpp.library(tmp_path_factory, SOURCE.format(header=cpp.KERNELS / "exponential.h"), flags)

    def run(what: int, *operands: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(operands[0])
        pointers = [ctypes.c_void_p(operands[i % len(operands)].data_ptr()) for i in range(3)]
        library.run(*pointers, ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(out.numel()), what)
        return out

    return run


@jit
def _kernel(a, b, c, out, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + at)
    if WHAT == 3:
        y = exponential.fma(x, tl.load(b + at), tl.load(c + at))
    elif WHAT == 2:
        y = exponential.log(x)
    else:
        y = exponential.exp(x, WHAT == 1)
    tl.store(out + at, y)


def kernel(where: str, what: int, *operands: torch.Tensor) -> torch.Tensor:
    with kernels_on(where) as device:
        moved = [operand.to(device) for operand in operands]
        out = torch.empty_like(moved[0])
        _kernel[(out.numel() // BLOCK,)](moved[0], moved[-2 % len(moved)], moved[-1], out, what, BLOCK, **EXACT)
    return out.cpu()


def reference(what: int, *operands: torch.Tensor) -> torch.Tensor:
    if what == FMA:
        return exponential.reference_fma(*operands)
    return exponential.reference_log(*operands) if what == LOG else exponential.reference_exp(*operands, what == 1)


def exponents(stride: int = 65519) -> torch.Tensor:
    """0, and numbers of every exponent below, where log2 and 2^n change, subnormals, -inf and NaN."""
    bits = torch.arange(-(2**31), -(2**31) + 0x7F800001, stride)
    edges = torch.tensor([0.0, -0.0, -INF, NAN, -87.33655, -87.68312, -87.6832, -88.02969, -103.97, -3.4e38])
    halves = -(torch.arange(0, 127) + 0.5).double() * math.log(2)
    d = torch.cat([bits.to(torch.int32).view(torch.float32), edges, halves.float(), -torch.arange(0, 90) / 1.0])
    return padded(torch.cat([d, *((d.view(torch.int32) + step).view(torch.float32) for step in (-1, 1))]).clamp(max=0))


def sums(stride: int = 65519) -> torch.Tensor:
    """Numbers of every exponent from the smallest normal number on; 1 and NaN and their neighbours."""
    s = torch.cat([torch.arange(0x00800000, 0x7F800000, stride), torch.arange(0x3F700000, 0x3F900000, 131)])
    s = s.to(torch.int32).view(torch.float32)
    return padded(torch.cat([s, torch.tensor([1.0, 1 + 2**-23, 1 - 2**-24, NAN, 2.0, 2.0**31])]))


def padded(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK), value=float(x[0]))


def factors() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Operands of fma: any patterns; sums that cancel; sums beside the middle of two numbers, normal and subnormal."""
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (BLOCK,), generator=generator).double()

    yield patterns(BLOCK, torch.float32, 0), patterns(BLOCK, torch.float32, 1), patterns(BLOCK, torch.float32, 2)
    a, b = torch.randn(2, BLOCK, generator=generator)
    yield a, b, -(a.double() * b * (1 + integers(-3, 4) * 2.0**-23)).float()
    step = integers(1, 300) * 2.0**-23
    a, b = (
        (1 + step) * (1 - 2 * integers(0, 2)),
        1 - step,
    )  # whose product is 1 - 2^-46 or a little less, or -1 and more
    yield a.float(), b.float(), (2 * integers(2**23, 2**24)).float()
    yield (a * 2.0**-75).float(), (b * 2.0**-75).float(), (integers(1, 2**15) * 2.0**-149).float()


@pytest.mark.parametrize("where", WHERE)
def test_fma_rounds_once(where: str, native: Any) -> None:
    differ = 0
    for a, b, c in factors():
        expected = native(FMA, a, b, c)
        assert_same_bits(reference(FMA, a, b, c), expected)
        assert_same_bits(native(FUSED, a, b, c), expected)
        assert_same_bits(kernel(where, FMA, a, b, c), expected)
        differ += int(((a.double() * b.double() + c.double()).float() != expected)[~expected.isnan()].sum())
    assert differ > 100  # if the sum is rounded to nearest in fp64, and again


def ulps(y: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The error in the distance of fp32 numbers at the exact result; of subnormal results, in that of normal ones."""
    _, exponent = torch.frexp(exact.abs().clamp(min=2.0**-126))
    error = (y.double() - exact).abs().where(y.double() != exact, 0.0)
    assert torch.equal(y.isnan(), exact.isnan())
    return torch.ldexp(error, 24 - exponent).nan_to_num(0)


def largest_error(what: int, x: torch.Tensor, y: torch.Tensor) -> float:
    """In ulps of float64's results, less `EXP_DEPTH` for each 1 below 0 where exp is not precise."""
    if what == LOG:
        return float(ulps(y, x.double().log()).max())
    exact = x.double().exp()
    normal = ~(exact < 2.0**-126)
    deeper = 0.0 if what == PRECISE_EXP else EXP_DEPTH * x[normal].nan_to_num(0).abs()
    assert (y[~normal] <= 2.0**-126).all() and (y[exact < 2.0**-126.51] == 0).all()
    return float((ulps(y[normal], exact[normal]) - deeper).max()) if normal.any() else 0.0


@pytest.mark.parametrize("what", [EXP, PRECISE_EXP, LOG], ids=["exp", "precise exp", "log"])
@pytest.mark.parametrize("where", WHERE)
def test_values_and_bits(where: str, what: int, native: Any) -> None:
    x = sums() if what == LOG else exponents()
    y = reference(what, x)
    assert largest_error(what, x, y) <= BOUNDS[what]
    assert_same_bits(y, native(what, x))
    assert_same_bits(y, kernel(where, what, x))
    one = torch.ones(1)
    assert reference(what, one if what == LOG else one - 1).item() == (0 if what == LOG else 1)


def test_cpp_has_the_constants_of_the_reference() -> None:
    """A last bit of the smallest ones changes no result of the inputs above."""
    numbers = re.findall(r"-?0x1\.\w+p[+-]\d+", (cpp.KERNELS / "exponential.h").read_text())
    of_reference = {*exponential.SHORT[:-1], *exponential.LONG[:-1], *exponential.SERIES, exponential.LOWEST}
    of_reference |= {exponential.LOG2_E, exponential.LOG2_E_REST, exponential.LOG_2, exponential.LOG_2_REST}
    assert {float.fromhex(number.removesuffix("f")) for number in numbers} == of_reference


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("what", "largest", "falls"),
    [(EXP, 1.9912, 35298), (PRECISE_EXP, 1.0032, 35290), (LOG, 0.8523, 0)],
    ids=["exp", "precise exp", "log"],
)
def test_all_inputs(what: int, largest: float, falls: int, native: Any) -> None:
    """All numbers from -0 down, -inf and NaN included, for log all normal numbers above 0: the same bits in C++, the
    largest error, and how many results lie on the wrong side of their neighbor's, each by one ulp."""
    first, last, step = (0x00800000, 0x7F800000, 2**21) if what == LOG else (-(2**31), 0, 2**21)
    worst, wrong, before = 0.0, 0, torch.empty(0)
    for start in range(first, last, step):
        x = torch.arange(start, min(start + step, last), dtype=torch.int32).view(torch.float32)
        y = reference(what, x)
        assert_same_bits(y, native(what, x), hex(start))
        worst = max(worst, largest_error(what, x, y))
        lower, upper = torch.cat([before, y]).unfold(0, 2, 1).unbind(1)[:: 1 if what == LOG else -1]
        fallen = upper < lower
        wrong += int(fallen.sum())
        assert (lower.view(torch.int32) - upper.view(torch.int32))[fallen].abs().eq(1).all(), hex(start)
        before = y[-1:]
    print(f"{worst:.4f} ulp, {wrong} falls")
    assert largest <= worst <= BOUNDS[what] and wrong == falls
