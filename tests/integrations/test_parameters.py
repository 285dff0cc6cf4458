"""Duplicate parameters, compiled steps, lazy negations, and `cast_parameters`, which leaves buffers unchanged."""

import copy
from typing import Any

import pytest
import torch
from layouts import some
from oracles import BF16, FP32, bits
from states import held, same
from torch._dynamo.utils import counters

import halfstep
from halfstep.integrations.precision import cast_parameters

pytestmark = pytest.mark.sample(3)

LAYOUTS = {**some("fp32", "split", "fp16"), "none": (BF16, {"master_weights": None})}
kinds = pytest.mark.parametrize("kind", LAYOUTS)


@kinds
@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_a_parameter_given_twice_is_warned_of_and_stepped_once(kind: str, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    dtype, options = LAYOUTS[kind]
    p, q, once = (torch.nn.Parameter(torch.ones(50, dtype=dtype)) for _ in range(3))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = halfstep.AdamW([p, q, p], lr=1e-2, **options)
    single = halfstep.AdamW([once], lr=1e-2, **options)
    with halfstep.backend(backend):
        for _ in range(3):
            for one in (p, q, once):
                one.grad = torch.ones_like(one)
            optimizer.step()
            single.step()
    assert (bits(p.detach()) == bits(once.detach())).all() and (bits(q.detach()) == bits(once.detach())).all()
    assert float(optimizer.state[p]["step"]) == 3
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert (bits(p.detach()) == bits(once.detach())).all()


def training(dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(BF16).to(dtype)
    return model, halfstep.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0, **options)


@kinds
def test_a_compiled_training_step_breaks_at_the_step_only(kind: str) -> None:
    """Forward and backward are one graph each; what Dynamo does not trace of torch itself (`backward`) is not ours."""
    dtype, options = LAYOUTS[kind]
    results = []
    for compiled in (False, True):
        model, optimizer = training(dtype, options)

        def loss_of(x: torch.Tensor, model: Any = model) -> torch.Tensor:
            return model(x).float().square().mean()

        def step(x: torch.Tensor, loss_of: Any = loss_of, optimizer: Any = optimizer) -> torch.Tensor:
            loss = loss_of(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = step
        if compiled:
            torch._dynamo.reset()
            counters.clear()
            # With fullgraph a break inside forward or backward is an error.
            torch.compile(loss_of, backend="aot_eager", fullgraph=True)(torch.ones(3, 8, dtype=dtype)).backward()
            optimizer.zero_grad()
            run = torch.compile(step, backend="aot_eager")
        compilations = []
        for number in range(5):
            run(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).to(dtype))
            compilations.append(counters["frames"]["total"])
        if compiled:
            broken = "\n".join(counters["graph_break"])
            assert "_step_on_device" in broken
            for reason in counters["graph_break"]:
                assert any(name in reason for name in ("_step_on_device", "backward", "zero_grad", "profile")), reason
            assert compilations[-1] == compilations[-2] > 0, "compiled anew at every step"
        results.append(held(optimizer, model.parameters()))
    assert same(*results)


@pytest.mark.parametrize("clip", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_compiled_step_with_a_scaler_has_the_same_bits_and_skips(clip: bool) -> None:
    """The whole AMP step in one compiled function: the scaler's calls run as they are; nothing is compiled twice."""
    results, scales = [], []
    for compiled in (False, True):
        model, optimizer = training(FP32, {})
        scaler = halfstep.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer, scaler: Any = scaler) -> torch.Tensor:
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            if clip:
                scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(step, backend="aot_eager") if compiled else step
        compilations, history = [], []
        for number in range(6):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            run(x * float("inf") if number == 3 else x)
            history.append(scaler.get_scale())
            compilations.append(counters["frames"]["total"])
        if compiled:
            assert compilations[-1] == compilations[-2] > 0, "compiled anew at every step"
        results.append(held(optimizer, model.parameters()))
        scales.append(history)
    assert same(*results)
    assert scales[0] == scales[1] == [2.0**10, 2.0**11, 2.0**11, 2.0**10, 2.0**10, 2.0**11]


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
@pytest.mark.parametrize("master_weights", ["auto", "full", None])
def test_lazy_negations_are_stepped_with_their_sign(backend: str, master_weights: str | None) -> None:
    """Their memory holds the opposite numbers: gradients of ``x.conj().imag``, for example."""
    from halfstep.kernels import backend as kernels_backend

    if backend == "triton" and (kernels_backend.triton is None or not kernels_backend.INTERPRET):
        pytest.skip("needs TRITON_INTERPRET=1")
    with halfstep.backend(backend):
        stepped = []
        for lazy in (False, True):
            values = torch.arange(1.0, 20.0).bfloat16()
            parameter = torch.nn.Parameter(torch._neg_view(values.neg()) if lazy else values.clone())
            parameter.grad = torch._neg_view(values.neg()) if lazy else values.clone()
            assert parameter.is_neg() == lazy == parameter.grad.is_neg()
            optimizer = halfstep.AdamW([parameter], lr=0.1, master_weights=master_weights)
            for _ in range(2):
                optimizer.step()
            stepped.append(parameter.detach().resolve_neg())
        assert torch.equal(*stepped)


class Rotary(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 8, 2) / 8))
        self.embedding, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = torch.nn.BatchNorm1d(8)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.numbers = torch.nn.Parameter(torch.arange(3), requires_grad=False)


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


def test_a_cast_model_trains_and_converts_back_to_fp32() -> None:
    model = cast_parameters(torch.nn.Linear(4, 2))
    optimizer = halfstep.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert cast_parameters(model, torch.float32).weight.dtype == torch.float32


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected dtype to be torch\.bfloat16, .* but got torch\.int8"):
        cast_parameters(torch.nn.Linear(2, 2), torch.int8)
