"""Exact softmax and log-probabilities in C++ (kernels/softmax.cpp) have the bits of their rules, whatever the CPU."""

import ctypes
import math
import platform
from collections.abc import Iterator
from itertools import product
from unittest import mock

import cpp
import pytest
import torch
from devices import assert_same_bits, normal, placed

import halfstep
from halfstep.kernels import backend, compiler, native
from halfstep.kernels.log_probabilities import dispatch as statistics
from halfstep.kernels.log_probabilities import rule as statistics_rule
from halfstep.kernels.softmax import dispatch, rule

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FP32, FP16, BF16)
INF, NAN = math.inf, math.nan
WIDTHS = (1, 5, 16, 63, 64, 1023, 1025, 2047, 2048, 2049, 6150)
LOG = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])


@pytest.fixture(scope="module", params=["tuned", "v3", "portable"], autouse=True)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[mock.Mock]:
    """The C++ for this machine, for one with AVX2, and for the oldest; calls are counted."""
    flags = {"tuned": None, "portable": cpp.PORTABLE}.get(request.param)
    if request.param == "v3":
        flags, needed = compiler.LEVELS["x86_64"]["v3"]
        if platform.machine() != "x86_64" or not compiler._cpu_flags().issuperset(needed):
            pytest.skip("needs AVX2")
    source = cpp.KERNELS / "softmax.cpp"
    compiled = native.declare(ctypes.CDLL(str(cpp.compiled(tmp_path_factory, source, flags))), source.read_text())
    with mock.patch.object(native, "library", return_value=mock.Mock(wraps=compiled)) as patched:
        yield patched.return_value


def rows(count: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows off 16-byte boundaries, with extremes: NaN, Inf, a dead group, nothing at all."""
    x = placed(4 * normal(count * columns, FP32, seed).to(dtype).view(count, columns), torch.device("cpu"), 1)
    if count > 4:
        x[1, columns // 2], x[2, columns - 1], x[3], x[4, : 2 * columns // 3] = NAN, INF, -INF, -INF
    return x


def check(
    x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> None:
    options = -1, scale, causal, log, True
    y = dispatch.forward(x, mask, *options, dtype)
    expected = rule.forward(x, mask, rule.Options(*options, dtype))
    what = (tuple(x.shape), x.dtype, dtype, scale, causal, None if mask is None else (mask.dtype, mask.stride()))
    assert_same_bits(y, expected, what)
    dy = placed(normal(y.numel(), FP32, 1).to(dtype).view(y.shape), torch.device("cpu"), 3)
    dx = dispatch.backward(dy, y, *options, x.dtype)
    assert_same_bits(dx, rule.backward(dy, y, rule.Options(*options, x.dtype)), (*what, "backward"))


@LOG
def test_widths_and_dtypes(library: mock.Mock, log: bool) -> None:
    for columns, (source, target) in product(WIDTHS, product(DTYPES, DTYPES)):
        check(rows(5, columns, source), None, 1.0, False, log, target)
    assert library.halfstep_softmax.called and library.halfstep_softmax_backward.called


@LOG
def test_masks(log: bool) -> None:
    for columns, causal in product((5, 40, 2050), (False, True)):
        x = torch.stack([rows(9, columns, BF16), rows(9, columns, BF16, 1)])[:, ::2]
        bias = placed(normal(10 * columns, FP32, 2).view(5, -1), torch.device("cpu"), 1)
        bias[0, 0], bias[1, :2], bias[4] = NAN, INF, -INF
        kept = bias > 0
        masks = [bias[:, :columns].to(dtype) for dtype in (*DTYPES, torch.float64)]
        masks += [bias[:, ::2], kept[:, 1::2], kept[:, :columns].T.contiguous().T, kept[2, :columns]]
        masks += [bias[:, :1], kept[:, :1], torch.stack([kept[:, :columns], kept[:, columns:]])]
        for mask in masks:
            check(x, mask, -0.7, causal, log, BF16)


@LOG
def test_causal_rows_of_several_groups(log: bool) -> None:
    """Those that have more than one, against the rule with a mask."""
    x, dy = rows(2060, 2060, BF16), normal(2060 * 2060, BF16, 1).view(2060, 2060)
    x[2056, 2057] = NAN  # above the diagonal
    y = dispatch.forward(x, None, -1, 0.25, True, log, True, BF16)
    dx = dispatch.backward(dy, y, -1, 0.25, True, log, True, BF16)
    last, options = slice(2040, None), rule.Options(-1, 0.25, False, log, True, BF16)
    assert_same_bits(y[last], rule.forward(x[last], torch.ones(2060, 2060).tril()[last] > 0, options))
    assert_same_bits(dx[last], rule.backward(dy[last], y[last], options))


@LOG
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, log: bool) -> None:
    for threads in (1, 2, 5):
        monkeypatch.setattr(native, "threads", lambda threads=threads: threads)
        check(rows(7, 5003, FP32), None, 1.0, False, log, FP32)
        check_statistics(rows(7, 5003, FP32), statistics_rule.Options(0.7, -100, True, True, True))


def check_statistics(logits: torch.Tensor, options: statistics_rule.Options) -> None:
    targets = (torch.arange(len(logits)) * 7919 % logits.shape[1]).to(torch.int32)
    targets[0], targets[-1] = -100, logits.shape[1]
    results = statistics.forward(logits, targets, *options, False)
    exact = options._replace(exact=True)  # on a CPU, always
    what = (tuple(logits.shape), logits.dtype, options)
    assert_same_bits(results, statistics_rule.forward(logits, targets, exact), what)
    grads, expected = normal(results.numel(), FP32, 3).view(results.shape), torch.empty_like(logits)
    grads[1, 2] = NAN
    statistics_rule.backward(grads, logits, targets, results, exact, expected)
    for inplace in (False, True):
        dx = statistics.backward(grads, logits, targets, results, *options, inplace)
        assert_same_bits(dx, expected, (*what, "backward"))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
def test_log_probabilities(library: mock.Mock, dtype: torch.dtype) -> None:
    for columns, flags in product((*WIDTHS, 1024), product((1.0, 0.7), (False, True), (False, True), (False, True))):
        temperature, *others = flags
        check_statistics(rows(7, columns, dtype), statistics_rule.Options(temperature, -100, *others))
    check_statistics(rows(3, 2**20 + 1025, dtype), statistics_rule.Options(1.0, -100, True, True, True))
    assert library.halfstep_log_probabilities.called and library.halfstep_log_probabilities_backward.called


def test_the_reference_runs_where_it_is_chosen_and_without_a_compiler(library: mock.Mock) -> None:
    x, targets = normal(3000, FP32).view(3, 1000), torch.tensor([5, 6, 7])
    expected = halfstep.softmax(x, precision="exact"), halfstep.log_probabilities(x, targets).logsumexp
    library.reset_mock()
    with halfstep.backend("reference"):
        chosen = halfstep.softmax(x, precision="exact"), halfstep.log_probabilities(x, targets, exact=True).logsumexp
    with mock.patch.object(native, "library", return_value=None):
        backend.resolve.cache_clear()
        left = halfstep.softmax(x, precision="exact"), halfstep.log_probabilities(x, targets, exact=True).logsumexp
    backend.resolve.cache_clear()
    assert not library.mock_calls
    for bits, others, fallback in zip(expected, chosen, left, strict=True):
        assert_same_bits(others, bits)
        assert_same_bits(fallback, bits)
