"""Adam with 8-bit moments against the oracle, bit for bit: rows of every length, shards, non-finite values."""

import dataclasses
from typing import Any

import block_oracle
import numpy as np
import pytest
from adam_cases import CODED, Memory, Step, cut, examine, label, make
from implementations import ALL, using
from noise import Noise
from oracles import BF16, FP16, FP32, NUMPY, AdamTensor

from halfstep.kernels.adam import FULL_MASTER, NO_MASTER, SPLIT24_MASTER, SPLIT_MASTER, Layout

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy, on overflow and NaN
]

INF, NAN = float("inf"), float("nan")
SPLIT = Layout(BF16, BF16, CODED, SPLIT_MASTER, False, False)
SPLIT24 = Layout(BF16, BF16, CODED, SPLIT24_MASTER, False, False, stochastic=True)
FULL = Layout(FP16, FP16, CODED, FULL_MASTER, True, True, stochastic=True)
ALONE = Layout(FP32, FP32, CODED, NO_MASTER, True, False)
layouts = pytest.mark.parametrize("layout", [SPLIT, SPLIT24, FULL, ALONE], ids=label)


def matrix(layout: Layout, rows: int, columns: int, rng: np.random.Generator, **options: Any) -> AdamTensor:
    return make(layout, rng.standard_normal(rows * columns).astype(np.float32), rng, columns=columns, **options)


