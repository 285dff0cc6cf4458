"""Adam and AdamW: bit for bit the numpy oracle's, in every layout and implementation; skipping, clipping, extremes;
with stochastic rounding, however the work is cut, and right in the mean. Moments in 8 bits: test_adam_coded.py."""

import dataclasses

import numpy as np
import oracles
import pytest
import torch
from adam_cases import CODED, FEW, LAYOUTS, STOCHASTIC_LAYOUTS, USUAL, Memory, Step, cut, examine, label, make, standard
from implementations import ALL, using
from noise import Noise
from oracles import BF16, FP16, FP32, NUMPY, assert_same_bits

from halfstep.kernels.adam import FULL_MASTER, NO_MASTER, SPLIT24_MASTER, SPLIT_MASTER, Layout
from halfstep.kernels.optimizer.launch import LANES

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy, on overflow and NaN
]

INF, NAN = float("inf"), float("nan")
PLAIN = Layout(BF16, BF16, FP32, NO_MASTER, False, False, stochastic=True)  # 22 bytes
LEAST = Layout(BF16, BF16, BF16, NO_MASTER, False, False, stochastic=True)  # 14 bytes
SPLIT = Layout(BF16, BF16, BF16, SPLIT_MASTER, False, False, stochastic=True)  # 18 bytes
SPLIT24 = Layout(BF16, BF16, BF16, SPLIT24_MASTER, False, False, stochastic=True)  # 16 bytes
HALF = Layout(FP16, FP16, FP32, NO_MASTER, False, False, stochastic=True)
CHANCE = [PLAIN, LEAST, SPLIT, SPLIT24, HALF]
EVERY = LAYOUTS + STOCHASTIC_LAYOUTS
names = pytest.mark.parametrize("name", ALL)


def normal(rng: np.random.Generator, size: int, layout: Layout | None = None) -> np.ndarray:
    """Weights in fp32, or gradients of a layout."""
    values = rng.standard_normal(size).astype(np.float32)
    return values if layout is None else values.astype(NUMPY[layout.grad])


