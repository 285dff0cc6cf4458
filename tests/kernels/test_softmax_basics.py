"""Start here: halfstep's softmax and log-softmax beside torch's, forward and backward.

On a CPU `native` is torch's own softmax; `triton` runs the kernels under Triton's interpreter, or on a GPU if there is
one; `reference` is `kernels/softmax/rule.py`, the specification.
"""

import pytest
import torch
from implementations import ALL, using

import halfstep

PAIRS = [(halfstep.softmax, torch.softmax), (halfstep.log_softmax, torch.log_softmax)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 129)])
def test_the_same_input_into_ours_and_torchs(name, ours, theirs, shape) -> None:  # type: ignore[no-untyped-def]
    with using(name, "softmax") as device:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
        x_ours, x_torch = x.clone().requires_grad_(), x.clone().requires_grad_()
        y_ours, y_torch = ours(x_ours), theirs(x_torch, dim=-1)
        y_ours.backward(grad)
        y_torch.backward(grad)
        torch.testing.assert_close(y_ours, y_torch, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(x_ours.grad, x_torch.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_scale_and_masks_as_torch_composes_them(name: str) -> None:
    with using(name, "softmax") as device:
        x = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(0)).to(device)
        keep = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
        expected = torch.softmax((0.125 * x).masked_fill(~keep, -torch.inf), -1)
        torch.testing.assert_close(halfstep.softmax(x, scale=0.125, causal=True), expected)
        torch.testing.assert_close(halfstep.softmax(x, scale=0.125, mask=keep), expected)
        attended = torch.nn.functional.scaled_dot_product_attention(
            x.cpu(), torch.eye(6).expand(4, 6, 6), torch.eye(6).expand(4, 6, 6), is_causal=True, scale=0.125
        )
        torch.testing.assert_close(halfstep.softmax(x, scale=0.125, causal=True).cpu(), attended)
        bias = torch.where(keep, 0.0, -torch.inf)
        torch.testing.assert_close(halfstep.softmax(x, scale=0.125, mask=bias), expected)


@pytest.mark.parametrize("name", ALL)
def test_bf16_is_rounded_once_from_fp32(name: str) -> None:
    with using(name, "softmax") as device:
        x = torch.randn(3, 65, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
        exact = torch.softmax(x.double(), -1)
        error = (halfstep.softmax(x).double() - exact).abs() / exact
        assert float(error.max()) < 0.51 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("name", ALL)
def test_one_nan_spoils_its_row_and_a_masked_row_is_zero(name: str) -> None:
    with using(name, "softmax") as device:
        x = torch.zeros(3, 5, device=device)
        x[0, 2] = torch.nan
        keep = torch.tensor([[True], [True], [False]], device=device)
        y = halfstep.softmax(x, mask=keep)
        assert y[0].isnan().all()
        assert y[1].tolist() == pytest.approx([0.2] * 5)
        assert y[2].tolist() == [0.0] * 5  # torch makes NaN of it
