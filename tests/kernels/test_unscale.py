"""Unscale and check: flags, the sum of squares against exact sums, the same bits from all three implementations."""

from fractions import Fraction
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import ALL, devices, twins, using
from oracles import BF16, DTYPES, FP16, FP32, assert_same_bits
from strategies import laid_out
from tolerances import SUM_OF_SQUARES
from verdicts import over
from verdicts import unscaled as unscaled_in_place

import halfstep
from halfstep.kernels import unscale
from halfstep.kernels.unscale import CHUNK, HAS_INF, HAS_NAN, LANES, Factor, Tally, Verdict

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy, on overflow and NaN
]

device = devices("unscale")
INF, NAN = float("inf"), float("nan")


def names(value: object) -> str:
    return str(value).removeprefix("torch.")


def unscaled(values: np.ndarray, inv_scale: float | None) -> np.ndarray:
    """The fp32 values after unscaling, before they are rounded to the tensor's dtype."""
    with np.errstate(all="ignore"):
        wide = values.astype(np.float32)
        return wide if inv_scale is None else wide * np.float32(inv_scale)


def flag_of(values: np.ndarray) -> int:
    return HAS_INF * bool(np.isinf(values).any()) + HAS_NAN * bool(np.isnan(values).any())


def check_by(name: str, tensors: list[torch.Tensor], inv_scale: object = None, write: bool = False) -> Verdict:
    """One implementation's answer on copies that lie in memory as the originals do; nothing but a write is written."""
    with using(name, "unscale") as device:
        placed = twins(tensors, device)
        before = [oracles.bits(tensor).copy() for tensor in placed]
        if write:
            result = unscaled_in_place(placed, inv_scale)
        else:
            result = halfstep.foreach_check(placed, inv_scale=inv_scale)  # type: ignore[arg-type]
            for tensor, kept in zip(placed, before, strict=True):
                assert (oracles.bits(tensor) == kept).all(), "checking wrote"
    assert (result.found_inf.dtype, result.found_inf.shape) == (FP32, ())
    assert (result.sum_of_squares.dtype, result.sum_of_squares.shape) == (torch.float64, ())
    assert (result.flags.dtype, result.flags.shape) == (torch.int32, (len(tensors),))
    return Verdict(*(part.cpu() for part in result))


def examine(tensors: list[torch.Tensor], inv_scale: float | None = None) -> Verdict:
    """All three implementations, the same bits; flags and sum against the oracle. Returns the common answer."""
    arrays = [unscaled(oracles.to_numpy(tensor.resolve_neg()), inv_scale) for tensor in tensors]
    flags = [flag_of(array) for array in arrays]
    results = [check_by(name, tensors, inv_scale) for name in ALL]
    for name, result in zip(ALL, results, strict=True):
        assert result.flags.tolist() == flags, name
        assert result.found_inf.item() == float(any(flags)), name
        assert_same_bits(result.sum_of_squares, results[0].sum_of_squares, f"sum of squares, {name}")
    total = results[0].sum_of_squares.item()
    if any(flags):
        assert not np.isfinite(total)
    else:
        near(total, np.concatenate([array.reshape(-1) for array in arrays]))
    return results[0]


def near(total: float, values: np.ndarray) -> None:
    """The tolerance of the table, against the correctly rounded sum; exact where that is 0."""
    exact = oracles.sum_of_squares(values)
    assert abs(total - exact) <= SUM_OF_SQUARES * exact, f"{total} for {exact}: {abs(total - exact) / exact} off"


def grads(sizes: list[int], dtype: torch.dtype, seed: int = 0, spread: float = 1.0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy((rng.standard_normal(size) * spread).astype(np.float32)).to(dtype) for size in sizes]


# ------------------------------------------------------------------------------------------------------ sum of squares