# --------------------------------------------------------------------------------------------------------- all layouts


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[pytest.mark.exhaustive] * (n % 2)) for n, layout in enumerate(FEW)],
    ids=label,
)
def test_layouts_that_cover_every_pair_of_choices_match_the_oracle(layout: Layout) -> None:
    """The digests of every layout are in tests/golden."""
    tensors, steps = standard(layout)
    examine(("reference", "native"), layout, tensors, steps)
    examine(("triton",), layout, tensors, steps[:2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", EVERY, ids=label)
def test_every_layout_matches_the_oracle(layout: Layout) -> None:
    tensors, steps = standard(layout, seed=1)
    examine(ALL, layout, tensors, steps)


@pytest.mark.parametrize("layout", FEW[::3] + USUAL + CHANCE, ids=label)
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_misaligned_tensors(layout: Layout, offset: int) -> None:
    """Views into DDP's buckets and FSDP's shards: 16-byte alignment in some operands, in none, in all."""
    tensors, steps = standard(layout)
    tried = ALL if offset == 1 else ("native", "triton") if layout.stochastic else ("native",)
    examine(tried, layout, tensors, steps[1:2], offset)


# --------------------------------------------------------------------------------------------------------------- sizes


@names
def test_more_tensors_than_lanes_each_with_its_own_step_count(name: str) -> None:
    """Empty tensors still count their steps; neighbours share powers only if group and count agree."""
    layout, rng = USUAL[0], np.random.default_rng(2)
    sizes = [0] * (LANES * 2 + 3)
    sizes[0] = sizes[300] = sizes[301] = sizes[-1] = 5
    tensors = [
        make(layout, normal(rng, size), rng, step=index // 2 % 7, lr=0.1 * (1 + index % 3))
        for index, size in enumerate(sizes)
    ]
    grads = [normal(rng, size) for size in sizes]
    examine((name,), layout, tensors, [Step(grads), Step(grads, found_inf=2.0), Step(grads)])


@names
@pytest.mark.parametrize("layout", [USUAL[1], LEAST], ids=label)
def test_one_list_or_several_in_any_order_and_any_threads(name: str, layout: Layout) -> None:
    rng = np.random.default_rng(5)
    sizes = (5, 20_000 if name == "native" else 3000, 0, 17, 2048)
    tensors = [make(layout, normal(rng, size), rng, noise=Noise(3, number)) for number, size in enumerate(sizes)]
    grads = [normal(rng, size, layout) for size in sizes]
    before = torch.get_num_threads()
    try:
        for order in ([[0, 1, 2, 3, 4]], [[4, 2, 0], [3, 1]], [[3], [1], [0], [4], [2]]):
            for numbers in order:
                examine((name,), layout, [tensors[n] for n in numbers], [Step([grads[n] for n in numbers])])
            torch.set_num_threads(1 + len(order))
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------------ skipping

AMSGRAD = Layout(FP16, FP16, BF16, FULL_MASTER, True, True)


@names
@pytest.mark.parametrize("found_inf", [1.0, -1.0, INF, NAN, 1e-45])
@pytest.mark.parametrize(
    "layout", [USUAL[1], AMSGRAD, Layout(FP16, FP16, CODED, FULL_MASTER, True, True, stochastic=True)], ids=label
)
def test_a_skipped_step_writes_nothing(name: str, found_inf: float, layout: Layout) -> None:
    """Any found_inf that is not 0, and a gradient that would spoil everything; not even a NaN's payload changes."""
    rng = np.random.default_rng(5)
    tensors = [make(layout, normal(rng, 40), rng, step=step) for step in (0, 7)]
    tensors.append(make(layout, oracles.specials(), rng, step=1))
    grads = [np.full(tensor.param.size, NAN, NUMPY[layout.grad]) for tensor in tensors]
    with using(name, "adam") as device:
        memory = Memory(layout, tensors, device, 0)
        memory.step(Step(grads, grad_scale=0.0, found_inf=found_inf, sum_of_squares=NAN, max_norm=1.0))
        memory.compare(tensors, f"{name}, found_inf {found_inf}", exactly=True)


@names
@pytest.mark.parametrize("layout", [USUAL[1], LEAST], ids=label)
def test_skipping_the_first_step_is_as_if_it_had_not_been(name: str, layout: Layout) -> None:
    """No count, and no random bits drawn."""
    rng = np.random.default_rng(7)
    tensors = [make(layout, normal(rng, 50), rng, step=step) for step in (0, 7)]
    grads = [normal(rng, 50, layout) for _ in tensors]
    after = examine((name,), layout, tensors, [Step(grads, found_inf=1.0), Step(grads, found_inf=-0.0)])
    assert [tensor.step for tensor in after] == [1, 8]
    for tensor, alone in zip(after, Step(grads).expected(tensors), strict=True):
        for array, other in zip(tensor.arrays().values(), alone.arrays().values(), strict=True):
            assert_same_bits(array, other)


# --------------------------------------------------------------------------------------------------- scaling, clipping


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("scale", "total", "max_norm"),
    [
        (None, 4.0, 1.0),  # clipped by half
        (65536.0, 4.0, 1.0),
        (1.0 / 3.0, 4.0, 3.0),  # not clipped
        (None, 1.0, 1.0),  # at the limit: 1e-6 in the divisor
        (None, 0.0, 1.0),
        (None, 1e-300, 1e-10),
        (None, 1e76, 1.0),
        (None, INF, 1.0),  # clips to 0
        (None, NAN, 1.0),  # stays NaN: hiding it would step on garbage
        (0.0, None, None),
        (INF, None, None),
        (NAN, None, None),
        (1e-45, None, None),
        (2.0**127, 7.0, 0.1),
    ],
    ids=str,
)
def test_grad_scale_and_clipping(name: str, scale: float | None, total: float | None, max_norm: float | None) -> None:
    rng = np.random.default_rng(8)
    for layout in USUAL:
        tensors = [
            make(layout, rng.standard_normal(20).astype(np.float32), rng, step=4, maximize=maximize)
            for maximize in (False, True)
        ]
        grads = [rng.standard_normal(20).astype(np.float32).astype(NUMPY[layout.grad]) for _ in tensors]
        steps = [Step(grads, grad_scale=scale, sum_of_squares=total, max_norm=max_norm)]
        (after, _) = examine((name,), layout, tensors, steps)
        if total is not None and total != total:
            assert np.isnan(after.param.astype(np.float32)).all()


@pytest.mark.parametrize("name", ALL)
def test_every_group_is_clipped_to_its_own_limit(name: str) -> None:
    layout, rng = USUAL[0], np.random.default_rng(9)
    tensors = [make(layout, rng.standard_normal(5).astype(np.float32), rng, lr=lr) for lr in (0.1, 0.2)]
    step = Step([np.ones(5, np.float32)] * 2, sum_of_squares=16.0)
    limits = (1.0, 2.0)
    with using(name, "adam") as device:
        memory = Memory(layout, tensors, device, 0)
        memory.step(step, limits)
        both = [dataclasses.replace(step, max_norm=limit).expected(tensors)[i] for i, limit in enumerate(limits)]
        memory.compare(both, name)


# ------------------------------------------------------------------------------------------------------------ extremes


@names
@pytest.mark.parametrize("layout", [USUAL[0], LEAST], ids=label)
@pytest.mark.parametrize("step", [0, 1, 999, 1e6, 2**24 - 2, 2**24 - 1, 2**24, 2.0**30, 2.0**40])
def test_step_counts(name: str, step: float, layout: Layout) -> None:
    """beta^t by squaring, up to counts that fp32 can no longer advance."""
    rng = np.random.default_rng(10)
    betas = [(0.9, 0.999), (0.0, 0.0), (0.999999, 0.9999999), (0.5, 0.9999)]
    tensors = [make(layout, normal(rng, 33), rng, step=step, beta1=beta1, beta2=beta2) for beta1, beta2 in betas]
    grads = [normal(rng, 33, layout) for _ in tensors]
    after = examine((name,), layout, tensors, [Step(grads), Step(grads)])
    assert after[0].step == (step + 2 if step <= 2**24 - 2 else max(2**24, step))


@names
@pytest.mark.parametrize("layout", [USUAL[0], LEAST, dataclasses.replace(LEAST, amsgrad=True)], ids=label)
def test_the_effect_of_a_huge_gradient_decays(name: str, layout: Layout) -> None:
    """Its square is capped at the largest fp32: an infinite second moment would freeze the weight for ever."""
    rng = np.random.default_rng(11)
    tensors = [make(layout, np.ones(64, np.float32), rng, beta2=0.5)]
    huge, small = (np.full(64, size, np.float32).astype(NUMPY[layout.grad]) for size in (1e30, 1.0))
    after = examine((name,), layout, tensors, [Step([huge])] * 2 + [Step([small])] * 2)
    assert np.isfinite(after[0].v.astype(np.float32)).all() and np.isfinite(after[0].param.astype(np.float32)).all()
    for _ in range(150):
        after = Step([small]).expected(after)
    assert (after[0].v.astype(np.float32) < 1e3).all()
    # A second moment that is already infinite, from elsewhere, comes back to the numbers too.
    tensors[0] = dataclasses.replace(tensors[0], v=np.full(64, INF, tensors[0].v.dtype), step=np.float32(3))
    after = examine((name,), layout, tensors, [Step([small])])
    assert np.isfinite(after[0].v.astype(np.float32)).all()


@names
@pytest.mark.parametrize(
    "layout",
    [*USUAL, Layout(FP16, FP16, FP32, FULL_MASTER, False, False), *CHANCE, dataclasses.replace(LEAST, amsgrad=True)],
    ids=label,
)
def test_non_finite_values_stay_where_they_are(name: str, layout: Layout) -> None:
    """One bad gradient spoils one weight; an infinite weight under decay stays infinite and makes no NaN. They are not
    rounded stochastically: 0x7fffffff plus a carry would be -0.0, infinity a NaN."""
    rng = np.random.default_rng(9)
    patterns = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], np.uint32).view(np.float32)
    infinities = np.tile([INF, -INF], 64).astype(np.float32)
    weights = np.concatenate([np.tile(patterns, 64), infinities, np.ones(256, np.float32)])
    grad = np.where(np.arange(640) < 384, 0.5, 0.0).astype(np.float32)
    grad[384:448], grad[448:512], grad[512:576] = NAN, INF, -INF
    with np.errstate(all="ignore"):
        tensors = [make(layout, weights, rng, decay=0.1)]
        (after,) = examine((name,), layout, tensors, [Step([grad.astype(NUMPY[layout.grad])])])
        param, m, v = (array.astype(np.float32) for array in (after.param, after.m, after.v))
    assert np.isnan(param[:256]).all() and (param[256:384:2] == INF).all() and (param[257:384:2] == -INF).all()
    assert np.isnan(param[384:448]).all() and np.isnan(m[384:448]).all() and np.isnan(v[384:448]).all()
    assert (m[448:512] == INF).all() and (m[512:576] == -INF).all() and np.isfinite(param[576:]).all()
    # An infinite gradient's square is the largest fp32, so the step is infinite and the loss must show it.
    assert not np.isfinite(param[448:576]).any()


