"""Start here: casts against torch's. test_cast.py has every pair, rounding and kind of tensor."""

import pytest
import torch
from devices import WHERE, assert_same_bits, kernels_on

import halfstep

FP16, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = [(torch.float32, FP16), (torch.float32, BF16), (FP16, BF16), (BF16, torch.float32), (torch.float32, E5M2)]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
@pytest.mark.parametrize("where", [*WHERE, "cpu"])
def test_casts_and_gradients_have_the_bits_of_torchs(where: str, source: torch.dtype, target: torch.dtype) -> None:
    """The bits of ``x.to``, of odd sizes, with a NaN, an overflow and a subnormal number; the gradient is cast back."""
    with kernels_on(where) as device:
        for size in (1, 15, 4097):
            x = torch.linspace(-3, 3, size, device=device).to(source)
            x[:4] = torch.tensor([float("nan"), 1e30, 1e-7, -0.0], device=device)[:size].to(source)
            ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            y, expected = halfstep.cast(ours, target), theirs.to(target)
            assert_same_bits(y, expected)
            (listed,) = halfstep.foreach_cast([x], target)
            assert_same_bits(listed, expected)
            gradient = torch.full_like(y, 0.3, dtype=torch.float32).to(target)
            y.backward(gradient)
            expected.backward(gradient)
            assert_same_bits(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_fp8_overflow_gives_nan_or_saturates() -> None:
    """E4M3 has no infinity: overflow gives NaN, or the largest number with `saturate`."""
    x = torch.tensor([464.0, 465.0, -1e9, float("inf"), float("nan")])
    plain, saturated = (halfstep.cast(x, E4M3, saturate=saturate).float() for saturate in (False, True))
    assert plain.isnan().tolist() == [False, True, True, True, True]
    assert saturated[:4].tolist() == [448.0, 448.0, -448.0, 448.0] and saturated[4].isnan()
    assert halfstep.cast(x, FP16, rounding="toward_zero").tolist()[2] == -65504.0


def test_stochastic_rounding_is_unbiased() -> None:
    """A quarter of the way from 1 to the next bf16 number: a quarter of the elements is rounded up."""
    x = torch.full((40_000,), 1 + 2.0**-9)
    y = halfstep.cast(x, BF16, rounding="stochastic", seed=1)
    assert sorted(set(y.tolist())) == [1.0, 1 + 2.0**-7]
    assert abs((y > 1).double().mean().item() - 0.25) < 5 * (0.25 * 0.75 / x.numel()) ** 0.5
    assert_same_bits(y, halfstep.cast(x, BF16, rounding="stochastic", seed=1))
    assert_same_bits(y[100:], halfstep.cast(x[100:], BF16, rounding="stochastic", seed=1, offset=100))
