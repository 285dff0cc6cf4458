"""The kernels on a real GPU, against the reference on the CPU; otherwise smaller ones on the model of its streams.

Imports nothing but pytest, numpy and torch, so that they run on a machine that has only these.
"""

from itertools import product
from typing import Any

import devices
import pytest
import torch
from devices import assert_same_bits, kernels_on, normal, patterns, placed
from gpu_instructions import nan_patterns, root_and_quotient
from softmax_oracle import Case, assert_within, backward_oracle, oracle

import halfstep
from halfstep.kernels.cells import Grid, width
from halfstep.kernels.statistics import foreach_count_

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (1, 15, 16, 17, 0, 1000, 2048, 4097)
OFFSETS = (0, 1, 0, 3, 0, 1, 0, 8)

gpu = pytest.mark.gpu
large = pytest.mark.gpu(only="the model has no room for 2^31 elements")


def many() -> int:
    """How many elements: enough for every launch shape on a GPU."""
    return 20_001 if devices.MODELED else 2**24 + 5


def lists(dtype: torch.dtype, device: torch.device, make: object = patterns) -> tuple[list[torch.Tensor], ...]:
    """Tensors of odd sizes, some misaligned, one empty: on the CPU and their copies on `device`."""
    tensors = [make(size, dtype, seed) for seed, size in enumerate(SIZES)]  # type: ignore[operator]
    return tensors, [placed(tensor, device, offset) for tensor, offset in zip(tensors, OFFSETS, strict=True)]


# -------------------------------------------------------------------------------------------------------- instructions

needs_nvidia = pytest.mark.skipif(torch.version.hip is not None, reason="our PTX runs on NVIDIA GPUs only")


@pytest.fixture(params=[False, True], ids=["f32", "f32x2"])
def paired(request: pytest.FixtureRequest) -> bool:
    if request.param and torch.cuda.get_device_capability()[0] < 10:
        pytest.skip("the instructions for two numbers need sm_100")
    return bool(request.param)


@pytest.mark.gpu(only="compiled PTX; the software GPU runs it in tests/software_gpu")
@needs_nvidia
def test_arithmetic_gives_the_nan_that_kernels_assume(paired: bool) -> None:
    nan_patterns(torch.device("cuda"), paired)


@pytest.mark.gpu(only="compiled PTX; the software GPU runs it in tests/software_gpu")
@needs_nvidia
def test_roots_and_quotients_are_rounded_correctly(paired: bool) -> None:
    """All mantissas with both parities of the exponent: with the slow way for all, then with the quick one."""
    root_and_quotient(torch.device("cuda"), paired, moments=1, least=float("inf"))
    root_and_quotient(torch.device("cuda"), paired)


# ---------------------------------------------------------------------------------------------------------------- cast

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
CASTS: list[tuple[torch.dtype, torch.dtype, dict[str, Any]]] = [
    *((source, target, {}) for source, target in product(FLOATS, FLOATS) if source != target),
    *((source, target, {}) for source in EIGHT_BITS for target in (*FLOATS, *EIGHT_BITS)),
    *(
        (torch.float32, target, options)
        for target in (torch.float16, torch.bfloat16, *EIGHT_BITS)
        for options in (
            {"saturate": True},
            {"rounding": "toward_zero"},
            {"rounding": "stochastic", "seed": 2**40 + 7},
            {"rounding": "stochastic", "seed": 3, "saturate": True},
        )
    ),
]


@gpu
@pytest.mark.parametrize(("source", "target", "options"), CASTS)
def test_casts_have_the_bits_of_the_reference(
    source: torch.dtype, target: torch.dtype, options: dict[str, Any]
) -> None:
    if devices.MODELED and options:
        pytest.skip("test_cast.py has every rounding")
    codes = torch.arange(256).to(torch.uint8).view(source) if source in EIGHT_BITS else patterns(many(), source)
    tensors = [codes, *(codes[: size % 256 if source in EIGHT_BITS else size] for size in SIZES)]
    with halfstep.backend("reference"):
        expected = halfstep.foreach_cast(tensors, target, **options)
    with kernels_on("cuda") as device:
        here = [placed(tensor, device, offset) for tensor, offset in zip(tensors, (1, *OFFSETS), strict=True)]
        assert_same_bits(halfstep.cast(here[0], target, **options), expected[0])
        assert_same_bits(halfstep.cast(codes.to(device), target, **options), expected[0], "aligned")
        for index, result in enumerate(halfstep.foreach_cast(here, target, **options)):
            assert_same_bits(result, expected[index], f"tensor {index}")


