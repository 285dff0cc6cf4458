"""A check made in parts, in any order and division, against one call over all tensors: the same bits."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import ALL, using
from oracles import BF16, DTYPES, FP16, FP32, assert_same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.kernels import unscale
from halfstep.kernels.unscale import CHUNK, Check, CheckInParts, Tally

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy, on overflow and NaN

INF, NAN = float("inf"), float("nan")
SIZES = (5, 0, CHUNK, 300, CHUNK + 1, 1, 3 * CHUNK - 7, 2)


def gradients(seed: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> list[torch.Tensor]:
    """Numbers so far apart, where the dtype allows it, that their squares add up to other bits in another order."""
    source = np.random.default_rng(seed)
    found = []
    for index, size in enumerate(SIZES):
        dtype = dtypes[index % len(dtypes)]
        spread = 9 if dtype == FP16 else 20
        values = torch.from_numpy(source.normal(size=size) * 2.0 ** source.integers(-spread, spread))
        found.append(values.to(device, dtype))
    return found


def numels() -> list[int]:
    return list(SIZES)


def assert_same(answer: Check, expected: Check, what: object) -> None:
    assert torch.equal(answer.flags, expected.flags), what
    assert answer.found_inf.item() == expected.found_inf.item(), what
    assert_same_bits(answer.sum_of_squares, expected.sum_of_squares, str(what))


@st.composite
def divisions(draw: st.DrawFn) -> list[list[int]]:
    """The slots in any order, cut into parts anywhere."""
    order = draw(st.permutations(range(len(SIZES))))
    cuts = sorted(draw(st.sets(st.integers(1, len(SIZES) - 1))))
    return [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(SIZES)], strict=True)]


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from(ALL),
    steps=st.lists(divisions(), min_size=1, max_size=3),
    asked=st.permutations(range(len(SIZES))),
    missing=st.sets(st.integers(0, len(SIZES) - 1), max_size=3),
    dtypes=st.sampled_from([(FP32,), (BF16,), (FP32, FP16), (BF16, FP32, FP16)]),
    bad=st.dictionaries(st.integers(0, len(SIZES) - 1), st.sampled_from([INF, -INF, NAN]), max_size=3),
    scale=st.sampled_from([None, 1.0, 1024.0, 3.0, 1e-4]),
)
def test_any_division_in_any_order(
    name: str,
    steps: list[list[list[int]]],
    asked: list[int],
    missing: set[int],
    dtypes: tuple[torch.dtype, ...],
    bad: dict[int, float],
    scale: float | None,
) -> None:
    """The optimizer's order is none of the parts'; some tensors are in no answer; a fault is told once."""
    with using(name, "unscale") as device:
        parts = CheckInParts(numels(), device)
        divisor = None if scale is None else torch.tensor(scale, device=device)
        slots = [-1 if slot in missing else slot for slot in asked]
        there = [slot for slot in slots if slot >= 0]
        for step, division in enumerate(steps):
            tensors = gradients(step, dtypes, device)
            for slot, value in bad.items() if step == 0 else ():
                tensors[slot][tensors[slot].numel() // 2 :] = value
            for part in division:
                parts.add(part, [tensors[slot] for slot in part], scale=divisor)
            places = [place for place, slot in enumerate(slots) if slot >= 0]
            out = Check(
                torch.empty((), device=device),
                torch.empty((), dtype=torch.float64, device=device),
                torch.empty(len(slots), dtype=torch.int32, device=device),
            )
            whole = halfstep.foreach_check([tensors[slot] for slot in there], scale=divisor, places=places, out=out)
            assert_same(parts.finish(slots), whole, (name, step, division))


@pytest.mark.parametrize("name", ALL)
def test_implementations_may_change_in_between(name: str) -> None:
    with using(name, "unscale") as device:
        tensors = gradients(3, (FP32, BF16), device)
        tensors[3][7] = NAN
        parts = CheckInParts(numels(), device)
        parts.add([0, 2, 4, 6], tensors[::2])
        with halfstep.backend("reference"):
            parts.add([1, 3, 5, 7], tensors[1::2])
            whole = halfstep.foreach_check(tensors)
        assert_same(parts.finish(range(8)), whole, name)


@pytest.mark.parametrize("name", ALL)
def test_added_again_the_new_replaces_the_old(name: str) -> None:
    """As after a backward that was never followed by a step."""
    with using(name, "unscale") as device:
        parts = CheckInParts([3, 4, 5], device)
        old = [torch.full((size,), INF, device=device) for size in (3, 4, 5)]
        new = [torch.ones(size, device=device) for size in (3, 4, 5)]
        parts.add([0, 1, 2], old)
        parts.add([1, 0], [new[1], new[0]])
        answer = parts.finish([0, 1])
        assert (answer.found_inf.item(), answer.flags.tolist(), answer.sum_of_squares.item()) == (0.0, [0, 0], 7.0)
        answer = parts.finish([2])
        assert (answer.found_inf.item(), answer.flags.tolist()) == (1.0, [1])
        parts.add([2], new[2:])
        assert parts.finish([2]).flags.tolist() == [0], "gathering leaves the flags zero"


@pytest.mark.parametrize("name", ALL)
def test_two_optimizers_gather_their_own(name: str) -> None:
    with using(name, "unscale") as device:
        tensors = gradients(1, (FP32,), device)
        tensors[4][9] = INF
        parts = CheckInParts(numels(), device)
        parts.add(range(8), tensors)
        first, second = parts.finish([7, 5, 3]), parts.finish([4, 6, 0])
        assert_same(first, halfstep.foreach_check([tensors[slot] for slot in (7, 5, 3)]), "first")
        assert_same(second, halfstep.foreach_check([tensors[slot] for slot in (4, 6, 0)]), "second")
        assert second.flags.tolist() == [1, 0, 0]


@pytest.mark.parametrize("name", ALL)
def test_a_tally_has_a_row_for_each_place(name: str) -> None:
    with using(name, "unscale") as device:
        parts = CheckInParts([3, 4], device)
        counts = torch.zeros(3, 4, dtype=torch.int32, device=device)
        tally = Tally(counts, torch.tensor([6], device=device))
        parts.add([1, 0], [torch.full((4,), NAN, device=device), torch.ones(3, device=device)])
        assert parts.finish([0, -1, 1], tally=tally).flags.tolist() == [0, 0, 2]
        assert counts.tolist() == [[0] * 4, [0] * 4, [0, 1, 7, 7]]


def test_a_second_round_of_lanes_takes_the_sums_in_order() -> None:
    """More than 1024 chunks; the order is the only thing that tells one answer from another."""
    sizes = [1] * 700 + [CHUNK * 400 + 1]
    source = np.random.default_rng(0)
    tensors = [torch.from_numpy(source.lognormal(0, 3, size)).float() for size in sizes]
    order = [int(slot) for slot in source.permutation(len(sizes))]
    whole = halfstep.foreach_check([tensors[slot] for slot in order])
    for name in ("reference", "native"):
        with using(name, "unscale") as device:
            parts = CheckInParts(sizes, device)
            parts.add(range(350), tensors[:350])
            parts.add(range(350, 701), tensors[350:])
            assert_same(parts.finish(order), whole, name)
            parts.add(range(701), tensors)
            with pytest.raises(AssertionError):
                assert_same(parts.finish(range(701)), whole, "in another order the bits are others")
    # A launch of as many programs is slow under the interpreter, so there the gathering kernel runs alone.
    sums = torch.from_numpy(source.lognormal(0, 3, 2600))
    places = torch.from_numpy(source.permutation(2600)[:2500].astype(np.int32))
    _, total = unscale._reference_finish(sums[places.long()], torch.zeros(1, dtype=torch.int32))
    with using("triton", "unscale") as device:
        answer = [torch.empty((), dtype=dtype, device=device) for dtype in (FP32, torch.float64, FP32)]
        flags = torch.tensor([0, 2, 0, 1], dtype=torch.int32, device=device)
        copied = torch.empty(3, dtype=torch.int32, device=device)
        rows = torch.tensor([3, -1, 0], dtype=torch.int32, device=device)
        unscale.finish_kernel[(1,)](
            *(sums.to(device), 2500, flags, 3, *answer, copied, copied, copied, places.to(device), rows),
            LANES=unscale.LANES,
            UNROLLED=unscale.UNROLLED,
            TALLY=False,
            APART=True,
            enable_fp_fusion=False,
        )
        assert copied.tolist() == [1, 0, 0] and flags.tolist() == [0, 2, 0, 0], "the flag of another is left alone"
        assert answer[0].item() == 1.0
        assert_same_bits(answer[1], total)


@pytest.mark.parametrize("name", ["native", "triton"])
def test_parts_in_threads_and_misaligned(name: str) -> None:
    """Parts come from the threads of the communication library, as views into flat buffers."""
    with using(name, "unscale") as device:
        sizes = [CHUNK + 3] * 6
        flat = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0)).to(device)
        views = list(flat.split(sizes))
        parts = CheckInParts(sizes, device)
        whole = halfstep.foreach_check(views)
        for _ in range(3):
            threads = [threading.Thread(target=parts.add, args=([slot], [views[slot]])) for slot in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert_same(parts.finish(range(6)), whole, name)


class Operations(TorchDispatchMode):
    """The names of torch's operations inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_division_seen_before_allocates_nothing() -> None:
    with using("native", "unscale") as device:
        tensors = gradients(0, DTYPES, device)
        parts, scale = CheckInParts(numels(), device), torch.ones((), device=device)
        out = halfstep.foreach_check(tensors)

        def step() -> None:
            parts.add([0, 2, 4, 6], tensors[::2], scale=scale)
            parts.add([1, 3, 5, 7], tensors[1::2], scale=scale)
            parts.finish([3, 2, 1, 0, 4, 5, 6, 7], out=out)

        step()
        with Operations() as seen:
            step()
        assert [name for name in seen.names if "view" not in name and "detach" not in name] == []


