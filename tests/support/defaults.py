"""Run every public function with other default dtypes and devices: the bits must not change.

    python tests/support/defaults.py --tries 64 --seed 0 --backend auto

A try generates data, runs everything below with one default dtype and one default device, and compares the bits of each
result with those of torch's own defaults. Each try is a separate process, so that a crash ends only this try.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layouts import LAYOUTS

import halfstep
from halfstep.integrations import checkpoint
from halfstep.kernels import unscale
from halfstep.kernels.rounding import ROUNDINGS
from halfstep.kernels.unscale import Factor, Tally

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (F32, F64, F16, BF16)
DEVICES = ("as it is", "set to meta", "set to cpu", "within meta", "within cpu")


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """A context with another default dtype, and another default device or device context."""
    before = torch.get_default_dtype()
    how, _, where = device.rpartition(" to " if " to " in device else " ")
    torch.set_default_dtype(dtype)
    if how == "set":
        torch.set_default_device(where)
    try:
        with torch.device(where) if how == "within" else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)
        if how == "set":
            torch.set_default_device(None)


def bits(value: Any) -> Any:
    """The types, shapes and bytes of a result."""
    if isinstance(value, torch.Tensor):
        held = value.detach().cpu().contiguous().reshape(-1)
        content = held.view(torch.uint8).numpy().tobytes() if held.numel() else b""
        return str(value.dtype), tuple(value.shape), str(value.device), hashlib.sha256(content).hexdigest()[:16]
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()[:16]
    if isinstance(value, dict):
        return {str(key): bits(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(one) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: bits(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return repr(value)


class Data:
    """Random numbers that depend only on a seed, not on torch's defaults."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator(device="cpu").manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=F32, device="cpu")
        return (drawn * scale).to(dtype)

    def lists(self) -> list[torch.Tensor]:
        """Tensors of all dtypes with odd sizes, a strided one and an empty one."""
        sizes = (1, 33, 4100)
        made = [self.normal(size, dtype=dtype) for size in sizes for dtype in (F32, F16, BF16)]
        return [*made, self.normal(7, 6).t(), self.normal(5, 6)[:, 1:], self.normal(0)]

    def model(self, dtype: torch.dtype) -> torch.nn.Module:
        model = torch.nn.Sequential(
            torch.nn.Linear(9, 17, dtype=F32, device="cpu"),
            torch.nn.Tanh(),
            torch.nn.Linear(17, 5, dtype=F32, device="cpu"),
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(self.normal(*parameter.shape))
        return model.to(dtype)


def number(value: float, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")


# --------------------------------------------------------------------------------------------------- public functions


def checks(data: Data) -> Iterator[Any]:
    grads = data.lists()
    yield halfstep.foreach_check(grads)
    yield halfstep.foreach_check(grads, inv_scale=0.3)
    yield unscale.check(grads, Factor(number(3.0), inverted=True))
    out = halfstep.foreach_check(grads)
    counts = torch.zeros(len(grads), 4, dtype=torch.int32, device="cpu")
    tally = Tally(counts, torch.zeros(1, dtype=torch.int64, device="cpu"))
    grads[0].fill_(float("inf"))
    grads[4][5] = float("nan")
    found = unscale.check(grads, out=out, tally=tally, slots=range(len(grads) - 1, -1, -1))
    yield found, tally, found.first_bad()
    yield halfstep.foreach_check([]), halfstep.foreach_unscale_([], 1.0)
    yield halfstep.foreach_unscale_(grads, 0.3), grads
    yield unscale.check(grads, Factor(number(0.7)), write=True), grads


def casts(data: Data) -> Iterator[Any]:
    x = data.normal(5, 133, scale=100.0)
    for source, target in itertools.product((F32, F16, BF16, *FP8), repeat=2):
        given = halfstep.cast(x, source)
        for rounding, saturate in itertools.product(ROUNDINGS, (False, True)):
            seed = 5 if rounding == "stochastic" else None
            yield halfstep.cast(given, target, rounding=rounding, saturate=saturate, seed=seed)
    torch.manual_seed(3)
    yield halfstep.cast(x, BF16, rounding="stochastic")
    yield halfstep.cast(x, BF16, out=torch.empty(5, 133, dtype=BF16, device="cpu"))
    lists = data.lists()
    for rounding in ROUNDINGS:
        yield halfstep.foreach_cast(lists, FP8[1], rounding=rounding)
    leaf = x.clone().requires_grad_()
    halfstep.cast(leaf, F16).sum().backward()
    yield leaf.grad
    yield halfstep.cast_parameters(torch.nn.ParameterList([x.clone()]), BF16)[0].detach()
    for name, axis in itertools.product(("mxfp8", "mxfp6_e2m3", "nvfp4"), (-1, (0, 1))):
        blocks = halfstep.cast(x[:, :132], name, axis=axis, rounding="stochastic", seed=5)
        yield blocks.codes.view(torch.uint8), blocks.scales.view(torch.uint8), blocks.global_scale


def softmaxes(data: Data) -> Iterator[Any]:
    keep = data.normal(6, 40) > 0
    masks = {"none": None, "keep": keep, "add": data.normal(6, 40, dtype=BF16), "add64": data.normal(6, 40, dtype=F64)}
    for function in (halfstep.softmax, halfstep.log_softmax):
        for dtype, (name, mask) in itertools.product(DTYPES, masks.items()):
            x = data.normal(3, 6, 40, dtype=dtype).requires_grad_()
            y = function(x, scale=0.5, mask=mask, causal=name == "keep")
            y.backward(data.normal(3, 6, 40, dtype=dtype))
            yield y, x.grad
        for dim, dtype in ((0, F16), (1, BF16), (-1, F32)):
            x = data.normal(3, 6, 40).requires_grad_()
            y = function(x, dim, scale=0.5, dtype=dtype, precision="exact")
            y.backward(data.normal(3, 6, 40, dtype=dtype))
            yield y, x.grad
        for dim, dtype in ((0, F16), (1, F32), (1, F64)):
            x = data.normal(3, 6, 40).requires_grad_()
            y = function(x, dim, dtype=dtype)
            (first,) = torch.autograd.grad((y * data.normal(3, 6, 40)).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
            yield y, first, second


def log_probabilities(data: Data) -> Iterator[Any]:
    targets = torch.tensor([3, -100, 0, 39, 7, 1], device="cpu")
    for dtype, exact in ((F32, True), (BF16, False), (F64, False)):
        logits = data.normal(6, 40, dtype=dtype).requires_grad_()
        row = halfstep.log_probabilities(logits, targets, 0.7, True, exact=exact)
        loss = halfstep.cross_entropy(logits, targets, label_smoothing=0.1, z_loss=1e-3, exact=exact)
        (row.log_probabilities.sum() + row.logsumexp.sum() + loss).backward()
        yield row, loss, logits.grad
    yield halfstep.cross_entropy(data.normal(6, 40), targets, data.normal(40).abs())


def counts(data: Data) -> Iterator[Any]:
    tensors = {"a": data.normal(300), "b": data.normal(40, dtype=F64), "c": data.normal(31).to(FP8[0])}
    tensors["d"] = data.normal(9, dtype=BF16)
    for format, scale, errors in (("fp16", 1.0, True), ("bf16", 3.0, True), ("e4m3fn", number(16.0), False)):
        found = halfstep.statistics(tensors, format, scale, errors=errors)
        yield found.counts, found.total.as_dict(), found.scale
    yield halfstep.advise_scale({name: tensor.double() for name, tensor in tensors.items()}, "fp16").as_dict()


def codes(data: Data) -> Iterator[Any]:
    values = data.normal(50, dtype=F64)
    for format in ("fp16", "e4m3fn", "fp32", "e2m1fn"):
        for given in (values, values.float(), values.numpy(), values.tolist()):
            coded = halfstep.encode(given, format)
            yield coded, halfstep.decode(coded, format), halfstep.round_to(given, format)
    yield halfstep.formats["fp16"].max


def optimizers(data: Data) -> Iterator[Any]:
    for number_of, (dtype, options) in enumerate(LAYOUTS.values()):
        kind = halfstep.Adam if number_of % 2 else halfstep.AdamW
        options = {**options, "seed": 3, "amsgrad": number_of % 4 == 1, "maximize": number_of % 5 == 2}
        lr = number(1e-2) if number_of % 2 else 1e-2
        limit = 0.5 if number_of % 3 == 0 else None
        parameters = [torch.nn.Parameter(data.normal(*shape, dtype=dtype)) for shape in ((), (3, 40), (4100,), (0,))]
        optimizer = kind(parameters, lr=lr, weight_decay=0.1, max_grad_norm=limit, **options)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = data.normal(*parameter.shape, dtype=dtype)
            optimizer.step()
        saved = optimizer.state_dict()
        other = kind([torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters], lr=lr, **options)
        other.load_state_dict(saved)
        for parameter, twin in zip(parameters, other.param_groups[0]["params"], strict=True):
            twin.grad = parameter.grad
        other.step()
        yield parameters, saved["state"], other.param_groups[0]["params"], other.canonical_state_dict()["state"]
        yield optimizer.grad_norm if limit else None


def parameters(model: torch.nn.Module, optimizer_class: Any) -> Any:
    return halfstep.muon_groups(model) if optimizer_class is halfstep.Muon else model.parameters()


def training(data: Data) -> Iterator[Any]:
    """Trainings with scaler, monitor, schedule, advice and checkpoints, with our optimizers and torch's."""
    classes: list[tuple[torch.dtype, Any]] = [(BF16, halfstep.AdamW), (F16, halfstep.Adam), (F32, torch.optim.SGD)]
    classes += [(BF16, partial(halfstep.SGD, momentum=0.9)), (BF16, halfstep.Muon)]
    for dtype, optimizer_class in classes:
        model = data.model(dtype)
        optimizer = optimizer_class(parameters(model, optimizer_class), lr=1e-2)
        scaler = halfstep.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, hysteresis=2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        skipping = halfstep.SkipAwareScheduler(scheduler, scaler)
        monitor = halfstep.AmpMonitor(model, scaler, every=1)
        yield halfstep.doctor(model, optimizer, scaler)
        for step in range(5):
            optimizer.zero_grad()
            loss = model(data.normal(4, 9, dtype=dtype)).float().square().mean()
            scaler.scale(loss).backward()
            if step == 1:
                next(iter(model.parameters())).grad.view(-1)[0] = float("inf")
            monitor.step()
            if step == 2:
                yield scaler.clip_grad_norm_(optimizer, 0.5)
            elif step == 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            skipping.step()
            yield loss, scaler.get_scale(), scaler.state_dict(), skipping.get_last_lr()
        yield (
            scaler.step_skipped,
            scaler.last_step_skipped(),
            scaler.overflow_report(model.named_parameters()).as_dict(),
        )
        yield monitor.state_dict(), monitor.report().as_dict(), list(model.parameters())
        if optimizer_class is torch.optim.SGD:
            continue
        yield list(optimizer.masters().values())
        yield halfstep.advise_scale(model, "fp16", scaled_by=scaler.get_scale()).as_dict()
        with tempfile.TemporaryDirectory() as folder:
            one = checkpoint.save(
                Path(folder) / "one", 3, {"model": model.state_dict(), "half": optimizer.state_dict()}
            )
            yield checkpoint.load(one)["model"]
            other = data.model(dtype)
            into = optimizer_class(parameters(other, optimizer_class), lr=1e-2)
            second = halfstep.GradScaler("cpu")
            saved = checkpoint.save(Path(folder) / "all", 3, model=model, optimizer=optimizer, scaler=scaler)
            checkpoint.load(saved, model=other, optimizer=into, scaler=second)
            yield list(other.parameters()), into.state_dict()["state"], second.state_dict()


CASES: dict[str, Callable[[Data], Iterator[Any]]] = {
    function.__name__: function
    for function in (checks, casts, softmaxes, log_probabilities, counts, codes, optimizers, training)
}


def everything(seed: int, cases: list[str]) -> Iterator[tuple[str, Any]]:
    """The results of every case, by name and place."""
    for name in cases:
        try:
            for place, result in enumerate(CASES[name](Data(seed))):
                yield f"{name} {place}", bits(result)
        except Exception as error:  # a complaint like any other
            yield f"{name} raised", f"{type(error).__name__}: {error}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tries", type=int, default=len(DTYPES) * len(DEVICES), help="how many (default: each pair once)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the data and of the order")
    parser.add_argument("--backend", choices=("auto", "reference", "triton"), default="auto")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    warnings.simplefilter("ignore")
    began, compared, wrong = time.monotonic(), 0, 0
    pairs = list(itertools.product(DTYPES, DEVICES))
    random.Random(options.seed).shuffle(pairs)
    expected: dict[str, Any] = {}
    with halfstep.backend(options.backend):
        for turn in range(options.tries):
            dtype, device = pairs[turn % len(pairs)]
            seed = options.seed + turn // len(pairs)
            if turn % len(pairs) == 0:
                expected = dict(everything(seed, options.cases))
                for name in expected:
                    if name.endswith("raised"):
                        wrong += 1
                        print(f"seed {seed}, torch's own defaults, {name}: {expected[name]}")
            with defaults(dtype, device):
                found = dict(everything(seed, options.cases))
            compared += len(found)
            for name in sorted(expected.keys() | found.keys()):
                if found.get(name) != expected.get(name):
                    wrong += 1
                    print(f"seed {seed}, default {dtype}, device {device}, {name}: {found.get(name)}")
    print(
        f"{options.tries} tries, {compared} results compared, {wrong} wrong, {time.monotonic() - began:.0f} s "
        f"({options.backend})"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what was said before a crash is seen
    os.environ.setdefault("MALLOC_PERTURB_", "165")
    sys.exit(main())