# ------------------------------------------------------------------------------------------------------------- unscale


@pytest.mark.parametrize("make", [normal, patterns])
@pytest.mark.parametrize("dtype", FLOATS)
@gpu
def test_check_and_unscale_have_the_bits_of_the_reference(dtype: torch.dtype, make: object) -> None:
    with kernels_on("cuda") as device:
        tensors, here = lists(dtype, device, make)
        inverse = torch.tensor(1 / 1000, device=device)
        check = halfstep.foreach_check(here, inv_scale=inverse)
        before = [tensor.clone() for tensor in here]
        unscaled = halfstep.foreach_unscale_(here, inverse)
    with halfstep.backend("reference"):
        expected = halfstep.foreach_check(tensors, inv_scale=1 / 1000)
        for index, (mine, theirs) in enumerate(zip(before, tensors, strict=True)):
            assert_same_bits(mine, theirs, f"checking wrote tensor {index}")
        other = halfstep.foreach_unscale_(tensors, 1 / 1000)
    for name, mine, theirs in zip(check._fields, check, expected, strict=True):
        assert_same_bits(mine, theirs, name)
    assert_same_bits(unscaled.found_inf, other.found_inf)
    for index, (mine, theirs) in enumerate(zip(here, tensors, strict=True)):
        assert_same_bits(mine, theirs, f"tensor {index}")


@gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_of_squares_of_a_large_tensor_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    values = normal(many(), dtype)
    with halfstep.backend("reference"):
        expected = halfstep.foreach_check([values])
    for _ in range(3):  # the order of the sum must not depend on which program ends first
        assert_same_bits(halfstep.foreach_check([values.cuda()]).sum_of_squares, expected.sum_of_squares)


# ---------------------------------------------------------------------------------------------------------- statistics

GRID = Grid(dropped=20, emin=-6, emax=8, overflow=7 << 20)  # a grid like that of E4M3