def test_divisions_that_keep_changing_are_forgotten() -> None:
    parts = CheckInParts([1] * 8, torch.device("cpu"))
    source = np.random.default_rng(0)
    with using("native", "unscale"):
        for _ in range(40):
            order = source.permutation(8)[: source.integers(1, 9)].tolist()
            parts.add(order, [torch.ones(1) for _ in order])
        assert parts._tabled <= 32 and len(parts._tables) <= 32


def test_errors_name_what_is_allowed() -> None:
    parts = CheckInParts([3, 4], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"slot 1 has 3 elements; allowed are 4"):
        parts.add([0, 1], [torch.ones(3), torch.ones(3)])
    with pytest.raises(ValueError, match=r"slots are 1 for 2 tensors; .* from 0 to below 2"):
        parts.add([0], [torch.ones(3), torch.ones(4)])
    for slots in ([0, 0], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match=r"another one for each tensor"):
            parts.add(slots, [torch.ones(3), torch.ones(3)])
    with pytest.raises(ValueError, match=r"tensors are on meta; allowed is cpu"):
        parts.add([0], [torch.ones(3, device="meta")])
    with pytest.raises(TypeError, match=r"Expected tensors\[0\] to have dtype .* but got torch.float64"):
        parts.add([0], [torch.ones(3, dtype=torch.float64)])
    parts.add([0], [torch.ones(3)])
    with pytest.raises(ValueError, match=r"slots are 2, of which 1 different ones were added"):
        parts.finish([0, 1])
    with pytest.raises(ValueError, match=r"allowed are added ones, once each"):
        parts.finish([0, 0])
    assert parts.finish([0]).sum_of_squares.item() == 3.0
    with pytest.raises(ValueError, match=r"slots are 1, of which 0 different"):
        parts.finish([0])
    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 fit one check"):
        CheckInParts([2**31 * CHUNK], torch.device("cpu"))
