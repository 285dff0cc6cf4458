"""What log-probabilities and cross-entropy promise to autograd, torch.compile, torch.func, and for wrong arguments."""

import math
import re
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
from devices import assert_same_bits, normal
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal.common_methods_invocations import op_db

import halfstep
from halfstep.kernels import native

TARGETS = torch.tensor([3, 0, -100, 5])
FP64 = torch.float64


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return normal(math.prod(shape), torch.float64, seed).view(shape).to(dtype)


def total(logits: torch.Tensor, targets: torch.Tensor = TARGETS, **options: Any) -> torch.Tensor:
    row = halfstep.log_probabilities(logits, targets, 0.7, True, **options)
    assert row.entropy is not None
    return 2 * row.log_probabilities + row.logsumexp.square() - row.entropy


@pytest.mark.parametrize("dtype", [torch.float32, FP64])
def test_torchs_own_cases_of_cross_entropy(dtype: torch.dtype) -> None:
    """The inputs with which torch tests its function, those with probabilities of classes for targets left out."""
    (info,) = [info for info in op_db if info.name == "nn.functional.cross_entropy"]
    cases = 0
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        (target,), options = sample.args, sample.kwargs
        if target.is_floating_point():
            continue
        ours, theirs = (sample.input.detach().clone().requires_grad_() for _ in range(2))
        loss = halfstep.cross_entropy(ours, target, **options)
        expected = torch.nn.functional.cross_entropy(theirs, target, **options)
        torch.testing.assert_close(loss, expected, equal_nan=True)
        (gradient,) = torch.autograd.grad(loss.sum(), ours)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), theirs)[0], equal_nan=True)
        cases += 1
    assert cases > 8


def test_first_and_second_derivatives_in_fp64() -> None:
    logits = (2 * randn(4, 6, dtype=FP64)).requires_grad_()
    assert gradcheck(total, (logits,)) and gradgradcheck(total, (logits,))
    masked = torch.tensor([[0, 1, 0, 0, 1, 0], [0] * 6, [1] * 6, [1, 1, 1, 0, 1, 0]], dtype=torch.bool)
    assert gradgradcheck(lambda x: total(x.masked_fill(masked, -math.inf)), (logits,))

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return halfstep.cross_entropy(logits, TARGETS, label_smoothing=0.2, z_loss=0.1)

    assert gradcheck(loss, (logits,)) and gradgradcheck(loss, (logits,))


def test_a_gradient_for_a_second_one_agrees_with_the_kernels() -> None:
    logits = (2 * randn(4, 6)).requires_grad_()
    (first,) = torch.autograd.grad(total(logits).sum(), logits)
    (second,) = torch.autograd.grad(total(logits).sum(), logits, create_graph=True)
    torch.testing.assert_close(first, second)
    transformed = torch.func.grad(lambda x: total(x).sum())(logits.detach())
    torch.testing.assert_close(first, transformed)
    by_row = torch.vmap(torch.func.grad(lambda x, t: total(x, t)))(logits.detach(), TARGETS)
    torch.testing.assert_close(first, by_row)
    with pytest.raises(RuntimeError, match=re.escape("inplace_backward=False for a gradient that is differentiated")):
        torch.autograd.grad(total(logits * 1, inplace_backward=True).sum(), logits, create_graph=True)


def test_vmap_over_either_operand() -> None:
    logits, targets = randn(3, 4, 6), torch.stack([TARGETS, TARGETS.flip(0)])
    assert torch.equal(torch.vmap(total, in_dims=(0, None))(logits, TARGETS), total(logits, TARGETS.expand(3, 4)))
    both = torch.vmap(lambda t: total(logits[0], t))(targets)
    assert torch.equal(both, total(logits[0].expand(2, 4, 6), targets))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(total, (logits[0],), (logits[0],))


def test_opcheck() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits, options = randn(4, 6, dtype=dtype).requires_grad_(), (0.7, -100, True, True, False)
        torch.library.opcheck(torch.ops.halfstep.log_probabilities.default, (logits, TARGETS, *options, False))
        results = torch.ops.halfstep.log_probabilities(logits.detach(), TARGETS, *options, False)
        arguments = torch.ones_like(results), logits.detach(), TARGETS, results, *options
        torch.library.opcheck(torch.ops.halfstep.log_probabilities_backward.default, arguments)


