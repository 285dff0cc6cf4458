"""calls.cpp, the fast way into C++: what it accepts, and that results do not depend on it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import halfstep
from halfstep.kernels import cast, multi_tensor, native, unscale
from halfstep.kernels.multi_tensor import TensorTable, packed

pytestmark = pytest.mark.skipif(native.calls() is None, reason="needs calls.cpp")

TOY = """#include "native.h"
extern "C" void halfstep_toy(const float* from, double* to, int32_t sign, float factor, uint64_t seed, int64_t* big) {
    *to = double(from ? *from : 7.0f) * sign * factor;
    *big = int64_t(seed);
}
HALFSTEP_PACKED(halfstep_toy)
"""


class Wrapped(torch.Tensor):
    """A subclass without operations of its own."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("toy")
    source = folder / "toy.cpp"
    source.write_text(TOY.replace('"native.h"', f'"{Path(native.__file__).parent / "native.h"}"'))
    command = native.compiler()
    assert command is not None and native._build(source, folder / "toy.so", command) == ""
    return ctypes.CDLL(str(folder / "toy.so"))


def test_invoke_passes_numbers_addresses_and_tensors(toy: ctypes.CDLL) -> None:
    function = ctypes.cast(toy.halfstep_toy_packed, ctypes.c_void_p).value
    invoke, kinds = native.calls().invoke, b"ppifip"
    x, y, big = torch.tensor(3.0), torch.zeros((), dtype=torch.float64), ctypes.c_int64()
    at = ctypes.addressof(big)
    invoke(function, kinds, x.data_ptr(), y.data_ptr(), -1, 0.5, 2**63 + 1, at)
    assert (y.item(), big.value) == (-1.5, 1 - 2**63)
    invoke(function, kinds, None, y.data_ptr(), True, 2, -5, at)  # an integer for a float, as with ctypes
    assert (y.item(), big.value) == (14.0, -5)
    for wrong, error in (
        ((x.data_ptr(), y.data_ptr(), 1.5, 1.0, 0, at), "argument 3 is no integer"),
        ((x.data_ptr(), y.data_ptr(), None, 1.0, 0, at), "argument 3 is no integer"),
        ((x.data_ptr(), y.data_ptr(), 1, "a", 0, at), "must be real number, not str"),
        (("a", y.data_ptr(), 1, 1.0, 0, at), "argument 1 is no address, plain tensor on the CPU or None"),
        ((torch.empty(2, device="meta"), y.data_ptr(), 1, 1.0, 0, at), "argument 1 is no address"),
        ((x.data_ptr(),), "wrong number of arguments"),
    ):
        with pytest.raises(TypeError, match=error):
            invoke(function, kinds, *wrong)
    with pytest.raises(OverflowError):
        invoke(function, kinds, None, y.data_ptr(), 1, 1.0, 2**64, at)
    with pytest.raises(ValueError, match="no function"):
        invoke(0, b"")
    function_of_tensors = torch.zeros(1), torch.zeros(1)
    invoke(function, kinds, function_of_tensors[0], y.data_ptr(), 1, 1.0, 0, function_of_tensors[1].new_zeros(2))
    assert y.item() == 0.0


def test_a_table_is_that_of_tensor_table() -> None:
    tensors = [torch.randn(shape) for shape in ((5000,), (3, 4), (0,), (), (4096,), (2, 1, 3))]
    targets = [torch.empty_like(one, dtype=torch.float16) for one in tensors]
    found = packed(4096, tensors, targets)
    assert found is not None and found.codes == (0, 1) and found.tensors == 6
    numels = [one.numel() for one in tensors]
    addresses = [[one.data_ptr() for one in some] for some in (tensors, targets)]
    want = TensorTable(numels, 2, 4096, torch.device("cpu"), addresses)
    rows = (ctypes.c_int64 * (4 * 6)).from_address(found.places[0])
    owners = (ctypes.c_int32 * found.chunks).from_address(found.places[1])
    assert list(rows) == want.rows.flatten().tolist()
    assert list(owners) == want.chunk_tensor.tolist() and found.chunks == want.chunks


