"""The cases: every provider here passes its check, and the check notices what a wrong provider would do."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from halfstep.bench import run
from halfstep.bench.cases.catalogue import GROUPS, cases
from halfstep.bench.cases.sizes import Sizes, sizes_for
from halfstep.bench.harness import OK, UNAVAILABLE, WRONG, Case, check

CPU = torch.device("cpu")
SMALL = Sizes(elements=2**13, columns=(64, 2**12), cast_elements=(999,), tensors=(1, 7), large=2**14, slow=False)
EVERY = cases(list(GROUPS), SMALL)


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_every_provider_here_agrees_with_float64(case: Case) -> None:
    inputs = case.prepare(CPU)
    found = [check(case, inputs, provider).result for provider in case.providers]
    assert [(r.provider, r.reason) for r in found if r.status not in (OK, UNAVAILABLE)] == []
    measured = {result.provider for result in found if result.status == OK}
    assert "halfstep" in measured and len(measured) > 1
    assert {r.reason for r in found if r.provider in ("liger-kernel", "flashoptim", "apex")} <= {"needs a GPU"}


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_a_job_can_be_repeated_and_checked_inputs_stay_as_they_are(case: Case) -> None:
    """Providers share the inputs: one that wrote them would spoil the next one's check."""
    inputs = case.prepare(CPU)
    for _ in range(2):
        checked = check(case, inputs, "halfstep")
        assert checked.result.status == OK and checked.job is not None
        checked.job.call()
        checked.job.call()


def _status(operation: str, provider: str = "halfstep") -> str:
    case = next(case for case in EVERY if case.operation == operation)
    return check(case, case.prepare(CPU), provider).result.status


@pytest.mark.parametrize(
    ("operation", "name", "spoil"),
    [
        ("softmax forward", "softmax", lambda good: lambda x: good(x) * 1.1),
        ("softmax backward", "softmax", lambda good: lambda x: good(x, scale=1.1)),
        ("softmax forward", "softmax", lambda good: lambda x: good(x) * float("nan")),
        ("cast", "cast", lambda good: lambda x, dtype: good(x, dtype, rounding="toward_zero")),
        ("cast of a list", "foreach_cast", lambda good: lambda x, dtype, out: good([-t for t in x], dtype, out=out)),
        (
            "check",
            "foreach_check",
            lambda good: lambda grads: good([torch.nan_to_num(grad, nan=0.0) for grad in grads]),
        ),
        (
            "check",
            "foreach_check",
            lambda good: lambda grads: good([torch.nan_to_num(grad, posinf=0.0) for grad in grads]),
        ),
        ("unscale", "foreach_unscale_", lambda good: lambda grads, inverse: good(grads, 0.5 * inverse)),
        ("adamw", "AdamW", lambda good: lambda p, **options: good(p, **{**options, "weight_decay": 0.0})),
        ("adamw", "AdamW", lambda good: lambda p, **options: good(p, **{**options, "betas": (0.9, 0.99)})),
        ("adamw", "AdamW", lambda good: lambda p, **options: good(p[:-1] or p, **{**options, "lr": 0.0})),
        ("AMP step", "AdamW", lambda good: lambda p, max_grad_norm, **options: good(p, **options)),
        ("AMP step", "GradScaler", lambda good: lambda *args, **options: good(*args, **options, hysteresis=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_result_is_seen(
    operation: str, name: str, spoil: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halfstep, name, spoil(getattr(halfstep, name)))
    global EVERY
    before, EVERY = EVERY, cases(list(GROUPS), SMALL)  # some cases hold the function they were made with
    try:
        assert _status(operation) == WRONG, "the check must see it, not an exception"
    finally:
        EVERY = before


def test_a_step_that_does_not_skip_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: torch.amp.GradScaler, optimizer: Any) -> None:
        torch.amp.GradScaler.step(self, torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.0))
        optimizer.grad_scale, optimizer.found_inf = self._scale, None
        optimizer.step()

    monkeypatch.setattr(halfstep.GradScaler, "step", step)
    assert _status("AMP step") == WRONG


@pytest.mark.parametrize(
    ("operation", "dtype", "each"),
    [
        ("softmax forward", "bf16", 4),
        ("softmax backward", "fp32", 12),
        ("cast", "fp32 to bf16", 6),
        ("cast", "fp32 to fp8 e4m3", 5),
        ("check", "bf16", 2),
        ("unscale", "fp32", 8),
        ("adamw", "fp32", 28),
        ("adamw", "bf16, fp32 master", 26),
        ("adamw", "bf16, small moments", 18),
        ("AMP step", "bf16, fp32 master", 28),
        ("AMP step", "fp32", 32),
    ],
)
def test_bytes_counted_per_element(operation: str, dtype: str, each: int) -> None:
    for case in EVERY:
        if (case.operation, case.dtype) == (operation, dtype):
            elements = case.size.get("elements") or case.size["columns"] * case.size["rows"]
            assert case.bytes_moved == each * elements


def test_the_grids_span_what_they_should() -> None:
    full = sizes_for(CPU, quick=False)
    assert (full.columns[0], full.columns[-1]) == (256, 2**20)
    assert full.tensors == (1, 100, 1_000, 10_000)
    assert full.large > full.elements
    on_gpu = sizes_for(torch.device("cuda"), quick=False)
    assert 2 * on_gpu.elements >= 2**26, "64 MiB of bf16 at least"
    assert len(cases(list(GROUPS), sizes_for(CPU, quick=True))) < len(cases(list(GROUPS), full)) / 2


def test_the_command_knows_all_groups_without_importing_torch() -> None:
    assert run.GROUP_NAMES == tuple(GROUPS)


def test_pytest_benchmark_gets_every_case_and_provider() -> None:
    pairs = runpy.run_path(str(Path(__file__).with_name("benchmarks.py")))["PAIRS"]
    assert {case.group for case, _ in pairs} == set(GROUPS)
    names = [f"{case.name}, {provider}" for case, provider in pairs]
    assert len(names) == len(set(names)) > 100
