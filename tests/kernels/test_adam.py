"""Adam and AdamW: bit for bit the numpy oracle's, in every layout and implementation; skipping, clipping, extremes."""

from __future__ import annotations

import dataclasses

import numpy as np
import oracles
import pytest
import torch
from adam_cases import FEW, LAYOUTS, USUAL, WEIGHTS, Memory, Step, examine, label, make, standard
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import ALL, using
from oracles import BF16, FP16, FP32, NUMPY, AdamOptions, AdamTensor, assert_same_bits
from tolerances import ADAM_STEP_UNITS, ROUNDOFF

from halfstep.kernels import adam
from halfstep.kernels.adam import FULL_MASTER, NO_MASTER, Layout

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy, on overflow and NaN
]

INF, NAN = float("inf"), float("nan")


# --------------------------------------------------------------------------------------------------------- all layouts


@pytest.mark.parametrize("layout", LAYOUTS, ids=label)
def test_native_in_every_layout(layout: Layout) -> None:
    tensors, steps = standard(layout)
    examine(("native",), layout, tensors, steps)


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("layout", FEW, ids=label)
def test_layouts_that_hold_every_pair_of_choices(layout: Layout, name: str) -> None:
    tensors, steps = standard(layout)
    examine((name,), layout, tensors, steps if name == "reference" else steps[:2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=label)
def test_every_layout(layout: Layout, name: str) -> None:
    tensors, steps = standard(layout, seed=1)
    examine((name,), layout, tensors, steps)


@pytest.mark.parametrize("layout", FEW[::2] + USUAL, ids=label)
@pytest.mark.parametrize("offset", [1, 8])
def test_misaligned_tensors(layout: Layout, offset: int) -> None:
    """Views into DDP's buckets and FSDP's shards: 16-byte alignment in some operands, in none, in all."""
    tensors, steps = standard(layout)
    examine(("reference", "native", "triton") if offset == 1 else ("native",), layout, tensors, steps[1:2], offset)


# --------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("name", ALL)
def test_sizes_around_blocks_and_chunks(name: str) -> None:
    layout, rng = USUAL[1], np.random.default_rng(1)
    sizes = [0, 1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 2047, 2048, 2049, 0]
    tensors = [make(layout, rng.standard_normal(size).astype(np.float32), rng, step=1) for size in sizes]
    grads = [rng.standard_normal(size).astype(np.float32).astype(NUMPY[BF16]) for size in sizes]
    examine((name,), layout, tensors, [Step(grads)])


@pytest.mark.parametrize("name", ALL)
def test_more_tensors_than_lanes_each_with_its_own_step_count(name: str) -> None:
    """Empty tensors still count their steps; neighbours share powers only if group and count agree."""
    layout, rng = USUAL[0], np.random.default_rng(2)
    sizes = [0] * (adam.LANES * 2 + 3)
    sizes[0] = sizes[300] = sizes[301] = sizes[-1] = 5
    tensors = [
        make(layout, rng.standard_normal(size).astype(np.float32), rng, step=index // 2 % 7, lr=0.1 * (1 + index % 3))
        for index, size in enumerate(sizes)
    ]
    grads = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    examine((name,), layout, tensors, [Step(grads), Step(grads, found_inf=2.0), Step(grads)])


@pytest.mark.parametrize("name", ["reference", "native"])
def test_many_small_tensors(name: str) -> None:
    layout, rng = USUAL[1], np.random.default_rng(3)
    sizes = rng.integers(0, 30, 1000).tolist()
    tensors = [
        make(layout, rng.standard_normal(size).astype(np.float32), rng, step=index % 3)
        for index, size in enumerate(sizes)
    ]
    grads = [rng.standard_normal(size).astype(np.float32).astype(NUMPY[BF16]) for size in sizes]
    examine((name,), layout, tensors, [Step(grads)])


def test_the_number_of_threads_changes_no_bit() -> None:
    layout, rng = USUAL[1], np.random.default_rng(4)
    tensors = [make(layout, rng.standard_normal(size).astype(np.float32), rng, step=1) for size in (20000, 3, 9000)]
    grads = [rng.standard_normal(tensor.param.size).astype(np.float32).astype(NUMPY[BF16]) for tensor in tensors]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            examine(("native",), layout, tensors, [Step(grads)])
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------------ skipping


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("found_inf", [1.0, 2.0, -1.0, 0.5, INF, NAN, 2.0**-126, 1e-45])
@pytest.mark.parametrize("layout", [USUAL[1], Layout(FP16, FP16, BF16, FULL_MASTER, True, True)], ids=label)
def test_a_skipped_step_writes_nothing(name: str, found_inf: float, layout: Layout) -> None:
    """Any found_inf that is not 0, and a gradient that would spoil everything; not even a NaN's payload changes."""
    rng = np.random.default_rng(5)
    tensors = [make(layout, rng.standard_normal(40).astype(np.float32), rng, step=step) for step in (0, 7)]
    tensors.append(make(layout, oracles.specials(), rng, step=1))
    grads = [np.full(tensor.param.size, NAN, NUMPY[layout.grad]) for tensor in tensors]
    with using(name, "adam") as device:
        memory = Memory(layout, tensors, device, 0)
        memory.step(Step(grads, grad_scale=0.0, found_inf=found_inf, sum_of_squares=NAN, max_norm=1.0))
        memory.compare(tensors, f"{name}, found_inf {found_inf}", exactly=True)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("found_inf", [None, 0.0, -0.0])
def test_a_step_is_taken_only_if_found_inf_is_zero(name: str, found_inf: float | None) -> None:
    layout, rng = USUAL[1], np.random.default_rng(6)
    tensors = [make(layout, rng.standard_normal(9).astype(np.float32), rng)]
    (after,) = examine((name,), layout, tensors, [Step([np.ones(9, NUMPY[BF16])], found_inf=found_inf)])
    assert after.step == 1


@pytest.mark.parametrize("name", ALL)
def test_skipping_the_first_step_is_as_if_it_had_not_been(name: str) -> None:
    layout, rng = USUAL[1], np.random.default_rng(7)
    tensors = [make(layout, rng.standard_normal(50).astype(np.float32), rng)]
    grad = [rng.standard_normal(50).astype(np.float32).astype(NUMPY[BF16])]
    after = examine((name,), layout, tensors, [Step(grad, found_inf=1.0), Step(grad, found_inf=1.0), Step(grad)])
    (alone,) = Step(grad).expected(tensors)
    assert after[0].step == 1
    for array, other in zip(after[0].arrays().values(), alone.arrays().values(), strict=True):
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


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("step", [0, 1, 999, 1e6, 2**24 - 2, 2**24 - 1, 2**24, 2.0**30, 2.0**40])
def test_step_counts(name: str, step: float) -> None:
    """beta^t by squaring, up to counts that fp32 can no longer advance."""
    layout, rng = USUAL[0], np.random.default_rng(10)
    betas = [(0.9, 0.999), (0.0, 0.0), (0.999999, 0.9999999), (0.5, 0.9999)]
    tensors = [
        make(layout, rng.standard_normal(7).astype(np.float32), rng, step=step, beta1=beta1, beta2=beta2)
        for beta1, beta2 in betas
    ]
    grads = [rng.standard_normal(7).astype(np.float32) for _ in tensors]
    after = examine((name,), layout, tensors, [Step(grads), Step(grads)])
    assert after[0].step == (step + 2 if step <= 2**24 - 2 else max(2**24, step))


@pytest.mark.parametrize("name", ALL)
def test_a_huge_gradient_is_forgotten_again(name: str) -> None:
    """Its square is capped at the largest fp32: an infinite second moment would freeze the weight for ever."""
    layout, rng = USUAL[0], np.random.default_rng(11)
    tensors = [make(layout, np.ones(4, np.float32), rng, beta2=0.9)]
    huge, small = np.full(4, 1e30, np.float32), np.ones(4, np.float32)
    after = examine((name,), layout, tensors, [Step([huge])] + [Step([small])] * 3)
    assert np.isfinite(after[0].v).all() and np.isfinite(after[0].param).all()
    for _ in range(1000):
        after = Step([small]).expected(after)
    assert (after[0].v < 1e3).all()
    # A second moment that is already infinite, from elsewhere, comes back to the numbers too.
    tensors[0] = dataclasses.replace(tensors[0], v=np.full(4, INF, np.float32), step=np.float32(3))
    after = examine((name,), layout, tensors, [Step([small])])
    assert np.isfinite(after[0].v).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layout", [*USUAL, Layout(FP16, FP16, FP32, FULL_MASTER, False, False)], ids=label)
def test_non_finite_values_stay_where_they_are(name: str, layout: Layout) -> None:
    """One bad gradient spoils one weight; an infinite weight under decay stays infinite and makes no NaN."""
    rng = np.random.default_rng(12)
    weights = np.array([1.0, INF, -INF, NAN, 1.0, 1.0, 1.0], np.float32)
    grad = np.array([0.5, 0.5, 0.5, 0.5, INF, -INF, NAN], np.float32).astype(NUMPY[layout.grad])
    tensors = [make(layout, weights, rng, decay=0.1)]
    (after,) = examine((name,), layout, tensors, [Step([grad])])
    param = after.param.astype(np.float32)
    assert np.isfinite(param[0]) and param[1] == INF and param[2] == -INF and np.isnan(param[3]) and np.isnan(param[6])
    # An infinite gradient's square is the largest fp32, so the step is infinite and the loss must show it.
    assert not np.isfinite(param[4:6]).any()


@pytest.mark.parametrize("name", ALL)
def test_zero_over_zero_with_eps_zero(name: str) -> None:
    """torch's Adam gives NaN here too; the bits must not depend on the implementation."""
    layout, rng = USUAL[0], np.random.default_rng(13)
    tensors = [make(layout, np.ones(20, np.float32), rng, eps=0.0)]
    (after,) = examine((name,), layout, tensors, [Step([np.zeros(20, np.float32)])])
    assert np.isnan(after.param).all()


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


@pytest.mark.parametrize("name", ALL)
def test_a_weight_zeroed_from_outside_goes_on_from_zero(name: str) -> None:
    """`zero_`, a pruning mask: the remainder is still the old weight's, and below zero lie the patterns of NaN."""
    layout, rng = USUAL[1], np.random.default_rng(16)
    zeros = np.zeros(64, np.float32)
    zeros[::2] = -0.0
    clean = make(layout, zeros, rng, step=5)
    stale = dataclasses.replace(clean, extra=rng.integers(-(2**15), 0, 64).astype(np.int16))
    step = Step([rng.standard_normal(64).astype(np.float32).astype(NUMPY[BF16])])
    with using(name, "adam") as device:
        memory = Memory(layout, [stale], device, 0)
        memory.step(step)
        memory.compare(step.expected([clean]), name)


@pytest.mark.parametrize("name", ALL)
def test_the_second_moment_converges_to_the_square(name: str) -> None:
    """With a constant gradient 1 it must come to 1, where the two-product form stops 1.3e-5 below."""
    layout, rng = USUAL[0], np.random.default_rng(15)
    tensor = make(layout, np.zeros(3, np.float32), rng)
    tensor = dataclasses.replace(tensor, v=np.full(3, 1.0, np.float32), step=np.float32(50000))
    examine((name,), layout, [tensor], [Step([np.ones(3, np.float32)])] * 3)
    after = [tensor]
    for _ in range(20):
        after = Step([np.ones(3, np.float32)]).expected(after)
    assert (after[0].v == 1).all()


MODERATE = st.floats(-1000, 1000, width=32).map(lambda x: x if abs(x) > 1e-3 else 0.0)


@settings(deadline=None, max_examples=60)
@given(
    w=MODERATE,
    m=MODERATE,
    g=MODERATE,
    v=MODERATE.map(abs),
    t=st.integers(1, 10**6),
    lr=st.sampled_from([1e-4, 1e-3, 0.1]),
    beta1=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    beta2=st.sampled_from([0.0, 0.5, 0.95, 0.999]),
    decay=st.sampled_from([0.0, 0.01, 0.1]),
    decoupled=st.booleans(),
)
def test_one_step_against_the_textbook_in_float64(
    w: float, m: float, g: float, v: float, t: int, lr: float, beta1: float, beta2: float, decay: float, decoupled: bool
) -> None:
    options = AdamOptions(lr, beta1, beta2, 1e-8, decay, False, decoupled)
    layout = Layout(FP32, FP32, FP32, NO_MASTER, False, not decoupled)
    (w32, m32, v32, g32) = (np.full(3, x, np.float32) for x in (w, m, v, g))
    tensor = AdamTensor(w32, m32, v32, np.float32(t - 1), options=options)
    exact_w, exact_m, exact_v = oracles.adam_step_float64(w, m, v, g, t, options)
    unit = ADAM_STEP_UNITS * ROUNDOFF[FP32]
    sizes = abs(m) + abs(g) + decay * abs(w)
    slope = lr / (1 - beta1**t) / (np.sqrt(exact_v / (1 - beta2**t)) + 1e-8)
    for name in ALL:
        with using(name, "adam") as device:
            memory = Memory(layout, [tensor], device, 0)
            memory.step(Step([g32]))
            new_w, new_m, new_v = (float(memory.lists[operand][0][1]) for operand in (adam.PARAM, adam.M, adam.V))
        assert abs(new_m - exact_m) <= unit * sizes, name
        assert abs(new_v - exact_v) <= unit * (abs(v) + sizes**2), name
        assert abs(new_w - exact_w) <= unit * (abs(w) + slope * sizes), name


def test_the_cover_of_pairs_is_one() -> None:
    assert len(LAYOUTS) == 252 and len(FEW) < 40
    assert {(layout.param, layout.master) for layout in FEW} == set(WEIGHTS)
    for first, second in (("grad", "state"), ("amsgrad", "l2"), ("master", "amsgrad"), ("param", "grad")):
        seen = {(getattr(layout, first), getattr(layout, second)) for layout in FEW}
        assert seen == {(getattr(layout, first), getattr(layout, second)) for layout in LAYOUTS}
