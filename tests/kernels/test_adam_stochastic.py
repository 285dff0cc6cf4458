"""Adam with stochastic rounding: bit for bit the oracle's, however the work is cut, and right in the mean."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import oracles
import pytest
import roundings
import torch
from adam_cases import FEW_STOCHASTIC, LAYOUTS, STOCHASTIC_LAYOUTS, Memory, Step, examine, label, make, standard
from implementations import ALL, using
from noise import Noise, stochastic, words
from oracles import BF16, FP16, FP32, NUMPY, AdamTensor

from halfstep.kernels import adam
from halfstep.kernels.adam import FULL_MASTER, NO_MASTER, SPLIT24_MASTER, SPLIT_MASTER, Layout

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy, on overflow and NaN
]

INF, NAN = float("inf"), float("nan")
PLAIN = Layout(BF16, BF16, FP32, NO_MASTER, False, False, True)  # 22 bytes
LEAST = Layout(BF16, BF16, BF16, NO_MASTER, False, False, True)  # 14 bytes
SPLIT = Layout(BF16, BF16, BF16, SPLIT_MASTER, False, False, True)  # 18 bytes
SPLIT24 = Layout(BF16, BF16, BF16, SPLIT24_MASTER, False, False, True)  # 16 bytes
HALF = Layout(FP16, FP16, FP32, NO_MASTER, False, False, True)


# ---------------------------------------------------------------------------------------------------------- the oracle


def test_the_oracles_words_are_those_of_the_published_vectors() -> None:
    """From the file kat_vectors of Random123, seven rounds, as far as counters of elements reach."""
    zeros = words(np.arange(8, dtype=np.uint64), 0, 0, 0) >> np.uint32(16)
    assert zeros.tolist() == [0xB709, 0x5F6F, 0x3F64, 0x0D89, 0x1F81, 0x4F12, 0x0A48, 0x4F73]
    group = 0x05A308D3243F6A88  # a counter below 2^61, by Python's integers
    index = np.uint64(8 * group) + np.arange(8, dtype=np.uint64)
    w = by_definition([group % 2**32, group >> 32, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0])
    two = [w[0] ^ w[1], w[1] ^ w[2], w[2] ^ w[3], w[3] ^ w[0]]
    three = [w[0] ^ w[1] ^ w[2], w[1] ^ w[2] ^ w[3], w[2] ^ w[3] ^ w[0], w[3] ^ w[0] ^ w[1]]
    for draw, of in enumerate((w, two, three)):
        found = words(index, 0x299F31D0A4093822, 0x13198A2E, 0x03707344, draw)
        assert found.tolist() == [half << 16 | 0x8000 for word in of for half in (word & 0xFFFF, word >> 16)]


def by_definition(c: list[int], k: list[int]) -> list[int]:
    for _ in range(7):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k[0], right % 2**32, (left >> 32) ^ c[3] ^ k[1], left % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_the_oracles_rounding_is_that_of_fractions(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([roundings.points(dtype, every=211), oracles.specials()])
    random = rng.integers(0, 2**32, len(values), dtype=np.uint32)
    random[::5], random[1::5] = 0, 2**32 - 1
    got = oracles.bits(stochastic(values, dtype, random))
    for value, word, code in zip(values.tolist(), random.tolist(), got.tolist(), strict=True):
        expected = roundings.code(value, dtype, "stochastic", False, word)
        if expected is None:
            assert value != value and np.isnan(np.array([code], np.uint16).view(NUMPY[dtype]).astype(np.float32))
        else:
            assert code == expected, (value.hex(), hex(word))


# --------------------------------------------------------------------------------------------------------- all layouts


@pytest.mark.parametrize("layout", STOCHASTIC_LAYOUTS, ids=label)
def test_native_in_every_layout(layout: Layout) -> None:
    tensors, steps = standard(layout)
    examine(("native",), layout, tensors, steps)


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("layout", FEW_STOCHASTIC, ids=label)
def test_layouts_that_hold_every_pair_of_choices(layout: Layout, name: str) -> None:
    tensors, steps = standard(layout)
    examine((name,), layout, tensors, steps if name == "reference" else steps[:2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("layout", STOCHASTIC_LAYOUTS, ids=label)
def test_every_layout(layout: Layout, name: str) -> None:
    tensors, steps = standard(layout, seed=1)
    examine((name,), layout, tensors, steps)


@pytest.mark.parametrize("layout", [PLAIN, LEAST, SPLIT, SPLIT24, HALF], ids=label)
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_misaligned_tensors(layout: Layout, offset: int) -> None:
    tensors, steps = standard(layout)
    examine(ALL if offset == 1 else ("native", "triton"), layout, tensors, steps[1:2], offset)


def test_there_is_something_to_round_exactly_where_fewer_than_32_bits_are_kept() -> None:
    for layout in LAYOUTS:
        alone = layout.param != FP32 and layout.master in (NO_MASTER, SPLIT24_MASTER)
        assert adam.rounds_stochastically(layout.param, layout.state, layout.master) == (alone or layout.state != FP32)
    assert len(STOCHASTIC_LAYOUTS) == 204


@pytest.mark.parametrize("name", ALL)
def test_where_nothing_is_rounded_by_chance_the_bits_are_those_of_nearest(name: str) -> None:
    """fp32 everywhere, or masters with fp32 moments: the kernels ignore the option too."""
    masters = ((BF16, SPLIT_MASTER), (FP16, FULL_MASTER), (FP32, NO_MASTER))
    for nearest in (Layout(param, param, FP32, master, False, False) for param, master in masters):
        tensors, steps = standard(nearest)
        for index, tensor in enumerate(tensors):
            tensors[index] = dataclasses.replace(tensor, noise=Noise(5, index))
        examine((name,), dataclasses.replace(nearest, stochastic=True), tensors, steps[:2])


@pytest.mark.parametrize("name", ALL)
def test_a_skipped_step_writes_nothing_and_draws_nothing(name: str) -> None:
    rng = np.random.default_rng(1)
    tensors = [make(LEAST, rng.standard_normal(40).astype(np.float32), rng, step=step) for step in (0, 7)]
    grads = [rng.standard_normal(40).astype(np.float32).astype(NUMPY[BF16]) for _ in tensors]
    skipped = examine((name,), LEAST, tensors, [Step(grads, found_inf=1.0), Step(grads)])
    for after, alone in zip(skipped, Step(grads).expected(tensors), strict=True):
        for array, other in zip(after.arrays().values(), alone.arrays().values(), strict=True):
            oracles.assert_same_bits(array, other)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("step", [0, 1, 2**24 - 2, 2**24, 2.0**30, 2.0**40])
def test_step_counts(name: str, step: float) -> None:
    rng = np.random.default_rng(2)
    tensors = [make(LEAST, rng.standard_normal(33).astype(np.float32), rng, step=step)]
    grads = [rng.standard_normal(33).astype(np.float32).astype(NUMPY[BF16])]
    examine((name,), LEAST, tensors, [Step(grads), Step(grads)])


# ------------------------------------------------------------------------------------- the same bits however it is cut


def cut(tensor: AdamTensor, shape: tuple[int, ...], ranges: list[tuple[int, int]]) -> AdamTensor:
    """A block of a tensor of `shape`, and how it lies in the whole as a single dimension's map can say it."""
    at = tuple(slice(start, stop) for start, stop in ranges)
    assert tensor.noise is not None
    strides = [int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))]
    base = sum(start * stride for (start, _), stride in zip(ranges, strides, strict=True))
    inner_cut = [dim for dim in range(1, len(shape)) if ranges[dim] != (0, shape[dim])]
    assert len(inner_cut) <= 1
    held = [stop - start for start, stop in ranges]
    inner = int(np.prod(held[inner_cut[0] :])) if inner_cut else 0
    inner_whole = int(np.prod(shape[inner_cut[0] :])) if inner_cut else 0
    parts = {
        name: array.reshape(shape)[at].reshape(-1).copy() for name, array in tensor.arrays().items() if name != "step"
    }
    noise = dataclasses.replace(tensor.noise, base=base, inner=inner, inner_whole=inner_whole)
    return dataclasses.replace(tensor, **parts, noise=noise)


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
def test_shards_have_the_bits_of_the_whole(name: str, kind: str) -> None:
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


