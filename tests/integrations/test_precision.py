"""`cast_parameters`: parameters in 16 bits, buffers as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfstep
from halfstep.integrations.precision import cast_parameters


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 8, 2) / 8))
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.numbers = nn.Parameter(torch.arange(3), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_are_cast_and_buffers_are_not(dtype: torch.dtype) -> None:
    model = Rotary()
    before = dict(model.named_parameters())
    model.embedding.weight.grad = torch.ones(11, 8)
    values = {name: p.detach().to(dtype) for name, p in before.items() if p.is_floating_point()}
    assert cast_parameters(model, dtype) is model
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before) and model.head.weight is model.embedding.weight
    assert {name: p.detach() for name, p in after.items()}.keys() == before.keys()
    for name, value in values.items():
        assert torch.equal(after[name].detach(), value) and after[name].dtype == dtype and after[name].grad is None
    assert after["numbers"].dtype == torch.int64
    assert all(buffer.dtype != dtype for buffer in model.buffers())


def test_the_doctor_has_no_complaint_about_the_buffers() -> None:
    model = cast_parameters(Rotary())
    assert "buffers-in-16-bits" not in halfstep.doctor(model, halfstep.AdamW(model.parameters())).names
    there = Rotary().to(torch.bfloat16)
    assert "buffers-in-16-bits" in halfstep.doctor(there, halfstep.AdamW(there.parameters())).names


def test_it_trains_and_goes_back_to_fp32() -> None:
    model = cast_parameters(nn.Linear(4, 2))
    optimizer = halfstep.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert cast_parameters(model, torch.float32).weight.dtype == torch.float32


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected dtype to be torch\.bfloat16, .* but got torch\.int8"):
        cast_parameters(nn.Linear(2, 2), torch.int8)
