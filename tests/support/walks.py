"""Checks of all 2^32 fp32 patterns of split masters in several processes; and another compilation of the casts."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import cpp
import numpy as np
import oracles
import torch

from halfstep.kernels import native
from halfstep.kernels.backend import INTERPRET, jit, tl
from halfstep.kernels.rounding import join_float32, join_master, split_float32, split_master

T = TypeVar("T")
# bf16 codes and remainders, as int16, and the joined fp32 patterns, as int32.
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Elements in order to a pair of vectors in either order, and back.
PAIRS = """
static int at(Order order, int element) { return order == ALTERNATE ? element % 2 * W + element / 2 : element; }
static Pair floats(Order order, const float* from) {
    alignas(64) float lanes[2 * W];
    for (int i = 0; i < 2 * W; ++i) lanes[at(order, i)] = from[i];
    return {get(lanes), get(lanes + W)};
}
static void put_floats(Order order, float* to, Pair x) {
    alignas(64) float lanes[2 * W];
    put(lanes, x.a);
    put(lanes + W, x.b);
    for (int i = 0; i < 2 * W; ++i) to[i] = lanes[at(order, i)];
}
"""

# The functions of optimizer.h, which the optimizers run.
WRAPPER = f"""
#include "{cpp.KERNELS / "optimizer.h"}"
using namespace halfstep;
static Split of(const uint16_t* weight, const int16_t* remainder) {{ return {{(bf16*)weight, (bf16*)remainder}}; }}

