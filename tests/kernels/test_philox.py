"""Random words: the published test vectors, and the same words from the reference, from C++ and from Triton."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from halfstep.kernels import native
from halfstep.kernels.backend import INTERPRET, jit, tl, triton
from halfstep.kernels.philox import check_seed, consecutive_words, reference_words, words_of

DEVICE = torch.device("cpu" if INTERPRET or not torch.cuda.is_available() else "cuda")

# Counter, key and result from the file kat_vectors of Random123, the authors' own implementation.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

SEEDS = (0, 1, 2**31 + 5, 0x1234_5678_9ABC_DEF0, 2**63 - 1)
# From the start, across 2^32 elements, and across the 2^34 where the second word of the counter begins to count.
FIRSTS = (0, 3, 2**32 - 6, 2**34 - 2, 2**40 + 1)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_reference_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    group = counter[0] | counter[1] << 32
    if group >= 2**61:  # an index counts elements, four per group, and so ends before the counter does
        assert words_by_definition(counter, key) == list(expected)
        return
    words = reference_words(4 * group + torch.arange(4), key[0] | key[1] << 32, counter[2], counter[3])
    assert words.tolist() == list(expected)


def words_by_definition(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 in Python integers, from the definition in the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k[0], right % 2**32, (left >> 32) ^ c[3] ^ k[1], left % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", FIRSTS)
def test_the_reference_against_the_definition(first: int, seed: int) -> None:
    step, stream = 7, 2**32 - 1
    index = torch.arange(first, first + 9)
    words = reference_words(index, seed, step, stream).tolist()
    for element, word in zip(index.tolist(), words, strict=True):
        group = element // 4
        counter = (group % 2**32, group >> 32, step, stream)
        assert word == words_by_definition(counter, (seed % 2**32, seed >> 32))[element % 4]


def test_step_and_stream_may_be_tensors() -> None:
    index = torch.arange(5)
    steps, streams = torch.tensor([[3], [4]]), torch.tensor([[9], [1]])
    both = reference_words(index, 5, steps, streams)
    assert both.shape == (2, 5)
    for row, (step, stream) in enumerate(((3, 9), (4, 1))):
        assert torch.equal(both[row], reference_words(index, 5, step, stream))


def test_words_are_uniform() -> None:
    """Each of the 32 bits is set half of the time, and the four words of a group differ."""
    n = 1 << 18
    words = reference_words(torch.arange(n), 0).numpy().astype(np.uint32)
    ones = np.array([(words >> bit & 1).sum() for bit in range(32)])
    assert np.abs(ones - n / 2).max() < 5 * np.sqrt(n) / 2  # five standard deviations
    assert len(np.unique(words)) > 0.9999 * n - 10  # about n^2 / 2^33 = 8 repeat by chance


@jit
def every_word_kernel(out, first, seed, step, stream, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    index = tl.load(first) + lane
    tl.store(out + lane, words_of(index, tl.load(seed), step, stream).to(tl.int64), mask=lane < n)


@jit
def block_kernel(out, first, seed, step, stream, BLOCK: tl.constexpr):
    words = consecutive_words(tl.load(first), tl.load(seed), step, stream, BLOCK)
    tl.store(out + tl.arange(0, BLOCK), words.to(tl.int64))


needs_triton = pytest.mark.skipif(
    triton is None or not (INTERPRET or torch.cuda.is_available()), reason="needs Triton and a GPU or its interpreter"
)


@needs_triton
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", FIRSTS)
def test_triton_gives_the_words_of_the_reference(first: int, seed: int) -> None:
    # In memory: the interpreter takes an integer argument from 2^31 to 2^32 for a negative one.
    start, key = torch.tensor(first, device=DEVICE), torch.tensor(seed, device=DEVICE)
    out = torch.empty(64, dtype=torch.int64, device=DEVICE)
    every_word_kernel[(1,)](out, start, key, 3, 2**31 + 5, 64, BLOCK=64)
    assert torch.equal(out.cpu(), reference_words(first + torch.arange(64), seed, 3, 2**31 + 5))
    aligned = first // 4 * 4
    block_kernel[(1,)](out, torch.tensor(aligned, device=DEVICE), key, 1, 1, BLOCK=64)
    assert torch.equal(out.cpu(), reference_words(aligned + torch.arange(64), seed, 1, 1))


WRAPPER = """
#include "native.h"
extern "C" void words(uint64_t seed, uint32_t step, uint32_t stream, int64_t first, int64_t n, uint32_t* out) {
    halfstep::random_words<256>(seed, step, stream, first, n, out);
}
"""


@pytest.fixture(scope="module", params=["as built", "portable"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    command = native.compiler()
    if command is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("philox")
    source, target = folder / "wrapper.cpp", folder / "wrapper.so"
    source.write_text(WRAPPER.replace("native.h", str(Path(native.__file__).resolve().parent / "native.h")))
    if request.param == "portable":  # without this machine's own instructions
        subprocess.run([*command, *native._EXACT, str(source), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))
    complaint = native._build(source, target, command)
    assert not complaint, complaint
    return ctypes.CDLL(str(target))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", FIRSTS)
def test_cpp_gives_the_words_of_the_reference(library: ctypes.CDLL, first: int, seed: int) -> None:
    for n in (0, 1, 2, 3, 4, 5, 16, 255, 256):
        out = np.full(n + 1, 7, dtype=np.uint32)
        library.words(
            ctypes.c_uint64(seed),
            ctypes.c_uint32(11),
            ctypes.c_uint32(2**32 - 2),
            ctypes.c_int64(first),
            ctypes.c_int64(n),
            ctypes.c_void_p(out.ctypes.data),
        )
        assert out[:n].tolist() == reference_words(first + torch.arange(n), seed, 11, 2**32 - 2).tolist()
        assert out[n] == 7, "written beyond the end"


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (-1, ValueError, "Expected seed to be from 0 to 2^63 - 1, but got -1: reduce it with seed % 2**63"),
        (2**63, ValueError, f"Expected seed to be from 0 to 2^63 - 1, but got {2**63}"),
        (1.5, TypeError, "Expected seed to be an integer from 0 to 2^63 - 1, but got 1.5, a float"),
        (True, TypeError, "but got True, a bool"),
    ],
)
def test_seeds_that_are_refused(seed: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        check_seed(seed)
    assert message in str(caught.value)
    assert check_seed(0) == 0 and check_seed(2**63 - 1) == 2**63 - 1