@torch._dynamo.config.patch(error_on_recompile=True)
@torch._inductor.config.patch(force_disable_caches=True)  # or it would run what an earlier version was compiled to
@pytest.mark.parametrize(
    ("backend", "inplace"),
    [
        ("aot_eager", False),
        ("aot_eager", True),
        ("inductor", True),
        pytest.param("inductor", False, marks=pytest.mark.exhaustive),  # takes half a minute
    ],
)
def test_compiled_code_has_the_bits_of_eager(backend: str, inplace: bool) -> None:
    """One graph for all sizes. Sums are left out, of which a compiler chooses the order and the dtype."""
    if backend == "inductor" and native.compiler() is None:
        pytest.skip("needs a C++ compiler")

    def step(first: torch.Tensor, second: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options: dict[str, Any] = {"reduction": "none", "label_smoothing": 0.1, "z_loss": 0.01}
        loss = halfstep.cross_entropy(first * 3, targets, inplace_backward=inplace, **options)
        row = halfstep.log_probabilities(second * 2, targets, 0.7, True, exact=True, inplace_backward=inplace)
        return loss, *row

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows, classes in ((4, 9), (3, 40)):
        logits = [randn(rows, classes, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in (1, 2)]
        grads = [randn(rows, seed=seed) for seed in (3, 4, 5, 6)]
        targets = TARGETS[:rows].clone()
        for values in zip(*(function(*logits, targets) for function in (step, compiled)), strict=True):
            assert_same_bits(*values)
        eager, fused = (torch.autograd.grad(function(*logits, targets), logits, grads) for function in (step, compiled))
        for gradients in zip(eager, fused, strict=True):
            assert_same_bits(*gradients)


def test_meta_and_fake_tensors_and_fp64() -> None:
    row = halfstep.log_probabilities(torch.empty(2, 7, device="meta", dtype=torch.bfloat16), TARGETS[:2].to("meta"))
    assert row.logsumexp.is_meta and row.logsumexp.shape == (2,) and row.logsumexp.dtype == torch.float32
    with torch._subclasses.FakeTensorMode():
        assert halfstep.cross_entropy(torch.empty(2, 7), torch.zeros(2, dtype=torch.int64)).shape == ()
    logits = randn(4, 6, dtype=FP64)
    exact = torch.log_softmax(logits, -1)[0, 3]
    torch.testing.assert_close(
        halfstep.log_probabilities(logits, TARGETS).log_probabilities[0], exact, rtol=0, atol=1e-15
    )


X, T = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
LOG, CROSS = halfstep.log_probabilities, halfstep.cross_entropy
ERRORS: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
    (TypeError, "Expected logits to be a tensor, but got a list", LOG, {"logits": [1.0]}),
    (TypeError, "Expected logits to have dtype", LOG, {"logits": T}),
    (TypeError, "Expected targets to have dtype int32 or int64, but got torch.uint8", LOG, {"targets": T.byte()}),
    (TypeError, "for probabilities use torch.nn.functional.cross_entropy", CROSS, {"targets": X}),
    (ValueError, "targets of shape (2,) and (3,) with the classes last", LOG, {"logits": X[0]}),
    (ValueError, "Expected logits of at least 1 class", LOG, {"logits": X[:, :0]}),
    (ValueError, "device of logits, cpu, but got meta: use targets.to", LOG, {"targets": T.to("meta")}),
    (ValueError, "whose inverse is finite in fp32, but got 0.0: for 0, take", LOG, {"temperature": 0.0}),
    (ValueError, "finite in fp32, but got nan", LOG, {"temperature": math.nan}),
    (ValueError, "but got 1e-39: for 0, take the argmax", LOG, {"temperature": 1e-39}),
    (TypeError, "Expected temperature to be a number, but got a Tensor", LOG, {"temperature": torch.tensor(2.0)}),
    (TypeError, "Expected temperature to be a number, but got a str", LOG, {"temperature": "1"}),
    (ValueError, "a number for each of 3 classes, on cpu, but got shape (4,)", CROSS, {"weight": torch.ones(4)}),
    (TypeError, "Expected weight to have dtype", CROSS, {"weight": T}),
    (IndexError, "from 0 to 2 or ignore_index=-100, but got 3", LOG, {"targets": T + 3}),
    (ValueError, "but got a leaf: use inplace", LOG, {"logits": X.clone().requires_grad_(), "inplace_backward": True}),
    (ValueError, "but got 'batch'", CROSS, {"reduction": "batch"}),
    (ValueError, "Expected label_smoothing to be from 0 to 1, but got 1.5", CROSS, {"label_smoothing": 1.5}),
    (ValueError, "Expected exact=False", CROSS, {"weight": X[0], "label_smoothing": 0.1, "exact": True}),
]


@pytest.mark.parametrize(("kind", "text", "function", "arguments"), ERRORS, ids=[text[:30] for _, text, *_ in ERRORS])
def test_errors_name_the_value_and_the_remedy(
    kind: type[Exception], text: str, function: Any, arguments: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        function(**{"logits": X, "targets": T, **arguments})


def test_logits_that_overlap_are_not_written_over() -> None:
    expanded = (randn(3).requires_grad_() * 2).expand(2, 3)
    with pytest.raises(ValueError, match=re.escape("but got strides (0, 1)")):
        halfstep.log_probabilities(expanded, T, inplace_backward=True)
