"""tables.cpp, the short way of lists on the CPU into C++: what it accepts, and that results do not depend on it."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import halfstep
from halfstep.kernels import cast, multi_tensor, native, unscale
from halfstep.kernels.multi_tensor import ListTable, TensorTable, list_table

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")
ALL = 255  # allows every dtype in a list


def table_of(*lists: object, allowed: tuple[int, ...] = (ALL,) * 4, chunk: int = 64) -> ListTable | None:
    return list_table(lists, allowed[: len(lists)], chunk)


@pytest.fixture
def without_list_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(multi_tensor, "_table_filler", lambda: None)
    yield


@pytest.mark.parametrize("copies", [1, 300])
def test_a_table_is_that_of_tensor_table(copies: int) -> None:
    shapes = [(5000,), (3, 4), (0,), (), (4096,), (2, 1, 3)] * copies
    tensors = [torch.randn(shape) for shape in shapes]
    targets = [torch.empty_like(one, dtype=torch.float16) for one in tensors]
    for lists in ((tensors,), (tensors, targets)):
        addresses = [[one.data_ptr() for one in some] for some in lists]
        numels = [one.numel() for one in tensors]
        want = TensorTable(numels, len(lists) + 1, 4096, torch.device("cpu"), [*addresses, list(range(len(numels)))])
        table = table_of(*lists, chunk=4096)
        assert table is not None and (table.tensors, table.chunks) == (want.tensors, want.chunks)
        rows = (ctypes.c_int64 * want.rows.numel()).from_address(table.places[0])
        assert list(rows) == want.rows.flatten().tolist()
        owners = (ctypes.c_int32 * want.chunks).from_address(table.places[1])
        assert list(owners) == want.chunk_tensor.tolist()


class Wrapped(torch.Tensor):
    """A subclass without operations of its own."""


def freed() -> torch.Tensor:
    tensor = torch.randn(5)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "unusual",
    [
        pytest.param(lambda: torch.randn(4, 4).t(), id="transposed"),
        pytest.param(lambda: torch.randn(8)[::2], id="strided"),
        pytest.param(lambda: torch.randn(4)._neg_view(), id="negated"),
        pytest.param(lambda: torch.randn(4).double(), id="fp64"),
        pytest.param(lambda: torch.arange(4), id="integers"),
        pytest.param(lambda: torch.empty(3, device="meta"), id="meta"),
        pytest.param(lambda: torch.randn(3).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.randn(3).as_subclass(Wrapped), id="subclass"),
        pytest.param(freed, id="freed"),
        pytest.param(lambda: 1.0, id="number"),
    ],
)
def test_what_is_unusual_has_no_table(unusual: object) -> None:
    one, usual = unusual(), torch.randn(4)  # type: ignore[operator]
    assert table_of([usual, usual], [usual, usual]) is not None
    assert table_of([one]) is None
    assert table_of([usual, one], [usual, usual]) is None
    assert table_of([usual, usual], [usual, one]) is None


def test_lists_that_do_not_fit_have_no_table() -> None:
    x = torch.randn(6)
    assert table_of([], []) is None
    assert table_of((x,), [x]) is None
    assert table_of(x) is None
    assert table_of([x], [x, x]) is None
    assert table_of([x], [x.view(2, 3)]) is None
    assert table_of([x], [x[:5]]) is None
    assert table_of([x, x.half()], [x, x]) is None


class Watching(TorchFunctionMode):
    """A mode in which every function of torch fails."""

    def __torch_function__(self, function: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise KeyboardInterrupt("in the mode")


def test_watched_operations_are_left_to_python() -> None:
    outside, seen = torch.randn(4), []

    def asked(x: torch.Tensor) -> torch.Tensor:
        seen.extend([table_of([x]), table_of([outside])])
        return x.sum()

    torch.func.vmap(asked)(torch.randn(3, 4))
    torch.func.grad(asked)(torch.randn(4))
    with FakeTensorMode():
        seen.append(table_of([outside]))
    assert seen == [None] * 5
    with Watching(), pytest.raises(KeyboardInterrupt, match="in the mode"):
        table_of([outside])


@pytest.mark.parametrize("exchange", [5, object()], ids=["5", "object"])
def test_an_unknown_exchange_is_not_used(exchange: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a version of torch has under this name, the rest works without tables of lists."""
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", exchange)
    multi_tensor._table_filler.cache_clear()
    try:
        assert table_of([torch.zeros(3)]) is None
        assert halfstep.foreach_check([torch.tensor([3.0, 4.0])]).sum_of_squares.item() == 25.0
    finally:
        multi_tensor._table_filler.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_do_not_depend_on_it(dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [0, 1, 7, 4096, 4097, 20000]
    tensors = [torch.randn(size, generator=generator, dtype=torch.float32).to(dtype) for size in sizes]
    bad = [one.clone() for one in tensors]
    bad[2][3], bad[5][-1] = float("inf"), float("nan")

    def results() -> list[torch.Tensor]:
        all_results = [*halfstep.foreach_check(tensors), *halfstep.foreach_check(bad, 0.5)]
        all_results += halfstep.foreach_check(tensors, torch.tensor(0.25))
        for by in (0.3, torch.tensor(0.3)):
            scaled = [one.clone() for one in bad]
            versions = [one._version for one in scaled]
            all_results += [*halfstep.foreach_unscale_(scaled, by), *scaled]
            assert all(one._version > version for one, version in zip(scaled, versions, strict=True))
            all_results += unscale.check(scaled, unscale.Factor(by), write=True)
        for target in cast.DTYPES:
            outs = [torch.empty_like(one, dtype=target) for one in tensors]
            result = halfstep.foreach_cast(tensors, target, out=outs)
            assert all(one is out for one, out in zip(result, outs, strict=True)) and outs[1]._version > 0
            all_results += result
        return all_results

    assert unscale._list_table(tensors)
    with_it = results()
    request.getfixturevalue("without_list_tables")
    assert not unscale._list_table(tensors)
    for one, other in zip(with_it, results(), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_a_factor_may_be_of_a_subclass() -> None:
    factor = torch.tensor(0.5).as_subclass(Wrapped)
    assert halfstep.foreach_check([torch.tensor([4.0])], factor).sum_of_squares.item() == 4.0


def test_a_lazy_copy_is_copied_before_it_is_written() -> None:
    x = torch.ones(5)
    lazy = torch._lazy_clone(x)
    halfstep.foreach_unscale_([lazy], 0.5)
    assert x.tolist() == [1.0] * 5 and lazy.tolist() == [0.5] * 5


def test_no_reference_is_lost_or_kept() -> None:
    """Neither by tables nor by lists that stop at one of the checks."""
    x, wide = torch.zeros(3), torch.zeros(3, dtype=torch.float64)
    before = [sys.getrefcount(one) for one in (x, wide, None)]
    for _ in range(1000):
        table_of([x] * 3, [x] * 3)
        table_of([x, wide])
        table_of([x], [wide])
    after = [sys.getrefcount(one) for one in (x, wide, None)]
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) < 50


def test_tensors_live_as_long_as_their_table() -> None:
    """Another thread may empty a list while a C++ function runs, without the lock of the interpreter."""
    tensors = [torch.zeros(3), torch.zeros(5)]
    alive = [weakref.ref(one) for one in tensors]
    table = table_of(tensors)
    tensors.clear()
    gc.collect()
    assert table is not None and all(one() is not None for one in alive)
    del table
    assert all(one() is None for one in alive)


def test_nothing_is_copied_to_the_cpu_for_tensors_elsewhere() -> None:
    """A copy of the factor would wait for a GPU, and fails for meta tensors."""
    x, factor = torch.ones(3, device="meta"), torch.ones((), device="meta")
    assert halfstep.foreach_unscale_([x], factor).norm.is_meta
    assert halfstep.foreach_check([x], factor).sum_of_squares.is_meta
    assert unscale.check([x], unscale.Factor(factor)).sum_of_squares.is_meta


def test_a_list_of_empty_tensors_has_no_chunks() -> None:
    table = table_of([torch.empty(0)] * 3)
    assert table is not None and (table.chunks, table.tensors) == (0, 3)
    assert np.array_equal(table.rows[0], [0, 0, 0])
    assert halfstep.foreach_check([torch.empty(0)]).flags.tolist() == [0]