// Call f with the order of the pair at i: each in turn, where the machine has both.
template <typename F> void in_turn(int64_t i, F&& f) {{
    if (i / (2 * W) % 2) f(std::integral_constant<Order, ORDERED>{{}});
    else f(std::integral_constant<Order, best_order<bf16>>{{}});
}}
{PAIRS}extern "C" void join_only(const uint16_t* weight, const int16_t* remainder, float* back, int64_t n) {{
    Split split = of(weight, remainder);
    walk_by_two(
        n,
        [&](int64_t i) {{
            in_turn(i, [&](auto order) {{ put_floats(order, back + i, split.get_two<decltype(order)::value>(i)); }});
        }},
        [&](int64_t i, int64_t k) {{ put_some(back + i, split.get_some(i, k), k); }});
}}
extern "C" void split_join(const float* from, uint16_t* weight, int16_t* remainder, float* back, int64_t n) {{
    Split split = of(weight, remainder);
    walk_by_two(
        n,
        [&](int64_t i) {{
            in_turn(i, [&](auto order) {{ split.put_two<decltype(order)::value>(i, floats(order, from + i)); }});
        }},
        [&](int64_t i, int64_t k) {{ split.put_some(i, get_some(from + i, k), k); }});
    join_only(weight, remainder, back, n);
}}
"""


@functools.cache
def load(library: str) -> ctypes.CDLL:
    return ctypes.CDLL(library)


@functools.cache
def load_casts(library: str) -> ctypes.CDLL:
    """Another compilation of cast.cpp."""
    source = Path(native.__file__).resolve().parent / "cast.cpp"
    return native.declare(ctypes.CDLL(library), source.read_text())


@jit
def split_join_kernel(values, weights, remainders, back, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    weight, remainder = split_float32(tl.load(values + at, mask=at < n), False)
    tl.store(weights + at, weight, mask=at < n)
    tl.store(remainders + at, remainder, mask=at < n)
    tl.store(back + at, join_float32(weight, remainder), mask=at < n)


DEVICE = torch.device("cpu" if INTERPRET or not torch.cuda.is_available() else "cuda")
BLOCK = 1 << 20 if INTERPRET else 1024  # the interpreter is fast on large blocks, a GPU on small ones


def block_for(n: int) -> int:
    """A block size for `n` elements: a power of two, no larger than `BLOCK`."""
    return min(BLOCK, 1 << max(n - 1, 1).bit_length())


def round_trip(implementation: str, patterns: np.ndarray, library: str | None) -> Parts:
    """Split and join fp32 patterns, given as uint32."""
    values, n = torch.from_numpy(patterns.view(np.float32)), len(patterns)
    if implementation == "reference":
        weight, remainder = split_master(values)
        return weight.view(torch.int16), remainder, join_master(weight, remainder).view(torch.int32)
    device = DEVICE if implementation == "triton" else torch.device("cpu")
    parts = [torch.empty(n, dtype=dtype, device=device) for dtype in (torch.int16, torch.int16, torch.int32)]
    if implementation == "native":
        assert library is not None
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (values, *parts)]
        load(library).split_join(*addresses, ctypes.c_int64(n))
    else:
        block = block_for(n)
        views = parts[0].view(torch.bfloat16), parts[1], parts[2].view(torch.float32)
        split_join_kernel[(-(-n // block),)](values.to(device), *views, n, BLOCK=block)
    return parts[0].cpu(), parts[1].cpu(), parts[2].cpu()


def check_split(patterns: np.ndarray, parts: Parts) -> tuple[int, int]:
    """Check every promise of kernels/rounding.py. Returns (NaN patterns, weights that are not nearest-even)."""
    codes, rest, joined = parts[0].numpy().view(np.uint16), parts[1].numpy(), parts[2].numpy().view(np.uint32)
    nan = (patterns & 0x7FFFFFFF) > 0x7F800000
    # Lossless, NaN aside.
    oracles.assert_same_bits(joined[~nan], patterns[~nan], "round trip")
    # NaN stays NaN of its sign, in the weight and in what comes back.
    assert ((codes[nan] & 0x7FFF) > 0x7F80).all() and ((joined[nan] & 0x7FFFFFFF) > 0x7F800000).all()
    assert (codes[nan] >> 15 == patterns[nan] >> 31).all() and (joined[nan] >> 31 == patterns[nan] >> 31).all()
    assert (codes[nan] & 0x40).all() and (joined[nan] & 0x400000).all(), "NaN comes back quiet"
    assert (rest[nan] == 0).all()
    # The weight is the nearest bf16, ties away from zero.
    code, low = oracles.split(patterns.view(np.float32))
    oracles.assert_same_bits(codes[~nan], code[~nan], "weight")
    oracles.assert_same_bits(rest[~nan], low[~nan], "remainder")
    # It is the cast's nearest-even save on exact ties.
    even = oracles.bits(oracles.round_to(patterns.view(np.float32), torch.bfloat16))
    differs = (codes != even) & ~nan
    assert (patterns[differs] & 0xFFFF == 0x8000).all(), "differs from nearest-even off a tie"
    ties = ~nan & (patterns & 0xFFFF == 0x8000)
    assert (differs[ties] == ((patterns[ties] >> 16) & 1 == 0)).all(), "differs where the lower neighbour is even"
    return int(nan.sum()), int(differs.sum())


def walk_slice(implementation: str, library: str | None, start: int, end: int) -> tuple[int, int]:
    """`check_split` of all patterns from `start` to `end`, multiples of 2^20."""
    counts = np.zeros(2, np.int64)
    for first in range(start, end, 2**20):
        patterns = np.arange(first, first + 2**20, dtype=np.int64).astype(np.uint32)
        counts += check_split(patterns, round_trip(implementation, patterns, library))
    return int(counts[0]), int(counts[1])


def _one_thread() -> None:
    torch.set_num_threads(1)


def in_processes(function: Callable[..., T], *arguments: object) -> Iterator[T]:
    """Yield ``function(*arguments, start, end)`` for 256 slices of 0 .. 2^32, a process per core."""
    workers = 1 if DEVICE.type == "cuda" else max(1, min(8, os.cpu_count() or 1))
    step = 2**24
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        jobs = [pool.submit(function, *arguments, start, start + step) for start in range(0, 2**32, step)]
        try:
            for job in jobs:
                yield job.result()
        finally:
            pool.shutdown(cancel_futures=True)
