"""Nearest, toward zero and stochastic rounding to every target format, saturating or not: the reference against
fractions, then C++ and Triton against the reference bit for bit."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import roundings
import torch
from implementations import ALL
from roundings import DTYPES

from halfstep.kernels import native
from halfstep.kernels.backend import INTERPRET, jit, tl, triton
from halfstep.kernels.philox import reference_words
from halfstep.kernels.rounding import FORMATS, ROUNDINGS, STOCHASTIC, TOWARD_ZERO, reference_round, round_float32

pytestmark = [pytest.mark.sample(3), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]

DEVICE = torch.device("cpu" if INTERPRET or not torch.cuda.is_available() else "cuda")
Round = Callable[[torch.Tensor, torch.dtype, int, bool, torch.Tensor], torch.Tensor]

modes = pytest.mark.parametrize(("rounding", "saturate"), list(itertools.product(ROUNDINGS, (False, True))))
dtypes = pytest.mark.parametrize("dtype", DTYPES)

STRUCTS = dict(zip(FORMATS, ("Float16", "BFloat16", "E4M3", "E5M2"), strict=True))
WRAPPER = """
#include "{header}"
using namespace halfstep;
"""
FUNCTION = """
extern "C" void round_{struct}_{rounding}_{saturate}(const float* x, const uint32_t* word, uint16_t* out, int64_t n) {{
    for (int64_t i = 0; i < n; ++i)
        out[i] = uint16_t(round_to<{struct}, Rounding({rounding}), {saturate}>(x[i], word[i]));
}}
"""


@jit
def round_kernel(
    x,
    words,
    out,
    n,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERFLOW: tl.constexpr,
    NAN: tl.constexpr,
    ROUNDING: tl.constexpr,
    SATURATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at, mask=at < n, other=0).to(tl.uint32)
    value = tl.load(x + at, mask=at < n, other=0.0)
    code = round_float32(value, word, BITS, MANTISSA, BIAS, LARGEST, OVERFLOW, NAN, ROUNDING, SATURATE)
    tl.store(out + at, code.to(tl.int32), mask=at < n)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    command = native.compiler()
    if command is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("modes")
    source, target = folder / "wrapper.cpp", folder / "wrapper.so"
    text = WRAPPER.format(header=Path(native.__file__).resolve().parent / "native.h")
    for struct, rounding, saturate in itertools.product(STRUCTS.values(), range(3), range(2)):
        text += FUNCTION.format(struct=struct, rounding=rounding, saturate=saturate)
    source.write_text(text)
    complaint = native._build(source, target, command)
    assert not complaint, complaint
    return ctypes.CDLL(str(target))


@pytest.fixture(params=ALL)
def round_by(request: pytest.FixtureRequest) -> Round:
    """One implementation, from fp32 values and words (int64) to codes as int64."""
    name = request.param

    def by_reference(
        x: torch.Tensor, dtype: torch.dtype, rounding: int, saturate: bool, words: torch.Tensor
    ) -> torch.Tensor:
        result = reference_round(x, dtype, rounding, saturate, words)
        assert result.dtype == dtype and result.shape == x.shape
        return codes_of(result)

    def by_cpp(x: torch.Tensor, dtype: torch.dtype, rounding: int, saturate: bool, words: torch.Tensor) -> torch.Tensor:
        function = getattr(library, f"round_{STRUCTS[dtype]}_{rounding}_{int(saturate)}")
        word, out = words.numpy().astype(np.uint32), np.empty(x.numel(), dtype=np.uint16)
        addresses = [ctypes.c_void_p(a) for a in (x.data_ptr(), word.ctypes.data, out.ctypes.data)]
        function(*addresses, ctypes.c_int64(x.numel()))
        return torch.from_numpy(out.astype(np.int64))

    def by_triton(
        x: torch.Tensor, dtype: torch.dtype, rounding: int, saturate: bool, words: torch.Tensor
    ) -> torch.Tensor:
        n = x.numel()
        out = torch.empty(n, dtype=torch.int32, device=DEVICE)
        block = min(2**20, 1 << max(n - 1, 1).bit_length()) if INTERPRET else 1024
        round_kernel[((n + block - 1) // block,)](
            x.to(DEVICE), words.to(DEVICE), out, n, *FORMATS[dtype], ROUNDING=rounding, SATURATE=saturate, BLOCK=block
        )
        return out.cpu().long()

    if name == "native":
        library = request.getfixturevalue("library")
        return by_cpp
    if name == "triton":
        if triton is None or not (INTERPRET or torch.cuda.is_available()):
            pytest.skip("needs Triton and a GPU or its interpreter")
        return by_triton
    return by_reference


def codes_of(result: torch.Tensor) -> torch.Tensor:
    return result.view(torch.uint8).long() if result.itemsize == 1 else result.view(torch.int16).long() & 0xFFFF


def is_nan(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    form = FORMATS[dtype]
    magnitude = codes & ((1 << (form.bits - 1)) - 1)
    return magnitude > form.overflow if form.overflow != form.nan else magnitude == form.nan


@cache
def by_fractions(dtype: torch.dtype, rounding: str, saturate: bool) -> tuple[np.ndarray, np.ndarray, list[int | None]]:
    """Values, words of noise, and the codes that they must round to."""
    values = roundings.points(dtype, every=1 if dtype.itemsize == 1 else 97)
    specials = np.array([0x7F800001, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    values = np.concatenate([values, specials])
    random = np.random.default_rng(0).integers(0, 2**32, len(values))
    words = np.concatenate([np.zeros(len(values), dtype=np.int64), np.full(len(values), 2**32 - 1), random])
    values = np.tile(values, 3)
    return (
        values,
        words,
        [
            roundings.code(x, dtype, rounding, saturate, word)
            for x, word in zip(values.tolist(), words.tolist(), strict=True)
        ],
    )


@dtypes
@modes
def test_every_rounding_against_fractions(round_by: Round, dtype: torch.dtype, rounding: str, saturate: bool) -> None:
    values, words, expected = by_fractions(dtype, rounding, saturate)
    codes = round_by(torch.from_numpy(values), dtype, ROUNDINGS.index(rounding), saturate, torch.from_numpy(words))
    found = [None if isnan else code for code, isnan in zip(codes.tolist(), is_nan(codes, dtype).tolist(), strict=True)]
    wrong = [at for at, (code, right) in enumerate(zip(found, expected, strict=True)) if code != right]
    assert not wrong, [(values[at].hex(), hex(words[at]), found[at], expected[at]) for at in wrong[:5]]


@dtypes
@modes
def test_every_implementation_has_the_bits_of_the_reference(
    round_by: Round, dtype: torch.dtype, rounding: str, saturate: bool
) -> None:
    generator = np.random.default_rng(1)
    patterns = generator.integers(0, 2**32, 2**17, dtype=np.uint32)
    # Exponents that the format can hold, and those just below, are rare among all patterns.
    near = generator.normal(size=2**16).astype(np.float32) * np.float32(2.0) ** generator.integers(-30, 18, 2**16)
    x = torch.from_numpy(np.concatenate([patterns.view(np.float32), near.astype(np.float32)]))
    words = torch.from_numpy(generator.integers(0, 2**32, x.numel()))
    mode = ROUNDINGS.index(rounding)
    assert torch.equal(
        round_by(x, dtype, mode, saturate, words), codes_of(reference_round(x, dtype, mode, saturate, words))
    )


@dtypes
def test_nearest_is_that_of_ml_dtypes_and_of_torch(dtype: torch.dtype) -> None:
    x = torch.from_numpy(np.random.default_rng(2).integers(0, 2**32, 2**18, dtype=np.uint32).view(np.float32))
    x = torch.cat([x, torch.from_numpy(roundings.points(dtype))])
    nan = x.isnan()
    ours, theirs = codes_of(reference_round(x, dtype)), codes_of(x.to(dtype))
    with np.errstate(all="ignore"):
        others = x.numpy().astype(roundings.NUMPY[dtype]).view(np.uint8 if dtype.itemsize == 1 else np.uint16)
    assert is_nan(ours[nan], dtype).all()
    assert torch.equal(ours[~nan], torch.from_numpy(others.astype(np.int64))[~nan])
    # What overflows in E4M3 becomes NaN in ml_dtypes and in some versions of torch, the largest number in others.
    defined = ~nan if roundings.HAS_INFINITY[dtype] else x.abs() <= 464.0
    assert torch.equal(ours[defined], theirs[defined])


@dtypes
@modes
def test_values_of_the_format_never_move(round_by: Round, dtype: torch.dtype, rounding: str, saturate: bool) -> None:
    bits = 8 * dtype.itemsize
    codes = torch.arange(2**bits)
    x = codes.to(torch.uint8 if bits == 8 else torch.int16).view(dtype).float()
    finite = x.isfinite()
    x, codes = x[finite], codes[finite]
    for word in (0, 1, 2**31, 2**32 - 1):
        words = torch.full_like(codes, word)
        assert torch.equal(round_by(x, dtype, ROUNDINGS.index(rounding), saturate, words), codes), hex(word)


@dtypes
def test_stochastic_rounding_is_unbiased_over_all_words_inside_the_normal_range(
    round_by: Round, dtype: torch.dtype
) -> None:
    """The mean over every value of the bits that are looked at is the number itself, exactly."""
    dropped = 23 - FORMATS[dtype].mantissa
    shift = 32 - dropped
    for value in (1.0 + 2.0**-23, -3.14159, 100.7):
        x = torch.full((2**dropped,), value)
        words = torch.arange(2**dropped) << shift
        codes = round_by(x, dtype, STOCHASTIC, False, words)
        rounded = codes.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype).double()
        assert rounded.mean().item() == x[0].double().item()


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES if d != torch.bfloat16]
)  # whose subnormals need no way of their own
def test_stochastic_rounding_of_subnormals_has_the_exact_probability(round_by: Round, dtype: torch.dtype) -> None:
    """Away from zero for exactly `part` of all draws of 23 - m bits, rounded to so many bits itself."""
    form = FORMATS[dtype]
    unit, steps = 2.0 ** (1 - form.bias - form.mantissa), 23 - form.mantissa
    generator = np.random.default_rng(3)
    units = np.concatenate([generator.uniform(0, 2**form.mantissa - 1, 500), [2.0**-13, 0.5, 2.0**-22, 2.0**-33]])
    x = torch.from_numpy((units * unit).astype(np.float32))
    exact = x.double() / unit
    parts = ((exact - exact.floor()) * 2**steps).round().long()
    last = round_by(x, dtype, STOCHASTIC, False, (2**steps - parts - 1).clamp(max=2**steps - 1) << (32 - steps))
    first = round_by(x, dtype, STOCHASTIC, False, (2**steps - parts).clamp(max=2**steps - 1) << (32 - steps))
    assert torch.equal(last, exact.floor().long() + (parts == 2**steps))
    assert torch.equal(first, exact.floor().long() + (parts > 0))


@dtypes
def test_the_probability_is_the_part_of_a_unit_to_2_16(round_by: Round, dtype: torch.dtype) -> None:
    """Over all 2^16 draws: exactly where 16 bits or fewer are dropped, the nearest multiple of 2^-16 in FP8."""
    draws, dropped = torch.arange(2**16) << 16 | 0x8000, 23 - FORMATS[dtype].mantissa
    for pattern in (0x3F800001, 0x3F9E0652, 0x40490FDB, 0x42C8FFFF, 0x3FAAAAAA, 0x3F80000F, 0x3F800008, 0x3F800007):
        x = torch.full((2**16,), pattern, dtype=torch.int32).view(torch.float32)
        codes = round_by(x, dtype, STOCHASTIC, False, draws)
        part = pattern % 2**dropped / 2**dropped
        assert int((codes - codes.min()).sum()) == int(part * 2**16 + 0.5) % 2**16, hex(pattern)


@dtypes
def test_the_mean_of_many_roundings_is_the_number(dtype: torch.dtype) -> None:
    """With the words that kernels use: within five standard errors, subnormals included."""
    n = 1 << 16
    form = FORMATS[dtype]
    smallest = 2.0 ** (1 - form.bias - form.mantissa)
    for stream, value in enumerate((1.2345, -0.777, smallest * 0.3, smallest * 1.7, -smallest * 2.01)):
        x = torch.full((n,), value)
        words = reference_words(torch.arange(n), 17, 0, stream)
        rounded = reference_round(x, dtype, STOCHASTIC, False, words).double()
        spread = rounded.std().item()
        assert abs(rounded.mean().item() - x[0].double().item()) <= 5 * spread / n**0.5
        assert len(rounded.unique()) == 2


@dtypes
def test_toward_zero_never_grows_and_is_within_a_unit(dtype: torch.dtype) -> None:
    x = torch.from_numpy(roundings.points(dtype))
    x = x[x.isfinite()]
    rounded = reference_round(x, dtype, TOWARD_ZERO).double()
    assert (rounded.abs() <= x.double().abs()).all()
    assert (rounded.signbit() == x.signbit()).all()