@pytest.mark.parametrize("name", ALL)
def test_weights_at_the_edges_of_the_formats(name: str) -> None:
    """Steps over zero, into infinity, among subnormals: with a split master too the weight is the master's rounding."""
    rng = np.random.default_rng(14)
    weights = oracles.specials()
    for layout in (USUAL[1], Layout(FP16, FP32, FP32, FULL_MASTER, False, False)):
        for lr in (1e-45, 1e-38, 1.0, 1e38):
            tensors = [make(layout, weights, rng, lr=lr, decay=0.0)]
            grad = np.where(np.arange(len(weights)) % 2, 1.0, -1.0).astype(np.float32).astype(NUMPY[layout.grad])
            examine((name,), layout, tensors, [Step([grad])])


# -------------------------------------------------------------------------------------------------- stochastic rounding


SHAPE = (7, 6, 60)
BLOCKS = {
    "rows": [[(0, 4), (0, 6), (0, 60)], [(4, 7), (0, 6), (0, 60)]],
    "middle": [[(0, 7), (0, 1), (0, 60)], [(0, 7), (1, 6), (0, 60)]],
    "last, even": [[(0, 7), (0, 6), (0, 24)], [(0, 7), (0, 6), (24, 60)]],
    "last, odd": [[(0, 7), (0, 6), (0, 23)], [(0, 7), (0, 6), (23, 60)]],
    "last, one column": [[(0, 7), (0, 6), (0, 59)], [(0, 7), (0, 6), (59, 60)]],
    "rows and last": [[(r, s), (0, 6), (c, d)] for r, s in ((0, 2), (2, 7)) for c, d in ((0, 20), (20, 60))],
    "rows and middle": [[(r, s), (c, d), (0, 60)] for r, s in ((0, 6), (6, 7)) for c, d in ((0, 5), (5, 6))],
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", BLOCKS)
def test_shards_have_the_bits_of_the_full_tensor(name: str, kind: str) -> None:
    rng = np.random.default_rng(3)
    size = int(np.prod(SHAPE))
    whole = make(LEAST, rng.standard_normal(size).astype(np.float32), rng, step=3, noise=Noise(11, 4))
    grad = rng.standard_normal(size).astype(np.float32).astype(NUMPY[BF16])
    (after,) = Step([grad]).expected([whole])
    blocks = BLOCKS[kind]
    parts = [cut(whole, SHAPE, ranges) for ranges in blocks]
    grads = [grad.reshape(SHAPE)[tuple(slice(*r) for r in ranges)].reshape(-1).copy() for ranges in blocks]
    with using(name, "adam") as device:
        for offset in (0, 8, 1):
            memory = Memory(LEAST, parts, device, offset)
            memory.step(Step(grads))
            memory.compare([cut(after, SHAPE, ranges) for ranges in blocks], f"{name}, {kind}, offset {offset}")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("inner", "chunks"), [(1, 2), (3, 2), (4, 2), (8, 2), (24, 2), (2044, 2), (2048, 2), (2056, 2), (5000, 8)]
)
def test_runs_of_every_length_across_chunks(name: str, inner: int, chunks: int) -> None:
    """A column block of a wide matrix, longer than a chunk: runs end anywhere in it."""
    rng = np.random.default_rng(4)
    size = 2048 * chunks + 37
    for base, gap in ((0, 4), (8, 2**33 + 8), (2, 3)):
        noise = Noise(2**62 + 3, 2**31 + 7, base, inner, inner + gap)
        tensors = [make(LEAST, rng.standard_normal(size).astype(np.float32), rng, noise=noise)]
        grads = [rng.standard_normal(size).astype(np.float32).astype(NUMPY[BF16])]
        examine((name,), LEAST, tensors, [Step(grads)])
