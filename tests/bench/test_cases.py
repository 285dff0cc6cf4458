"""The cases: every available provider passes its check, and the check detects wrong providers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from halfstep.bench.cases import GROUPS, Sizes, cases
from halfstep.bench.cases.installed import needs
from halfstep.bench.harness import OK, UNAVAILABLE, WRONG, Case, Unavailable, check, ours

CPU = torch.device("cpu")
SMALL = Sizes(elements=2**13, columns=(64, 2**12), cast_elements=(999,), tensors=(1, 7), large=2**14, slow=False)
EVERY = cases(list(GROUPS), SMALL)


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_every_available_provider_agrees_with_float64_twice(case: Case) -> None:
    """Providers share the inputs: one that wrote them would spoil the next check."""
    inputs = case.prepare(CPU)
    found = []
    for provider in [*case.providers, "halfstep"]:
        result, job = check(case, inputs, provider)
        found.append(result)
        if job is not None:
            job.call()
            job.call()
    assert [(r.provider, r.reason) for r in found if r.status not in (OK, UNAVAILABLE)] == []
    measured = {result.provider for result in found if result.status == OK}
    assert "halfstep" in measured and len(measured) > 1
    assert {r.reason for r in found if r.provider in ("liger-kernel", "flashoptim")} <= {"needs a GPU"}


def _status(operation: str, provider: str = "halfstep") -> str:
    case = next(case for case in EVERY if case.operation == operation)
    return check(case, case.prepare(CPU), provider)[0].status


@pytest.mark.parametrize(
    ("operation", "name", "spoil"),
    [
        ("softmax forward", "softmax", lambda good: lambda x: good(x) * 1.1),
        ("softmax backward", "softmax", lambda good: lambda x: good(x, scale=1.1)),
        ("softmax forward", "softmax", lambda good: lambda x: good(x) * float("nan")),
        (
            "cross-entropy training",
            "cross_entropy",
            lambda good: lambda x, t, **options: good(x, t, **options, label_smoothing=0.1),
        ),
        ("cast", "cast", lambda good: lambda x, dtype: good(x, dtype, rounding="toward_zero")),
        ("cast to blocks", "cast", lambda good: lambda x, form: good(x, form, rounding="toward_zero")),
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
        ("sgd", "SGD", lambda good: lambda p, **options: good(p, **{**options, "momentum": 0.8})),
        ("muon", "Muon", lambda good: lambda p, **options: good(p, **{**options, "momentum": 0.5})),
        ("AMP step", "AdamW", lambda good: lambda p, max_grad_norm, **options: good(p, **options)),
        ("AMP step", "GradScaler", lambda good: lambda *args, **options: good(*args, **options, hysteresis=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_results_are_detected(
    operation: str, name: str, spoil: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halfstep, name, spoil(getattr(halfstep, name)))
    global EVERY
    before, EVERY = EVERY, cases(list(GROUPS), SMALL)  # some cases hold the function they were made with
    try:
        assert _status(operation) == WRONG, "the check must see it, not an exception"
    finally:
        EVERY = before


def test_a_step_that_fails_to_skip_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: torch.amp.GradScaler, optimizer: Any) -> None:
        torch.amp.GradScaler.step(self, torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.0))
        optimizer.grad_scale, optimizer.found_inf = self._scale, None
        optimizer.step()

    monkeypatch.setattr(halfstep.GradScaler, "step", step)
    assert _status("AMP step") == WRONG


def test_a_peer_that_does_not_import_is_not_measured_for_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that look for a GPU or a compiler when they are imported raise what they like."""
    (tmp_path / "a_peer.py").write_text("raise RuntimeError('no GPU here')")
    monkeypatch.syspath_prepend(tmp_path)
    for module, reason in (("a_peer", "does not import here: no GPU here"), ("no_peer", "not installed")):
        with pytest.raises(Unavailable, match=reason):
            needs(module)


# Bytes per element of each provider whose layout is not the job's, and of the others; counted by hand.
HALFSTEP24, FLASH, INT8 = 8 + 4 + 6 / 32, 7 + 5 + 2 * 2 * 2 / 32, 2 + 2 * 2 + 2 * 2 * (1 + 4 / 256)


@pytest.mark.parametrize(
    ("operation", "dtype", "each", "others"),
    [
        ("softmax forward", "bf16", 4, {}),
        ("softmax backward", "fp32", 12, {}),
        ("cross-entropy forward", "bf16", 2, {}),
        ("cross-entropy backward", "fp32", 8, {}),
        ("cross-entropy training", "bf16", 6, {}),
        ("cast", "fp32 to bf16", 6, {}),
        ("cast", "fp32 to fp8 e4m3", 5, {}),
        ("check", "bf16", 2, {}),
        ("unscale", "fp32", 8, {}),
        ("adamw", "fp32", 28, {}),
        ("adamw", "bf16, fp32 master", 26, {"halfstep full master": 28}),
        ("adamw", "bf16, bf16 moments", 18, {"halfstep split24": 16, "flashoptim": 16}),
        ("adamw", "bf16, 8-bit moments", 14 + 6 / 32, {"halfstep split24": HALFSTEP24, "flashoptim": FLASH}),
        ("adamw", "bf16, 8-bit, no master", 10 + 6 / 32, {"torch fused": 14, "torchao": INT8, "bitsandbytes": INT8}),
        ("sgd", "fp32", 20, {}),
        ("sgd", "bf16, fp32 master", 18, {}),
        ("sgd", "bf16, bf16 momentum", 14, {}),
        ("muon", "bf16, fp32 master", 22, {}),
        ("muon", "bf16, 8-bit momentum", 16 + 2 / 32, {}),
        ("AMP step", "bf16, fp32 master", 28, {}),
        ("AMP step", "fp32", 32, {}),
    ],
)
def test_bytes_counted_per_element(operation: str, dtype: str, each: float, others: dict[str, float]) -> None:
    cases_of = [case for case in EVERY if (case.operation, case.dtype) == (operation, dtype)]
    assert cases_of
    for case in cases_of:
        elements = case.size.get("elements") or case.size["columns"] * case.size["rows"]
        assert case.bytes_moved == each * elements
        assert case.layout_bytes == {provider: int(moved * elements) for provider, moved in others.items()}


@pytest.mark.parametrize("case", [case for case in EVERY if "8-bit" in case.dtype], ids=lambda case: case.name)
def test_moments_in_8_bits_are_8_bits_wide(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors keep fp32 moments: bytes counted for 8 bits would give them GB/s that they do not reach."""
    optimizers: list[torch.optim.Optimizer] = []

    def kept(make: Any, *arguments: Any, **options: Any) -> Any:
        optimizers.append(make(*arguments, **options))
        return optimizers[-1]

    for name in ("AdamW", "Muon"):
        monkeypatch.setattr(halfstep, name, partial(kept, getattr(halfstep, name)))
    for provider in filter(ours, case.providers):
        _, job = check(case, case.prepare(CPU), provider)
        assert job is not None
    assert optimizers
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            moments = [state[name].nbytes for name in state if name.startswith(("exp_avg", "momentum_buffer"))]
            elements = parameter.numel() * (1 if case.group == "muon" else 2)
            assert elements <= sum(moments) < 1.1 * elements
