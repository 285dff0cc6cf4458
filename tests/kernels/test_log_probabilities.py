"""Log-probabilities against fp64 and their own rule: every form, extreme rows, memory layouts, long rows, in place."""

import math
from typing import Any

import log_probabilities_oracle as oracle
import numpy as np
import pytest
import torch
from devices import WHERE, assert_same_bits, kernels_on, normal
from implementations import twin
from softmax_oracle import assert_within

import halfstep
from halfstep.kernels.log_probabilities import dispatch, rule
from halfstep.kernels.log_probabilities.rule import Options

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = math.inf, math.nan
# A backward through tensors of the model of a GPU is not that of its memory.
REAL = [pytest.param("cuda", marks=pytest.mark.gpu(only="autograd on tensors of the device")), "interpreter"]
EXACT = pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])


def example(rows: int, classes: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(seed))
    return (4 * normal(rows * classes, FP32, seed)).to(dtype).view(rows, classes), targets


def run(
    logits: torch.Tensor, targets: torch.Tensor, options: Options, grads: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The six results and the gradient."""
    results = dispatch.forward(logits, targets, *options, False)
    grads = torch.ones_like(results) if grads is None else grads.to(results.device)
    return results, dispatch.backward(grads, logits, targets, results, *options, False)


@pytest.mark.parametrize("where", [*WHERE, "cpu"])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(("classes", "temperature"), [(1, 1.0), (6, 0.3), (1000, 1.0), (1024, 1.7), (5003, 0.6)])
def test_within_the_bounds_of_fp64(where: str, dtype: torch.dtype, classes: int, temperature: float) -> None:
    logits, targets = example(4, classes, dtype)
    targets[2] = -100
    grads = normal(24, FP32, 7).view(6, 4)
    for exact in (False, True):
        with kernels_on(where) as device:
            options = Options(temperature, -100, True, True, exact)
            results, dx = run(twin(logits, device), targets.to(device), options, grads)
        if where != "cpu" and exact:
            assert_same_bits(results, rule.forward(logits, targets, options))
            expected = torch.empty_like(logits)
            rule.backward(grads, logits, targets, results.cpu(), options, expected)
            assert_same_bits(dx, expected)
        for index, (value, bound) in zip((0, 1, 4, 5), oracle.oracle(logits, targets, temperature), strict=True):
            assert_within(results[index], value, bound, rule.Row._fields[index])
        of_results = grads[[0, 1, 4, 5]].double().numpy()
        assert_within(dx, *oracle.gradient_oracle(logits, targets, temperature, of_results), "gradient")


@EXACT
@pytest.mark.parametrize("where", [*REAL, "cpu"])
def test_extreme_rows(where: str, exact: bool) -> None:
    """Each row with a target that is kept, one that is -inf, and one that is ignored, which hides everything."""
    rows = {
        "nan": [0.0, NAN, 1.0, -INF],
        "inf": [0.0, INF, 1.0, -INF],
        "some": [2.0, -INF, -1.0, -INF],
        "nothing": [-INF] * 4,
        "largest": [3e38, -3e38, 3e38, -INF],
        "smallest": [1e-45, -1e-45, 0.0, -INF],
    }
    with kernels_on(where) as device:
        for name, row in rows.items():
            logits = torch.tensor([row] * 3, device=device).requires_grad_()
            targets = torch.tensor([2, 3, -100], device=device)
            numbers = halfstep.log_probabilities(logits, targets, entropy=True, exact=exact)
            mean = run(logits.detach(), targets, Options(1.0, -100, False, True, exact))[0][5]
            assert numbers.entropy is not None
            for got, (value, bound) in zip(
                (*numbers, mean), oracle.oracle(logits.detach().cpu(), targets.cpu(), 1.0), strict=True
            ):
                assert_within(got, value, bound, name)
            (numbers.log_probabilities + numbers.logsumexp + numbers.entropy).sum().backward()
            assert logits.grad is not None
            assert (logits.grad[2] == 0).all()
            if name in ("nan", "inf"):
                assert logits.grad[:2].isnan().all()
            else:
                assert logits.grad.isfinite().all()
            if name == "nothing":
                assert (logits.grad == 0).all() and numbers.entropy.tolist() == [0.0] * 3
            if name == "some":  # only logsumexp and entropy have a gradient where the target is -inf
                assert torch.allclose(logits.grad[1].sum(), torch.ones(()).to(device)) and logits.grad[1, 3] == 0


@pytest.mark.parametrize("where", REAL)
def test_a_target_out_of_range_gives_nan_and_reads_nothing(where: str) -> None:
    with kernels_on(where) as device:
        logits, _ = example(6, 10, FP32)
        targets = torch.tensor([10, -1, 2**40, -(2**40), 2**32 + 3, 4], device=device)
        results, dx = run(logits.to(device), targets, Options(1.0, -100, False, False, False))
        assert results[0].isnan().tolist() == dx.isnan().any(1).tolist() == [True] * 5 + [False]
        assert dx[:5].isnan().all() and results[1].isfinite().all()
    with pytest.raises(IndexError, match="to be from 0 to 9 or ignore_index=-100, but got 10"):
        halfstep.log_probabilities(logits, targets.cpu())
    assert halfstep.log_probabilities(logits[:1], torch.tensor([10]), ignore_index=10).logsumexp.tolist() == [0.0]


@EXACT
@pytest.mark.parametrize("where", [*WHERE, "cpu"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_no_layout_changes_a_bit(where: str, dtype: torch.dtype, exact: bool) -> None:
    """Rows that are strided twice, transposed, apart, expanded, off boundaries; and int32 targets."""
    options = Options(0.9, -100, True, True, exact)
    logits, targets = example(12, 1032, dtype)
    with kernels_on(where) as device:
        logits, targets = logits.to(device), targets.to(device)
        results, dx = run(logits, targets, options)
        three = logits.view(3, 4, -1)
        odd = torch.zeros(12, 1035, dtype=dtype, device=device)
        odd[:, 3:] = logits
        shifted, four = torch.zeros(2, 3, 5, 1032, dtype=dtype, device=device)
        shifted[:, :4] = four[:, :4] = three
        for name, x, t in (
            ("shifted", shifted[:, :4], targets.view(3, 4)),
            ("transposed", three.transpose(0, 1).contiguous().transpose(0, 1), targets.view(3, 4).int()),
            ("off boundaries", odd[:, 3:], targets),
            ("apart", torch.stack([logits, logits], -1)[..., 0], targets),
            ("four dimensions", four.unsqueeze(0)[:, :, :4], targets.view(1, 3, 4)),
        ):
            others, gradient = run(x, t, options)
            assert_same_bits(others.reshape(6, 12), results, name)
            assert_same_bits(gradient.reshape(12, -1), dx, name)
            over = dispatch.backward(torch.ones_like(others), x, t, others, *options, True)
            assert over is x, name
            assert_same_bits(x.reshape(12, -1), dx, name)
        assert (odd[:, :3] == 0).all() and (shifted[:, 4] == 0).all()  # in place writes rows only


@pytest.mark.parametrize("where", WHERE)
def test_more_chunks_than_one_block_of_them(where: str) -> None:
    columns = 2**20 + 2**12 + 5
    logits, targets = example(1, columns, BF16)
    options = Options(1.0, -100, True, True, True)
    with kernels_on(where) as device:
        results = dispatch.forward(logits.to(device), targets.to(device), *options, False)
    for index, (value, bound) in zip((0, 1, 4, 5), oracle.oracle(logits, targets, 1.0), strict=True):
        assert_within(results[index], value, bound, rule.Row._fields[index])
    if columns < 2**21:  # the rule is slow for many
        assert_same_bits(results, rule.forward(logits, targets, options))


def test_the_rule_computes_long_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(0.8, -100, True, True, False)
    logits, targets = example(3, 5000, FP32)
    results, dx = run(logits, targets, options)
    monkeypatch.setattr(rule, "ELEMENTS", 2048)
    parts, dx_of_parts = run(logits, targets, options)
    assert_same_bits(parts, results)
    assert_same_bits(dx_of_parts, dx)


@pytest.mark.parametrize("where", [*REAL, "cpu"])
def test_gradients_written_in_place(where: str) -> None:
    logits, targets = example(3, 40, BF16)
    with kernels_on(where) as device:
        weight = logits.to(device).requires_grad_()
        targets = targets.to(device)
        halfstep.cross_entropy(weight * 1.5, targets).backward()
        expected, weight.grad = weight.grad, None
        computed = weight * 1.5
        version = computed._version
        loss = halfstep.cross_entropy(computed, targets, inplace_backward=True)
        assert computed._version == version
        loss.backward(retain_graph=True)
        assert weight.grad is not None and expected is not None
        assert_same_bits(weight.grad, expected)
        assert computed._version > version
        assert_same_bits(computed * 1.5, weight.grad)  # the gradient of `computed` lies there
        with pytest.raises(RuntimeError, match="one backward with inplace_backward=True, but got a second"):
            loss.backward()


def test_what_saved_the_logits_notices_that_they_are_gone() -> None:
    weight = normal(20, FP32).view(2, 10).requires_grad_()
    computed = weight * 2
    both = halfstep.cross_entropy(computed, torch.tensor([1, 2]), inplace_backward=True)
    square = computed.square().sum()
    both.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


@pytest.mark.parametrize("where", [*REAL, "cpu"])
def test_nothing_is_looked_at_in_empty_batches_and_ignored_rows(where: str) -> None:
    with kernels_on(where) as device:
        empty = torch.empty(0, 5, device=device, requires_grad=True)
        numbers = halfstep.log_probabilities(empty, torch.empty(0, dtype=torch.int64, device=device), entropy=True)
        assert [value.shape for value in numbers if value is not None] == [(0,)] * 3
        numbers.log_probabilities.sum().backward()
        assert empty.grad is not None and empty.grad.shape == (0, 5)
        logits = torch.full((2, 5), NAN, device=device).requires_grad_()
        ignored = torch.full((2,), 7, device=device)
        loss = halfstep.cross_entropy(logits, ignored, ignore_index=7, reduction="sum", z_loss=0.1)
        loss.backward()
        assert loss.item() == 0.0 and logits.grad is not None and (logits.grad == 0).all()
        assert halfstep.cross_entropy(logits, ignored, ignore_index=7).isnan()  # 0 / 0, as torch's


def test_no_copy_of_the_logits_in_fp32_is_made() -> None:
    """The largest tensor that the rule makes on the way has a bounded number of elements."""
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **kwargs or {})
            sizes.extend(t.numel() for t in [result] if isinstance(t, torch.Tensor) and t.dtype == FP32)
            return result

    logits, targets = example(64, 20_000, BF16)
    with Sizes():
        results = rule.forward(logits, targets, Options(1.0, -100, False, False, False))
        rule.backward(results, logits, targets, results, Options(1.0, -100, False, False, False), logits)
    assert max(sizes) <= 1.1 * rule.ELEMENTS


def test_the_order_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, over the bits 8, 9, 0, 1, 2, 7, 6, 5, 4, 3 of the column; another order has other bits."""
    terms = normal(8 * 1024, FP32).view(8, 1024)
    left = {tuple(map(int, f"{column:010b}"[::-1])): terms[:, column].numpy() for column in range(1024)}
    for bit in (8, 9, 0, 1, 2, 7, 6, 5, 4, 3):
        lower = {key: value for key, value in left.items() if key[bit] == 0}
        left = {key: value + left[(*key[:bit], 1, *key[bit + 1 :])] for key, value in lower.items()}
    ((_, total),) = left.items()
    assert_same_bits(rule.chunk_sum(terms), torch.from_numpy(np.asarray(total)))
    monkeypatch.setattr(rule, "ORDER", (0, 8, 9, 1, 2, 7, 6, 5, 4, 3))
    assert not torch.equal(rule.chunk_sum(terms), torch.from_numpy(np.asarray(total)))
