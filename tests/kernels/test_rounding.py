"""The roundings and the split master weight that every kernel shares, in the reference, in C++ and in Triton.

Per commit every upper half meets a few dozen lower halves; `make exhaustive` walks all 2^32 fp32 patterns.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path

import cpp
import numpy as np
import oracles
import pytest
import roundings
import torch
import walks
from implementations import ALL
from oracles import BF16, FP32, assert_same_bits
from roundings import DTYPES

from halfstep.kernels.backend import INTERPRET, jit, tl, triton
from halfstep.kernels.philox import reference_words
from halfstep.kernels.rounding import (
    FORMATS,
    ROUNDINGS,
    STOCHASTIC,
    exact_sqrt,
    join_float32,
    join_master,
    reference_round,
    round_float32,
)

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy, on the specials
]

Round = Callable[[torch.Tensor, torch.dtype, int, bool, torch.Tensor], torch.Tensor]

modes = pytest.mark.parametrize(("rounding", "saturate"), list(itertools.product(ROUNDINGS, (False, True))))
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def needs_triton() -> None:
    if triton is None or not (INTERPRET or torch.cuda.is_available()):
        pytest.skip("needs Triton, and a GPU or TRITON_INTERPRET=1")


# ------------------------------------------------------------------------------------------------------------ rounding

STRUCTS = dict(zip(FORMATS, ("Float16", "BFloat16", "E4M3", "E5M2"), strict=True))
FUNCTION = """
extern "C" void round_{struct}_{rounding}_{saturate}(const float* x, const uint32_t* word, uint16_t* out, int64_t n) {{
    for (int64_t i = 0; i < n; ++i)
        out[i] = uint16_t(round_to<{struct}, Rounding({rounding}), {saturate}>(x[i], word[i]));
}}
"""


@jit
def round_kernel(
    x, words, out, n, DTYPE: tl.constexpr, ROUNDING: tl.constexpr, SATURATE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at, mask=at < n, other=0).to(tl.uint32)
    value = tl.load(x + at, mask=at < n, other=0.0)
    code = round_float32(value, word, DTYPE, ROUNDING, SATURATE)
    tl.store(out + at, code.to(tl.int32), mask=at < n)


@pytest.fixture(scope="module")
def round_to(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    text = f'#include "{cpp.KERNELS / "native.h"}"\nusing namespace halfstep;\n'
    for struct, rounding, saturate in itertools.product(STRUCTS.values(), range(3), range(2)):
        text += FUNCTION.format(struct=struct, rounding=rounding, saturate=saturate)
    return cpp.library(tmp_path_factory, text)


def codes_of(result: torch.Tensor) -> torch.Tensor:
    return result.view(torch.uint8).long() if result.itemsize == 1 else result.view(torch.int16).long() & 0xFFFF


@pytest.fixture(params=ALL)
def round_by(request: pytest.FixtureRequest) -> Round:
    """One implementation, from fp32 values, a dtype, rounding, saturation and words (int64) to codes as int64."""
    if request.param == "reference":
        return lambda *arguments: codes_of(reference_round(*arguments))
    if request.param == "triton":
        needs_triton()
    library = request.getfixturevalue("round_to") if request.param == "native" else None

    def by(x: torch.Tensor, dtype: torch.dtype, rounding: int, saturate: bool, words: torch.Tensor) -> torch.Tensor:
        n = x.numel()
        if library is not None:
            word, out = words.numpy().astype(np.uint32), np.empty(n, dtype=np.uint16)
            addresses = [ctypes.c_void_p(a) for a in (x.data_ptr(), word.ctypes.data, out.ctypes.data)]
            getattr(library, f"round_{STRUCTS[dtype]}_{rounding}_{int(saturate)}")(*addresses, ctypes.c_int64(n))
            return torch.from_numpy(out.astype(np.int64))
        device, block = walks.DEVICE, walks.block_for(n)
        codes = torch.empty(n, dtype=torch.int32, device=device)
        options = {"DTYPE": FORMATS[dtype].triton_type, "ROUNDING": rounding, "SATURATE": saturate, "BLOCK": block}
        round_kernel[(-(-n // block),)](x.to(device), words.to(device), codes, n, **options)
        return codes.cpu().long()

    return by


@cache
def by_fractions(dtype: torch.dtype, rounding: str, saturate: bool) -> tuple[np.ndarray, np.ndarray, list[int | None]]:
    """Values, words of noise, and the codes that they must round to."""
    values = roundings.points(dtype, every=1 if dtype.itemsize == 1 else 199)
    specials = np.array([0x7F800001, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    values = np.concatenate([values, specials])
    random = np.random.default_rng(0).integers(0, 2**32, len(values))
    words = np.concatenate([np.zeros(len(values), dtype=np.int64), np.full(len(values), 2**32 - 1), random])
    values = np.tile(values, 3)
    pairs = zip(values.tolist(), words.tolist(), strict=True)
    return values, words, [roundings.code(x, dtype, rounding, saturate, word) for x, word in pairs]


@dtypes
@modes
def test_every_rounding_against_fractions(round_by: Round, dtype: torch.dtype, rounding: str, saturate: bool) -> None:
    values, words, expected = by_fractions(dtype, rounding, saturate)
    codes = round_by(torch.from_numpy(values), dtype, ROUNDINGS.index(rounding), saturate, torch.from_numpy(words))
    integers = torch.uint8 if dtype.itemsize == 1 else torch.int16
    isnan = codes.to(integers).view(dtype).float().isnan()
    found = [None if nan else code for code, nan in zip(codes.tolist(), isnan.tolist(), strict=True)]
    wrong = [at for at, (code, right) in enumerate(zip(found, expected, strict=True)) if code != right]
    assert not wrong, [(values[at].hex(), hex(words[at]), found[at], expected[at]) for at in wrong[:5]]


@dtypes
def test_the_probability_is_the_part_of_a_unit_to_2_16(dtype: torch.dtype) -> None:
    """Over all 2^16 draws: exactly where 16 bits or fewer are dropped, the nearest multiple of 2^-16 in FP8; and in the
    mean of the words that kernels use, subnormals included, within five standard errors."""
    draws, dropped = torch.arange(2**16) << 16 | 0x8000, 23 - FORMATS[dtype].mantissa
    for pattern in (0x3F800001, 0x3F9E0652, 0x40490FDB, 0x42C8FFFF, 0x3FAAAAAA, 0x3F80000F, 0x3F800008, 0x3F800007):
        x = torch.full((2**16,), pattern, dtype=torch.int32).view(torch.float32)
        codes = codes_of(reference_round(x, dtype, STOCHASTIC, False, draws))
        part = pattern % 2**dropped / 2**dropped
        assert int((codes - codes.min()).sum()) == int(part * 2**16 + 0.5) % 2**16, hex(pattern)
    smallest = float(roundings.grid(dtype)[1])
    for stream, value in enumerate((-0.777, smallest * 0.3, -smallest * 2.01)):
        x = torch.full((2**16,), value)
        words = reference_words(torch.arange(2**16), 17, 0, stream)
        rounded = reference_round(x, dtype, STOCHASTIC, False, words).double()
        assert abs(rounded.mean().item() - x[0].double().item()) <= 5 * rounded.std().item() / 2**8


def test_the_square_root_is_correctly_rounded() -> None:
    """Where torch's own on the CPU is not: numpy's is, by IEEE."""
    random = np.random.default_rng(2).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
    values = np.concatenate([oracles.specials(), random])
    with np.errstate(invalid="ignore"):
        assert_same_bits(exact_sqrt(torch.from_numpy(values)), np.sqrt(values))


# -------------------------------------------------------------------------------------------------------- split master


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Split and join of optimizer.h made callable."""
    return cpp.compiled(tmp_path_factory, walks.WRAPPER)