def test_codes_are_those_of_the_dtypes() -> None:
    for dtype, code in cast.CODES.items():
        one = packed(64, [torch.zeros(3).to(dtype)])
        assert one is not None and one.codes == (code,)
        assert native.calls().code(torch.zeros(3).to(dtype)) == code


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
    one = unusual()  # type: ignore[operator]
    assert packed(64, [one]) is None
    assert packed(64, [torch.randn(4), one]) is None
    assert native.calls().code(one) == -1


def test_lists_that_do_not_fit_have_no_table() -> None:
    x = torch.randn(6)
    assert packed(64, []) is None
    assert packed(64, (x,)) is None
    assert packed(64, [x], [x, x]) is None
    assert packed(64, [x], [x.view(2, 3)]) is None
    assert packed(64, [x], [x[:5]]) is None
    assert packed(64, [x, x.half()]) is None
    with FakeTensorMode():
        assert packed(64, [x]) is None
    assert native.calls().code(torch.empty(0)) == -1


def test_transforms_are_left_to_python() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(packed(64, [x]))
        return x.sum()

    torch.func.vmap(look)(torch.randn(3, 4))
    torch.func.grad(look)(torch.randn(4))
    assert seen == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_do_not_depend_on_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [0, 1, 7, 4096, 4097, 20000]
    tensors = [torch.randn(size, generator=generator, dtype=torch.float32).to(dtype) for size in sizes]
    bad = [one.clone() for one in tensors]
    bad[2][3], bad[5][-1] = float("inf"), float("nan")
    rows = torch.randn(5, 77, generator=generator, dtype=torch.float32).to(dtype).requires_grad_()

    def results() -> list[torch.Tensor]:
        found = [*halfstep.foreach_check(tensors), *halfstep.foreach_check(bad, 0.5)]
        found += halfstep.foreach_check(tensors, torch.tensor(0.25))
        for by in (0.3, torch.tensor(0.3)):
            own = [one.clone() for one in bad]
            versions = [one._version for one in own]
            found += [*halfstep.foreach_unscale_(own, by), *own]
            assert all(one._version > version for one, version in zip(own, versions, strict=True))
        for target in cast.DTYPES:
            outs = [torch.empty_like(one, dtype=target) for one in tensors]
            result = halfstep.foreach_cast(tensors, target, out=outs)
            assert all(one is out for one, out in zip(result, outs, strict=True)) and outs[1]._version > 0
            found += [*result, *halfstep.foreach_cast(tensors, target), halfstep.cast(tensors[5], target)]
        y = halfstep.softmax(rows)
        (gradient,) = torch.autograd.grad(y, rows, torch.ones_like(y) * rows)
        return [*found, y.detach(), gradient.detach()]

    with_it = results()
    monkeypatch.setattr(native, "calls", lambda: None)
    native.function.cache_clear()
    try:
        without = results()
    finally:
        native.function.cache_clear()
    for one, other in zip(with_it, without, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_a_factor_may_be_of_a_subclass() -> None:
    factor = torch.tensor(0.5).as_subclass(Wrapped)
    assert halfstep.foreach_check([torch.tensor([4.0])], factor).sum_of_squares.item() == 4.0


def test_a_cast_is_differentiated_as_before() -> None:
    x = torch.randn(8, requires_grad=True)
    y = halfstep.cast(x, torch.bfloat16)
    y.backward(torch.full((8,), 3.0, dtype=torch.bfloat16))
    assert x.grad is not None and x.grad.dtype == torch.float32 and x.grad.tolist() == [3.0] * 8


def test_it_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an older torch nor a missing header is an error or a warning."""
    monkeypatch.setattr(native, "_compiled", lambda family, source: "no Python.h")
    native.calls.cache_clear()
    try:
        assert native.calls() is None and packed(64, [torch.zeros(1)]) is None
    finally:
        native.calls.cache_clear()
    monkeypatch.undo()
    assert native.calls() is not None
    assert multi_tensor.packed(64, [torch.zeros(1)]) is not None and unscale._packed([torch.zeros(1)]) is not None


def test_a_lazy_copy_is_copied_before_it_is_written() -> None:
    x = torch.ones(5)
    lazy = torch._lazy_clone(x)
    halfstep.foreach_unscale_([lazy], 0.5)
    assert x.tolist() == [1.0] * 5 and lazy.tolist() == [0.5] * 5
