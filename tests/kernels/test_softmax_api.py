"""Softmax under autograd, torch.compile and torch.func, and its errors."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from implementations import ALL, using
from torch.autograd import gradcheck, gradgradcheck

import halfstep

pytestmark = pytest.mark.sample(3)

FUNCTIONS = pytest.mark.parametrize("function", [halfstep.softmax, halfstep.log_softmax])
Function = Callable[..., torch.Tensor]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def torch_twin(function: Function) -> Function:
    return torch.softmax if function is halfstep.softmax else torch.log_softmax


@FUNCTIONS
def test_first_and_second_derivatives_in_fp64(function: Function) -> None:
    x = randn(2, 5, 4, dtype=torch.float64).requires_grad_()
    mask = randn(5, 1, dtype=torch.float64, seed=1).requires_grad_()
    keep = torch.rand(5, 4, generator=torch.Generator().manual_seed(2)) > 0.4
    keep[3] = False

    def finite(y: torch.Tensor) -> torch.Tensor:  # a log of 0 has no derivative to compare with
        return y if function is halfstep.softmax else y.exp()

    for run, arguments in (
        (lambda x: finite(function(x, 1, scale=-0.7, mask=keep)), (x,)),
        (lambda x: finite(function(x, causal=True, scale=0.3)), (x,)),
        (lambda x, m: function(x, scale=0.7, mask=m), (x, mask)),
    ):
        assert gradcheck(run, arguments)
        assert gradgradcheck(run, arguments)


@FUNCTIONS
@pytest.mark.parametrize("name", ALL)
def test_second_derivatives_through_the_kernels(name: str, function: Function) -> None:
    def second(run: Function, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad(run(x).square().mul(v).sum(), x, create_graph=True)
        return torch.autograd.grad(first.mul(v).sum(), x)[0]

    with using(name, "softmax") as device:
        x, v = randn(3, 20).to(device).requires_grad_(), randn(3, 20, seed=1).to(device)
        ours = second(lambda x: function(x, scale=0.5), x, v)
        theirs = second(lambda x: torch_twin(function)(x * 0.5, -1), x, v)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # two formulas, both in fp32
        narrow = x.detach().bfloat16().requires_grad_()
        (first,) = torch.autograd.grad(function(narrow, dtype=torch.float32).square().sum(), narrow, create_graph=True)
        first.float().square().sum().backward()
        assert narrow.grad is not None and narrow.grad.dtype == torch.bfloat16 and narrow.grad.isfinite().all()


def test_the_gradient_of_an_additive_mask_is_summed_to_its_shape() -> None:
    x = randn(2, 3, 8, 8)
    for shape in ((8,), (8, 1), (2, 1, 1, 8), (1, 3, 8, 8), ()):
        ours, theirs = randn(*shape, seed=1).requires_grad_(), randn(*shape, seed=1).requires_grad_()
        weights = randn(2, 3, 8, 8, seed=2)
        (halfstep.softmax(x, scale=0.5, mask=ours) * weights).sum().backward()
        (torch.softmax(x * 0.5 + theirs, -1) * weights).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("log", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_opcheck(log: bool, dtype: torch.dtype) -> None:
    x = randn(4, 6, dtype=dtype).requires_grad_()
    for mask in (randn(6).requires_grad_(), torch.rand(4, 1) > 0.2):
        torch.library.opcheck(torch.ops.halfstep.softmax.default, (x, mask, -1, 0.5, True, log, False, torch.float32))
    transposed = randn(6, 4, dtype=dtype).t().requires_grad_()
    torch.library.opcheck(torch.ops.halfstep.softmax.default, (transposed, None, -2, 0.5, False, log, True, dtype))
    y = torch.softmax(randn(4, 6, seed=1), -1).to(dtype).requires_grad_()
    torch.library.opcheck(torch.ops.halfstep.softmax_backward.default, (x, y, -1, 0.5, True, log, False, dtype))


@FUNCTIONS
def test_compiles_without_a_graph_break(function: Function) -> None:
    def step(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        return function(x * 2, scale=scale, mask=mask, causal=True).exp().square()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    mask = torch.arange(7) != 2
    for rows, scale in ((7, 0.5), (5, 0.25)):
        x = randn(2, rows, 7).requires_grad_()
        eager, fused = step(x, mask, scale), compiled(x, mask, scale)
        assert torch.equal(eager, fused)
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (eager, fused)]
        assert torch.equal(*gradients)


@FUNCTIONS
def test_functional_transforms(function: Function) -> None:
    x, twin = randn(4, 6), torch_twin(function)
    keep = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) > 0.3

    def run(x: torch.Tensor) -> torch.Tensor:
        return function(x, 0)

    def expected(x: torch.Tensor) -> torch.Tensor:
        return twin(x, 0)

    def close(a: torch.Tensor, b: torch.Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    close(torch.func.grad(lambda x: run(x)[0, 0])(x), torch.func.grad(lambda x: expected(x)[0, 0])(x))
    close(torch.vmap(run, in_dims=1, out_dims=1)(x), expected(x))
    gradient = torch.func.grad(lambda row: function(row)[1])
    close(torch.vmap(gradient)(x), torch.vmap(torch.func.grad(lambda row: twin(row, -1)[1]))(x))
    close(torch.func.grad(lambda x: torch.vmap(run)(x)[1, 2])(x), torch.func.grad(lambda x: twin(x, 1)[1, 2])(x))
    close(torch.func.jacrev(torch.func.jacrev(run))(x[0]), torch.func.jacrev(torch.func.jacrev(expected))(x[0]))
    masked = torch.vmap(lambda x, m: function(x, mask=m))(x, keep)
    assert torch.equal(masked, function(x, mask=keep))
    one_x = torch.vmap(lambda x, m: function(x, mask=m), in_dims=(None, 0))(x, keep[:, None, :])
    assert torch.equal(one_x, function(x.expand(4, 4, 6), mask=keep[:, None, :]))


@FUNCTIONS
def test_forward_mode_is_refused(function: Function) -> None:
    x = randn(3, 4)
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative.*use reverse mode \(torch.func.vjp"):
        torch.func.jvp(function, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            function(dual)


@FUNCTIONS
def test_fp64_is_computed_in_fp64_and_every_dtype_is_kept(function: Function) -> None:
    x = randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(function(x), torch_twin(function)(x, -1), rtol=1e-14, atol=1e-14)
    assert function(x.float(), dtype=torch.float64).dtype == torch.float64
    assert torch.equal(function(x), function(x, precision="fast"))
    assert torch.equal(function(x.float()), function(x.float(), precision="exact"))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which changes no dtype
        assert function(x.bfloat16()).dtype == torch.bfloat16 and function(x.float()).dtype == torch.float32


FP64, EXACT = torch.float64, {"precision": "exact"}
X, SQUARE = torch.ones(3), torch.ones(3, 3)
TYPES = "Expected x to have dtype float32, float16, bfloat16 or float64, but got torch.int64: convert it with .to()"
ERRORS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "Expected x to be a tensor, but got a list: use torch.as_tensor()", {"x": [1.0]}),
    (TypeError, TYPES, {"x": torch.arange(3)}),
    (TypeError, "but got torch.float8_e4m3fn", {"x": X.to(torch.float8_e4m3fn)}),
    (TypeError, "dense tensor, but got layout torch.sparse_coo: use .to_dense()", {"x": torch.eye(3).to_sparse()}),
    (TypeError, "Expected dtype to be None, float32, float16, bfloat16 or float64, but got", {"dtype": torch.int32}),
    (TypeError, "a finite number, but got a Tensor: multiply x by a tensor yourself", {"scale": torch.ones(())}),
    (TypeError, "Expected scale to be a finite number, but got a str", {"scale": "1"}),
    (ValueError, "Expected scale to be a number that is finite in fp32, but got inf", {"scale": math.inf}),
    (ValueError, "but got nan: to mask elements, use mask=", {"scale": math.nan}),
    (ValueError, "finite in fp32, but got 1e+39", {"scale": 1e39}),
    (IndexError, "Expected dim to be from -2 to 1, as x has 2 dimensions, but got 2", {"x": SQUARE, "dim": 2}),
    (IndexError, "as x has 2 dimensions, but got -3", {"x": SQUARE, "dim": -3}),
    (IndexError, "dim to be from -1 to 0, as x has 0 dimensions, but got 1", {"x": torch.ones(()), "dim": 1}),
    (TypeError, "Expected dim to be an integer, but got a float", {"dim": 0.0}),
    (ValueError, "2 or more dimensions (..., queries, keys) with causal=True, but got shape (3,)", {"causal": True}),
    (ValueError, "last of 2 with causal=True, but got 0: transpose x", {"x": SQUARE, "dim": 0, "causal": True}),
    (ValueError, "Expected precision to be None, 'exact' or 'fast', but got 'high'", {"precision": "high"}),
    (TypeError, "with precision='exact', but got torch.float32 and torch.float64", {"dtype": FP64, **EXACT}),
    (TypeError, "Expected mask to be a tensor, but got a list", {"mask": [True]}),
    (TypeError, "Expected mask to have dtype bool, float32, float16, bfloat16 or float64, but got", {"mask": X.long()}),
    (ValueError, "shape of mask to broadcast to that of x, (3,), but got (2,)", {"mask": torch.ones(2)}),
    (ValueError, "to broadcast to that of x, (3,), but got (1, 3): insert dimensions", {"mask": torch.ones(1, 3)}),
    (ValueError, "device of x, cpu, but got meta: use mask.to(x.device)", {"mask": torch.ones(3, device="meta")}),
]


@FUNCTIONS
@pytest.mark.parametrize(("kind", "text", "arguments"), ERRORS, ids=[text[:40] for _, text, _ in ERRORS])
def test_errors_name_the_value_and_the_remedy(
    function: Function, kind: type[Exception], text: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        function(**{"x": X, **arguments})
