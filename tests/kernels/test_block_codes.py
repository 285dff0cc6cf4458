"""Blocks of 8-bit codes: every code and exponent, rounding, what is not finite; the reference, C++ and Triton alike."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import block_oracle
import numpy as np
import oracles
import pytest
import torch
from implementations import ALL

from halfstep.kernels import block_codes, native
from halfstep.kernels.backend import INTERPRET, jit, tl, triton
from halfstep.kernels.block_codes import SPAN, blocks_per_row

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy, on the hostile patterns
]

DEVICE = torch.device("cpu" if INTERPRET or not torch.cuda.is_available() else "cuda")
# Encode fp32 numbers of shape (rows, columns), with random words or None, signed or positive; and decode.
Codec = tuple[
    Callable[[np.ndarray, np.ndarray | None, bool], tuple[np.ndarray, np.ndarray]],
    Callable[[np.ndarray, np.ndarray, bool], np.ndarray],
]
kinds = pytest.mark.parametrize("signed", [True, False], ids=["signed", "positive"])
modes = pytest.mark.parametrize("chance", [False, True], ids=["nearest", "stochastic"])

WRAPPER = """
#include "{header}"
using namespace halfstep;
extern "C" void encode(const float* x, const uint32_t* words, uint8_t* codes, uint8_t* exponent, int64_t n,
                       int64_t sign) {{
    *exponent = sign ? encode_signed(x, words, codes, n) : encode_positive(x, words, codes, n);
}}
extern "C" void decode(const uint8_t* codes, const uint8_t* exponent, float* x, int64_t n, int64_t sign) {{
    if (sign) decode_signed(codes, *exponent, x, n);
    else decode_positive(codes, *exponent, x, n);
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    command = native.compiler()
    if command is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("block_codes")
    source, target = folder / "wrapper.cpp", folder / "wrapper.so"
    source.write_text(WRAPPER.format(header=Path(native.__file__).resolve().parent / "block_codes.h"))
    complaint = native._build(source, target, command)
    assert not complaint, complaint
    return ctypes.CDLL(str(target))


@jit
def encode_kernel(x, words, codes, exponents, rows, SIGNED: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = row[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    here = row[:, None] < rows
    noise = tl.load(words + at, mask=here, other=0).to(tl.uint32) >> 12
    value = tl.load(x + at, mask=here, other=0.0)
    if SIGNED:
        code, exponent = block_codes.encode_signed_block(value, noise)
    else:
        code, exponent = block_codes.encode_positive_block(value, noise)
    tl.store(codes + at, code, mask=here)
    tl.store(exponents + row, exponent, mask=row < rows)


@jit
def decode_kernel(codes, exponents, x, rows, SIGNED: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = row[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    here = row[:, None] < rows
    power = block_codes.power_of_exponents(tl.load(exponents + row, mask=row < rows, other=0))[:, None]
    code = tl.load(codes + at, mask=here, other=0)
    if SIGNED:
        value = block_codes.decode_signed_block(code, power)
    else:
        value = block_codes.decode_positive_block(code, power)
    tl.store(x + at, value, mask=here)


def as_blocks(array: np.ndarray) -> np.ndarray:
    """Each block a row of 128 elements, filled up with zeros."""
    rows, columns = array.shape
    count = blocks_per_row(columns)
    return np.pad(array, ((0, 0), (0, count * SPAN - columns))).reshape(rows * count, SPAN)


def as_rows(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return np.ascontiguousarray(array.reshape(rows, -1)[:, :columns])


@pytest.fixture(params=ALL)
def codec(request: pytest.FixtureRequest) -> Codec:
    """One implementation."""
    name = request.param
    if name == "reference":

        def encode(x: np.ndarray, words: np.ndarray | None, signed: bool) -> tuple[np.ndarray, np.ndarray]:
            noise = block_codes.noise_of(None if words is None else torch.from_numpy(words.astype(np.int64)))
            function = block_codes.encode_signed if signed else block_codes.encode_positive
            codes, exponents = function(torch.from_numpy(x.copy()), noise)
            assert codes.dtype == exponents.dtype == torch.uint8 and codes.shape == x.shape and codes.is_contiguous()
            return codes.numpy(), exponents.numpy()

        def decode(codes: np.ndarray, exponents: np.ndarray, signed: bool) -> np.ndarray:
            function = block_codes.decode_signed if signed else block_codes.decode_positive
            return function(torch.from_numpy(codes), torch.from_numpy(exponents)).numpy()

        return encode, decode
    if name == "native":
        cpp = request.getfixturevalue("library")

        def call(function: str, *arguments: object) -> None:
            places = [ctypes.c_void_p(one.ctypes.data) for one in arguments if isinstance(one, np.ndarray)]
            getattr(cpp, function)(*places, *(ctypes.c_int64(one) for one in arguments if isinstance(one, int)))

        def encode(x: np.ndarray, words: np.ndarray | None, signed: bool) -> tuple[np.ndarray, np.ndarray]:
            words = np.full(x.shape, 2**31, np.uint32) if words is None else words
            codes = np.full(x.shape, 77, np.uint8)
            exponents = np.empty((x.shape[0], blocks_per_row(x.shape[1])), np.uint8)
            for row, at in np.ndindex(exponents.shape):
                part = slice(at * SPAN, (at + 1) * SPAN)
                pieces = x[row, part], words[row, part], codes[row, part], exponents[row, at:]
                call("encode", *pieces, pieces[0].size, int(signed))
            return codes, exponents

        def decode(codes: np.ndarray, exponents: np.ndarray, signed: bool) -> np.ndarray:
            x = np.empty(codes.shape, np.float32)
            for row, at in np.ndindex(exponents.shape):
                part = slice(at * SPAN, (at + 1) * SPAN)
                call("decode", codes[row, part], exponents[row, at:], x[row, part], x[row, part].size, int(signed))
            return x

        return encode, decode
    if triton is None or not (INTERPRET or torch.cuda.is_available()):
        pytest.skip("needs Triton, and a GPU or TRITON_INTERPRET=1")

    def launch(kernel: object, rows: int, *tensors: torch.Tensor, signed: bool) -> None:
        many = 2**10 if INTERPRET else 8
        grid = ((rows + many - 1) // many,)
        kernel[grid](*tensors, rows, SIGNED=signed, SPAN=SPAN, BLOCKS=many)  # type: ignore[index]

    def encode(x: np.ndarray, words: np.ndarray | None, signed: bool) -> tuple[np.ndarray, np.ndarray]:
        words = np.full(x.shape, 2**31, np.uint32) if words is None else words
        values, random = as_blocks(x), as_blocks(words).astype(np.int64)
        codes = torch.empty(values.shape, dtype=torch.uint8, device=DEVICE)
        exponents = torch.empty(len(values), dtype=torch.uint8, device=DEVICE)
        given = torch.from_numpy(values).to(DEVICE), torch.from_numpy(random).to(DEVICE)
        launch(encode_kernel, len(values), *given, codes, exponents, signed=signed)
        return as_rows(codes.cpu().numpy(), *x.shape), exponents.cpu().numpy().reshape(x.shape[0], -1)

    def decode(codes: np.ndarray, exponents: np.ndarray, signed: bool) -> np.ndarray:
        given = as_blocks(codes)
        x = torch.empty(given.shape, dtype=torch.float32, device=DEVICE)
        scales = torch.from_numpy(exponents.reshape(-1)).to(DEVICE)
        launch(decode_kernel, len(given), torch.from_numpy(given).to(DEVICE), scales, x, signed=signed)
        return as_rows(x.cpu().numpy(), *codes.shape)

    return encode, decode


def usual(exponents: np.ndarray, signed: bool) -> np.ndarray:
    """Those exponent bytes that an encoder writes."""
    return exponents[(exponents >= (18 if signed else 32)) | (exponents == 0)]


def random_words(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    words = rng.integers(0, 2**16, shape, dtype=np.uint32) << np.uint32(16) | np.uint32(2**15)
    words[..., ::7], words[..., 3::11] = 2**15, 2**32 - 2**15
    return words


def check(codec: Codec, x: np.ndarray, words: np.ndarray | None, signed: bool) -> np.ndarray:
    """Encode, compare with the oracle, decode, compare again, encode again. Returns what was decoded."""
    encode, decode = codec
    codes, exponents = encode(x, words, signed)
    expected = block_oracle.encoded(x, words, signed)
    oracles.assert_same_bits(exponents, expected[1], "exponents")
    oracles.assert_same_bits(codes, expected[0], "codes")
    back = decode(codes, exponents, signed)
    oracles.assert_same_bits(back, block_oracle.decoded(codes, exponents, signed), "decoded")
    for again in (None, words):
        assert all((one == other).all() for one, other in zip(encode(back, again, signed), expected, strict=True))
    return back


@kinds
def test_every_code_under_every_exponent(codec: Codec, signed: bool) -> None:
    """All 256 x 256 pairs decode as defined. Blocks that an encoder writes are encoded again with the same bits."""
    encode, decode = codec
    bytes_of = usual(np.arange(256, dtype=np.uint8), signed)
    exponents = np.repeat(bytes_of[:, None], 4, axis=1)
    # Each block has one of the largest codes.
    largest = [np.uint8(0x7F if signed else 0xFF), np.uint8(0xFF)]
    parts = [np.append(np.arange(64, dtype=np.uint8) + np.uint8(64 * k), largest[k % 2]) for k in range(4)]
    row = np.concatenate([np.pad(part, (0, SPAN - len(part)), mode="edge") for part in parts])
    assert set(row) == set(range(256))
    table = np.repeat(row[None], len(bytes_of), axis=0)
    x = decode(table, exponents, signed)
    oracles.assert_same_bits(x, block_oracle.decoded(table, exponents, signed))
    known = (bytes_of > 0) & (bytes_of < 255)
    for words in (None, random_words(table[known].shape, np.random.default_rng(0))):
        again, bytes_again = encode(x[known], words, signed)
        oracles.assert_same_bits(again, table[known])
        oracles.assert_same_bits(bytes_again, exponents[known])


@kinds
@modes
@pytest.mark.parametrize("columns", [1, 2, 127, 128, 129, 300])
def test_random_blocks(codec: Codec, signed: bool, chance: bool, columns: int) -> None:
    """Numbers of all sizes, blocks of one size, and blocks that spread over more than the codes reach."""
    rng = np.random.default_rng(columns)
    shape = (60, columns)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-150, 127, (60, 1))) * np.exp2(-rng.exponential(8, shape))
    x[::3] *= rng.random((20, columns)) < 0.1
    with np.errstate(all="ignore"):
        values = np.nan_to_num(x.astype(np.float32))
    values = values if signed else np.abs(values)
    check(codec, values, random_words(shape, rng) if chance else None, signed)


@kinds
@modes
def test_thresholds_of_rounding(codec: Codec, signed: bool, chance: bool) -> None:
    """Codes, midpoints and their neighbors among fp32 numbers, in blocks of small, ordinary and large exponents."""
    rng = np.random.default_rng(1)
    table = block_oracle.SIGNED if signed else block_oracle.POSITIVE
    between = np.concatenate([table, (table[1:] + table[:-1]) / 2, table[1:] - np.diff(table) / 4, [table[-1]]])
    rows = []
    for exponent in (18, 32, 33, 127, 140, 253, 254):
        patterns = np.ldexp(between, exponent - 127).astype(np.float32).view(np.int32)
        for offset in (-1, 0, 1):
            moved = np.clip(patterns.astype(np.int64) + offset, 0, 0x7F700000).astype(np.int32).view(np.float32)
            rows.append(np.resize(rng.permutation(moved), 1024))
    x = np.stack(rows)
    x[::2] = np.copysign(x[::2], rng.standard_normal(x[::2].shape)) if signed else x[::2]
    check(codec, x, random_words(x.shape, rng) if chance else None, signed)


@kinds
@modes
@pytest.mark.parametrize("bad", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0x7F7FFFFF])
def test_what_is_not_finite_makes_its_block_nan(codec: Codec, signed: bool, chance: bool, bad: int) -> None:
    """NaN of any payload, infinity, and a number that rounds to it; other blocks do not notice."""
    x = np.ones((3, 300), np.float32)
    x[1, 150] = np.array([bad], np.uint32).view(np.float32)[0]
    x.view(np.uint32)[1, 150] = bad  # numpy may have made a signalling NaN quiet
    words = np.full(x.shape, 2**32 - 2**15, np.uint32) if chance else None
    back = check(codec, x, words, signed)
    assert np.isnan(back[1, 128:256]).all() and np.isfinite(back).sum() == 3 * 300 - 128


@kinds
@modes
def test_blocks_of_zeros_and_of_the_smallest_numbers(codec: Codec, signed: bool, chance: bool) -> None:
    rng = np.random.default_rng(2)
    patterns = [0, 1, 2, 2**19, 2**20 - 1, 2**20, 2**20 + 1, 2**21 - 1, 2**21, 2**22, 0x7FFFFF, 0x800000, 0x8FFFFF]
    patterns += [exponent << 23 | rest for exponent in (17, 18, 31, 32, 33) for rest in (0, 1, 0x780000, 0x7FFFFF)]
    x = np.repeat(np.array(patterns, np.uint32).view(np.float32)[:, None], 140, axis=1)
    x[:, 1::2] = 0.0  # beside zeros
    x[:, 4::8] = -0.0 if signed else 0.0
    back = check(codec, x, random_words(x.shape, rng) if chance else None, signed)
    assert (back[0] == 0).all()
    if not signed:  # no zero beside a number that is not
        some = (back != 0).any(axis=1)
        assert (back[some] >= 2.0**-126).all() and some[patterns.index(2**21) :].all()


@kinds
def test_a_range_of_rows_is_encoded_as_in_the_whole(signed: bool) -> None:
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.standard_normal((9, 333)).astype(np.float32))
    function = block_codes.encode_signed if signed else block_codes.encode_positive
    whole = function(x)
    for start, stop in ((0, 4), (4, 9), (2, 2)):
        for part, of in zip(function(x[start:stop]), whole, strict=True):
            assert torch.equal(part, of[start:stop])


@kinds
def test_the_mean_of_stochastic_rounding_is_the_number(codec: Codec, signed: bool) -> None:
    """Over all 2^16 draws, within half of a draw; below the smallest normal code too."""
    encode, decode = codec
    draws = np.arange(2**16, dtype=np.uint32) << np.uint32(16) | np.uint32(2**15)
    for value in (1.0 + 0.3 / 8, 1.93, 2.0**-12 * 1.01, 2.0**-16 * 0.77, 2.0**-20):
        x = np.full((2**10, SPAN), value, np.float32)
        words = np.zeros(x.shape, np.uint32)
        words[:, 1 : 1 + 2**6] = draws.reshape(2**10, 2**6)
        x[:, 0] = 1.0
        back = decode(*encode(x, words, signed), signed)[:, 1 : 1 + 2**6].astype(np.float64)
        unit = 2.0 ** (max(np.frexp(value)[1] - 1, -14 if signed else -31) - 3)
        assert abs(back.mean() - np.float32(value)) <= unit * 2.0**-17 + 1e-12, value
