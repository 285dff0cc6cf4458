"""A small call of each kernel, and its expected results: the bits of the reference, or for softmax a bound.

Most are calls of which golden.py records the digests, here with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import golden
import torch
from devices import normal, patterns

import halfstep

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Run = Callable[[int], list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A call of one kernel."""

    run: Run  # creates the inputs from a seed, calls the kernel, and returns all results and changed tensors
    units: float = 0.0  # the allowed error in units of 2^-24, of each result and of the largest in its row; 0: exact


def _golden(subject: str, name: str, units: float = 0.0) -> Case:
    def run(seed: int) -> list[torch.Tensor]:
        with mock.patch.object(golden, "SEED", 1000 * seed):
            return list(golden.CASES[subject][0](name).values())

    return Case(run, units)


def _lists(source: torch.dtype, target: torch.dtype, **options: object) -> Run:
    def run(seed: int) -> list[torch.Tensor]:
        values = patterns(9000, FP32, seed).to(source)
        pieces = [values[:1], values[16:4115], values[4128:8000], values[8001:8100]]
        return halfstep.foreach_cast([piece.clone() for piece in pieces], target, **options)  # type: ignore[arg-type]

    return run


def _check_extremes(seed: int) -> list[torch.Tensor]:
    """One large number at different positions. All lanes must scale by it, since its square overflows if scaled by the
    largest of the other numbers. Each is another power of two, so that no two errors cancel in the sum."""
    grads = [normal(4096, BF16, seed + n) for n in range(24)]
    for n, grad in enumerate(grads):
        grad[3 + 85 * n] = 2.0 ** (100 - n)
    answer = halfstep.foreach_check(grads)
    return [answer.found_inf, answer.flags, answer.sum_of_squares]


def _check_many(seed: int) -> list[torch.Tensor]:
    """So many chunks that several warps of the last launch have numbers."""
    answer = halfstep.foreach_check([normal(3, FP32, 1000 * seed + n) for n in range(300)])
    return [answer.found_inf, answer.flags, answer.sum_of_squares]


