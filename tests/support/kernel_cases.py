"""A small call of each kernel, and its expected results: the bits of the reference, or for softmax a bound."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from devices import normal, patterns

import halfstep
from halfstep.kernels.adam import LONG_CHUNK
from halfstep.kernels.statistics import Grid, foreach_count_, width

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


Run = Callable[[int], list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A call of one kernel.

    Attributes:
        run: creates the inputs from a seed, calls the kernel, and returns all results and changed tensors.
        units: the allowed error in units of 2^-24, of each result and of the largest in its row; 0 for exact results.
    """

    run: Run
    units: float = 0.0


def _casts(source: torch.dtype, target: torch.dtype, **options: object) -> Run:
    def run(seed: int) -> list[torch.Tensor]:
        return [halfstep.cast(patterns(2061, FP32, seed).to(source), target, **options)]  # type: ignore[arg-type]

    return run


def _lists(source: torch.dtype, target: torch.dtype, **options: object) -> Run:
    def run(seed: int) -> list[torch.Tensor]:
        values = patterns(9000, FP32, seed).to(source)
        pieces = [values[:1], values[16:4115], values[4128:8000], values[8001:8100]]
        return halfstep.foreach_cast([piece.clone() for piece in pieces], target, **options)  # type: ignore[arg-type]

    return run


def _gradients(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    wide = normal(5000, dtype, seed)
    return [normal(n, dtype, n + seed) for n in (1, 15, 4099, 513)] + [wide[1:4000]]


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


def _check(dtype: torch.dtype, spoiled: bool = False) -> Run:
    def run(seed: int) -> list[torch.Tensor]:
        grads = _gradients(dtype, seed)
        if spoiled:
            grads[2][-1] = torch.inf
            grads[4][7] = torch.nan
        answer = halfstep.foreach_check(grads, inv_scale=0.125)
        return [answer.found_inf, answer.flags] + ([] if spoiled else [answer.sum_of_squares])

    return run


def _unscale(dtype: torch.dtype) -> Run:
    def run(seed: int) -> list[torch.Tensor]:
        grads = _gradients(dtype, seed)
        answer = halfstep.foreach_unscale_(grads, torch.tensor(1 / 3))
        return [*grads, answer.found_inf]

    return run


def _adam(dtype: torch.dtype, kind: str = "AdamW", **options: object) -> Run:
    # One of more than a chunk.
    sizes = (1, 17, LONG_CHUNK + 108 if options.get("rounding") == "stochastic" else 2500, 64)

    def run(seed: int) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(normal(n, dtype, n + seed)) for n in sizes]
        optimizer = getattr(halfstep, kind)(parameters, lr=1e-2, weight_decay=0.1, **options)
        for step in range(2):
            for parameter in parameters:
                parameter.grad = normal(parameter.numel(), dtype, 100 * step + parameter.numel() + seed)
            optimizer.step()
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        return [parameter.detach() for parameter in parameters] + [v for v in state if isinstance(v, torch.Tensor)]

    return run


def _coded(dtype: torch.dtype, **options: object) -> Run:
    """Moments in 8 bits: rows of whole and of short blocks, several chunks per row and several rows per chunk."""
    shapes = ((40, 128), (32, 144), (3, 2500), (4096, 1), (17, 20, 13), (70,), (6, 3088), (9, 2048))

    def run(seed: int) -> list[torch.Tensor]:
        parameters = [
            torch.nn.Parameter(normal(shape.numel(), dtype, seed).view(shape)) for shape in map(torch.Size, shapes)
        ]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "group 0 rounds moments of 8 bits to nearest")
            optimizer = halfstep.AdamW(parameters, lr=1e-2, weight_decay=0.1, state_dtype="8bit", **options)
        for step in range(2):
            for parameter in parameters:
                spread = torch.exp2(-normal(parameter.numel(), FP32, step + seed).abs() * 8)
                values = normal(parameter.numel(), FP32, 100 * step + parameter.numel() + seed) * spread
                parameter.grad = values.to(dtype).view(parameter.shape)
            parameters[2].grad[1, 300] = torch.nan  # type: ignore[index]
            optimizer.step()
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        return [parameter.detach() for parameter in parameters] + [v for v in state if isinstance(v, torch.Tensor)]

    return run


def _amp(spoiled: bool) -> Run:
    def run(seed: int) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(normal(n, FP16, n + seed)) for n in (17, 2500)]
        optimizer = halfstep.AdamW(parameters, lr=1e-2, max_grad_norm=1.0)
        scaler = halfstep.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scaler.scale(torch.zeros(()))
        for step in range(3):
            for parameter in parameters:
                parameter.grad = normal(parameter.numel(), FP16, step + seed) * 8
            if spoiled and step == 1:
                parameters[1].grad[3] = torch.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
        left = [scaler._scale, scaler._growth_tracker, optimizer.grad_norm, scaler.step_skipped]
        return [parameter.detach() for parameter in parameters] + [torch.as_tensor(value) for value in left]

    return run


