"""Golden digests: SHA-256 of what the kernels compute on fixed inputs, in tests/golden/*.json.

A refactoring changes none of them. A change of bits writes them anew and says so in the first line of its commit:

    python tests/support/golden.py --write

All implementations have the same digest: the reference, C++, the interpreter and the compiled kernels executed by the
software GPU. Only fast softmax has one for each, because its exponential is not specified to the bit.

The inputs are made of a generator's raw bits and of nothing that could round, so that they are the same everywhere.
NaN is hashed as one pattern, since its payload is not specified.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).resolve().parents[1] / "golden"
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
FORMATS = {"fp32": FP32, "fp16": FP16, "bf16": BF16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
EXTREMES = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 1e-39, 65504.0, 65520.0, 3.4e38, 1.0, -2.0)

CPU = torch.device("cpu")
SEED = 0  # of the digests; kernel_cases.py calls the cases with others

Results = dict[str, torch.Tensor]


def raw(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Random words of 32 bits."""
    return np.random.PCG64(SEED + seed).random_raw((count + 1) // 2).view(np.uint32)[:count]


def patterns(count: int, seed: int) -> torch.Tensor:
    """Patterns of fp32 of every kind, with the extremes in front."""
    values = torch.from_numpy(raw(count, seed).copy().view(np.float32))
    values[: len(EXTREMES)] = torch.tensor(EXTREMES, dtype=FP32, device="cpu")[:count]
    return values


def moderate(shape: tuple[int, ...], seed: int, dtype: torch.dtype = FP32, smallest: int = -8) -> torch.Tensor:
    """Numbers of both signs with magnitudes from 2^smallest to 4, which every dtype rounds in the same way."""
    words = raw(math.prod(shape), seed)
    exponents = (127 + smallest + (words >> 8) % (2 - smallest)).astype(np.uint32)
    bits = (words & 0x8000_0000) | (exponents << 23) | ((words * np.uint32(2_654_435_761)) & 0x7F_FFFF)
    return torch.from_numpy(bits.view(np.float32).copy()).view(shape).to(dtype)


def digest(results: Results) -> str:
    """SHA-256 of names, dtypes, shapes and bits."""
    total = hashlib.sha256()
    for name, tensor in sorted(results.items()):
        tensor = tensor.detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        if tensor.is_floating_point():
            # FP8 has no operations of its own.
            invalid = (tensor.float() if tensor.itemsize == 1 else tensor).isnan()
            quiet = torch.full((), math.nan, dtype=tensor.dtype, device="cpu")
            tensor = torch.where(invalid, quiet.view(INTEGERS[tensor.itemsize]), tensor.view(INTEGERS[tensor.itemsize]))
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()[:32]


# ------------------------------------------------------------------------------------------------------------- cases


def _names(*columns: tuple[str, ...]) -> list[str]:
    names = [""]
    for column in columns:
        names = [f"{name} {entry}".strip() for name in names for entry in column]
    return names


# The options of rules.
_FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True},
    "momentum": {"momentum": 0.9, "dampening": 0.25},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "recent": {"momentum": 0.25, "nesterov": False},
}
SHAPES = ((), (1,), (17,), (3, 70), (0,), (5, 31, 3), (40, 128), (2, 1040))
MATRICES = ((40, 128), (5, 31, 3), (2, 1040), (3, 70), (0, 4), (70, 100), (60, 112))  # of Muon


