"""The split master weight and the conversions every kernel shares, in the reference, in C++ and in Triton.

Per commit every upper half meets a few dozen lower halves; `make exhaustive` walks all 2^32 fp32 patterns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import oracles
import pytest
import torch
import walks
from implementations import ALL, using
from oracles import BF16, FP16, FP32, assert_same_bits

from halfstep.kernels import adam, native
from halfstep.kernels.backend import INTERPRET, jit, tl, triton
from halfstep.kernels.multi_tensor import TensorTable
from halfstep.kernels.rounding import exact_sqrt, from_float32, join_float32, join_master, split_master, to_float32

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy, on the specials
]

# A function from fp32 patterns (int32) to (bf16 codes, remainders, fp32 patterns joined again), all as torch integers.
RoundTrip = Callable[[torch.Tensor], walks.Parts]

# ---------------------------------------------------------------------------------------- the implementations, bare


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """adam.cpp with its split and join made callable."""
    command = native.compiler()
    if command is None:
        pytest.skip("needs a C++ compiler")
    return walks.build(tmp_path_factory.mktemp("rounding"), command)


@jit
def join_kernel(weights, remainders, back, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    joined = join_float32(tl.load(weights + at, mask=at < n), tl.load(remainders + at, mask=at < n))
    tl.store(back + at, joined, mask=at < n)


@jit
def convert_kernel(source, target, n, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, from_float32(to_float32(tl.load(source + at, mask=at < n)), TARGET), mask=at < n)


def triton_device() -> torch.device:
    if triton is None:
        pytest.skip("needs Triton")
    if not INTERPRET and not torch.cuda.is_available():
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")
    return walks.DEVICE


def needed(name: str, request: pytest.FixtureRequest) -> str | None:
    """Skip where an implementation cannot run; the path of the compiled library if it is the native one."""
    if name == "triton":
        triton_device()
    return str(request.getfixturevalue("library")) if name == "native" else None


@pytest.fixture(params=ALL)
def round_trip(request: pytest.FixtureRequest) -> RoundTrip:
    """split and then join, by one implementation."""
    path = needed(request.param, request)
    return lambda patterns: walks.round_trip(request.param, patterns, path)


def join_by(name: str, request: pytest.FixtureRequest, weight: np.ndarray, remainder: np.ndarray) -> np.ndarray:
    """join alone, by one implementation, of uint16 codes and int16 remainders."""
    codes, rest = torch.from_numpy(weight.view(np.int16).copy()), torch.from_numpy(remainder.copy())
    n = codes.numel()
    back = torch.empty(n, dtype=FP32)
    path = needed(name, request)
    if name == "reference":
        back = join_master(codes.view(BF16), rest)
    elif path is not None:
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, rest, back)]
        walks.load(path).join_only(*addresses, ctypes.c_int64(n))
    else:
        device, block = triton_device(), walks.block_for(n)
        back = back.to(device)
        join_kernel[((n + block - 1) // block,)](codes.view(BF16).to(device), rest.to(device), back, n, BLOCK=block)
    return oracles.to_numpy(back)


# --------------------------------------------------------------------------------------------- what a split must be

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
    """All 2^16 upper halves, each with all of `lower`, as uint32."""
    return ((np.arange(2**16, dtype=np.uint32) << 16)[:, None] | lower.astype(np.uint32)).reshape(-1)


def check_split(patterns: np.ndarray, weight: torch.Tensor, remainder: torch.Tensor, back: torch.Tensor) -> None:
    """Every promise of kernels/rounding.py, for these patterns."""
    codes, rest, joined = weight.numpy().view(np.uint16), remainder.numpy(), back.numpy().view(np.uint32)
    nan = (patterns & 0x7FFFFFFF) > 0x7F800000
    # Lossless, NaN aside.
    assert_same_bits(joined[~nan], patterns[~nan], "round trip")
    # NaN stays NaN of its sign, in the weight and in what comes back.
    assert ((codes[nan] & 0x7FFF) > 0x7F80).all() and ((joined[nan] & 0x7FFFFFFF) > 0x7F800000).all()
    assert (codes[nan] >> 15 == patterns[nan] >> 31).all() and (joined[nan] >> 31 == patterns[nan] >> 31).all()
    assert (codes[nan] & 0x40).all() and (joined[nan] & 0x400000).all(), "NaN comes back quiet"
    assert (rest[nan] == 0).all()
    # The weight is the nearest bf16, ties away from zero.
    code, low = oracles.split(patterns.view(np.float32))
    assert_same_bits(codes[~nan], code[~nan], "weight")
    assert_same_bits(rest[~nan], low[~nan], "remainder")
    # It is the cast's nearest-even save on exact ties.
    even = oracles.bits(oracles.round_to(patterns.view(np.float32), BF16))
    differs = (codes != even) & ~nan
    assert (patterns[differs] & 0xFFFF == 0x8000).all(), "differs from nearest-even off a tie"
    ties = ~nan & (patterns & 0xFFFF == 0x8000)
    assert (differs[ties] == ((patterns[ties] >> 16) & 1 == 0)).all(), "differs where the lower neighbour is even"


def test_split_and_join_of_every_upper_half(round_trip: RoundTrip) -> None:
    patterns = every_upper_half(LOWER)
    check_split(patterns, *round_trip(torch.from_numpy(patterns.view(np.int32))))


def test_split_and_join_of_specials_and_of_random_patterns(round_trip: RoundTrip) -> None:
    random = np.random.default_rng(0).integers(0, 2**32, 2**18 + 7, dtype=np.uint32)
    patterns = np.concatenate([oracles.specials().view(np.uint32), random])
    check_split(patterns, *round_trip(torch.from_numpy(patterns.view(np.int32))))


def test_the_weight_is_the_nearest_in_rational_numbers() -> None:
    """`oracles.split` is itself held against fractions, with ties undone."""
    patterns = np.concatenate(
        [oracles.specials().view(np.uint32), np.random.default_rng(1).integers(0, 2**32, 3000, dtype=np.uint32)]
    )
    values = patterns.view(np.float32)
    codes, _ = oracles.split(values)
    for value, code in zip(values.tolist(), codes.tolist(), strict=True):
        nearest = oracles.nearest_code(value, BF16)
        if nearest is None:
            assert code & 0x7FFF > 0x7F80
        elif code != nearest:
            # A tie: both neighbours are as near, and ours is the farther from zero.
            assert code == nearest + 1
            below, above = (oracles.value_of(c & 0x7FFF, BF16) for c in (nearest, code))
            assert abs(oracles.Fraction(value)) * 2 == below + above


@pytest.mark.parametrize("name", ALL)
def test_a_join_is_nan_only_where_the_weight_is(name: str, request: pytest.FixtureRequest) -> None:
    """Somebody zeroes a parameter and the old remainder stays: 0x00000000 - 5 would be 0xfffffffb, a NaN."""
    codes = np.arange(2**16, dtype=np.uint16)
    for stale in (-0x8000, -0x7FFF, -5, -1, 0, 1, 5, 0x7FFF):
        remainder = np.full(2**16, stale, dtype=np.int16)
        joined = join_by(name, request, codes, remainder)
        nan = (codes & 0x7FFF) > 0x7F80
        assert (np.isnan(joined) == nan).all(), f"remainder {stale}"
        assert (
            joined[[0, 0x8000]] == [0 if stale < 0 else stale * 2.0**-149, 0 if stale < 0 else -stale * 2.0**-149]
        ).all()
        number = ~nan & ~np.isinf(joined)
        # Near the weight that was written: within half a step of its code, so that it rounds to that code again.
        again, _ = oracles.split(joined[number])
        assert_same_bits(again, codes[number], f"weight joined with remainder {stale}")


def test_shapes_and_strides_of_the_reference() -> None:
    values = torch.randn(6, 10)[::2, 1::3]
    weight, remainder = split_master(values)
    assert weight.shape == remainder.shape == values.shape
    assert (weight.dtype, remainder.dtype) == (BF16, torch.int16)
    assert torch.equal(join_master(weight, remainder), values)
    for empty in (torch.empty(0), torch.empty(3, 0)):
        assert join_master(*split_master(empty)).shape == empty.shape
    scalar = torch.tensor(0.1)
    assert join_master(*split_master(scalar)).item() == scalar.item()


# -------------------------------------------------------------------------------------- through a whole Adam step


@pytest.mark.parametrize("name", ALL)
def test_a_step_that_changes_nothing_keeps_every_bit_of_a_split_master(name: str) -> None:
    """Gradient 0, learning rate 0: the step joins, subtracts 0 and splits, so each weight must come back as it was."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = np.concatenate([every_upper_half(lower), oracles.specials().view(np.uint32)])
    code, low = oracles.split(patterns.view(np.float32))
    with using(name, "adam") as device:
        weight = oracles.to_torch(code.view(ml_dtypes.bfloat16)).to(device)
        remainder = oracles.to_torch(low).to(device)
        zeros = [torch.zeros(len(patterns), dtype=dtype, device=device) for dtype in (BF16, FP32, FP32)]
        step = torch.zeros((), device=device)
        lists = [[zeros[0]], [weight], [remainder], [zeros[1]], [zeros[2]], [], [step]]
        table = TensorTable([len(patterns)], adam.OPERANDS, adam.CHUNK, device)
        for operand, tensors in enumerate(lists):
            if tensors:
                table.refresh(operand, [tensor.data_ptr() for tensor in tensors])
        layout = adam.Layout(BF16, BF16, FP32, adam.SPLIT_MASTER, False, False)
        batch = adam.Batch(
            layout,
            table,
            lists,
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(1, adam.HYPER_COLUMNS, device=device),
        )
        groups = torch.tensor([[0.0, 0.9, 0.999, 1e-8, 0.0, 0.0, 1.0, 0.0]], dtype=torch.float64, device=device)
        adam.step(batch, groups, adam.Control())
    assert step.item() == 1
    assert_same_bits(weight, code.view(ml_dtypes.bfloat16), "weight")
    assert_same_bits(remainder, low, "remainder")


