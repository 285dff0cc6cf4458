"""Check and unscale: where answers and scratch live, what is launched and allocated, lazy negations, any list."""

from __future__ import annotations

import threading

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import ALL, using
from oracles import BF16, DTYPES, FP16, assert_same_bits
from tolerances import SUM_OF_SQUARES
from torch.utils._python_dispatch import TorchDispatchMode
from verdicts import over, unscaled

import halfstep
from halfstep.kernels import unscale
from halfstep.kernels.unscale import CHUNK, HAS_INF, HAS_NAN, Factor, Verdict

INF, NAN = float("inf"), float("nan")


class Operations(TorchDispatchMode):
    """The names of torch's operations inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------- answers and what is kept


@pytest.mark.parametrize("name", ALL)
def test_an_answer_given_back_is_written_again(name: str) -> None:
    with using(name, "unscale") as device:
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
        assert first.flags.tolist() == [0, HAS_NAN] and first.found_inf.item() == 1
        tensors[1][7] = 1.0
        unscale.check(tensors, Factor(0.5), out=first)
        assert (first.found_inf.item(), first.sum_of_squares.item(), first.flags.tolist()) == (
            0,
            (CHUNK + 8) / 4,
            [0, 0],
        )


def test_the_steady_state_makes_no_tensor() -> None:
    """On a CPU and with `out`, not one operation of torch runs; without it, three new tensors are made."""
    tensors = [torch.ones(size) for size in (5, 0, 5000)]
    with using("native", "unscale"):
        check = halfstep.foreach_check(tensors)
        factor = torch.tensor(0.5)
        with Operations():  # while a mode watches, the table is that of `TableCache`, which is made once
            halfstep.foreach_check(tensors)
        with Operations() as seen:
            unscale.check(tensors, Factor(factor), out=check)
            unscale.check(tensors, Factor(0.25), out=check)
        assert seen.names == []
        with Operations() as seen:
            halfstep.foreach_check(tensors)
        assert seen.names == ["aten.empty.memory_format"] * 3
        with Operations() as seen:
            halfstep.foreach_unscale_(tensors, 0.5)
        assert seen.names == ["aten.empty.memory_format"] * 4


@pytest.mark.parametrize("name", ["native", "triton"])
def test_launches_are_one_per_dtype_and_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []
    for function in ("_launch_native", "_launch_triton", "_gather"):
        original = getattr(unscale, function)

        def counting(*arguments: object, _original: object = original, _name: str = function) -> object:
            launches.append(_name)
            return _original(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(unscale, function, counting)
    with using(name, "unscale") as device:
        tensors = [torch.ones(size, device=device).to(DTYPES[size % 3]) for size in range(12)]
        halfstep.foreach_check(tensors)
    assert launches == [f"_launch_{name}"] * 3 + ["_gather"]


@pytest.mark.parametrize("name", ["native", "triton"])
def test_scratch_is_used_again_and_grows(name: str) -> None:
    with using(name, "unscale") as device:
        unscale._scratches.drop()
        one = unscale._scratches.take(device, 3, 5)
        assert unscale._scratches.take(device, 2, 1) is one
        more = unscale._scratches.take(device, 4, 5)
        assert more is not one and more.sums.numel() == 4 and more.flags.numel() == 7
        assert unscale._scratches.take(device, 3, 6) is more
        elsewhere: list[object] = []
        thread = threading.Thread(target=lambda: elsewhere.append(unscale._scratches.take(device, 1, 1)))
        thread.start()
        thread.join()
        assert elsewhere[0] is not more, "two threads share their scratch"
        # A long list, then short ones: what the long one left behind must not show.
        halfstep.foreach_check([torch.full((9,), NAN, device=device) for _ in range(40)])
        for count in (40, 3, 1):
            clean = halfstep.foreach_check([torch.ones(9, device=device) for _ in range(count)])
            assert clean.flags.tolist() == [0] * count and clean.sum_of_squares.item() == 9 * count


@pytest.mark.parametrize("name", ["native", "triton"])
def test_a_call_that_failed_leaves_no_flags_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with using(name, "unscale") as device:
        bad, good = [torch.full((9,), INF, device=device)], [torch.ones(9, device=device)]
        bad.append(bad[0].half())  # a list of one dtype is checked by one call on a CPU

        def fail(*arguments: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(unscale, "_gather", fail)
            with pytest.raises(KeyboardInterrupt):
                halfstep.foreach_check(bad)
        assert halfstep.foreach_check([*good, good[0].half()]).flags.tolist() == [0, 0]


@pytest.mark.parametrize("name", ALL)
def test_the_first_bad_tensor(name: str) -> None:
    with using(name, "unscale") as device:
        tensors = [torch.ones(3, device=device) for _ in range(5)]
        assert halfstep.foreach_check(tensors).first_bad().item() == -1
        for index, value in ((4, NAN), (2, INF), (0, -INF)):
            tensors[index][1] = value
            first = halfstep.foreach_check(tensors).first_bad()
            assert first.item() == index and first.dtype == torch.int64 and first.shape == ()
    assert halfstep.foreach_check([]).first_bad().item() == -1


def test_unscaling_by_nothing_writes_nothing() -> None:
    for name in ALL:
        with using(name, "unscale") as device:
            tensor = torch.tensor([1.0, INF, 3.0], device=device)
            version = tensor._version
            check = unscaled([tensor], None)
            assert check.flags.tolist() == [HAS_INF] and tensor._version == version


@pytest.mark.parametrize("name", ALL)
def test_a_lazy_negation_is_read_and_written_with_its_sign(name: str) -> None:
    with using(name, "unscale") as device:
        base = torch.arange(1.0, 6.0, device=device)
        x = torch._neg_view(base)
        assert halfstep.foreach_check([x]).sum_of_squares.item() == 55
        halfstep.foreach_unscale_([x], 0.5)
        assert x.tolist() == [-0.5, -1.0, -1.5, -2.0, -2.5]
        assert base.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5]
        # A sign that is wrong shows in the sum only by way of the scale.
        scale = torch._neg_view(torch.tensor(-0.5, device=device))
        halfstep.foreach_unscale_([base], scale)
        assert base.tolist() == [0.25, 0.5, 0.75, 1.0, 1.25]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [1e30, 3e38, 1e-30, 1e-45])
def test_norms_beyond_the_range_of_fp32_squares(name: str, value: float) -> None:
    """fp32 squares of these are infinity or 0; the sum is neither, and the norm comes out in fp32 where it fits."""
    with using(name, "unscale") as device:
        tensor = torch.full((3 * CHUNK + 5,), value, device=device)
        exact = float(tensor[0].double()) ** 2 * tensor.numel()
        check = halfstep.foreach_check([tensor])
        assert check.found_inf.item() == 0
        assert abs(check.sum_of_squares.item() - exact) <= SUM_OF_SQUARES * exact
        norm = halfstep.foreach_unscale_([tensor], 1.0).norm.item()
        with np.errstate(over="ignore"):
            assert norm == np.float32(np.sqrt(check.sum_of_squares.item()))
        assert norm == INF if value == 3e38 else 0 < norm < INF


# ----------------------------------------------------------------------------------------------------------- properties


@st.composite
def laid_out(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any format, shape and layout, of ordinary values with a few special ones among them."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(
        st.one_of(st.lists(st.integers(0, 9), max_size=3), st.sampled_from([[CHUNK], [CHUNK + 1], [CHUNK - 1]]))
    )
    layout = draw(st.sampled_from(["as it is", "transposed", "gaps", "misaligned", "expanded", "negated"]))
    size = int(np.prod(shape)) if shape else 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.standard_normal(2 * size + 3).astype(np.float32) * np.float32(2.0) ** draw(st.integers(-140, 120))
    for special in draw(st.lists(st.sampled_from([INF, -INF, NAN, -0.0, 3e38, 1e-45, 65504.0]), max_size=2)):
        values[rng.integers(0, len(values))] = special
    base = torch.from_numpy(values).to(dtype)
    x = base[:size].reshape(shape)
    if layout == "transposed" and x.dim() >= 2:
        x = x.transpose(0, -1)
    elif layout == "gaps":
        x = base[: 2 * size : 2].reshape(shape) if x.dim() != 1 else base[: 2 * size : 2]
    elif layout == "misaligned":
        x = base[1 : size + 1].reshape(shape)
    elif layout == "expanded" and x.dim() and x.numel():
        x = x[:1].expand(3, *x.shape[1:])
    elif layout == "negated":
        x = torch._neg_view(x)
    return x


@settings(deadline=None, max_examples=40)
@given(st.lists(laid_out(), min_size=1, max_size=5), st.sampled_from([None, 1.0, 0.5, 1 / 3, 3e38, 1e-45, -2.0]))
def test_any_list_has_the_same_answer_everywhere(tensors: list[torch.Tensor], inv_scale: float | None) -> None:
    arrays = []
    for tensor in tensors:
        with np.errstate(all="ignore"):
            wide = oracles.to_numpy(tensor.resolve_neg()).astype(np.float32)
            arrays.append(wide if inv_scale is None else wide * np.float32(inv_scale))
    flags = [int(np.isinf(a).any()) * HAS_INF + int(np.isnan(a).any()) * HAS_NAN for a in arrays]
    results: list[Verdict] = []
    for name in ALL:
        with using(name, "unscale") as device:
            results.append(halfstep.foreach_check([t.to(device) for t in tensors], inv_scale=inv_scale))
    for name, result in zip(ALL, results, strict=True):
        assert result.flags.tolist() == flags, name
        assert result.found_inf.item() == float(any(flags)), name
        assert_same_bits(result.sum_of_squares, results[0].sum_of_squares, name)
    if not any(flags):
        exact = oracles.sum_of_squares(np.concatenate([a.reshape(-1) for a in arrays]))
        assert abs(results[0].sum_of_squares.item() - exact) <= SUM_OF_SQUARES * exact


@settings(deadline=None, max_examples=25)
@given(st.lists(laid_out(), min_size=1, max_size=4), st.sampled_from([0.5, 1 / 3, 3e38, 1e-45, -0.0]))
def test_any_list_is_unscaled_the_same_way_everywhere(tensors: list[torch.Tensor], inv_scale: float) -> None:
    """What is stored is numpy's product rounded once, and what is checked is what is stored."""
    tensors = [tensor for tensor in tensors if 0 not in tensor.stride() or tensor.numel() == 0]
    stored = []
    for tensor in tensors:
        with np.errstate(all="ignore"):
            wide = oracles.to_numpy(tensor.resolve_neg()).astype(np.float32) * np.float32(inv_scale)
            stored.append(wide.astype(oracles.NUMPY[tensor.dtype]))
    for name in ALL:
        with using(name, "unscale") as device:
            placed = []
            for tensor in tensors:
                copy = torch.empty_like(tensor.resolve_neg(), device=device).copy_(tensor)
                placed.append(torch._neg_view(copy.neg()) if tensor.is_neg() else copy)
            # As a tensor: the interpreter loses the sign of a zero given as a number.
            check = unscaled(placed, torch.tensor(inv_scale, device=device))
        for tensor, want, flag in zip(placed, stored, check.flags.tolist(), strict=True):
            assert_same_bits(tensor.resolve_neg(), want, name)
            wide = want.astype(np.float32)
            assert flag == int(np.isinf(wide).any()) * HAS_INF + int(np.isnan(wide).any()) * HAS_NAN, name


