"""Verdicts in parts: the bits of a single verdict, however the gradients are split and ordered."""

from collections.abc import Callable

import pytest
import torch
from oracles import assert_same_bits
from torch.testing._internal.two_tensor import TwoTensor

import halfstep
from halfstep.kernels.unscale import Factor
from halfstep.numerics.scaling.decision import Checker

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def _plain() -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    parameters = []
    for index in range(24):
        size = (1 + 701 * index) % 9001
        parameter = torch.nn.Parameter(torch.empty(size, dtype=DTYPES[index % 3]))
        # Sums of squares from 1e-8 to 1e8, whose bits fp64 cannot hold, so that the sum depends on the order.
        grad = torch.randn(size, generator=random) * 10.0 ** (index % 5 * 2 - 4)
        parameter.grad = grad.to(parameter.dtype)
        parameters.append(parameter)
    parameters[7].grad = None
    return parameters


def _transposed() -> list[torch.nn.Parameter]:
    parameters = _plain()
    parameters.append(torch.nn.Parameter(torch.empty(5, 3)))
    parameters[-1].grad = torch.arange(15.0).reshape(3, 5).t()
    return parameters


def _subclasses() -> list[torch.nn.Parameter]:
    parameters = []
    for index in range(5):
        value = 10.0**index * torch.linspace(1, 2, 40)
        parameters.append(torch.nn.Parameter(TwoTensor(value, -value)))
        parameters[-1].grad = TwoTensor(value / 3, value / 7)
    return parameters


@pytest.mark.parametrize("given", [_plain, _transposed, _subclasses])
@pytest.mark.parametrize("bad", [None, float("inf")])
@pytest.mark.parametrize("parts", [1, 3, 24])
def test_parts_have_the_bits_of_one_verdict(
    given: Callable[[], list[torch.nn.Parameter]], bad: float | None, parts: int
) -> None:
    parameters = given()
    if bad is not None:
        assert parameters[2].grad is not None
        parameters[2].grad[0] = bad
    optimizer = halfstep.AdamW(parameters)
    factor = Factor(torch.tensor(3.0), inverted=True)
    step = torch.tensor([4])
    whole, divided = Checker(optimizer), Checker(optimizer)
    expected = whole.verdict(factor, step=step)
    for _ in range(2):  # what the first left behind does not matter
        divided.begin_parts()
        for part in reversed(range(parts)):
            own = [one for one in parameters[part::parts] if one.grad is not None]
            if own:
                divided.add_part(own, factor)
        found = divided.end_parts(step)
        assert expected is not None and found is not None
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)
    counts, others = whole.counts[torch.device("cpu")], divided.counts[torch.device("cpu")]
    assert torch.equal(others[:, 0], 2 * counts[:, 0]) and torch.equal(others[:, 2], counts[:, 2])
    assert bool(counts.any()) == (bad is not None)


def test_without_parts_there_is_no_verdict() -> None:
    optimizer = halfstep.AdamW(_plain())
    checker = Checker(optimizer)
    checker.begin_parts()
    assert checker.end_parts() is None