# ---------------------------------------------------------------------------------- conversions of the Triton kernels


@pytest.mark.parametrize("target", oracles.DTYPES)
def test_the_kernels_conversions_from_fp32(target: torch.dtype) -> None:
    device = triton_device()
    values = np.concatenate([oracles.thresholds(FP16), oracles.thresholds(BF16), oracles.specials()])
    source = torch.from_numpy(values).to(device)
    result = torch.empty(len(values), dtype=target, device=device)
    types, block = {FP32: tl.float32, FP16: tl.float16, BF16: tl.bfloat16}, walks.block_for(len(values))
    convert_kernel[((len(values) + block - 1) // block,)](
        source, result, len(values), TARGET=types[target], BLOCK=block
    )
    assert_same_bits(result, values if target == FP32 else oracles.round_to(values, target), target)


@pytest.mark.parametrize("source", [FP16, BF16])
def test_the_kernels_widening_of_every_code(source: torch.dtype) -> None:
    device = triton_device()
    codes = np.arange(2**16, dtype=np.uint16).view(oracles.NUMPY[source])
    result = torch.empty(2**16, device=device)
    block = walks.block_for(2**16)
    convert_kernel[(2**16 // block,)](oracles.to_torch(codes).to(device), result, 2**16, TARGET=tl.float32, BLOCK=block)
    assert_same_bits(result, codes.astype(np.float32), source)


def test_the_square_root_is_correctly_rounded() -> None:
    """Where torch's own on the CPU is not: numpy's is, by IEEE."""
    random = np.random.default_rng(2).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
    values = np.concatenate([oracles.specials(), random])
    with np.errstate(invalid="ignore"):
        assert_same_bits(exact_sqrt(torch.from_numpy(values)), np.sqrt(values))


# ------------------------------------------------------------------------------------------------ all 2^32 patterns


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_split_and_join_of_all_patterns(
    name: str, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lossless, NaN kept, weight nearest with ties away, and nearest-even save on ties: `walks.walk_slice`."""
    path = needed(name, request)
    found = list(walks.in_processes(capfd, walks.walk_slice, name, path))
    assert sum(nans for nans, _ in found) == 2 * (2**23 - 1)
    assert sum(uneven for _, uneven in found) == 0x7F80, "one tie for every even code, of both signs together"