def _gradients(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    wide = normal(5000, dtype, seed)
    return [normal(n, dtype, n + seed) for n in (1, 15, 4099, 513)] + [wide[1:4000]]


def _check(dtype: torch.dtype) -> Run:
    return lambda seed: list(halfstep.foreach_check(_gradients(dtype, seed), inv_scale=0.125))


def _unscale(dtype: torch.dtype) -> Run:
    def run(seed: int) -> list[torch.Tensor]:
        grads = _gradients(dtype, seed)
        for grad in grads[1:]:  # a GPU of AMD could multiply and convert by an instruction that makes 0.0 of -0.0
            grad[:4] = torch.tensor([0.0, -0.0, 2.0**-24, -(2.0**-24)])
        return [*grads, halfstep.foreach_unscale_(grads, torch.tensor(1 / 3)).found_inf]

    return run


def _adam(seed: int) -> list[torch.Tensor]:
    """Two steps of finite numbers, in which every fault shows."""
    parameters = [torch.nn.Parameter(normal(size, BF16, size + seed)) for size in (1, 17, 2500, 64)]
    optimizer = halfstep.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    for step in range(2):
        for parameter in parameters:
            parameter.grad = normal(parameter.numel(), BF16, 100 * step + parameter.numel() + seed)
        optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [parameter.detach() for parameter in parameters] + state


def _sgd_of_rows(master_weights: str | None) -> Run:
    """Rows of whole blocks, which are loaded in vectors, with weights that are rounded stochastically."""

    def run(seed: int) -> list[torch.Tensor]:
        weight = torch.nn.Parameter(normal(40 * 128, BF16, seed).view(40, 128))
        optimizer = halfstep.SGD([weight], lr=1e-2, momentum=0.9, state_dtype="8bit", master_weights=master_weights)
        for step in range(2):
            weight.grad = normal(40 * 128, BF16, 100 * step + seed).view(40, 128)
            optimizer.step()
        return [weight.detach(), *optimizer.state[weight].values()]

    return run


def _softmax(
    dtype: torch.dtype,
    rows: int,
    columns: int,
    dim: int = -1,
    log: bool = False,
    masked: bool = False,
    precision: str = "exact",
) -> Run:
    def run(seed: int) -> list[torch.Tensor]:
        x = (2 * normal(rows * columns, dtype, seed)).view(rows, columns).requires_grad_()
        mask = normal(rows * columns, FP32, seed + 1).view(rows, columns) > -0.5 if masked else None
        y = (halfstep.log_softmax if log else halfstep.softmax)(x, dim, mask=mask, precision=precision)
        y.backward(normal(rows * columns, dtype, seed + 2).view(rows, columns))
        assert x.grad is not None
        return [y.detach(), x.grad]

    return run


def _log_probabilities(seed: int) -> list[torch.Tensor]:
    """With the exponential of the device, in rows that begin off 16-byte boundaries, and in place."""
    wide = (2 * normal(4 * 1301, BF16, seed)).view(4, 1301).requires_grad_()
    logits = wide * 1
    row = halfstep.log_probabilities(logits[:, 1:], torch.arange(4), 0.7, True, inplace_backward=True)
    assert row.entropy is not None
    (row.log_probabilities + row.entropy).sum().backward()
    assert wide.grad is not None
    return [row.log_probabilities.detach(), row.logsumexp.detach(), row.entropy.detach(), wide.grad]


CASES = {
    "cast bf16 stochastic": _golden("cast", "fp32 bf16 stochastic plain"),
    "cast e4m3 saturating": _golden("cast", "bf16 e4m3 nearest saturating"),
    "cast list": Case(_lists(FP32, E5M2)),
    "cast list wide": Case(_lists(E4M3, FP16)),
    "block cast mxfp8": _golden("block_cast", "bf16 mxfp8 rows nearest"),
    "block cast mxfp6 stochastic": _golden("block_cast", "fp32 mxfp6_e2m3_ceil rows stochastic"),
    "block cast mxfp4 columns": _golden("block_cast", "bf16 mxfp4 columns nearest"),
    "block cast mxfp4 toward zero": _golden("block_cast", "fp32 mxfp4_rceil rows toward_zero"),
    "block cast nvfp4": _golden("block_cast", "bf16 nvfp4 rows nearest"),
    "block cast nvfp4 squares stochastic": _golden("block_cast", "bf16 nvfp4 squares stochastic"),
    "check bf16": Case(_check(BF16)),
    "check fp32": Case(_check(FP32)),
    "check of many": Case(_check_many),
    "check of extremes": Case(_check_extremes),
    "unscale bf16": Case(_unscale(BF16)),
    "unscale fp16": Case(_unscale(FP16)),
    "check fp16 with overflow": _golden("check", "fp16 overflow"),
    "rank sum with check": _golden("rank_sum", "bf16 finite"),
    "rank sum with overflow": _golden("rank_sum", "fp32 overflow"),
    "adam split": Case(_adam),
    "adam full fp16": _golden("adam", "AdamW fp16 full fp32 nearest plain"),
    "adam fp32 L2 amsgrad": _golden("adam", "Adam fp32 none fp32 nearest amsgrad"),
    "adam 8-bit split": _golden("adam", "AdamW bf16 split 8bit nearest plain"),
    "adam 8-bit split24 stochastic": _golden("adam", "AdamW bf16 split24 8bit stochastic plain"),
    "adam 8-bit fp16 full amsgrad stochastic": _golden("adam", "AdamW fp16 full 8bit stochastic amsgrad"),
    "adam 8-bit fp32 amsgrad": _golden("adam", "AdamW fp32 none 8bit nearest amsgrad"),
    "adam stochastic": _golden("adam", "AdamW bf16 none bf16 stochastic plain"),
    "sgd 8-bit split stochastic": _golden("sgd", "SGD bf16 split 8bit stochastic nesterov"),
    "sgd 8-bit split24 stochastic, vectors": Case(_sgd_of_rows("split24")),
    "sgd 8-bit stochastic, vectors": Case(_sgd_of_rows(None)),
    "sgd bf16 split24": _golden("sgd", "SGD bf16 split24 bf16 stochastic momentum"),
    "muon 8-bit split stochastic": _golden("muon", "Muon bf16 split 8bit stochastic nesterov"),
    "muon 8-bit fp32": _golden("muon", "Muon fp32 none 8bit nearest recent"),
    "muon bf16 split24 stochastic": _golden("muon", "Muon bf16 split24 bf16 stochastic nesterov"),
    "muon full fp16": _golden("muon", "Muon fp16 full fp32 nearest nesterov"),
    "amp with overflow": _golden("amp", "fp16"),
    "statistics": _golden("statistics", "bf16 plain"),
    "statistics with errors": _golden("statistics", "fp32 errors"),
    "softmax fast": _golden("softmax", "bf16 rows", 32.0),
    "softmax fast, masked": Case(_softmax(FP32, 7, 256, masked=True, precision="fast"), 32.0),
    "softmax fast, causal": _golden("softmax", "fp32 causal", 32.0),
    "softmax fast, long": Case(_softmax(BF16, 2, 40_000, log=True, precision="fast"), 64.0),
    "softmax fast, strided": _golden("softmax", "fp32 columns", 32.0),
    "log-probabilities, fast": Case(_log_probabilities, 64.0),
    "log-probabilities, exact": _golden("log_probabilities", "bf16 rows"),
    "log-probabilities, exact, fp32": _golden("log_probabilities", "fp32 long"),
    "softmax fast, strided by halves": Case(_softmax(BF16, 160, 48, 0, precision="fast"), 32.0),
    "softmax": Case(_softmax(BF16, 9, 4096)),
    "softmax masked": Case(_softmax(FP32, 7, 333, log=True, masked=True)),
    "softmax of groups": Case(_softmax(FP32, 3, 9000)),
    "softmax long": Case(_softmax(BF16, 2, 40_001, log=True)),
}


def difference(case: Case, mine: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """A description of the difference between results and expected results; empty if there is none."""
    assert len(mine) == len(expected)
    for index, (a, b) in enumerate(zip(mine, expected, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {index} has another shape or dtype"
        wide, exact = a.double(), b.double()
        same = wide.isnan() & exact.isnan()
        if case.units:
            unit = 2.0**-24 + (0.0 if b.dtype == FP32 else 2.0 ** (-7 if b.dtype == BF16 else -10))
            largest = exact.abs().nan_to_num(0, 0).amax().clamp(min=2.0**-30)
            bound = unit * (exact.abs() + case.units * 2.0**-24 / unit * largest)
            same = same | (wide == exact) | ((wide - exact).abs() <= bound)
        else:
            same = same | (a.contiguous().view(INTEGERS[a.itemsize]) == b.contiguous().view(INTEGERS[b.itemsize]))
        if not bool(same.all()):
            return f"result {index} differs in {int((~same).sum())} of {same.numel()} elements"
    return ""