@jit
def join_kernel(weights, remainders, back, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    joined = join_float32(tl.load(weights + at, mask=at < n), tl.load(remainders + at, mask=at < n))
    tl.store(back + at, joined, mask=at < n)


def needed(name: str, request: pytest.FixtureRequest) -> str | None:
    """Skip where an implementation cannot run; the path of the compiled library if it is the native one."""
    if name == "triton":
        needs_triton()
    return str(request.getfixturevalue("library")) if name == "native" else None


def join_by(name: str, path: str | None, weight: np.ndarray, remainder: np.ndarray) -> np.ndarray:
    """join alone, by one implementation, of uint16 codes and int16 remainders."""
    codes, rest = torch.from_numpy(weight.view(np.int16).copy()), torch.from_numpy(remainder.copy())
    n = codes.numel()
    back = torch.empty(n, dtype=FP32, device=walks.DEVICE if name == "triton" else "cpu")
    if name == "reference":
        back = join_master(codes.view(BF16), rest)
    elif path is not None:
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, rest, back)]
        walks.load(path).join_only(*addresses, ctypes.c_int64(n))
    else:
        block = walks.block_for(n)
        join_kernel[(-(-n // block),)](codes.view(BF16).to(back.device), rest.to(back.device), back, n, BLOCK=block)
    return oracles.to_numpy(back)


LOWER = np.unique(
    np.concatenate(
        [
            [0, 1, 2, 3, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF, 0x5555, 0xAAAA],
            1 << np.arange(16),
            (1 << np.arange(16)) - 1,
        ]
    )
)


def every_upper_half(lower: np.ndarray) -> np.ndarray:
    """All 2^16 upper halves, each with all of `lower`, and specials, as uint32."""
    upper = ((np.arange(2**16, dtype=np.uint32) << 16)[:, None] | lower.astype(np.uint32)).reshape(-1)
    return np.concatenate([upper, oracles.specials().view(np.uint32)])


@pytest.mark.parametrize("name", ALL)
def test_split_and_join(name: str, request: pytest.FixtureRequest) -> None:
    random = np.random.default_rng(0).integers(0, 2**32, 2**18 + 7, dtype=np.uint32)
    patterns = np.concatenate([every_upper_half(LOWER), random])
    walks.check_split(patterns, walks.round_trip(name, patterns, needed(name, request)))


@pytest.mark.parametrize("name", ALL)
def test_a_join_is_nan_only_where_the_weight_is(name: str, request: pytest.FixtureRequest) -> None:
    """Somebody zeroes a parameter and the old remainder stays: 0x00000000 - 5 would be 0xfffffffb, a NaN."""
    codes = np.arange(2**16, dtype=np.uint16)
    for stale in (-0x8000, -0x7FFF, -5, -1, 0, 1, 5, 0x7FFF):
        joined = join_by(name, needed(name, request), codes, np.full(2**16, stale, dtype=np.int16))
        nan = (codes & 0x7FFF) > 0x7F80
        assert (np.isnan(joined) == nan).all(), f"remainder {stale}"
        least = 0 if stale < 0 else stale * 2.0**-149
        assert joined[[0, 0x8000]].tolist() == [least, -least]
        number = ~nan & ~np.isinf(joined)
        # Near the weight that was written: within half a step of its code, so that it rounds to that code again.
        again, _ = oracles.split(joined[number])
        assert_same_bits(again, codes[number], f"weight joined with remainder {stale}")


# ------------------------------------------------------------------------------------------------ all 2^32 patterns


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_split_and_join_of_all_patterns(name: str, request: pytest.FixtureRequest) -> None:
    found = list(walks.in_processes(walks.walk_slice, name, needed(name, request)))
    assert sum(nans for nans, _ in found) == 2 * (2**23 - 1)
    assert sum(uneven for _, uneven in found) == 0x7F80, "one tie for every even code, of both signs together"