@pytest.mark.parametrize("name", ALL)
def test_one_list_or_several_in_any_order_and_any_threads(name: str) -> None:
    rng = np.random.default_rng(5)
    tensors = [
        make(LEAST, rng.standard_normal(size).astype(np.float32), rng, noise=Noise(3, number))
        for number, size in enumerate((5, 3000, 0, 17, 2048))
    ]
    grads = [rng.standard_normal(tensor.param.size).astype(np.float32).astype(NUMPY[BF16]) for tensor in tensors]
    before = torch.get_num_threads()
    try:
        for order in ([[0, 1, 2, 3, 4]], [[4, 2, 0], [3, 1]], [[3], [1], [0], [4], [2]]):
            for numbers in order:
                examine((name,), LEAST, [tensors[n] for n in numbers], [Step([grads[n] for n in numbers])])
            torch.set_num_threads(1 + len(order))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "other",
    [
        Noise(1, 0),
        Noise(2**32, 0),
        Noise(0, 1),
        Noise(0, 2**31),
        Noise(0, 0, 4),
        Noise(0, 0, 2**34),
        Noise(0, 0, 0, 8, 16),
    ],
    ids=["seed's lower half", "upper half", "stream", "stream's top", "base", "base's upper half", "runs"],
)
def test_everything_that_names_an_element_changes_its_bits(name: str, other: Noise) -> None:
    """Seen on a moment that starts from 0, so that only random bits differ; a third of all roundings on average."""
    rng = np.random.default_rng(6)
    grad = rng.standard_normal(512).astype(np.float32)
    results = []
    for noise in (Noise(0, 0), other):
        layout = Layout(FP32, FP32, BF16, NO_MASTER, False, False, True)
        tensors = [make(layout, np.zeros(512, np.float32), rng, noise=noise)]
        with using(name, "adam") as device:
            memory = Memory(layout, tensors, device, 0)
            memory.step(Step([grad]))
            memory.compare(Step([grad]).expected(tensors), name)
            results.append([oracles.bits(memory.lists[operand][0])[8:] for operand in (adam.M, adam.V)])
    for left, right in zip(*results, strict=True):
        assert (left != right).mean() > 0.25


