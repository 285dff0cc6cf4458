"""Start here: one step of Adam in every implementation, against torch.optim. test_adam.py has the rest."""

import math

import pytest
import torch
from implementations import ALL, using

import halfstep
from halfstep.kernels.adam import rule

SIZES = ((), (1,), (17,), (3, 70), (0,), (5, 31, 3), (2061,))
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}


def tensors(device: torch.device, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in SIZES]


def stepped(optimizer_class: type, device: torch.device, **options: object) -> list[torch.Tensor]:
    """The parameters after two steps, with one NaN in the gradients of the last one."""
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors(device, 0)]
    optimizer = optimizer_class(parameters, **OPTIONS, **options)
    for seed in (1, 2):
        for parameter, grad in zip(parameters, tensors(device, seed), strict=True):
            parameter.grad = grad
        if seed == 2:
            parameters[3].grad[1, 5] = math.nan
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("implementation", ALL)
def test_a_step_is_that_of_torch(implementation: str, name: str, amsgrad: bool) -> None:
    with using(implementation, "adam") as device:
        results = stepped(getattr(halfstep, name), device, amsgrad=amsgrad)
        theirs = stepped(getattr(torch.optim, name), device, amsgrad=amsgrad)
        for index, (result, expected) in enumerate(zip(results, theirs, strict=True)):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
            assert result.isnan().sum() == (index == 3)  # the NaN stays where it was


@pytest.mark.parametrize("implementation", ALL)
def test_a_step_has_the_bits_of_the_rule(implementation: str) -> None:
    """The first step of AdamW, whose moments begin at 0, of fp32 weights."""
    group = rule.Group(*torch.tensor([[0.01], [0.1], [0], [0], [0.9], [0.99], [1e-8], [1]], dtype=torch.float64))
    hyper = rule.numbers(group, count=torch.tensor([1]), gscale=torch.ones(1, dtype=torch.float64))
    with using(implementation, "adam") as device:
        for w, grad in zip(tensors(device, 0), tensors(device, 1), strict=True):
            zeros = torch.zeros_like(w).cpu()
            expected, m, v = rule.adam(
                w.cpu(), grad.cpu(), zeros, zeros, None, hyper, l2=False, largest=3.4e38, stored=lambda x: x
            )
            parameter = torch.nn.Parameter(w)
            parameter.grad = grad
            optimizer = halfstep.AdamW([parameter], **OPTIONS)
            optimizer.step()
            state = optimizer.state[parameter]
            assert torch.equal(parameter.detach().cpu(), expected.view(w.shape))
            assert torch.equal(state["exp_avg"].cpu(), m.view(w.shape))
            assert torch.equal(state["exp_avg_sq"].cpu(), v.view(w.shape))