@pytest.mark.parametrize("errors", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@gpu
def test_statistics_count_as_the_reference_does(dtype: torch.dtype, errors: bool) -> None:
    with kernels_on("cuda") as device:
        tensors, here = lists(dtype, device)
        counts = torch.zeros(len(here), width(errors), dtype=torch.int64, device=device)
        for _ in range(2):  # counts are added to
            foreach_count_(here, counts, GRID, scale=torch.tensor(3.0, device=device))
    expected = torch.zeros(len(tensors), width(errors), dtype=torch.int64)
    with halfstep.backend("reference"):
        for _ in range(2):
            foreach_count_(tensors, expected, GRID, scale=torch.tensor(3.0))
    assert_same_bits(counts, expected)


# ------------------------------------------------------------------------------------------------------------- softmax


@gpu
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 7, 256, 1000, 4096, 40_000, 2**18 + 1])
def test_softmax_is_within_the_stated_units(columns: int, dtype: torch.dtype, log: bool) -> None:
    if devices.MODELED and columns > 256:
        pytest.skip("slow, and the model runs torch's own softmax anyway")
    rows = max(2, min(3 if devices.MODELED else 64, 2**22 // columns)) + 3
    case = Case(normal(rows * columns, dtype).view(rows, columns) * 4, log=log)
    case.x[0] = -torch.inf
    case.x[1, columns // 2 :] = -torch.inf
    case.x[2, 0] = torch.nan
    dy = normal(rows * columns, dtype, 1).view(rows, columns)
    with kernels_on("cuda") as device:
        x = case.x.to(device).requires_grad_()
        y = case.run(device, x)
        y.backward(dy.to(device))
        assert x.grad is not None
        y, dx = y.detach().cpu(), x.grad.cpu()
    assert_within(y, *oracle(case), "forward")
    assert_within(dx, *backward_oracle(case, y, dy), "backward")


# ------------------------------------------------------------------------------------------------------------- size


def _free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30


@large
def test_more_elements_than_an_int32_counts() -> None:
    size = 2**31 + 17
    if _free_gib() < 40:
        pytest.skip("needs 40 GiB of free GPU memory")
    x = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    x[-1], x[2**31 - 1], x[2**31], x[0] = 1.0, 2.0, 3.0, 4.0
    check = halfstep.foreach_check([x])
    assert (check.found_inf.item(), check.sum_of_squares.item()) == (0.0, 30.0)
    wide = halfstep.cast(x, torch.float32)
    assert [wide[at].item() for at in (-1, 2**31 - 1, 2**31, 0)] == [1.0, 2.0, 3.0, 4.0]
    (listed,) = halfstep.foreach_cast([wide], torch.float16)
    assert [listed[at].item() for at in (-1, 2**31 - 1, 2**31, 0)] == [1.0, 2.0, 3.0, 4.0]
    halfstep.foreach_unscale_([x], 0.5)
    assert [x[at].item() for at in (-1, 2**31 - 1, 2**31, 0)] == [0.5, 1.0, 1.5, 2.0]
    counts = torch.zeros(1, width(False), dtype=torch.int64, device="cuda")
    foreach_count_([x], counts, GRID)
    assert counts.sum().item() == size
    x[-1] = torch.inf
    assert halfstep.foreach_check([x]).flags.tolist() == [1]


# ------------------------------------------------------------------------------------------------------------ the host


@gpu
def test_no_function_waits_for_the_device() -> None:
    x = normal(5000, torch.bfloat16).cuda()
    wide = normal(5000, torch.float32).view(5, 1000).cuda().requires_grad_()
    inverse = torch.tensor(0.5, device="cuda")
    for attempt in ("compile", "check"):
        torch.cuda.set_sync_debug_mode("error" if attempt == "check" else "default")
        try:
            halfstep.cast(x, torch.float32)
            halfstep.foreach_cast([x, x[1:100]], torch.float16)
            halfstep.cast(x, torch.float8_e4m3fn, rounding="stochastic")
            halfstep.foreach_cast([x], torch.float8_e5m2, rounding="stochastic")
            halfstep.foreach_check([x, x[1:100]], inv_scale=inverse)
            halfstep.foreach_check([x, x[1:100]], inv_scale=0.5)
            halfstep.foreach_unscale_([x, x[1:100]], 0.5)
            halfstep.softmax(wide, scale=0.5, causal=True).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@gpu
def test_kernels_run_on_the_stream_of_their_caller() -> None:
    """Inputs are written on a side stream behind a long wait; a launch on any other stream would read the old ones."""
    side = torch.cuda.Stream()
    x = torch.zeros(100_000, device="cuda")
    halfstep.cast(x, torch.bfloat16)
    halfstep.foreach_cast([x], torch.bfloat16)
    halfstep.foreach_check([x])
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)
        one = halfstep.cast(x, torch.bfloat16)
        (listed,) = halfstep.foreach_cast([x], torch.bfloat16)
        squares = halfstep.foreach_check([x]).sum_of_squares
        soft = halfstep.softmax(x.view(100, 1000))
    side.synchronize()
    assert bool((one == 2).all()) and bool((listed == 2).all())
    assert squares.item() == 400_000.0
    torch.testing.assert_close(soft.sum().item(), 100.0, rtol=1e-4, atol=0.0)


@gpu
def test_pinned_copies_of_addresses_arrive_before_their_kernel_runs() -> None:
    """The host runs far ahead of the device: each table must still hold the addresses of its own call."""
    sets = [[torch.full((100,), float(index), device="cuda") for _ in range(50)] for index in range(20)]
    halfstep.foreach_check(sets[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    squares = [halfstep.foreach_check(tensors).sum_of_squares for tensors in sets]
    assert [value.item() for value in squares] == [5000.0 * index * index for index in range(20)]


@pytest.mark.gpu(only="the model is one device")
def test_every_device_computes_its_own_tensors() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for index in range(torch.cuda.device_count()):
        x = torch.ones(5000, device=f"cuda:{index}")
        assert halfstep.cast(x, torch.bfloat16).sum().item() == 5000
        assert halfstep.foreach_check([x]).sum_of_squares.item() == 5000
        torch.testing.assert_close(halfstep.softmax(x).sum().item(), 1.0, rtol=1e-4, atol=0.0)