@pytest.mark.parametrize("name", ALL)
def test_every_step_draws_anew(name: str) -> None:
    rng = np.random.default_rng(7)
    grad = np.full(256, 1.0 + 2.0**-12, np.float32).astype(np.float32)
    seen = []
    for step in (1, 2, 3):
        layout = Layout(FP32, FP32, BF16, NO_MASTER, False, False, True)
        tensor = make(layout, np.zeros(256, np.float32), rng, step=step, noise=Noise(0, 0), beta1=0.0)
        examine((name,), layout, [tensor], [Step([grad])])
        (after,) = Step([grad]).expected([tensor])
        seen.append(oracles.bits(after.m))
    for left, right in itertools.combinations(seen, 2):
        assert (left != right).any()


# --------------------------------------------------------------------------------------------------- values and means


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "layout", [PLAIN, LEAST, HALF, Layout(FP16, FP32, BF16, NO_MASTER, False, True, True)], ids=label
)
def test_exact_weights_never_move(name: str, layout: Layout) -> None:
    """lr 0 and decay 0: every finite weight of the format keeps its bits, whatever the random bits are."""
    codes = np.arange(0, 2**16, 7, dtype=np.uint16).view(NUMPY[layout.param])
    with np.errstate(all="ignore"):
        weights = codes.astype(np.float32)
    weights = weights[np.isfinite(weights) & (oracles.bits(weights) != 2**31)]
    rng = np.random.default_rng(8)
    tensors = [make(layout, weights, rng, step=5, lr=0.0, decay=0.0)]
    grads = [rng.standard_normal(len(weights)).astype(np.float32).astype(NUMPY[layout.grad])]
    (after,) = examine((name,), layout, tensors, [Step(grads)])
    assert (oracles.bits(after.param) == oracles.bits(tensors[0].param)).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "layout", [PLAIN, LEAST, SPLIT, SPLIT24, HALF, dataclasses.replace(LEAST, amsgrad=True)], ids=label
)
def test_non_finite_values_stay_where_they_are(name: str, layout: Layout) -> None:
    """NaN and infinity are not rounded stochastically: 0x7fffffff plus a carry would be -0.0, infinity a NaN."""
    rng = np.random.default_rng(9)
    patterns = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], np.uint32).view(np.float32)
    infinities = np.tile([INF, -INF], 64).astype(np.float32)
    weights = np.concatenate([np.tile(patterns, 64), infinities, np.ones(192, np.float32)])
    grad = np.where(np.arange(576) < 384, 0.5, 0.0).astype(np.float32)
    grad[384:448], grad[448:512], grad[512:] = NAN, INF, -INF
    tensors = [make(layout, weights, rng, decay=0.1)]
    with np.errstate(all="ignore"):
        (after,) = examine((name,), layout, tensors, [Step([grad.astype(NUMPY[layout.grad])])])
    param, m, v = (array.astype(np.float32) for array in (after.param, after.m, after.v))
    assert np.isnan(param[:256]).all() and (param[256:384:2] == INF).all() and (param[257:384:2] == -INF).all()
    assert np.isnan(param[384:448]).all() and np.isnan(m[384:448]).all() and np.isnan(v[384:448]).all()
    assert (m[448:512] == INF).all() and (m[512:] == -INF).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_second_moment_that_overflowed_comes_back_to_the_numbers(name: str, amsgrad: bool) -> None:
    layout = dataclasses.replace(LEAST, amsgrad=amsgrad)
    rng = np.random.default_rng(10)
    tensor = make(layout, np.ones(64, np.float32), rng, beta2=0.5)
    huge = np.full(64, 3e19, np.float32).astype(NUMPY[BF16])
    after = examine((name,), layout, [tensor], [Step([huge])] * 2 + [Step([np.ones(64, NUMPY[BF16])])] * 2)
    assert np.isfinite(after[0].v.astype(np.float32)).all()