def tree(values: np.ndarray) -> np.ndarray:
    """The docstring's sum by hand: halves, halves of these, neighbours."""
    for _ in range(2):
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    while len(values) > 1:
        values = np.array([values[2 * i] + values[2 * i + 1] for i in range(len(values) // 2)])
    return values[0]


def test_the_sum_is_what_the_docstring_says() -> None:
    """In numpy: fp32 within a chunk, fp64 across."""
    (tensor,) = grads([CHUNK + 100], FP32)
    values, total = tensor.numpy(), np.float64(0)
    for start in range(0, len(values), CHUNK):
        chunk = np.zeros(CHUNK, np.float32)
        chunk[: len(values[start : start + CHUNK])] = values[start : start + CHUNK]
        _, exponent = np.frexp(np.abs(chunk).max())
        power = np.float32(2.0) ** np.float32(1 - exponent)
        total = total + np.float64(tree((chunk * power) ** 2)) / np.float64(power) ** 2
    assert check_by("reference", [tensor]).sum_of_squares.item() == total
    sums = np.random.default_rng(0).lognormal(0, 20, 2 * LANES + 77)
    lanes = np.zeros(LANES)
    for start in range(0, len(sums), LANES):
        lanes[: len(sums[start : start + LANES])] += sums[start : start + LANES]
    assert unscale.reference_sum(torch.from_numpy(sums)).item() == tree(lanes)


@pytest.mark.parametrize("exponent", [-149, -148, -127, -126, -125, -75, 0, 63, 64, 126, 127])
def test_no_square_overflows_or_underflows(exponent: int) -> None:
    """From the smallest fp32, 1.4e-45, to the largest, 3.4e38: fp32 squares would be 0 or inf."""
    value = np.float32(2.0**exponent)
    tensor = torch.full((4099,), float(value))
    assert Fraction(examine([tensor]).sum_of_squares.item()) == Fraction(float(value)) ** 2 * 4099
    below = float(np.nextafter(np.float32(2.0) ** min(exponent + 1, 127), np.float32(0)))
    examine([torch.full((5,), below)])
    examine([torch.full((CHUNK,), below), torch.tensor([3.4028234663852886e38, 1e-45, -1e-38])])
    norm = halfstep.foreach_unscale_([tensor], 1.0).norm.item()
    with np.errstate(over="ignore"):
        assert norm == np.float32(np.sqrt(np.float64(value) ** 2 * 4099))


@pytest.mark.parametrize(("dtype", "way"), [(FP32, "checked"), (FP16, "scaled"), (BF16, "written")])
def test_sums_have_the_order_of_the_reference(dtype: torch.dtype, way: str) -> None:
    """Magnitudes over ten binades: fp32 rounds the sums of their squares, so another order gives other bits."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy((2.0 ** rng.uniform(-10, 0, 16 * CHUNK)).astype(np.float32)).to(dtype)
    inv_scale = None if way == "checked" else 2.0**-3
    reference, native = (check_by(name, [values], inv_scale, way == "written") for name in ("reference", "native"))
    assert_same_bits(native.sum_of_squares, reference.sum_of_squares)
    orders = [values[torch.from_numpy(rng.permutation(16 * CHUNK))] for _ in range(3)]
    sums = {check_by("reference", [moved], inv_scale, way == "written").sum_of_squares.item() for moved in orders}
    assert len(sums) > 1


def test_more_chunks_than_lanes() -> None:
    """1,024 lanes in fp64: the chunks beyond take a second round."""
    tensors = grads([1] * (LANES + 9) + [CHUNK * 3 + 1] * 2, FP32)
    reference, native = (check_by(name, tensors) for name in ("reference", "native"))
    assert_same_bits(native.sum_of_squares, reference.sum_of_squares)
    near(native.sum_of_squares.item(), np.concatenate([tensor.numpy() for tensor in tensors]))
    # A launch of as many programs is slow under the interpreter, so there the gathering kernel runs alone.
    for chunks, marked in ((1, None), (1023, 0), (1024, 1023), (1025, 1024), (2500, None), (2500, 0), (2500, 2499)):
        sums = torch.from_numpy(np.random.default_rng(chunks).lognormal(0, 20, chunks))
        flags = torch.zeros(chunks, dtype=torch.int32)
        if marked is not None:
            flags[marked] = HAS_NAN
        found, total = flags.any(), unscale.reference_sum(sums)
        with using("triton", "unscale") as device:
            answer = [torch.empty((), dtype=dtype, device=device) for dtype in (FP32, torch.float64, FP32)]
            copied = torch.empty(chunks, dtype=torch.int32, device=device)
            between = flags.to(device, copy=True)
            unscale.finish_kernel[(1,)](
                *(sums.to(device), chunks, between, chunks, *answer, copied, copied, copied),
                LANES=LANES,
                UNROLLED=unscale.UNROLLED,
                TALLY=False,
                enable_fp_fusion=False,
            )
        assert answer[0].item() == found.item() == float(marked is not None)
        assert_same_bits(answer[1], total, f"{chunks} chunks")
        assert_same_bits(answer[2], total.sqrt().float(), f"{chunks} chunks")
        assert torch.equal(copied.cpu(), flags) and not between.any(), "flags are handed over and left zero"


SCALES = (None, 1.0, 2.0**-16, 0.5, 1 / 3, 3e38, 1e-45, 0.0, -2.0, INF, NAN)


@settings(deadline=None, max_examples=10)
@given(st.lists(laid_out(DTYPES, (CHUNK - 1, CHUNK, CHUNK + 1)), min_size=1, max_size=5), st.sampled_from(SCALES))
def test_any_list_has_the_same_answer_everywhere(tensors: list[torch.Tensor], inv_scale: float | None) -> None:
    """What is checked is the unscaled value: a scale below 1 can make a finite gradient overflow."""
    plain = [tensor for tensor in tensors if not tensor.is_neg()]
    if plain:
        examine(plain, inv_scale)
    for name in ALL:
        with using(name, "unscale") as device:
            result = halfstep.foreach_check([t.to(device) for t in tensors], inv_scale=inv_scale)
        arrays = [unscaled(oracles.to_numpy(tensor.resolve_neg()), inv_scale) for tensor in tensors]
        assert result.flags.tolist() == list(map(flag_of, arrays)), name
        if not any(map(flag_of, arrays)):
            near(result.sum_of_squares.item(), np.concatenate([array.reshape(-1) for array in arrays]))


@settings(deadline=None, max_examples=8)
@given(
    st.lists(laid_out(DTYPES, (CHUNK - 1, CHUNK + 1)), min_size=1, max_size=4),
    st.sampled_from([0.5, 1 / 3, 2e5, 3e38, 1e-45, 0.0, -0.0, INF]),
)
def test_any_list_is_unscaled_the_same_way_everywhere(tensors: list[torch.Tensor], inv_scale: float) -> None:
    """What is stored is numpy's product rounded once, and what is checked is what is stored."""
    tensors = [tensor for tensor in tensors if 0 not in tensor.stride() or tensor.numel() == 0]
    stored = []
    for tensor in tensors:
        with np.errstate(all="ignore"):
            wide = unscaled(oracles.to_numpy(tensor.resolve_neg()), inv_scale)
            stored.append(wide.astype(oracles.NUMPY[tensor.dtype]))
    flags = [flag_of(array.astype(np.float32)) for array in stored]
    for name in ALL:
        with using(name, "unscale") as device:

            def copies(device: torch.device = device) -> list[torch.Tensor]:
                plain = [torch.empty_like(t.resolve_neg(), device=device).copy_(t) for t in tensors]
                return [torch._neg_view(c.neg()) if t.is_neg() else c for c, t in zip(plain, tensors, strict=True)]

            placed, public = copies(), copies()
            # As a tensor: the interpreter loses the sign of a zero given as a number.
            factor = torch.tensor(inv_scale, device=device)
            check = unscaled_in_place(placed, factor)
            result = halfstep.foreach_unscale_(public, factor)
        assert check.flags.tolist() == flags and result.found_inf.item() == check.found_inf.item() == any(flags), name
        for tensor, again, want in zip(placed, public, stored, strict=True):
            assert_same_bits(tensor.resolve_neg(), want, name)
            assert_same_bits(again.resolve_neg(), want, name)
        if not any(flags) and tensors:
            near(check.sum_of_squares.item(), np.concatenate([array.astype(np.float32).ravel() for array in stored]))
            with np.errstate(over="ignore"):
                assert result.norm.item() == np.float32(np.sqrt(check.sum_of_squares.item()))


# --------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_flags_name_the_tensor_and_the_kind(dtype: torch.dtype) -> None:
    tensors = grads([7, 7, 7, 7, 7, 0, 5000], dtype)
    tensors[1][3] = INF
    tensors[2][0] = NAN
    tensors[3][1], tensors[3][6] = -INF, NAN
    tensors[6][2] = -INF
    result = examine(tensors)
    assert result.flags.tolist() == [0, 1, 2, 3, 0, 0, 1] and result.first_bad().item() == 1
    assert np.isnan(result.sum_of_squares.item())
    result = examine([tensors[0], tensors[1]])
    assert result.sum_of_squares.item() == INF, "an infinity alone is not a NaN"
    first = examine(tensors[:1]).first_bad()
    assert first.item() == halfstep.foreach_check([]).first_bad().item() == -1
    assert first.dtype == torch.int64 and first.shape == ()


@pytest.mark.parametrize("bad", [INF, -INF, NAN, "signalling"])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_one_bad_element_anywhere(dtype: torch.dtype, bad: float | str) -> None:
    """First and last of a chunk, last of a tail, alone in a tensor, and where addresses are not aligned."""
    size = CHUNK + 37
    places = [0, 16, CHUNK - 1, CHUNK, size - 17, size - 1]
    flag = HAS_NAN if bad == "signalling" or bad != bad else HAS_INF
    signalling = {FP32: 0x7F800001, FP16: 0x7C01, BF16: 0x7F81}[dtype]
    for offset in (0, 1):
        (clean,) = grads([size + offset], dtype)
        tensors = []
        for place in places if offset == 0 else [0, CHUNK - 1, size - 1]:
            tensor = clean.clone()[offset:]
            if isinstance(bad, str):
                tensor.view(torch.int32 if dtype == FP32 else torch.int16)[place] = signalling
            else:
                tensor[place] = bad
            tensors.append(tensor)
        tensors.append(clean[offset:])
        expected = [flag] * (len(tensors) - 1) + [0]
        for name in ALL if bad != -INF else ("reference", "native"):
            assert check_by(name, tensors).flags.tolist() == expected, (name, offset)


def test_empty_lists_and_tensors_are_finite(device: torch.device) -> None:
    for tensors in ([], [torch.empty(0, device=device)], [torch.empty(0, 3, device=device, dtype=BF16)] * 2):
        check = halfstep.foreach_check(tensors)
        assert (check.found_inf.item(), check.sum_of_squares.item()) == (0, 0)
        assert check.flags.tolist() == [0] * len(tensors)
        result = halfstep.foreach_unscale_(tensors, 0.5)
        assert (result.found_inf.item(), result.norm.item()) == (0, 0)
    # Each answer is its own: writing on one must not show in the next.
    halfstep.foreach_check([]).found_inf.fill_(1)
    assert halfstep.foreach_check([]).found_inf.item() == 0


def test_parameters_and_gradients_that_require_gradients() -> None:
    for name in ALL:
        with using(name, "unscale") as device:
            parameter = torch.nn.Parameter(torch.ones(5, device=device))
            assert not halfstep.foreach_check([parameter]).sum_of_squares.requires_grad
            halfstep.foreach_unscale_([parameter], torch.tensor(2.0, device=device, requires_grad=True))
            assert parameter.tolist() == [2] * 5 and parameter.requires_grad


# ------------------------------------------------------------------------------------------------------------- scaling


def test_forms_of_inv_scale(device: torch.device) -> None:
    third = np.float32(1 / 3)
    forms = [
        1 / 3,
        np.float64(1 / 3),
        torch.tensor(1 / 3, device=device),
        torch.tensor([[1 / 3]], device=device),
        torch.tensor(1 / 3, dtype=torch.float64, device=device),
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.tensor([0.0, 1 / 3, 0.0], device=device)[1],
        *(torch._neg_view(torch.tensor(value, device=device)) for value in (-1 / 3, [-1 / 3])),
    ]
    for form in forms:
        tensor = torch.full((9,), 7.0, device=device)
        result = halfstep.foreach_unscale_([tensor], form)
        assert set(tensor.tolist()) == {float(np.float32(7) * third)}, form
        assert result.norm.shape == ()
        again = halfstep.foreach_check([torch.full((9,), 7.0, device=device)], inv_scale=form)
        near(again.sum_of_squares.item(), np.full(9, np.float32(7) * third))
    tensor = torch.full((3,), 7.0, device=device)
    halfstep.foreach_unscale_([tensor], torch.tensor(2, device=device))
    halfstep.foreach_unscale_([tensor], 2)
    assert tensor.tolist() == [28.0] * 3
    version = tensor._version
    assert unscaled_in_place([tensor], None).flags.tolist() == [0] and tensor._version == version


def test_unscaling_in_place_writes_the_tensor_and_nothing_beyond(device: torch.device) -> None:
    base = torch.arange(1.0, 61.0)
    whole = base.to(device, copy=True).reshape(6, 10)
    views = [whole[:, 2:7], *(base.to(device, copy=True)[part] for part in (slice(1, None), slice(None, None, 7)))]
    wanted = [view * 0.5 for view in views]
    versions = [view._version for view in views]
    halfstep.foreach_unscale_(views, 0.5)
    for view, want, version in zip(views, wanted, versions, strict=True):
        assert torch.equal(view, want)
        assert view._version > version, "autograd cannot see the write"
    assert torch.equal(whole[:, :2].cpu(), base.view(6, 10)[:, :2]), "beside the view"
    for dtype in DTYPES:
        for offset, size in ((1, 1), (3, 4095), (8, 4096), (16, 4097), (1, 4097)):
            buffer = torch.ones(offset + size + 9, dtype=dtype, device=device)
            halfstep.foreach_unscale_([buffer[offset : offset + size]], 0.5)
            assert (buffer[offset : offset + size] == 0.5).all()
            assert (buffer[:offset] == 1).all() and (buffer[offset + size :] == 1).all(), (dtype, offset, size)


@pytest.mark.parametrize("scale", [65536.0, 3.0, 1e-3, 7.7e30, 2.0**-126, 1e-40])
def test_a_scale_is_its_reciprocal_rounded_once(device: torch.device, scale: float) -> None:
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(5000).astype(np.float32))
    tensor = torch.tensor(scale)
    with np.errstate(over="ignore"):
        inverse = float(np.float32(1.0) / np.float32(scale))
    here = [values.to(device)]
    mine = over(here, tensor.to(device))
    theirs = halfstep.foreach_check(here, inv_scale=torch.tensor(inverse, device=device))
    for part, want in zip(mine, theirs, strict=True):
        assert_same_bits(part, want)


# ------------------------------------------------------------------------------------------- answers and what is kept


def test_a_result_passed_back_is_overwritten(device: torch.device) -> None:
    tensors = [torch.ones(5, device=device), torch.ones(CHUNK + 3, device=device, dtype=FP16)]
    first = halfstep.foreach_check(tensors)
    kept = [part.clone() for part in first]
    tensors[1][7] = NAN
    second = halfstep.foreach_check(tensors)
    for part, before in zip(first, kept, strict=True):
        assert_same_bits(part, before, "an answer changed with a later call")
    assert unscale.check(tensors, out=first) is first
    for part, want in zip(first, second, strict=True):
        assert_same_bits(part, want)
    tensors[1][7] = 1.0
    unscale.check(tensors, Factor(0.5), out=first)
    answer = first.found_inf.item(), first.sum_of_squares.item(), first.flags.tolist()
    assert answer == (0, (CHUNK + 8) / 4, [0, 0])


@pytest.mark.parametrize("name", ["native", "triton"])
def test_reused_scratch_memory_has_no_stale_values(name: str) -> None:
    with using(name, "unscale") as device:
        # A long list, then short ones: what the long one left behind must not show.
        halfstep.foreach_check([torch.full((9,), NAN, device=device) for _ in range(40)])
        for count in (40, 3, 1):
            clean = halfstep.foreach_check([torch.ones(9, device=device) for _ in range(count)])
            assert clean.flags.tolist() == [0] * count and clean.sum_of_squares.item() == 9 * count


def test_scratch_of_a_table_grows_with_the_other_tensors_and_the_flags(device: torch.device) -> None:
    x, y = torch.full((9,), INF, device=device), torch.full((3 * CHUNK,), 2.0, dtype=BF16, device=device)
    halfstep.foreach_check([x, y[:1]])
    assert halfstep.foreach_check([torch.ones(9, device=device), y]).sum_of_squares.item() == 9 + 4 * y.numel()
    check = unscale.check([x], out=Verdict.empty(20, torch.device(device)), slots=[19])
    assert check.flags.tolist() == [0] * 19 + [HAS_INF]


@pytest.mark.parametrize("name", ["native", "triton"])
def test_a_call_that_failed_leaves_no_flags_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with using(name, "unscale") as device:
        bad, good = [torch.full((9,), INF, device=device)], [torch.ones(9, device=device)]
        bad.append(bad[0].half())  # a list of one dtype is checked by one call on a CPU

        def fail(*arguments: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(unscale, "_combine", fail)
            with pytest.raises(KeyboardInterrupt):
                halfstep.foreach_check(bad)
        assert halfstep.foreach_check([*good, good[0].half()]).flags.tolist() == [0, 0]


def test_a_tally_notes_which_tensors_were_bad_when_and_how_often(device: torch.device) -> None:
    bad = {1: {0: [NAN]}, 3: {0: [INF], 2: [INF, NAN]}, 4: {2: [-INF]}}  # step: tensor: values
    tally = Tally(
        torch.zeros(3, 4, dtype=torch.int32, device=device), torch.zeros((), dtype=torch.int64, device=device)
    )
    for step in range(1, 6):
        tensors = [torch.ones(4), torch.ones(CHUNK + 9), torch.ones(2, dtype=BF16)]
        for index, values in bad.get(step, {}).items():
            tensors[index][: len(values)] = torch.tensor(values, dtype=tensors[index].dtype)
        check = unscale.check([tensor.to(device) for tensor in tensors], tally=tally)
        assert check.found_inf.item() == float(step in bad)
        tally.step.add_(1)
    assert tally.counts.tolist() == [[1, 1, 1, 3], [0, 0, 0, 0], [2, 1, 3, 4]]


def test_tensors_may_have_places_of_their_own_among_the_flags(device: torch.device) -> None:
    out = Verdict.empty(6, device)
    out.flags.fill_(9)
    counts = torch.zeros(6, 4, dtype=torch.int32, device=device)
    tally = Tally(counts, torch.zeros((), dtype=torch.int64, device=device))
    here = [t.to(device) for t in (torch.tensor([INF]), torch.ones(3, dtype=FP16), torch.tensor([NAN]))]
    unscale.check(here, out=out, tally=tally, slots=[4, 0, 1])
    assert out.flags.tolist() == [0, HAS_NAN, 0, 0, HAS_INF, 0]
    assert counts[:, 3].tolist() == [0, 1, 0, 0, 1, 0]
    of_one_dtype = [here[0], torch.ones(2, device=device), here[2]]
    assert unscale.check(of_one_dtype, slots=range(2, -1, -1)).flags.tolist() == [HAS_NAN, 0, HAS_INF]
    unscale.check(here[1:2], out=out, slots=[3])
    assert out.flags.tolist() == [0] * 6 and out.found_inf.item() == 0


# ----------------------------------------------------------------------------------------------------------- refusals

ONE_NUMBER = "Expected inv_scale to be one number, a float or a one-element tensor, but got shape"


@pytest.mark.parametrize(
    ("inv_scale", "error", "message"),
    [
        (torch.ones(2), ValueError, f"{ONE_NUMBER} (2,)"),
        (torch.empty(0), ValueError, f"{ONE_NUMBER} (0,)"),
        (torch.tensor(1j), TypeError, "Expected inv_scale to have a real dtype, but got torch.complex64"),
    ],
)
def test_refused_tensors_are_named_and_not_written(inv_scale: Any, error: type[Exception], message: str) -> None:
    grad = torch.ones(1)
    for function in (halfstep.foreach_check, halfstep.foreach_unscale_):
        with pytest.raises(error) as raised:
            function([grad], inv_scale)
        assert str(raised.value) == message
    assert grad.item() == 1
