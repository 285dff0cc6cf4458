"""Random bits: the published test vectors, and the same words from the reference, from C++ and from Triton."""

from __future__ import annotations

import ctypes

import cpp
import noise
import numpy as np
import pytest
import torch

from halfstep.kernels.backend import INTERPRET, jit, tl, triton
from halfstep.kernels.philox import reference_words, words_of, words_of_groups

pytestmark = pytest.mark.sample(3)

DEVICE = torch.device("cpu" if INTERPRET or not torch.cuda.is_available() else "cuda")

# Counter, key and result of philox4x32 with 7 rounds, from the file kat_vectors of Random123, the authors' own.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]

SEEDS = (0, 1, 2**31 + 5, 0x1234_5678_9ABC_DEF0, 2**63 - 1)
# From the start, across 2^32 elements, and across the 2^35 where the second word of the counter begins to count.
FIRSTS = (0, 3, 2**32 - 6, 2**35 - 2, 2**40 + 5)


def words_by_definition(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox4x32-7 in Python integers, from the definition in the paper."""
    c, k = list(counter), list(key)
    for _ in range(7):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k[0], right % 2**32, (left >> 32) ^ c[3] ^ k[1], left % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def word_by_definition(element: int, seed: int, step: int, stream: int, draw: int) -> int:
    """The word of an element in Python integers, from the docstring of kernels/philox.py."""
    group, place = divmod(element, 8)
    w = words_by_definition((group % 2**32, group >> 32, step, stream), (seed % 2**32, seed >> 32))
    k = place // 2
    mixed = w[k] if draw == 0 else w[k] ^ w[(k + 1) % 4] if draw == 1 else w[k] ^ w[(k + 1) % 4] ^ w[(k + 2) % 4]
    return (mixed // 2**16 if element % 2 else mixed % 2**16) * 2**16 + 2**15


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_reference_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert words_by_definition(counter, key) == list(expected)
    group = counter[0] | counter[1] << 32
    if group < 2**60:  # an index counts elements, eight per group, and so ends before the counter does
        words = reference_words(8 * group + torch.arange(8), key[0] | key[1] << 32, counter[2], counter[3])
        assert words.tolist() == [half << 16 | 0x8000 for word in expected for half in (word & 0xFFFF, word >> 16)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", FIRSTS)
def test_the_reference_and_the_oracle_against_the_definition(first: int, seed: int) -> None:
    step, stream = 7, 2**32 - 1
    index = torch.arange(first, first + 17)
    for draw in range(3):
        words = [word_by_definition(element, seed, step, stream, draw) for element in index.tolist()]
        assert reference_words(index, seed, step, stream, draw).tolist() == words
        assert noise.words(index.numpy().astype(np.uint64), seed, step, stream, draw).tolist() == words


@jit
def every_word_kernel(out, first, seed, step, stream, n, DRAWS: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    index = tl.load(first) + lane
    word, second, third = words_of(index, tl.load(seed), step, stream, DRAWS)
    tl.store(out + lane, word.to(tl.int64), mask=lane < n)
    tl.store(out + n + lane, second.to(tl.int64), mask=lane < n)
    tl.store(out + 2 * n + lane, third.to(tl.int64), mask=lane < n)


@jit
def runs_kernel(out, first, seed, step, stream, DRAWS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr):
    firsts = tl.load(first) + EACH * tl.arange(0, BLOCK // EACH)
    word, second, third = words_of_groups(firsts >> 3, firsts, tl.load(seed), step, stream, DRAWS, EACH, BLOCK)
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, word.to(tl.int64))
    tl.store(out + BLOCK + lane, second.to(tl.int64))
    tl.store(out + 2 * BLOCK + lane, third.to(tl.int64))


needs_triton = pytest.mark.skipif(
    triton is None or not (INTERPRET or torch.cuda.is_available()), reason="needs Triton and a GPU or its interpreter"
)


@needs_triton
@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", FIRSTS)
def test_triton_gives_the_words_of_the_reference(first: int, seed: int, draws: int) -> None:
    # In memory: the interpreter takes an integer argument from 2^31 to 2^32 for a negative one.
    start, key = torch.tensor(first, device=DEVICE), torch.tensor(seed, device=DEVICE)
    out = torch.empty(3, 64, dtype=torch.int64, device=DEVICE)

    def expected(from_: int, step: int, stream: int) -> torch.Tensor:
        of = [0, 1, 2] if draws == 3 else [0, 0, 0]
        return torch.stack([reference_words(from_ + torch.arange(64), seed, step, stream, draw) for draw in of])

    every_word_kernel[(1,)](out, start, key, 3, 2**31 + 5, 64, DRAWS=draws, BLOCK=64)
    assert torch.equal(out.cpu(), expected(first, 3, 2**31 + 5))
    for each in (4, 8):
        aligned = first // each * each
        runs_kernel[(1,)](out, torch.tensor(aligned, device=DEVICE), key, 1, 1, DRAWS=draws, EACH=each, BLOCK=64)
        assert torch.equal(out.cpu(), expected(aligned, 1, 1))


WRAPPER = """
#include "native.h"
extern "C" void words(uint64_t seed, uint32_t step, uint32_t stream, int64_t first, int64_t n, uint32_t* out) {
    halfstep::random_words<256>(seed, step, stream, first, n, out);
}
extern "C" void draws(uint64_t seed, uint32_t step, uint32_t stream, int64_t first, int64_t n, uint32_t* out) {
    halfstep::random_words<256, 3>(seed, step, stream, first, n, out);
}
"""


@pytest.fixture(scope="module", params=["as built", "portable"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    text = WRAPPER.replace("native.h", str(cpp.KERNELS / "native.h"))
    return cpp.library(tmp_path_factory, text, cpp.PORTABLE if request.param == "portable" else None)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", FIRSTS)
def test_cpp_gives_the_words_of_the_reference(library: ctypes.CDLL, first: int, seed: int) -> None:
    for n in (0, 1, 2, 7, 8, 9, 16, 255, 256):
        expected = [reference_words(first + torch.arange(n), seed, 11, 2**32 - 2, draw).tolist() for draw in range(3)]
        for function, draws in ((library.words, 1), (library.draws, 3)):
            out = np.full((draws, 256), 7, dtype=np.uint32)
            function(
                ctypes.c_uint64(seed),
                ctypes.c_uint32(11),
                ctypes.c_uint32(2**32 - 2),
                ctypes.c_int64(first),
                ctypes.c_int64(n),
                ctypes.c_void_p(out.ctypes.data),
            )
            assert out[:, :n].tolist() == expected[:draws]
            assert (out[:, n:] == 7).all(), "written beyond the end"