def test_the_largest_second_moment_is_the_largest_that_was_stored() -> None:
    """With random bits of its own it would rise further: each step could round it up, and none could lower it."""
    layout = dataclasses.replace(LEAST, amsgrad=True)
    rng = np.random.default_rng(11)
    state = [make(layout, np.zeros(4096, np.float32), rng, noise=Noise(0, 0), beta2=0.9)]
    largest = state[0].v.astype(np.float32)
    for _ in range(200):
        grad = np.abs(rng.standard_normal(4096)).astype(np.float32).astype(NUMPY[BF16])
        state = Step([grad]).expected(state)
        largest = np.maximum(largest, state[0].v.astype(np.float32))
        assert (state[0].top.astype(np.float32) == largest).all()  # type: ignore[union-attr]
    tensors = [make(layout, np.zeros(512, np.float32), rng, step=5, noise=Noise(0, 0))]
    examine(ALL, layout, tensors, [Step([rng.standard_normal(512).astype(np.float32).astype(NUMPY[BF16])])])


def run_native(layout: Layout, tensor: AdamTensor, grads: list[np.ndarray], steps: int) -> Memory:
    with using("native", "adam") as device:
        memory = Memory(layout, [tensor], device, 0)
        for step in range(steps):
            memory.step(Step([grads[step % len(grads)]]))
        return memory


