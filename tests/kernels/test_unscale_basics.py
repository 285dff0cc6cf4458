"""Start here: checks and unscaling against torch's operator. test_unscale.py has every bit of the sum."""

import pytest
import torch
from devices import WHERE, assert_same_bits, kernels_on
from tolerances import SUM_OF_SQUARES

import halfstep
from halfstep.kernels.unscale import HAS_INF, HAS_NAN

SIZES = (1, 15, 4096, 4097)


def gradients(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [torch.linspace(-2, 2, size, device=device).to(dtype) for size in SIZES]


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", [*WHERE, "cpu"])
def test_unscaling_has_the_bits_of_torchs(where: str, dtype: torch.dtype, bad: float | None) -> None:
    """GradScaler's operator multiplies in place and finds non-finite elements; ours gives the norm too."""
    with kernels_on(where) as device:
        ours, theirs = gradients(dtype, device), gradients(dtype, device)
        if bad is not None:
            ours[3][7] = theirs[3][7] = bad
        inv_scale = torch.tensor(1 / 3, device=device)
        found_inf = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(theirs, found_inf, inv_scale)
        unscaled = halfstep.foreach_unscale_(ours, inv_scale)
        assert unscaled.found_inf.item() == found_inf.item() == float(bad is not None)
        for our, their in zip(ours, theirs, strict=True):
            assert_same_bits(our, their)
        if bad is None:
            norm = torch.cat([their.double() for their in theirs]).norm().item()
            assert unscaled.norm.item() == pytest.approx(norm, rel=SUM_OF_SQUARES)


@pytest.mark.parametrize("where", [*WHERE, "cpu"])
def test_a_check_writes_nothing_and_names_the_bad_tensors(where: str) -> None:
    with kernels_on(where) as device:
        grads = gradients(torch.float16, device)
        grads[1][3], grads[3][4096] = float("nan"), float("inf")
        before = [grad.clone() for grad in grads]
        verdict = halfstep.foreach_check(grads, inv_scale=0.5)
        assert verdict.found_inf.item() == 1 and verdict.flags.tolist() == [0, HAS_NAN, 0, HAS_INF]
        assert verdict.first_bad().item() == 1
        for grad, kept in zip(grads, before, strict=True):
            assert_same_bits(grad, kept)


def test_squares_do_not_overflow() -> None:
    """1e30 and 1e-30 have squares that fp32 cannot hold; what is checked is the product."""
    for value in (1e30, 1e-30):
        x = torch.full((5000,), value)
        assert halfstep.foreach_check([x]).sum_of_squares.item() == pytest.approx(5000 * float(x[0]) ** 2)
    assert halfstep.foreach_check([x], inv_scale=float("inf")).found_inf.item() == 1
    assert halfstep.foreach_check([]).flags.tolist() == []
