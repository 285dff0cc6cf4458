"""Run every public function with other default dtypes and devices: the bits must not change.

    python tests/support/defaults.py --tries 20 --seed 0

A try runs calls of golden.py with other numbers and what is below with one default dtype and one default device, and
compares the bits of each result with those of torch's own defaults. The variable HALFSTEP_BACKEND chooses the backend.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import campaign
import golden
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
DEVICES = ("within meta", "set to meta", "within cpu", "set to cpu", "as it is")
DEFAULTS = list(itertools.product((BF16, F16, F64, F32), DEVICES))


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
        return str(value.device), golden.digest({"": value})
    if isinstance(value, np.ndarray):
        return "ndarray", golden.digest({"": torch.from_numpy(value)})
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
        self.seed = seed
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


# ------------------------------------------------------------------------ public functions that golden.py does not call


def checks(data: Data) -> Iterator[Any]:
    grads = data.lists()
    out = halfstep.foreach_check(grads)
    yield out, unscale.check(grads, Factor(number(3.0), inverted=True))
    counts = torch.zeros(len(grads), 4, dtype=torch.int32, device="cpu")
    tally = Tally(counts, torch.zeros(1, dtype=torch.int64, device="cpu"))
    grads[0].fill_(float("inf"))
    grads[4][5] = float("nan")
    found = unscale.check(grads, out=out, tally=tally, slots=range(len(grads) - 1, -1, -1))
    yield found, tally, found.first_bad()
    yield halfstep.foreach_check([]), halfstep.foreach_unscale_([], 1.0)
    yield unscale.check(grads, Factor(number(0.7)), write=True), grads


def casts(data: Data) -> Iterator[Any]:
    x = data.normal(5, 133, scale=100.0)
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
    masks = (None, data.normal(6, 40) > 0, data.normal(6, 40, dtype=BF16), data.normal(6, 40, dtype=F64))
    for function, dtype, mask in itertools.product((halfstep.softmax, halfstep.log_softmax), DTYPES, masks):
        x = data.normal(3, 6, 40, dtype=dtype).requires_grad_()
        y = function(x, scale=0.5, mask=mask, causal=mask is masks[1])
        y.backward(data.normal(3, 6, 40, dtype=dtype))
        yield y, x.grad
    for dim, dtype in ((0, F16), (1, BF16), (1, F32), (1, F64)):
        x = data.normal(3, 6, 40).requires_grad_()
        if dtype != F64:
            yield halfstep.softmax(x, dim, scale=0.5, dtype=dtype, precision="exact")
        y = halfstep.log_softmax(x, dim, dtype=dtype)
        (first,) = torch.autograd.grad((y * data.normal(3, 6, 40)).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        yield y, first, second


def log_probabilities(data: Data) -> Iterator[Any]:
    targets = torch.tensor([3, -100, 0, 39, 7, 1], device="cpu")
    for dtype in (BF16, F64):
        logits = data.normal(6, 40, dtype=dtype).requires_grad_()
        row = halfstep.log_probabilities(logits, targets, 0.7, True)
        loss = halfstep.cross_entropy(logits, targets, label_smoothing=0.1, z_loss=1e-3)
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


def states(data: Data) -> Iterator[Any]:
    """Saved and loaded, in every layout."""
    for turn, (dtype, options) in enumerate(LAYOUTS.values()):
        kind = halfstep.Adam if turn % 2 else halfstep.AdamW
        lr = number(1e-2) if turn % 2 else 1e-2
        parameters = [torch.nn.Parameter(data.normal(*shape, dtype=dtype)) for shape in ((), (3, 40), (4100,), (0,))]
        first = kind(parameters, lr=lr, amsgrad=turn % 4 == 1, max_grad_norm=0.5, **options, seed=3)
        for parameter in parameters:
            parameter.grad = data.normal(*parameter.shape, dtype=dtype)
        first.step()
        second = kind(parameters, lr=lr, **options)
        second.load_state_dict(first.state_dict())
        second.step()
        yield parameters, first.grad_norm, second.state_dict()["state"], second.canonical_state_dict()["state"]


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


def recorded(data: Data, subject: str) -> Iterator[Any]:
    """The calls whose digests are in tests/golden, of optimizers one in seven, with the numbers of another seed."""
    run, names, _ = golden.CASES[subject]
    with mock.patch.object(golden, "SEED", 1000 * data.seed):
        yield from map(run, names[data.seed % 7 :: 7] if run is golden.optimizer else names)


CASES: dict[str, Callable[[Data], Iterator[Any]]] = {
    **{f"recorded {subject}": partial(recorded, subject=subject) for subject in golden.CASES},
    **{case.__name__: case for case in (checks, casts, softmaxes, log_probabilities, counts, codes, states, training)},
}


def results(seed: int, cases: Iterable[str]) -> dict[str, Any]:
    """The bits of all results, by case and number."""
    found = {}
    for name in cases:
        try:
            found |= {f"{name}, {number}": bits(result) for number, result in enumerate(CASES[name](Data(seed)))}
        except Exception as error:
            found[f"{name} raised {type(error).__name__}: {error}"] = None
    return found


@functools.cache
def expected(seed: int, cases: Iterable[str]) -> dict[str, Any]:
    """The same with torch's own defaults, where nothing raises."""
    found = results(seed, cases)
    assert None not in found.values(), f"with torch's own defaults: {found}"
    return found


def run(seed: int, cases: Iterable[str] = tuple(CASES)) -> Counter[str]:
    """Compare under one pair of defaults. Counts the results of each case."""
    seed, turn = divmod(seed, len(DEFAULTS))
    wanted = expected(seed, cases)
    with defaults(*DEFAULTS[turn]):
        found = results(seed, cases)
    different = [name for name in {**wanted, **found} if name not in found or found[name] != wanted.get(name, "")]
    assert not different, f"{DEFAULTS[turn]}: {different}"
    return Counter(name.split(",")[0] for name in found)


if __name__ == "__main__":
    torch.set_num_threads(min(2, torch.get_num_threads()))
    warnings.simplefilter("ignore")
    sys.exit(campaign.main(__doc__, run, len(DEFAULTS)))