def _count(dtype: torch.dtype, errors: bool) -> Run:
    def run(seed: int) -> list[torch.Tensor]:
        tensors = [patterns(n, FP32, n + seed).to(dtype) for n in (1, 700, 16384, 9000)]
        counts = torch.zeros(4, width(errors), dtype=torch.int64)
        grid = Grid(dropped=20, emin=-6, emax=8, overflow=7 << 20)
        foreach_count_(tensors, counts, grid, rows=[3, 1, 0, 2], scale=torch.tensor(3.0, dtype=FP32))
        return [counts]

    return run


def _softmax(dtype: torch.dtype, rows: int, columns: int, **options: object) -> Run:
    def run(seed: int) -> list[torch.Tensor]:
        function = halfstep.log_softmax if options.get("log") else halfstep.softmax
        given = {name: value for name, value in options.items() if name != "log"}
        if given.get("mask"):
            given["mask"] = normal(rows * columns, FP32, seed + 1).view(rows, columns) > -0.5
        x = (2 * normal(rows * columns, dtype, seed)).view(rows, columns).requires_grad_()
        y = function(x, **given)  # type: ignore[arg-type]
        y.backward(normal(rows * columns, dtype, seed + 2).view(rows, columns))
        assert x.grad is not None
        return [y.detach(), x.grad]

    return run


CASES = {
    "cast bf16 stochastic": Case(_casts(FP32, BF16, rounding="stochastic", seed=3)),
    "cast e4m3 saturating": Case(_casts(BF16, E4M3, saturate=True)),
    "cast list": Case(_lists(FP32, E5M2)),
    "cast list wide": Case(_lists(E4M3, FP16)),
    "check bf16": Case(_check(BF16)),
    "check fp32": Case(_check(FP32)),
    "check of many": Case(_check_many),
    "check of extremes": Case(_check_extremes),
    "check fp16 with overflow": Case(_check(FP16, spoiled=True)),
    "unscale bf16": Case(_unscale(BF16)),
    "adam split": Case(_adam(BF16)),
    "adam full fp16": Case(_adam(FP16)),
    "adam fp32 L2 amsgrad": Case(_adam(FP32, "Adam", amsgrad=True)),
    "adam 8-bit split": Case(_coded(BF16, rounding="nearest")),
    "adam 8-bit split24 stochastic": Case(_coded(BF16, master_weights="split24", rounding="stochastic", seed=5)),
    "adam 8-bit fp16 full amsgrad stochastic": Case(_coded(FP16, amsgrad=True, rounding="stochastic")),
    "adam 8-bit fp32 amsgrad": Case(_coded(FP32, amsgrad=True, rounding="nearest")),
    "adam stochastic": Case(_adam(BF16, master_weights=None, state_dtype=BF16, rounding="stochastic", seed=5)),
    "amp": Case(_amp(False)),
    "amp with overflow": Case(_amp(True)),
    "statistics": Case(_count(BF16, errors=False)),
    "statistics with errors": Case(_count(FP32, errors=True)),
    "softmax": Case(_softmax(BF16, 21, 333), 32.0),
    "softmax masked": Case(_softmax(FP32, 7, 256, mask=True), 32.0),
    "softmax causal": Case(_softmax(FP32, 40, 40, causal=True), 32.0),
    "softmax long": Case(_softmax(BF16, 2, 40_000, log=True), 64.0),
    "softmax strided": Case(_softmax(FP32, 60, 33, dim=0), 32.0),
    "softmax strided by halves": Case(_softmax(BF16, 160, 48, dim=0), 32.0),
}


def difference(case: Case, mine: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """A description of the difference between results and expected results; empty if there is none."""
    assert len(mine) == len(expected)
    for index, (a, b) in enumerate(zip(mine, expected, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {index} has another shape or dtype"
        if case.units:
            wide, exact = a.double(), b.double()
            unit = 2.0**-24 + (0.0 if b.dtype == FP32 else 2.0 ** (-7 if b.dtype == BF16 else -10))
            bound = unit * (exact.abs() + case.units * 2.0**-24 / unit * exact.abs().amax().clamp(min=2.0**-30))
            if not bool(((wide - exact).abs() <= bound).all()):
                return (
                    f"result {index} is off by {float(((wide - exact).abs() / bound).nan_to_num(9e9).max()):.3g} bounds"
                )
        else:
            integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
            nan = (a != a) & (b != b) if a.dtype.itemsize > 1 else torch.zeros(a.shape, dtype=torch.bool)
            if not bool(((a.reshape(-1).view(integers) == b.reshape(-1).view(integers)) | nan.reshape(-1)).all()):
                return f"result {index} has other bits"
    return ""