# ------------------------------------------------------------------------------------------------- scale and tally


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("scale", [65536.0, 3.0, 1e-3, 7.7e30, 2.0**-126, 1e-40])
def test_a_scale_is_its_reciprocal_rounded_once(name: str, scale: float) -> None:
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(5000).astype(np.float32))
    with using(name, "unscale") as device:
        tensor = torch.tensor(scale)
        with np.errstate(over="ignore"):
            inverse = float(np.float32(1.0) / np.float32(scale))
        here = [values.to(device)]
        mine = over(here, tensor.to(device))
        theirs = halfstep.foreach_check(here, inv_scale=torch.tensor(inverse, device=device))
        for part, want in zip(mine, theirs, strict=True):
            assert_same_bits(part, want)


@pytest.mark.parametrize("name", ALL)
def test_a_tally_notes_which_tensors_were_bad_when_and_how_often(name: str) -> None:
    bad = {1: {0: [NAN]}, 3: {0: [INF], 2: [INF, NAN]}, 4: {2: [-INF]}}  # step: tensor: values
    with using(name, "unscale") as device:
        tally = unscale.Tally(
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


@pytest.mark.parametrize("name", ALL)
def test_tensors_may_have_places_of_their_own_among_the_flags(name: str) -> None:
    with using(name, "unscale") as device:
        out = Verdict(
            torch.empty((), device=device),
            torch.empty((), dtype=torch.float64, device=device),
            torch.full((6,), 9, dtype=torch.int32, device=device),
        )
        counts = torch.zeros(6, 4, dtype=torch.int32, device=device)
        tally = unscale.Tally(counts, torch.zeros((), dtype=torch.int64, device=device))
        tensors = [torch.tensor([INF]), torch.ones(3, dtype=FP16), torch.tensor([NAN])]
        here = [tensor.to(device) for tensor in tensors]
        unscale.check(here, out=out, tally=tally, places=[4, 0, 1])
        assert out.flags.tolist() == [0, HAS_NAN, 0, 0, HAS_INF, 0]
        assert counts[:, 3].tolist() == [0, 1, 0, 0, 1, 0]
        of_one_dtype = [here[0], torch.ones(2, device=device), here[2]]
        assert unscale.check(of_one_dtype, places=range(2, -1, -1)).flags.tolist() == [HAS_NAN, 0, HAS_INF]
        unscale.check(here[1:2], out=out, places=[3])
        assert out.flags.tolist() == [0] * 6 and out.found_inf.item() == 0
