"""Blocks of 8-bit codes: every code and scale, rounding, non-finite values; in the reference, C++ and Triton."""

from __future__ import annotations

import ctypes

import block_oracle
import cpp
import numpy as np
import oracles
import pytest
import torch
from implementations import ALL

from halfstep.kernels import backend, block_codes
from halfstep.kernels.backend import INTERPRET, cuda_capability_geq, jit, tl, triton
from halfstep.kernels.block_codes import SPAN, blocks_per_row

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy, on the hostile patterns
]

DEVICE = torch.device("cpu" if INTERPRET or not torch.cuda.is_available() else "cuda")
KINDS = {"positive": (np.uint8, np.int16), "signed": (np.uint8, np.uint8), "linear": (np.int8, np.uint8)}
kinds = pytest.mark.parametrize("kind", KINDS)
modes = pytest.mark.parametrize("chance", [False, True], ids=["nearest", "stochastic"])

WRAPPER = """
#include "{header}"
using namespace halfstep;
extern "C" void encode(const float* x, const uint32_t* words, uint8_t* codes, void* scale, int64_t n, int64_t kind) {{
    float numbers[SPAN];
    uint32_t chances[SPAN]{{}};
    std::memcpy(numbers, x, n * sizeof *x);
    std::memcpy(chances, words, n * sizeof *words);
    fill_up(numbers, n);
    if (kind == 2) *(uint8_t*)scale = encode_linear(numbers, chances, codes, n);
    else if (kind) *(uint8_t*)scale = encode_signed(numbers, chances, codes, n);
    else *(uint16_t*)scale = encode_positive(numbers, chances, codes, n);
}}
extern "C" void decode(const uint8_t* codes, const void* scale, float* x, int64_t n, int64_t kind) {{
    float numbers[SPAN];
    if (kind == 2) decode_linear(codes, *(const uint8_t*)scale, numbers, n);
    else if (kind) decode_signed(codes, *(const uint8_t*)scale, numbers, n);
    else decode_positive(codes, *(const uint16_t*)scale, numbers, n);
    std::memcpy(x, numbers, n * sizeof *x);
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return cpp.library(tmp_path_factory, WRAPPER.format(header=cpp.KERNELS / "block_codes.h"))


@jit
def encode_kernel(x, words, exists, codes, scales, rows, KIND: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = row[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    here = row[:, None] < rows
    noise = tl.load(words + at, mask=here, other=0).to(tl.uint32) >> 8
    value = tl.load(x + at, mask=here, other=0.0)
    if KIND == "signed":
        code, scale = block_codes.encode_signed_block(value, noise)
    elif KIND == "linear" and cuda_capability_geq(8, 0):
        code, scale = block_codes.encode_linear_packed(value, noise, True)
    elif KIND == "linear":
        code, scale = block_codes.encode_linear_block(value, noise)
    else:
        code, scale = block_codes.encode_positive_block(value, noise, tl.load(exists + at, mask=here, other=0) != 0)
    tl.store(codes + at, code, mask=here)
    tl.store(scales + row, scale, mask=row < rows)


@jit
def decode_kernel(codes, scales, x, rows, KIND: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = row[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    here = row[:, None] < rows
    scale = tl.load(scales + row, mask=row < rows, other=0)[:, None]
    code = tl.load(codes + at, mask=here, other=0)
    if KIND == "signed":
        value = block_codes.decode_signed_block(code, block_codes.power_of_exponents(scale))
    elif KIND == "linear":
        value = block_codes.decode_linear_block(code, block_codes.power_of_exponents(scale))
    else:
        value = block_codes.decode_positive_block(code, scale)
    tl.store(x + at, value, mask=here)


def as_blocks(array: np.ndarray) -> np.ndarray:
    """Each block a row of SPAN elements, filled up with zeros."""
    rows, columns = array.shape
    count = blocks_per_row(columns)
    return np.pad(array, ((0, 0), (0, count * SPAN - columns))).reshape(rows * count, SPAN)


def as_rows(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return np.ascontiguousarray(array.reshape(rows, -1)[:, :columns])


class Codec:
    """One implementation: encodes fp32 numbers of shape (rows, columns), with random words or None, of a kind; and
    decodes."""

    def encode(self, x: np.ndarray, words: np.ndarray | None, kind: str) -> tuple[np.ndarray, np.ndarray]:
        noise = block_codes.noise_of(None if words is None else torch.from_numpy(words.astype(np.int64)))
        function = getattr(block_codes, f"encode_{kind}")
        codes, scales = function(torch.from_numpy(x.copy()), noise)
        assert codes.shape == x.shape and codes.is_contiguous()
        assert (codes.numpy().dtype, scales.numpy().dtype) == KINDS[kind]
        return codes.numpy(), scales.numpy()

    def decode(self, codes: np.ndarray, scales: np.ndarray, kind: str) -> np.ndarray:
        return getattr(block_codes, f"decode_{kind}")(torch.from_numpy(codes), torch.from_numpy(scales)).numpy()


class NativeCodec(Codec):
    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def by_block(self, function: str, arrays: list[np.ndarray], scales: np.ndarray, kind: str) -> None:
        """Call for each block. Scales come last for an encoder, and after the codes for a decoder."""
        for row, at in np.ndindex(scales.shape):
            parts = [array[row, at * SPAN : (at + 1) * SPAN] for array in arrays]
            parts.insert(3 if function == "encode" else 1, scales[row, at:])
            places = [ctypes.c_void_p(part.ctypes.data) for part in parts]
            getattr(self.library, function)(
                *places, ctypes.c_int64(parts[0].size), ctypes.c_int64(list(KINDS).index(kind))
            )

    def encode(self, x: np.ndarray, words: np.ndarray | None, kind: str) -> tuple[np.ndarray, np.ndarray]:
        words = np.full(x.shape, 2**31, np.uint32) if words is None else words
        codes = np.full(x.shape, 77, KINDS[kind][0])
        scales = np.empty((x.shape[0], blocks_per_row(x.shape[1])), KINDS[kind][1])
        self.by_block("encode", [x, words, codes], scales, kind)
        return codes, scales

    def decode(self, codes: np.ndarray, scales: np.ndarray, kind: str) -> np.ndarray:
        x = np.empty(codes.shape, np.float32)
        self.by_block("decode", [codes, x], scales, kind)
        return x


class TritonCodec(Codec):
    def launch(self, kernel: object, *arrays: np.ndarray, kind: str) -> list[torch.Tensor]:
        """Launch over blocks. Returns the tensors."""
        tensors = [torch.from_numpy(array).to(DEVICE) for array in arrays]
        rows, many = len(arrays[0]), 2**10 if INTERPRET else 8
        kernel[(-(-rows // many),)](*tensors, rows, KIND=kind, SPAN=SPAN, BLOCKS=many)  # type: ignore[index]
        return tensors

    def encode(self, x: np.ndarray, words: np.ndarray | None, kind: str) -> tuple[np.ndarray, np.ndarray]:
        words = np.full(x.shape, 2**31, np.uint32) if words is None else words
        values, random = as_blocks(x), as_blocks(words).astype(np.int64)
        codes, scales = np.empty(values.shape, KINDS[kind][0]), np.empty(len(values), KINDS[kind][1])
        exists = as_blocks(np.ones(x.shape, np.uint8))
        *_, code, scale = self.launch(encode_kernel, values, random, exists, codes, scales, kind=kind)
        return as_rows(code.cpu().numpy(), *x.shape), scale.cpu().numpy().reshape(x.shape[0], -1)

    def decode(self, codes: np.ndarray, scales: np.ndarray, kind: str) -> np.ndarray:
        given = as_blocks(codes)
        *_, x = self.launch(decode_kernel, given, scales.reshape(-1), np.empty(given.shape, np.float32), kind=kind)
        return as_rows(x.cpu().numpy(), *codes.shape)


@pytest.fixture(params=ALL)
def codec(request: pytest.FixtureRequest) -> Codec:
    if request.param == "native":
        return NativeCodec(request.getfixturevalue("library"))
    if request.param == "triton" and (triton is None or not (backend.TAKES_CPU_TENSORS or torch.cuda.is_available())):
        pytest.skip("needs Triton, and a GPU or TRITON_INTERPRET=1")
    return TritonCodec() if request.param == "triton" else Codec()


def random_words(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    words = rng.integers(0, 2**16, shape, dtype=np.uint32) << np.uint32(16) | np.uint32(2**15)
    words[..., ::7], words[..., 3::11] = 2**15, 2**32 - 2**15
    return words


def decoded(codes: np.ndarray, scales: np.ndarray, kind: str) -> np.ndarray:
    linear = kind == "linear"
    return (
        block_oracle.decoded_linear(codes, scales) if linear else block_oracle.decoded(codes, scales, kind == "signed")
    )


def check(codec: Codec, x: np.ndarray, words: np.ndarray | None, kind: str) -> np.ndarray:
    """Encode, compare with the oracle, decode, compare again, encode again. Returns what was decoded."""
    encode, decode = codec.encode, codec.decode
    codes, scales = encode(x, words, kind)
    linear = kind == "linear"
    expected = block_oracle.encoded_linear(x, words) if linear else block_oracle.encoded(x, words, kind == "signed")
    oracles.assert_same_bits(scales, expected[1], "scales")
    oracles.assert_same_bits(codes, expected[0], "codes")
    back = decode(codes, scales, kind)
    oracles.assert_same_bits(back, decoded(codes, scales, kind), "decoded")
    for again in (None, words, np.full(x.shape, block_oracle.UP), np.zeros(x.shape, np.uint32)):
        oracles.assert_same_bits(decode(*encode(back, again, kind), kind), back, "encoded again")
    return back


def rows_with_every_code(ends: list[int], blocks: int = 9) -> np.ndarray:
    """A row of all codes, each block of which has the codes `ends`."""
    each = SPAN - len(ends)
    parts = [np.append(np.arange(each * k, each * (k + 1)).clip(max=255), ends) for k in range(blocks)]
    row = np.concatenate(parts).astype(np.uint8)
    assert set(row) == set(range(256))
    return row


def again(codec: Codec, table: np.ndarray, scales: np.ndarray, kind: str) -> None:
    """Decode, compare with the oracle, and encode with and without chance to the same numbers."""
    encode, decode = codec.encode, codec.decode
    x = decode(table, scales, kind)
    oracles.assert_same_bits(x, decoded(table, scales, kind))
    numbers = np.isfinite(x).all(axis=1) & (scales[:, 0] != 0)
    for words in (None, random_words(x[numbers].shape, np.random.default_rng(0))):
        codes, found = encode(x[numbers], words, kind)
        oracles.assert_same_bits(decode(codes, found, kind), x[numbers])
        if kind != "positive":  # with the same codes too
            oracles.assert_same_bits(codes, table[numbers])
            oracles.assert_same_bits(found, scales[numbers])


def test_every_signed_code_under_every_exponent(codec: Codec) -> None:
    row = rows_with_every_code([0x7F, 0xFF], blocks=9)
    exponents = np.append([0], np.arange(18, 256)).astype(np.uint8)
    again(codec, np.repeat(row[None], len(exponents), axis=0), np.repeat(exponents[:, None], 9, axis=1), "signed")


def test_every_linear_code_under_every_exponent(codec: Codec) -> None:
    row = np.concatenate([np.append(np.arange(30 * k, 30 * k + 30).clip(max=254), [0, 254]) - 127 for k in range(9)])
    exponents = np.append([0], np.arange(24, 256 - 7)).astype(np.uint8)
    table = np.repeat(row[None].astype(np.int8), len(exponents), axis=0)
    again(codec, table, np.repeat(exponents[:, None], 9, axis=1), "linear")
    assert np.isnan(codec.decode(table[:1], np.full((1, 9), 255, np.uint8), "linear")).all()


@pytest.mark.sample(1)
def test_quotients_of_linear_codes_are_rounded_down(codec: Codec) -> None:
    """Negative numbers just beyond what the noise lifts to 0, which become -1, and those that it does lift."""
    noise = 2 ** np.arange(23)
    x = np.zeros((2, SPAN), np.float32)
    x[:, 31], x[0, :23], x[1, :23] = 127, -(noise + 0.5) / 2**24, -noise / 2**24
    words = np.zeros(x.shape, np.uint32)
    words[:, :23] = noise << 8
    back = check(codec, x, words, "linear")
    assert (back[0, :23] == -1).all() and (back[1, :23] == 0).all()


def test_linear_codes_are_right_on_average() -> None:
    """Over all 2^16 random bits, the mean of a code is the quotient to 2^-17: of negative numbers too."""
    x = np.random.default_rng(4).uniform(-1, 1, 32).astype(np.float32)
    x[0] = -127 / 128
    words = (np.arange(2**16, dtype=np.uint32) << np.uint32(16) | np.uint32(2**15))[:, None]
    codes, scales = Codec().encode(np.repeat(x[None], 2**16, axis=0), np.repeat(words, 32, axis=1), "linear")
    assert (scales == 127 - 7).all()
    assert (np.abs(codes.mean(axis=0) - 128 * x.astype(np.float64)) <= 2.0**-17).all()


def test_every_positive_code_under_every_scale(codec: Codec) -> None:
    """Bases and steps whose largest code is a number, each third one and the last ones."""
    row = rows_with_every_code([0, 255])
    pairs = [(base, step) for base in range(1, 255) for step in range(16, 21)]
    fitting = [base << 7 | step for base, step in pairs if (base << 7) + (255 << step - 16) <= 0x7F70]
    assert 254 << 7 | 15 not in fitting and 223 << 7 | 20 in fitting and 224 << 7 | 20 not in fitting
    scales = np.array(fitting[::3] + fitting[-3:], np.int16)
    again(codec, np.repeat(row[None], len(scales), axis=0), np.repeat(scales[:, None], 9, axis=1), "positive")
    nothing = np.zeros((1, SPAN), np.uint8)
    for scale, meaning in ((0, 0.0), (block_oracle.NAN_SCALE, np.nan)):
        decoded = codec.decode(nothing, np.full((1, 1), scale, np.int16), "positive")
        assert np.array_equal(decoded, np.full((1, SPAN), meaning), equal_nan=True)


@kinds
@modes
@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 100])
def test_random_blocks(codec: Codec, kind: str, chance: bool, columns: int) -> None:
    """Numbers of all sizes, blocks of one size, and blocks that spread over more than the codes reach."""
    rng = np.random.default_rng(columns)
    shape = (60, columns)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-150, 127, (60, 1))) * np.exp2(-rng.exponential(8, shape))
    x[::3] *= rng.random((20, columns)) < 0.1
    with np.errstate(all="ignore"):
        values = np.nan_to_num(x.astype(np.float32))
    values = np.abs(values) if kind == "positive" else values
    check(codec, values, random_words(shape, rng) if chance else None, kind)


@kinds
@modes
def test_thresholds_of_rounding(codec: Codec, kind: str, chance: bool) -> None:
    """Codes, midpoints and their neighbors among fp32 numbers, in blocks of small, ordinary and large scales."""
    rng = np.random.default_rng(1)
    tables = {
        "signed": [block_oracle.SIGNED],
        "linear": [np.arange(128.0)],
        "positive": [block_oracle.positive(0, step) for step in range(16, 21)],
    }[kind]
    rows = []
    for table in tables:
        between = np.concatenate([table, (table[1:] + table[:-1]) / 2, table[1:] - np.diff(table) / 4, [table[-1]]])
        top = np.frexp(table[-1])[1] - 1
        for exponent in (33, 254) if kind == "positive" else (18, 127, 254):
            patterns = np.ldexp(between, exponent - 127 - top).astype(np.float32).view(np.int32)
            for offset in (-1, 0, 1):
                moved = np.clip(patterns.astype(np.int64) + offset, 0, 0x7F700000).astype(np.int32).view(np.float32)
                row = np.resize(rng.permutation(moved), 1024)
                row[::SPAN], row[1::SPAN] = moved[0], moved[len(table) - 1]  # so that the block has this step
                rows.append(row)
    x = np.stack(rows)
    x[::2] = x[::2] if kind == "positive" else np.copysign(x[::2], rng.standard_normal(x[::2].shape))
    check(codec, x, random_words(x.shape, rng) if chance else None, kind)


@kinds
@modes
@pytest.mark.parametrize("bad", [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0])
def test_non_finite_values_make_their_block_nan(codec: Codec, kind: str, chance: bool, bad: int) -> None:
    """NaN of any payload, infinity, and numbers beyond the largest one (0 stands for); other blocks do not notice."""
    x = np.ones((3, 300), np.float32)
    largest = np.float32(block_oracle.LARGEST_LINEAR if kind == "linear" else block_oracle.LARGEST)
    bad = bad or int(largest.view(np.uint32)) + 1
    x[1, 150] = np.array([bad], np.uint32).view(np.float32)[0]
    x.view(np.uint32)[1, 150] = bad  # numpy may have made a signalling NaN quiet
    words = np.full(x.shape, 2**32 - 2**15, np.uint32) if chance else None
    x[0, 0] = largest  # which is a number
    back = check(codec, x, words, kind)
    assert np.isnan(back[1, 128:160]).all() and np.isfinite(back).sum() == 3 * 300 - SPAN


@kinds
@modes
def test_blocks_of_zeros_and_of_the_smallest_numbers(codec: Codec, kind: str, chance: bool) -> None:
    rng = np.random.default_rng(2)
    patterns = [0, 1, 2, 2**19, 2**22, 0x7EFFFF, 0x7F0000, 0x7F0001, 0x7FFFFF, 0x800000, 0x8FFFFF]
    patterns += [exponent << 23 | rest for exponent in (17, 18, 31, 32, 33) for rest in (0, 1, 0x780000, 0x7FFFFF)]
    x = np.repeat(np.array(patterns, np.uint32).view(np.float32)[:, None], 140, axis=1)
    x[:, 1::2] = 0.0  # beside zeros
    x[:, 4::8] = 0.0 if kind == "positive" else -0.0
    back = check(codec, x, random_words(x.shape, rng) if chance else None, kind)
    assert (back[0] == 0).all()
    if kind == "positive":  # no zero beside a number that is not
        some = (back != 0).any(axis=1)
        assert (back[some] >= 2.0**-126).all() and some.tolist() == [pattern > 0x7F0000 for pattern in patterns]


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(("shape", "blocks"), [((0, 70), 3), ((0, 96, 96), 288)])
def test_a_shard_without_rows_has_codes_and_scales(shape: tuple[int, ...], blocks: int, linear: bool) -> None:
    codes, scales = block_codes.encode(torch.zeros(shape), 0, signed=True, linear=linear)
    assert scales.shape == (0, blocks)
    assert block_codes.decode(codes, scales, signed=True).shape == shape