def optimizer(name: str, device: torch.device = CPU) -> Results:
    """Three steps of a layout, with a NaN, an infinity and subnormal gradients, a misaligned weight, a strided gradient
    and a step that is skipped. That of Muon has no matrix products, whose bits are those of the device."""
    import halfstep

    optimizer_name, dtype_name, master, moments, rounding, form = name.split(" ")
    dtype = FORMATS[dtype_name]
    parameters = []
    for index, shape in enumerate(MATRICES if optimizer_name == "Muon" else SHAPES):
        memory = torch.zeros(math.prod(shape) + 1, dtype=dtype, device=device)
        values = memory[index % 2 : index % 2 + math.prod(shape)].view(shape)
        parameters.append(torch.nn.Parameter(values.copy_(moderate(shape, index, dtype))))
    options: dict[str, Any] = {"master_weights": None if master == "none" else master} if dtype != FP32 else {}
    options |= {"seed": 7} if rounding == "stochastic" else {}
    options |= _FORMS[form] | ({"ns_steps": 0} if optimizer_name == "Muon" else {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "group 0 rounds moments of 8 bits to nearest")
        stepped = getattr(halfstep, optimizer_name)(
            *(parameters,),
            lr=0.0125,
            weight_decay=0.1,
            state_dtype={"fp32": FP32, "bf16": BF16, "8bit": "8bit"}[moments],
            rounding=rounding,
            maximize=optimizer_name == "Adam" and rounding == "stochastic",
            **options,
        )
    for step in range(3):
        for index, parameter in enumerate(parameters):
            grad = moderate((2, *parameter.shape), 100 * step + index, smallest=-20)[0].to(dtype).to(device)
            parameter.grad = grad.T.contiguous().T if grad.ndim == 2 and index % 3 == 0 else grad
        flat = parameters[3].grad.reshape(-1)  # type: ignore[union-attr]
        extremes = [math.nan, math.inf, 1e-45, -1e-39] if step == 0 else [0.0, -0.0, 1e-39, 1e-45]
        flat[:4] = torch.tensor(extremes, dtype=FP32, device=CPU).to(dtype).to(device)  # a GPU could round subnormals
        parameters[3].grad = flat.view(parameters[3].shape)
        stepped.grad_scale = stepped.found_inf = None
        if step:  # as torch's scalers pass them to a fused optimizer
            stepped.grad_scale = torch.tensor(4.0, dtype=FP32, device=device)
            stepped.found_inf = torch.tensor(float(step == 1), dtype=FP32, device=device)
        stepped.step()
    results = {f"weight {index}": parameter.detach() for index, parameter in enumerate(parameters)}
    for index, parameter in enumerate(parameters):
        results |= {f"{key} {index}": value for key, value in stepped.state[parameter].items()}
    return results


def adam_names() -> Iterator[str]:
    """Every layout: two optimizers, dtype, master, moments, rounding, amsgrad."""
    for dtype, masters in (
        ("fp32", ("none",)),
        ("bf16", ("none", "full", "split", "split24")),
        ("fp16", ("none", "full")),
    ):
        for master in masters:
            for moments in ("fp32", "bf16", "8bit"):
                for rounding in ("nearest", "stochastic"):
                    for amsgrad in ("plain", "amsgrad"):
                        for optimizer in ("Adam", "AdamW"):
                            yield f"{optimizer} {dtype} {master} {moments} {rounding} {amsgrad}"


def sgd_names() -> Iterator[str]:
    """Every master with every buffer: dtype, master, buffer, rounding, kind of momentum."""
    for masters in ("fp32 none", "bf16 none", "bf16 full", "bf16 split", "bf16 split24", "fp16 full"):
        for buffer, rounding in (
            ("fp32", "nearest"),
            ("bf16", "stochastic"),
            ("8bit", "nearest"),
            ("8bit", "stochastic"),
        ):
            for form in ("momentum", "nesterov"):
                yield f"SGD {masters} {buffer} {rounding} {form}"
        yield f"SGD {masters} fp32 stochastic plain"


def muon_names() -> Iterator[str]:
    """Every master with every momentum: dtype, master, momentum, rounding, form of the average."""
    for masters in ("fp32 none", "bf16 none", "bf16 full", "bf16 split", "bf16 split24", "fp16 full"):
        for momentum in (
            "fp32 nearest nesterov",
            "fp32 stochastic recent",
            "bf16 stochastic nesterov",
            "8bit nearest recent",
            "8bit stochastic nesterov",
        ):
            yield f"Muon {masters} {momentum}"


def amp(name: str, device: torch.device = CPU) -> Results:
    """A scaler, clipping, an overflow: weights, scale, norm."""
    import halfstep

    dtype = FORMATS[name.split(" ")[0]]
    parameters = [torch.nn.Parameter(moderate((count,), count, dtype).to(device)) for count in (17, 2501, 300)]
    optimizer = halfstep.AdamW(parameters, lr=0.01, max_grad_norm=1.0)
    scaler = halfstep.GradScaler(device.type, init_scale=1024.0, growth_interval=2)
    scaler.scale(torch.zeros((), dtype=FP32, device=device))
    for step in range(4):
        for index, parameter in enumerate(parameters):
            parameter.grad = moderate((parameter.numel(),), 10 * step + index, dtype).to(device)
        if step == 1:
            parameters[1].grad[3] = math.inf  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
    results = {f"weight {index}": parameter.detach() for index, parameter in enumerate(parameters)}
    assert optimizer.grad_norm is not None and scaler._scale is not None and scaler._growth_tracker is not None
    return results | {"norm": optimizer.grad_norm, "scale": scaler._scale, "tracker": scaler._growth_tracker}


def cast(name: str, device: torch.device = CPU) -> Results:
    """A tensor and a list, misaligned, to nearest, towards zero and stochastically, with and without saturation."""
    import halfstep

    source, target, rounding, saturate = name.split(" ")
    options: dict[str, Any] = {"rounding": rounding, "saturate": saturate == "saturating"}
    if rounding == "stochastic":
        options["seed"] = 5
    values = patterns(2061, 3)
    values[200:1200] = moderate((1000,), 4, smallest=-30)
    if source == "e4m3":  # torch 2.11 makes NaN of what later versions saturate
        values = values.clamp(-448.0, 448.0)
    values = values.to(FORMATS[source])
    if source != "fp32":  # also patterns that no conversion makes
        values[1500:] = torch.from_numpy(raw(561, 9).view(np.uint8)[: 561 * values.itemsize].copy()).view(values.dtype)
    values = values.to(device)
    pieces = [values[:1], values[3:1501], values[1504:2061].clone()]
    listed = halfstep.foreach_cast(pieces, FORMATS[target], **options)
    return {"tensor": halfstep.cast(values[1:], FORMATS[target], **options)} | {
        f"list {index}": tensor for index, tensor in enumerate(listed)
    }


def block_cast(name: str, device: torch.device = CPU) -> Results:
    """A tensor with short blocks and a list with whole ones, with numbers that are not finite, blocks of zeros, and
    scales that are rounded to 0 or overflow."""
    import halfstep

    source, target, form, rounding = name.split(" ")
    axis = {"rows": -1, "columns": 1, "squares": (2, 1)}[form]
    options: dict[str, Any] = {"rounding": rounding, "saturate": rounding == "toward_zero", "axis": axis}
    options |= {"seed": 6} if rounding == "stochastic" else {}
    values = moderate((3, 50, 70), 1, smallest=-30)
    values[0, 4, 5], values[1, 40, 69], values[2, :40], values[1, 0, 3] = math.nan, math.inf, 0.0, 1e-39
    whole, values = moderate((2, 32, 128), 2).to(device), values.to(FORMATS[source]).to(device)
    coded = [halfstep.cast(values, target, **options), halfstep.cast(whole, target, **options)]
    listed = [values[:, :32], whole[0], whole.to(FORMATS[source])]
    coded += halfstep.foreach_cast(listed, target, **options | {"axis": -1})
    results = {f"codes {index}": each.codes.view(torch.uint8) for index, each in enumerate(coded)}
    results |= {f"scales {index}": each.scales.view(torch.uint8) for index, each in enumerate(coded)}
    scales = {f"global scale {index}": each.global_scale for index, each in enumerate(coded)}
    return results | {key: scale for key, scale in scales.items() if scale is not None}


def check(name: str, device: torch.device = CPU) -> Results:
    """Flags, norm and, where they are written, unscaled gradients, finite and not."""
    import halfstep

    dtype_name, spoiled = name.split(" ")
    dtype, sizes = FORMATS[dtype_name], (1, 15, 4099, 513, 1, 33_000)
    grads = [moderate((size,), size, dtype, smallest=-14).to(device) for size in sizes]
    grads.append(moderate((60, 50), 8, dtype).to(device)[:, ::2])
    if spoiled == "overflow":
        grads[2][-1], grads[3][7], grads[6][4, 3] = math.inf, math.nan, -math.inf
    verdict = halfstep.foreach_check(grads, inv_scale=0.125)
    results = {"found": verdict.found_inf, "flags": verdict.flags, "squares": verdict.sum_of_squares}
    unscaled = halfstep.foreach_unscale_(grads, torch.tensor(1 / 3, dtype=FP32, device=device))
    results["unscaled found"] = unscaled.found_inf
    return results | {f"unscaled {index}": grad for index, grad in enumerate(grads)}


def rank_sum(name: str, device: torch.device = CPU) -> Results:
    """Means of three ranks and the checks of their ranges: empty, misaligned, padded, and with chunks not full."""
    from halfstep.kernels.rank_sum import Ranges, sum_and_check
    from halfstep.kernels.unscale import Factor, Verdict, finish_parts

    dtype_name, spoiled = name.split(" ")
    elements = 22_288
    ranges = Ranges([(0, 17), (32, 5000), (5040, 4096), (9152, 4096), (13_264, 0), (13_280, 9000)], elements)
    parts = torch.stack([moderate((elements,), rank, FORMATS[dtype_name]) for rank in range(3)])
    parts[0, 20], parts[1, 13_250] = math.nan, math.inf  # padding
    if spoiled == "overflow":
        parts[0, 5031], parts[1, 9152], parts[2, 22_279] = math.inf, math.nan, -math.inf
    out = torch.empty(elements, dtype=FP32, device=device)
    factor = Factor(torch.tensor(5.0, dtype=FP32, device=device), inverted=True)
    checks = sum_and_check(parts.to(device), out, 3.0, ranges, factor)
    verdict = finish_parts(checks, range(len(checks)), Verdict.empty(len(checks), device))
    return {"out": out, "found": verdict.found_inf, "flags": verdict.flags, "squares": verdict.sum_of_squares}


def statistics(name: str, device: torch.device = CPU) -> Results:
    from halfstep.kernels.cells import Grid, width
    from halfstep.kernels.statistics import foreach_count_

    dtype_name, errors = name.split(" ")
    values = [patterns(count, count).to(FORMATS[dtype_name]).to(device) for count in (1, 700, 16_385, 9000)]
    counts = torch.zeros(4, width(errors == "errors"), dtype=torch.int64, device=device)
    grid = Grid(dropped=20, emin=-6, emax=8, overflow=7 << 20)
    foreach_count_(values, counts, grid, rows=[3, 1, 0, 2], scale=torch.tensor(3.0, dtype=FP32, device=device))
    return {"counts": counts}


def softmax(name: str, device: torch.device = CPU, precision: str = "fast") -> Results:
    """Forward and backward of rows, masked, causal and over another dimension."""
    import halfstep

    dtype_name, form = name.split(" ")
    shape, options = {
        "rows": ((21, 333), {}),
        "log": ((2, 9001), {"log": True}),
        "masked": ((7, 257), {"mask": moderate((7, 257), 2).to(device) > -0.5}),
        "causal": ((40, 40), {"causal": True}),
        "columns": ((60, 33), {"dim": 0}),
    }[form]
    function = halfstep.log_softmax if options.pop("log", False) else halfstep.softmax
    x = moderate(shape, 1, FORMATS[dtype_name])
    if form == "rows":
        x[3, 5], x[4, 6], x[5, :] = math.nan, math.inf, -math.inf
    x = x.to(device).requires_grad_()
    y = function(x, precision=precision, **options)
    y.backward(moderate(shape, 3, FORMATS[dtype_name]).to(device))
    assert x.grad is not None
    return {"y": y, "grad": x.grad}


def log_probabilities(name: str, device: torch.device = CPU) -> Results:
    """Forward and backward with exact exponentials, of rows with NaN, infinities and targets that are ignored."""
    import halfstep

    dtype_name, form = name.split(" ")
    shape = (3, 5000) if form == "long" else (9, 333)
    logits = 4 * moderate(shape, 1, FORMATS[dtype_name])
    if form == "rows":
        logits[3, 5], logits[4, 6], logits[5, :], logits[6, 3] = math.nan, math.inf, -math.inf, -math.inf
    targets = torch.from_numpy((raw(shape[0], 2) % shape[1]).astype(np.int64))
    targets[0], targets[-3 if form == "rows" else -1] = 3, -100
    logits, targets = logits.to(device).requires_grad_(), targets.to(device)
    row = halfstep.log_probabilities(logits, targets, 0.75, True, exact=True)
    loss = halfstep.cross_entropy(logits, targets, label_smoothing=0.125, z_loss=0.25, reduction="none", exact=True)
    assert row.entropy is not None
    terms = (row.log_probabilities, row.logsumexp, row.entropy, loss)
    torch.autograd.backward(terms, [moderate(targets.shape, 3 + index).to(device) for index in range(4)])
    assert logits.grad is not None
    return {"grad": logits.grad} | {str(index): term.detach() for index, term in enumerate(terms)}


WIDE = ("fp32", "fp16", "bf16")
_SOFTMAX = _names(WIDE, ("rows", "log", "masked", "causal", "columns"))
_CASTS = _names(tuple(FORMATS), tuple(FORMATS), ("nearest", "toward_zero", "stochastic"), ("plain", "saturating"))
_BLOCK_CASTS = [
    *_names(("bf16",), ("mxfp8", "mxfp4", "nvfp4"), ("rows", "columns", "squares"), ("nearest", "stochastic")),
    *_names(("fp32",), ("mxfp8_e5m2_even", "mxfp6_e2m3_ceil", "mxfp6_e3m2_rceil"), ("rows",), ("nearest",)),
    *_names(("fp32",), ("mxfp8_e5m2_even", "mxfp6_e2m3_ceil", "mxfp6_e3m2_rceil"), ("rows",), ("stochastic",)),
    *_names(("fp16", "fp32"), ("mxfp8", "mxfp4_rceil", "nvfp4"), ("rows",), ("toward_zero",)),
]
# By subject: what runs a case, the names of the cases, and the C++ without which "native" would be the reference.
CASES: dict[str, tuple[Callable[..., Results], list[str], str]] = {
    "adam": (optimizer, list(adam_names()), "adam"),
    "sgd": (optimizer, list(sgd_names()), "sgd"),
    "muon": (optimizer, list(muon_names()), "muon"),
    "amp": (amp, _names(WIDE), "unscale"),
    "cast": (cast, _CASTS, "cast"),
    "block_cast": (block_cast, _BLOCK_CASTS, "block_cast"),
    "check": (check, _names(WIDE, ("finite", "overflow")), "unscale"),
    "log_probabilities": (log_probabilities, _names(WIDE, ("rows", "long")), "softmax"),
    "statistics": (statistics, _names(WIDE, ("plain", "errors")), "statistics"),
    "rank_sum": (rank_sum, _names(WIDE, ("finite", "overflow")), "unscale"),
    "softmax": (softmax, _SOFTMAX, "softmax"),
    "softmax_exact": (partial(softmax, precision="exact"), _SOFTMAX, "softmax"),
}


def recorded(subject: str) -> dict[str, Any]:
    """The digests in the repository."""
    return json.loads((FOLDER / f"{subject}.json").read_text())  # type: ignore[no-any-return]


def implementation_of_softmax(backend: str, target: str | None) -> str:
    """The name under which a digest of softmax is recorded: its bits depend on the library of the exponential, which
    for torch's on a CPU is another one on another processor."""
    if target is not None:
        return target
    if backend == "reference":
        exponentials = torch.exp(moderate((4096,), 0, smallest=-20))
        return f"reference, torch.exp {digest({'exp': exponentials})[:8]}"
    return f"{backend} {torch.backends.cpu.get_cpu_capability()} numpy {np.__version__}"


def write() -> None:
    """Record the digests of the reference, and those of softmax on each implementation."""
    import halfstep

    for subject, (run, names, _) in CASES.items():
        if subject == "softmax":
            continue
        with halfstep.backend("reference"):
            digests = {name: digest(run(name)) for name in names}
        (FOLDER / f"{subject}.json").write_text(json.dumps(digests, indent=0) + "\n")
        print(f"{subject}: {len(digests)} digests")
    path = FOLDER / "softmax.json"
    by_implementation = {} if not path.exists() else recorded("softmax")
    for backend, target in (("reference", None), ("triton", None), *(("triton", target) for target in TARGETS)):
        # Triton is interpreted or compiled for one target in the whole process.
        command = [sys.executable, __file__, "--softmax", backend, *([] if target is None else [target])]
        by_implementation |= json.loads(subprocess.check_output(command))
    path.write_text(json.dumps(dict(sorted(by_implementation.items())), indent=0) + "\n")
    print(f"softmax: {len(by_implementation)} implementations")


def print_softmax(backend: str, target: str | None = None) -> None:
    """Print the digests of one implementation of softmax."""
    if target is None:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        from software_gpu import gpu

        gpu.install(target)
    import halfstep

    with halfstep.backend(backend):
        digests = {name: digest(softmax(name)) for name in CASES["softmax"][1]}
    print(json.dumps({implementation_of_softmax(backend, target): digests}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--softmax", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    write() if arguments.write else print_softmax(*arguments.softmax)
