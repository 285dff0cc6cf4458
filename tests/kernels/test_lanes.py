"""The vectors of kernels/lanes.h against single numbers, with this machine's instructions and without them."""

from __future__ import annotations

import ctypes
import platform

import cpp
import numpy as np
import pytest
import torch
import walks

from halfstep.kernels import native

WRAPPER = """
#include "HEADER"
using namespace halfstep;
PAIRS
template <Order O, typename T> void rounded_in(const float* from, T* to, float* stored, int64_t n) {
    walk_by_two(
        n,
        [&](int64_t i) { put_floats(O, stored + i, put_two<O>(to + i, floats(O, from + i))); },
        [&](int64_t i, int64_t k) {
            put_some(to + i, get_some(from + i, k), k);
            put_some(stored + i, get_some(to + i, k), k);
        });
}
template <Order O, typename T> void widened_in(const T* from, float* to, int64_t n) {
    walk_by_two(
        n,
        [&](int64_t i) { put_floats(O, to + i, get_two<O>(from + i)); },
        [&](int64_t i, int64_t k) { put_some(to + i, get_some(from + i, k), k); });
}
// In the order for T alone, or in that for T beside fp32.
template <typename T> void rounded(const float* from, T* to, float* stored, int64_t n, int32_t mixed) {
    if (mixed) rounded_in<best_order<T, float>>(from, to, stored, n);
    else rounded_in<best_order<T>>(from, to, stored, n);
}
template <typename T> void widened(const T* from, float* to, int64_t n, int32_t mixed) {
    if (mixed) widened_in<best_order<T, float>>(from, to, n);
    else widened_in<best_order<T>>(from, to, n);
}
extern "C" {
int32_t width() { return W; }
void round_bf16(const float* from, bf16* to, float* back, int64_t n, int32_t mixed) {
    rounded(from, to, back, n, mixed);
}
void round_f16(const float* from, f16* to, float* back, int64_t n, int32_t mixed) { rounded(from, to, back, n, mixed); }
void widen_bf16(const bf16* from, float* to, int64_t n, int32_t mixed) { widened(from, to, n, mixed); }
void widen_f16(const f16* from, float* to, int64_t n, int32_t mixed) { widened(from, to, n, mixed); }
void visits(int32_t* counts, int64_t n) {
    const auto pair = [&](int64_t i) { for (int j = 0; j < 2 * W; ++j) ++counts[i + j]; };
    const auto rest = [&](int64_t i, int64_t k) { for (int64_t j = 0; j < k; ++j) ++counts[i + j]; };
    walk_by_two(n, pair, rest);
}
void roots(const float* from, float* to) { put(to, root(get(from))); }
void larger_of(const float* a, const float* b, float* to) { put(to, larger(get(a), get(b))); }
void smaller_of(const float* a, const float* b, float* to) { put(to, smaller(get(a), get(b))); }
void sums(const float* a, const float* b, float* to) { put(to, neighbours(get(a), get(b))); }
}
"""
FLAGS = {"as built": None, "AVX2": ["-march=x86-64-v3"], "portable": cpp.PORTABLE}


@pytest.fixture(scope="module", params=FLAGS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if request.param == "AVX2" and (platform.machine() != "x86_64" or "avx2" not in native._cpu_identity()):
        pytest.skip("needs a CPU with AVX2")
    text = WRAPPER.replace("HEADER", str(cpp.KERNELS / "lanes.h")).replace("PAIRS", walks.PAIRS)
    return cpp.library(tmp_path_factory, text, FLAGS[request.param])


def at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def every_kind(count: int) -> torch.Tensor:
    """fp32 numbers of every sign and exponent, NaN with payloads among them, half of them ties in bf16."""
    bits = torch.arange(2**16, dtype=torch.int64).repeat_interleave(count) << 16
    generator = torch.Generator().manual_seed(0)
    low = torch.randint(2**16, bits.shape, generator=generator)
    low[::2] = torch.tensor([0x8000, 0x7FFF, 0x8001, 0])[torch.arange(len(low[::2])) % 4]
    return (bits + low).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "beside fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_16_bits(library: ctypes.CDLL, dtype: torch.dtype, mixed: bool) -> None:
    """Alone among ordinary numbers, where a vector may be rounded by one instruction, and with its like."""
    x = every_kind(8)
    name = "round_bf16" if dtype == torch.bfloat16 else "round_f16"
    for values in (x, x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))][:-3]):
        got, stored = torch.empty(len(values), dtype=dtype), torch.empty(len(values))
        getattr(library, name)(at(values), at(got), at(stored), ctypes.c_int64(len(values)), ctypes.c_int32(mixed))
        assert torch.equal(stored.isnan(), got.isnan())
        assert torch.equal(stored.nan_to_num(7.0).view(torch.int32), got.float().nan_to_num(7.0).view(torch.int32))
        want = values.to(dtype)
        if dtype == torch.bfloat16:  # the quiet NaN of its sign
            nan = torch.where(values.view(torch.int32) < 0, -64, 0x7FC0).short().view(torch.bfloat16)
            want = torch.where(values.isnan(), nan, want)
        else:
            assert torch.equal(got.isnan(), values.isnan())
            got, want = got[~got.isnan()], want[~want.isnan()]
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "beside fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_in_fp32(library: ctypes.CDLL, dtype: torch.dtype, mixed: bool) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)[:-1]
    got = torch.empty(len(every))
    getattr(library, "widen_bf16" if dtype == torch.bfloat16 else "widen_f16")(
        at(every), at(got), ctypes.c_int64(len(every)), ctypes.c_int32(mixed)
    )
    assert torch.equal(got.isnan(), every.isnan())
    keep = ~every.isnan()
    assert torch.equal(got[keep].view(torch.int32), every.float()[keep].view(torch.int32))


def test_walks_visit_every_element_once(library: ctypes.CDLL) -> None:
    for n in range(9 * library.width()):
        counts = torch.zeros(n + 1, dtype=torch.int32)
        library.visits(at(counts), ctypes.c_int64(n))
        assert counts.tolist() == [1] * n + [0]


def test_roots_are_correctly_rounded(library: ctypes.CDLL) -> None:
    width = library.width()
    x = every_kind(1).abs()
    for start in range(0, len(x), 997 * width):
        part, got = x[start : start + width].clone(), torch.empty(width)
        if len(part) < width:
            break
        library.roots(at(part), at(got))
        assert np.array_equal(got.numpy(), np.sqrt(part.numpy()), equal_nan=True)


def test_the_larger_and_the_smaller_keep_the_second_where_the_first_is_nan(library: ctypes.CDLL) -> None:
    width, nan = library.width(), float("nan")
    a = torch.tensor([nan, 1.0, nan, 2.0]).repeat(width // 4)
    b = torch.tensor([1.0, nan, nan, 3.0]).repeat(width // 4)
    for name, last in (("larger_of", 3.0), ("smaller_of", 2.0)):
        got = torch.empty(width)
        getattr(library, name)(at(a), at(b), at(got))
        assert np.array_equal(got.numpy(), np.array([1.0, nan, nan, last] * (width // 4)), equal_nan=True)


def test_neighbours_are_added_in_order(library: ctypes.CDLL) -> None:
    width = library.width()
    values = torch.arange(2 * width, dtype=torch.float32) ** 2
    a, b, got = values[:width], values[width:], torch.empty(width)
    library.sums(at(a), at(b), at(got))
    assert torch.equal(got, values[0::2] + values[1::2])