def test_small_steps_arrive_in_the_mean_and_are_lost_to_nearest() -> None:
    """1000 steps of 1e-5 from 1, where half a bf16 unit is 2e-3: to 0.99 on average, by nearest nowhere."""
    n, lr = 4096, 1e-5
    rng = np.random.default_rng(12)
    ends = {}
    for layout in (PLAIN, LEAST, dataclasses.replace(PLAIN, stochastic=False)):
        tensor = make(layout, np.ones(n, np.float32), rng, noise=Noise(1, 0), lr=lr, decay=0.0)
        memory = run_native(layout, tensor, [np.ones(n, NUMPY[BF16])], 1000)
        ends[layout] = oracles.to_numpy(memory.lists[adam.PARAM][0]).astype(np.float64)
    assert (ends[dataclasses.replace(PLAIN, stochastic=False)] == 1).all()
    end = ends[PLAIN]
    # m is 1 and v is 1 all along, so every step is lr; the unit below 1 is 2^-8, and the steps add up to 2.56 of them.
    assert abs(end.mean() - 0.99) <= 5 * end.std() / n**0.5
    # Of 1000 draws with probability lr * 2^8 each, the variance.
    expected = (1000 * (lr * 2**8) * (1 - lr * 2**8)) ** 0.5 * 2**-8
    assert end.std() == pytest.approx(expected, rel=0.1)
    assert abs(ends[LEAST].mean() - 0.99) <= 6e-4  # bf16 moments add noise of their own to every step


def test_the_second_moment_keeps_moving_in_bf16() -> None:
    """From 1 towards a quarter with beta2 0.999: to nearest it stops where a step is below half a unit."""
    n = 4096
    rng = np.random.default_rng(13)
    ends = {}
    for chance in (False, True):
        layout = Layout(FP32, FP32, BF16, NO_MASTER, False, False, chance)
        tensor = make(layout, np.zeros(n, np.float32), rng, step=1000, noise=Noise(2, 0))
        tensor = dataclasses.replace(tensor, v=np.ones(n, NUMPY[BF16]))
        memory = run_native(layout, tensor, [np.full(n, 0.5, np.float32)], 3000)
        ends[chance] = oracles.to_numpy(memory.lists[adam.V][0]).astype(np.float64)
    exact = 0.25 + 0.75 * 0.999**3000
    assert abs(ends[True].mean() - exact) <= 5 * ends[True].std() / n**0.5
    assert (ends[False] > 0.9).all()


def test_the_three_roundings_of_an_element_are_uncorrelated_and_unbiased() -> None:
    """Errors of parameter, first and second moment in units, over 2^18 elements of one step."""
    n = 2**18
    rng = np.random.default_rng(14)
    layout = Layout(BF16, FP32, BF16, NO_MASTER, False, False, True)
    tensor = make(layout, np.ones(n, np.float32), rng, noise=Noise(3, 0), lr=0.1, decay=0.0)
    grad = (1.0 + rng.random(n)).astype(np.float32)
    memory = run_native(layout, tensor, [grad], 1)
    exact = {
        adam.M: np.float32(0.1) * grad,
        adam.V: np.float32(0.001) * (grad * grad),
    }
    errors = []
    for operand, value in exact.items():
        got = oracles.to_numpy(memory.lists[operand][0]).astype(np.float64)
        unit = np.exp2(np.floor(np.log2(value.astype(np.float64))) - 7)
        errors.append((got - value) / unit)
    param = oracles.to_numpy(memory.lists[adam.PARAM][0]).astype(np.float64)
    errors.append((param - 0.9) / 2**-8)  # m / sqrt(v) is 1 up to some units of 2^-24 and eps
    for error in errors:
        assert np.abs(error).max() < 1.001
        assert abs(error.mean()) <= 5 * error.std() / n**0.5 + 1e-4
    correlation = np.corrcoef(errors)
    assert np.abs(correlation - np.eye(3)).max() <= 5 / n**0.5