def gradient(layout: Layout, size: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(size).astype(np.float32).astype(NUMPY[layout.grad])


# Rows shorter and longer than a block and a chunk, of whole blocks and not.
SHAPES = [(18, 1), (0, 128), (19, 27), (3, 127), (5, 129), (9, 144), (7, 33), (40, 32), (2, 2304), (1, 2500)]


@layouts
def test_rows_of_every_length(layout: Layout) -> None:
    """Several rows in a block of the kernel, several chunks in a row, blocks of one element; aligned or not."""
    rng = np.random.default_rng(0)
    tensors = [matrix(layout, rows, columns, rng, step=3) for rows, columns in SHAPES]
    steps = [Step([gradient(layout, t.param.size, rng) for t in tensors])]
    expected = steps[0].expected(tensors)
    for name, offsets in (("reference", (0,)), ("native", (0, 1, 8)), ("triton", (len(label(layout)) % 3,))):
        with using(name, "adam") as device:
            for offset in offsets:
                memory = Memory(layout, tensors, device, offset)
                memory.step(steps[0])
                memory.compare(expected, f"{name}, offset {offset}")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layout", [SPLIT24, FULL], ids=label)
@pytest.mark.parametrize(
    "ranges",
    [
        [((0, 4), (0, 450)), ((4, 7), (0, 450))],
        [((0, 7), (0, 32)), ((0, 7), (32, 384)), ((0, 7), (384, 450))],
        [((0, 3), (0, 256)), ((3, 7), (0, 256)), ((0, 7), (256, 450))],
    ],
    ids=["rows", "columns", "both"],
)
def test_shards_have_the_bits_of_the_full_tensor(
    name: str, layout: Layout, ranges: list[tuple[tuple[int, int], tuple[int, int]]]
) -> None:
    rng = np.random.default_rng(1)
    columns = 450
    whole = matrix(layout, 7, columns, rng, step=3, noise=Noise(11, 4))
    grad = gradient(layout, whole.param.size, rng)
    (after,) = Step([grad]).expected([whole])
    parts = [cut(whole, (7, columns), place) for place in ranges]
    grads = [grad.reshape(7, columns)[slice(*rows), slice(*part)].reshape(-1).copy() for rows, part in ranges]
    with using(name, "adam") as device:
        for offset in (0, 1) if name != "triton" else (int(layout is FULL),):
            memory = Memory(layout, parts, device, offset)
            memory.step(Step(grads))
            memory.compare([cut(after, (7, columns), place) for place in ranges], f"{name}, offset {offset}")


@layouts
@pytest.mark.parametrize("columns", [300, 320])  # 320: with wide accesses
@pytest.mark.parametrize("name", ALL)
def test_non_finite_values_affect_only_their_block(name: str, layout: Layout, columns: int) -> None:
    rng = np.random.default_rng(2)
    hostile = (NAN, -NAN, INF)
    tensors = [matrix(layout, 4, columns, rng, step=2) for _ in hostile]
    first, second = ([gradient(layout, 4 * columns, rng) for _ in hostile] for _ in range(2))
    for at, (grad, bad) in enumerate(zip(first, hostile, strict=True)):
        grad[columns + 130 + at] = bad  # even and odd places, of which some kernels take two at a time
    for after in examine((name,), layout, tensors, [Step(first), Step(second)]):
        # Infinite gradients make infinite first moments; the square stops at the largest number.
        assert after.m_scales is not None and (after.m_scales == 255).nonzero() == (np.array([1]), np.array([4]))
        spoiled = ~np.isfinite(after.param.astype(np.float32)).reshape(4, columns)
        assert spoiled[1, 128:160].all() and spoiled.sum() == block_oracle.SPAN


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("stochastic", [False, True])
def test_huge_and_tiny_gradients_make_no_nan(name: str, stochastic: bool) -> None:
    """Squares beyond the largest code stop there; gradients too small for the block, or for any, make no NaN."""
    rng = np.random.default_rng(3)
    layout = dataclasses.replace(ALONE, stochastic=stochastic, amsgrad=False)
    tensor = make(layout, np.ones(1024, np.float32), rng, columns=256, beta2=0.0, eps=1e-8)
    grad = np.ones(1024, np.float32)
    grad[:256:2], grad[1:256:2], grad[256:512], grad[512:768:3] = 3e38, 1e-30, 1e-35, 1e-44
    # Moments on both sides of what is kept: second ones, a step each, then first ones.
    grad[928:960], grad[960:992], grad[992:] = 2.0**-63, 15 * 2.0**-109, 15 * 2.0**-110
    after = examine((name,), layout, [tensor], [Step([grad]), Step([grad / 2]), Step([grad])])
    assert np.isfinite(after[0].param).all() and (after[0].v_scales != block_oracle.NAN_SCALE).all()
    # The largest code of a block that spans 32 powers of two, of which the last one is 2^127.
    assert after[0].v[0] == 255 and after[0].v_scales[0, 0] == (254 - 31) << 7 | 20


# The short way is compiled code's: the interpreter does not have it.
@pytest.mark.parametrize(
    "names", [("reference", "native"), pytest.param(("triton",), marks=pytest.mark.exhaustive)], ids=["CPU", "triton"]
)
@pytest.mark.parametrize(
    "layout", [SPLIT, SPLIT24, Layout(BF16, BF16, CODED, FULL_MASTER, False, False, stochastic=True), ALONE], ids=label
)
def test_roots_and_quotients_of_every_size(names: tuple[str, ...], layout: Layout) -> None:
    """Kernels have a short way for the usual sizes, which is not exact for others, nor for weights that are no numbers.

    Each row has gradients of one power of two: second moments from 0 to beyond the largest fp32 number, with quotients
    from 0 up. A sum of root and epsilon is large or infinite in the last tensors.
    """
    rng = np.random.default_rng(6)
    columns = 72
    sizes = np.float64(2.0) ** np.concatenate([np.arange(-148.0, 128.0, 14.0), np.linspace(-59, -46, 20)])
    rows = len(sizes)
    options: list[dict[str, Any]] = [{}, {"eps": 0.0}, {"eps": 1e-30, "beta2": 0.0}, {"eps": 2.0**100}, {"eps": 3e38}]
    tensors, grads = [], []
    for index, given in enumerate(options):
        weights = rng.standard_normal(rows * columns).astype(np.float32)
        weights[::2] = 0.0  # where every bit of an update shows
        weights[::35] = np.resize(np.array([INF, -INF, NAN, 0.0, -0.0, 3e38, 1e-44], np.float32), len(weights[::35]))
        tensors.append(make(layout, weights, rng, step=0.0, columns=columns, **given))
        grad = rng.standard_normal((rows, columns)) * (1 if index == 4 else sizes[:, None])
        # With some elements small beside the others of a block, and zeros.
        grad *= np.where(rng.random(grad.shape) < 0.1, 2.0 ** rng.integers(-30, 0, grad.shape), 1.0)
        grads.append(np.where(rng.random(grad.shape) < 0.01, 0, grad).reshape(-1).astype(np.float32))
    first = [grad.astype(NUMPY[layout.grad]) for grad in grads]
    second = [grad[::-1].copy() for grad in first]
    examine(names, layout, tensors, [Step(first), Step(first), Step(second)])
