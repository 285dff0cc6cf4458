"""The model: emulated products against a float64 oracle, and the same initial weights in every precision."""

import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, SIZES, Precision, add_adapters, merged
from tolerances import ROUNDOFF
from torch.utils.flop_counter import FlopCounterMode

from halfstep.numerics.planning.work import training_flops

CPU = torch.device("cpu")
FP16 = Precision.on("fp16", CPU)
EMULATED = [FP16, Precision("bf16", torch.bfloat16, emulated=True)]
each = pytest.mark.parametrize("precision", EMULATED, ids=lambda precision: precision.name)


def _random(precision: Precision, *shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(precision.dtype).requires_grad_()


def _is_product(value: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `value` is a·b rounded to its dtype: within half an ulp, plus what an fp32 sum may be off."""
    exact = a.detach().double() @ b.detach().double()
    magnitude = a.detach().double().abs() @ b.detach().double().abs()
    least = torch.tensor(torch.finfo(value.dtype).smallest_normal, dtype=torch.float64)
    ulp = torch.maximum(exact.abs(), least) * ROUNDOFF[value.dtype]
    slack = magnitude * a.shape[-1] * 2.0**-24
    return value.dtype == a.dtype and bool(((value.double() - exact).abs() <= ulp * 1.0001 + slack).all())


@each
def test_products_are_rounded_once_forward_and_backward(precision: Precision) -> None:
    x, w = _random(precision, 3, 5, 17, seed=0), _random(precision, 11, 17, seed=1)
    grad = _random(precision, 3, 5, 11, seed=2).detach()
    y = precision.product(F.linear, x, w)
    y.backward(grad)
    assert x.grad is not None and w.grad is not None and x.grad.shape == x.shape
    assert _is_product(y, x, w.t())
    assert _is_product(x.grad, grad, w)
    assert _is_product(w.grad, grad.flatten(0, 1).t(), x.flatten(0, 1))
    a, b = _random(precision, 2, 3, 7, 5, seed=0), _random(precision, 2, 3, 9, 5, seed=1)
    grad = _random(precision, 2, 3, 7, 9, seed=2).detach()
    c = precision.product(torch.matmul, a, b.mT)
    c.backward(grad)
    assert a.grad is not None and b.grad is not None
    assert _is_product(c, a, b.mT)
    assert _is_product(a.grad, grad, b)
    assert _is_product(b.grad, grad.mT, a)
    # 4096 terms of 1 stop at 2048 in an fp16 accumulator, at 256 in one of bf16.
    ones = torch.ones(1, 4096, dtype=precision.dtype)
    assert precision.product(F.linear, ones, ones).item() == 4096
    table = torch.zeros(4, 2, dtype=precision.dtype, requires_grad=True)
    index = torch.zeros(3000, dtype=torch.int64)
    precision.embedding(index, table).backward(torch.ones(3000, 2, dtype=precision.dtype))
    assert table.grad is not None
    assert table.grad[0].tolist() == [float(torch.tensor(3000.0).to(precision.dtype))] * 2
    assert not table.grad[1:].any()


def test_the_model_starts_the_same_in_every_precision_and_computes_nearly_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randint(0, 256, (4, 32), generator=generator) for _ in range(2))
    models = {name: GPT(SIZES["nano"], Precision.on(name, CPU), seed=5) for name in ("fp32", "bf16", "fp16")}
    for values in zip(*(model.parameters() for model in models.values()), strict=True):
        assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
    losses, slopes = {}, {}
    for name, model in models.items():
        model.to(model.precision.dtype)
        loss = model(inputs, targets)
        assert loss.dtype == torch.float32
        (loss * 1024).backward()
        losses[name] = loss.item()
        slopes[name] = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]) / 1024
    for name, bound in (("bf16", 2.0**-8), ("fp16", 2.0**-11)):
        assert losses[name] == pytest.approx(losses["fp32"], rel=bound)
        error = (slopes[name] - slopes["fp32"]).norm() / slopes["fp32"].norm()
        assert error < 6 * bound, f"{name}: gradients are {error:.2e} off"


def test_a_byte_is_predicted_from_earlier_ones_only() -> None:
    model = GPT(SIZES["nano"], Precision.on("fp32", CPU), seed=0)
    inputs = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(1))
    changed = inputs.clone()
    changed[0, 20] += 1 if changed[0, 20] < 255 else -1
    targets = torch.zeros_like(inputs)
    # the loss over the first 20 places does not see place 20; over the first 21 it does
    assert model(inputs[:, :20], targets[:, :20]) == model(changed[:, :20], targets[:, :20])
    assert model(inputs[:, :21], targets[:, :21]) != model(changed[:, :21], targets[:, :21])


def test_adapters_start_as_the_model_train_alone_and_compute_loras_product() -> None:
    """W + 2 B A in fp64, of every matrix in the blocks."""
    tokens = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(0))
    model, target = (GPT(SIZES["nano"], Precision.on("fp32", CPU), 0) for _ in range(2))
    add_adapters(model, 3, 7)
    weights = dict(model.named_parameters())
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert torch.equal(loss, target(tokens[:, :-1], tokens[:, 1:]))
    loss.backward()
    matrices = [f"blocks.{block}.{name}" for block in (0, 1) for name in ("qkv", "out", "up", "down")]
    assert {name for name, weight in weights.items() if weight.grad is not None} == {
        f"{name}.lora_{letter}" for name in matrices for letter in "ab"
    }
    assert weights["blocks.0.down.lora_a"].std().item() == pytest.approx(128**-0.5, rel=0.15)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in matrices:
            weights[f"{name}.lora_b"].normal_(std=0.1, generator=generator)
            product = weights[f"{name}.lora_b"].double() @ weights[f"{name}.lora_a"].double()
            target.get_parameter(f"{name}.weight").add_((2 * product).float())
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    torch.testing.assert_close(model(inputs, targets), target(inputs, targets), rtol=1e-5, atol=0)
    sums = merged({name: weight.detach() for name, weight in weights.items()})
    assert sums.keys() == dict(target.named_parameters()).keys()
    for name, weight in target.named_parameters():
        torch.testing.assert_close(sums[name], weight.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rank", [0, 4])
def test_planned_flops_are_those_of_the_products(rank: int) -> None:
    """Counted by torch in forward and backward, in which products for frozen weights do not take place."""
    model = GPT(SIZES["nano"], Precision.on("fp32", CPU), seed=0)
    if rank:
        add_adapters(model, rank, seed=0)
    tokens = torch.zeros(4, 33, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    expected = training_flops(SIZES["nano"], 4, 32, rank)
    if rank:  # the input of the first block needs no gradient, and neither do its queries, keys and values
        expected -= 2 * 4 * 32 * 96 * 32 + 2 * 4 * 32 * rank * 32
    assert counter.get_total_flops() == expected
