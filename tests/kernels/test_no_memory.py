"""Tensors without memory of their own: wrapper subclasses, fake and meta tensors, freed storages.

Kernels work on addresses. Such a tensor is worked on through its own operations, or refused before memory is touched.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from implementations import ALL, using
from tolerances import SUM_OF_SQUARES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from verdicts import unscaled

import halfstep
from halfstep.kernels import unscale
from halfstep.kernels.loss_scale import Rules, State, update
from halfstep.kernels.multi_tensor import TableCache, TensorTable, address
from halfstep.kernels.unscale import Tally

CPU = torch.device("cpu")
NOWHERE = (
    "without: pass the tensors inside a wrapper subclass, real tensors instead of fake ones, "
    "and no tensor whose storage was freed"
)


class Named(torch.Tensor):
    """A subclass that overrides no operation: its elements are in its own memory."""


def freed(offset: int = 0) -> torch.Tensor:
    whole = torch.ones(8)
    part = whole[offset:]
    whole.untyped_storage().resize_(0)
    return part


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype)


def two(dtype: torch.dtype = torch.float32) -> TwoTensor:
    first, second = torch.linspace(-2, 3, 24).reshape(4, 6), torch.linspace(1, 5, 24).reshape(4, 6)
    return TwoTensor(first.to(dtype), second.to(dtype))


def nowhere() -> dict[str, torch.Tensor]:
    """Tensors that neither have memory nor say what their elements are."""
    return {
        "freed": freed(),
        "a view into freed memory": freed(3),
        "a freed parameter": torch.nn.Parameter(freed(1)),
        "a freed subclass": freed(1).as_subclass(Named),
        "zeros without memory": torch._efficientzerotensor((3,)),
        "functional": torch._to_functional_tensor(torch.ones(3)),
    }


# ------------------------------------------------------------------------------------------------------------ helpers


@pytest.mark.parametrize("name", nowhere())
def test_an_address_is_never_an_offset_from_zero(name: str) -> None:
    tensor = nowhere()[name]
    table = TensorTable([3, tensor.numel()], operands=1, chunk=4, device=CPU)
    cache = TableCache(operands=1, chunk=4)
    for take in (
        lambda: address(tensor),
        lambda: table.point(0, [torch.ones(3), tensor]),
        lambda: cache.table([torch.ones(3), tensor]),
    ):
        with pytest.raises(TypeError) as raised:
            take()
        kind, shape = type(tensor).__name__, tuple(tensor.shape)
        expected = (
            f"Expected a tensor with memory of its own, but got a {kind} of shape {shape} and dtype torch.float32 "
        )
        assert str(raised.value) == expected + NOWHERE
    assert table.written[0] is None and not table.rows[2].any()


# --------------------------------------------------------------------------------------------- refused, never touched

FREED_ROWS = torch.ones(3, 4).t()
FREED_ROWS.untyped_storage().resize_(0)

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "foreach_check": lambda t: halfstep.foreach_check([torch.ones(3), t]),
    "foreach_check, scaled": lambda t: halfstep.foreach_check([torch.ones(3)], inv_scale=freed(7)),
    "foreach_unscale_": lambda t: halfstep.foreach_unscale_([torch.ones(3), t], 0.5),
    "cast": lambda t: halfstep.cast(t, torch.float8_e4m3fn),
    "cast, plain": lambda t: halfstep.cast(t, torch.bfloat16),
    "foreach_cast": lambda t: halfstep.foreach_cast([torch.ones(3), t], torch.bfloat16),
    "cast to blocks": lambda t: halfstep.cast(t, "mxfp8"),
    "foreach_cast to blocks": lambda t: halfstep.foreach_cast([torch.ones(3), t], "mxfp8"),
    "foreach_cast, out": lambda t: halfstep.foreach_cast([torch.ones(t.shape)], torch.float32, out=[t]),
    "softmax": halfstep.softmax,
    "softmax, transposed": lambda t: halfstep.softmax(FREED_ROWS),
    "softmax, mask": lambda t: halfstep.softmax(torch.ones(t.shape), mask=t),
    "log_softmax": halfstep.log_softmax,
    "statistics": lambda t: halfstep.statistics([torch.ones(3), t]),
    "loss_scale": lambda t: update(
        State(
            torch.ones(1), *(torch.ones(1, dtype=torch.int32) for _ in range(2)), torch.ones(1), torch.ones(3).long()
        ),
        t,
        Rules(2.0, 0.5, 10, 1, False, 1.0, 1e6),
    ),
}


@pytest.mark.parametrize("name", ["native", "triton"])
@pytest.mark.parametrize("call", CALLS)
def test_freed_memory_is_refused(call: str, name: str) -> None:
    with using(name, "unscale") as device:
        if device.type != "cpu":
            pytest.skip("the tensors are on the CPU")
        for tensor in (freed(2), freed().as_subclass(Named)):
            with pytest.raises(TypeError, match="Expected a tensor with memory of its own, but got a"):
                CALLS[call](tensor)


# ------------------------------------------------------------------------------------------ through its own operations


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_wrapper_is_checked_through_its_own_operations(dtype: torch.dtype, name: str) -> None:
    with using(name, "unscale") as device, device:
        plain = torch.tensor([1.0, float("nan")])
        clean, bad = two(dtype), two(dtype)
        bad.a[1, 2] = float("inf")  # the first of two: what the last one writes would not tell
        found = halfstep.foreach_check([clean, bad, plain], inv_scale=0.5)
        assert found.found_inf.item() == 1 and found.flags.tolist() == [0, 1, 2]
        assert type(found.sum_of_squares) is torch.Tensor and not found.sum_of_squares.isfinite()
        found = halfstep.foreach_check([clean, torch.ones(3)])
        apart = halfstep.foreach_check([clean.a, clean.b, torch.ones(3)])
        torch.testing.assert_close(found.sum_of_squares, apart.sum_of_squares, rtol=SUM_OF_SQUARES, atol=0)
        assert found.found_inf.item() == 0

        out = halfstep.foreach_check([plain, plain, plain])
        tally = Tally(torch.zeros(3, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
        assert unscale.check([bad, clean], out=out, tally=tally, slots=[2, 0], in_memory=False) is out
        assert out.flags.tolist() == [0, 0, 1] and tally.counts[:, 0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", ALL)
def test_a_wrapper_is_unscaled_through_its_own_operations(name: str) -> None:
    with using(name, "unscale") as device, device:
        for dtype in (torch.float32, torch.bfloat16):
            grad, plain = two(dtype), torch.full((3,), 3.0)
            apart = [grad.a.clone(), grad.b.clone(), plain.clone()]
            found = halfstep.foreach_unscale_([grad, plain], 1 / 3)
            expected = halfstep.foreach_unscale_(apart, 1 / 3)
            for ours, theirs in zip((grad.a, grad.b, plain), apart, strict=True):
                assert torch.equal(ours, theirs)
            torch.testing.assert_close(found.norm, expected.norm, rtol=SUM_OF_SQUARES, atol=0)
            assert found.found_inf.item() == 0
            grad.a[0, 0] = float("nan")
            check = unscaled([plain, grad], torch.tensor(0.5))
            assert check.flags.tolist() == [0, 2] and check.found_inf.item() == 1


@pytest.mark.parametrize("name", ALL)
def test_wrappers_are_cast_counted_and_normalised(name: str) -> None:
    with using(name, "cast") as device, device:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            (result,) = halfstep.foreach_cast([two()], dtype)
            expected = halfstep.foreach_cast([two().a, two().b], dtype)
            single = halfstep.cast(two(), dtype)
            for one in (result, single):
                assert isinstance(one, TwoTensor)
                for ours, theirs in zip((one.a, one.b), expected, strict=True):
                    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    with using(name, "statistics") as device, device:
        found, apart = halfstep.statistics([two()]).total, halfstep.statistics([two().a, two().b]).total
        assert (found.cells == apart.cells).all() and (found.errors == apart.errors).all()
        assert found.largest_error == apart.largest_error
    with using(name, "softmax") as device, device:
        x = two().detach().requires_grad_()
        y = halfstep.softmax(x, scale=0.5)
        assert isinstance(y, TwoTensor)
        assert torch.equal(y.a, halfstep.softmax(two().a, scale=0.5))
        y.backward(two())
        assert isinstance(x.grad, TwoTensor) and x.grad.shape == x.shape


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["fake", "meta", "fake, under its mode"])
def test_fake_and_meta_tensors_give_fake_and_meta_results(kind: str, name: str) -> None:
    mode = FakeTensorMode()

    def like(made: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        assert (tuple(made.shape), made.dtype) == (shape, dtype)
        assert made.is_meta if kind == "meta" else type(made).__name__ == "FakeTensor"

    with using(name, "unscale") as device, device, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="triton.runtime.interpreter")  # that of 3.6 uses numpy in old ways
        with mode:
            x = torch.empty(4, 6, requires_grad=True)
        if kind == "meta":
            x = torch.empty(4, 6, device="meta", requires_grad=True)
        with mode if "under" in kind else torch.no_grad():
            check = halfstep.foreach_check([x.detach(), x.detach()], inv_scale=2.0)
            like(check.found_inf, (), torch.float32)
            like(check.sum_of_squares, (), torch.float64)
            like(check.flags, (2,), torch.int32)
            like(halfstep.foreach_unscale_([x.detach()], 0.5).norm, (), torch.float32)
            for rounding in ("nearest", "stochastic"):
                like(halfstep.foreach_cast([x], torch.bfloat16, rounding=rounding)[0], (4, 6), torch.bfloat16)
                like(halfstep.cast(x, torch.float8_e5m2, rounding=rounding), (4, 6), torch.float8_e5m2)
        y = halfstep.softmax(x, causal=True, dtype=torch.float16)
        like(y, (4, 6), torch.float16)
        y.sum().backward()
        like(x.grad, (4, 6), torch.float32)
        with pytest.raises(
            TypeError, match=r"0 is (on the meta device|a fake tensor) and has no values; load it first"
        ):
            halfstep.statistics([x])
        # What a call leaves for the next is real.
        assert halfstep.foreach_check([torch.ones(5)]).sum_of_squares.item() == 5
