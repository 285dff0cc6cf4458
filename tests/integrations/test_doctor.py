"""The doctor: texts, faulty training loops, first_nonfinite, checkpoints and environments."""

import importlib.metadata
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import doctor_cases
import doctor_ranks
import pytest
import torch
from errors import error_of
from library_wrappers import AmpOptimWrapper, NativeScaler, OptimWrapper, Precision
from torch import nn

import halfstep
from halfstep.integrations.doctor import Diagnosis, doctor, first_nonfinite, watch
from halfstep.integrations.doctor.findings import TEXTS
from halfstep.integrations.doctor.rules import examine_checkpoint, examine_environment, facts
from halfstep.integrations.tensor_files import read_all
from halfstep.kernels import compiler

BF16 = torch.bfloat16
ROOT = Path(__file__).resolve().parents[2]


def _net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)).to(dtype)


# ---------------------------------------------------------------------------------------------------------------- texts


def test_the_text_of_a_finding() -> None:
    model = _net(BF16)
    found = doctor(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert str(found).split("\n")[:4] == [
        "Sequential of 4 parameters, AdamW of torch: 2 findings",
        "error: moments-in-16-bits",
        "  where   4 parameters: 0.weight, 0.bias, 1.weight, ...",
        "  what    exp_avg and exp_avg_sq in bf16, rounded to nearest",
    ]
    assert found.findings[0].stake.endswith("; 1.13 KiB now, 2.26 KiB in fp32")
    assert found.as_dict()["findings"][1]["name"] == "decay-lost" and not found.ok


def test_the_shares_of_lost_updates_are_those_of_steps() -> None:
    """Against the weights themselves: of the elements with a gradient, those that a step leaves as they are."""
    model = _net(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    unchanged = total = 0
    with watch(model, optimizer) as watched:
        for _ in range(3):
            model(torch.randn(4, 16).to(BF16)).square().mean().backward()
            before = [one.detach().clone() for one in model.parameters()]
            optimizer.step()
            for one, old in zip(model.parameters(), before, strict=True):
                assert one.grad is not None
                unchanged += int(((one == old) & (one.grad != 0)).sum())
                total += int((one.grad != 0).sum())
            optimizer.zero_grad()
    (found,) = (one for one in watched.diagnosis.findings if one.name == "updates-lost")
    assert 0 < unchanged < total
    assert found.stake == f"{100 * unchanged / total:.1f} % of the updates in 3 steps change nothing"


def test_lost_updates_and_16_bit_momentum_of_muon_are_found() -> None:
    model = torch.nn.Linear(256, 256, bias=False).bfloat16()
    found = halfstep.doctor(model, torch.optim.Muon(model.parameters(), lr=1e-4))
    assert found.names == ["updates-lost", "moments-in-16-bits"] and "halfstep.Muon" in str(found)
    assert not halfstep.doctor(model, halfstep.Muon(model.parameters(), lr=1e-4, state_dtype="8bit")).names


@pytest.mark.parametrize(("dtype", "lr", "which"), [(BF16, 1e-4, "updates as large as lr"), (torch.float32, 1e-4, "")])
def test_lost_updates_are_predicted_at_rest(dtype: torch.dtype, lr: float, which: str) -> None:
    model = _net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
    for expected in (which, which and "the next step's updates"):
        stakes = [finding.stake for finding in doctor(model, optimizer).findings if finding.name == "updates-lost"]
        assert [stake.partition(" % of ")[2] for stake in stakes] == [f"{expected} change nothing"] * bool(expected)
        model(torch.randn(4, 16).to(dtype)).square().mean().backward()
        optimizer.step()


def test_arguments_that_cannot_be_examined_are_refused() -> None:
    model = _net()
    assert error_of(TypeError, lambda: doctor([model], None)) == (  # type: ignore[arg-type]
        "Expected model to be a torch.nn.Module, but got a list"
    )
    for optimizer, name in (([model], "Sequential"), (0, "int"), (False, "bool")):
        assert error_of(TypeError, lambda optimizer=optimizer: doctor(model, optimizer)) == (
            f"Expected optimizer to be an optimizer with param_groups, or a sequence of them, but got a {name}"
        )
    for scaler in ("fp16", torch.float16, model, Precision("fp16")):
        assert error_of(TypeError, lambda scaler=scaler: doctor(model, None, scaler)) == (
            "Expected scaler to be a loss scaler with scale, step, update and get_scale, or an object with one as "
            f"_scaler, loss_scaler, scaler, but got a {type(scaler).__name__}: pass the torch.amp.GradScaler or "
            "halfstep.GradScaler, or None if there is none"
        )


def test_wrapped_optimizers_and_scalers_are_examined() -> None:
    model = _net()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    collapsed = torch.amp.GradScaler("cpu", init_scale=0.0)
    for scaler in (collapsed, NativeScaler(collapsed), Precision(NativeScaler(collapsed))):
        assert doctor(model, optimizer, scaler).names == ["scale-collapsed"]
    assert doctor(model, AmpOptimWrapper(optimizer, collapsed)).names == ["scale-collapsed"]
    wrapped = OptimWrapper(halfstep.AdamW(model.parameters()))
    assert doctor(model, wrapped, halfstep.GradScaler("cpu")).examined == (
        "Sequential of 4 parameters, AdamW of halfstep, GradScaler of halfstep"
    )


# --------------------------------------------------------------------------------------------------- cases


@pytest.mark.parametrize("case", doctor_cases.HEALTHY, ids=lambda case: case.name)
def test_no_false_alarm(case: doctor_cases.Case) -> None:
    assert case.told() == []


@pytest.mark.parametrize("case", doctor_cases.BREAKS, ids=str)
def test_faults_of_training_loops_are_named(case: doctor_cases.Case) -> None:
    names = case.told()
    assert case.name in names
    # Steps do not show these to be copies.
    assert names.count("optimizer-of-other-parameters") == (3 if case.name == "optimizer-of-other-parameters" else 0)


# ----------------------------------------------------------------------------------------------------- NaN and infinity


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.complex64])
def test_one_value_that_is_not_finite_is_named(dtype: torch.dtype, value: float) -> None:
    """Wherever it is: every element is read."""
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "last": nn.Linear(512, 513)}).to(dtype)
    model["last"].weight.data[511, 510] = value
    (found,) = doctor(model, halfstep.AdamW(model.parameters()) if dtype == BF16 else None).findings
    assert (found.name, found.severity, found.where) == ("values-not-finite", "error", "1 tensor: last.weight")
    assert found.what == f"{'NaN' if math.isnan(value) else 'Inf'} in weights"
    assert "halfstep.integrations.doctor.first_nonfinite(model)" in found.remedy


def test_nan_in_buffers_and_codes_and_inf_in_gradients_are_located() -> None:
    model = nn.Sequential(nn.Linear(128, 64, dtype=BF16), nn.BatchNorm1d(64))
    optimizer = halfstep.AdamW(model.parameters(), state_dtype="8bit", rounding="stochastic")
    for value in (0.0, math.nan):
        assert doctor(model, optimizer).ok
        model[0](torch.randn(4, 128, dtype=BF16)).sum().backward()
        model[0].weight.grad[5, 7] += value  # type: ignore[index, union-attr]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model[0].weight.nan_to_num_()
    model[1].running_var[3] = math.nan  # type: ignore[index]
    model[0].bias.grad = torch.full_like(model[0].bias, math.inf)  # type: ignore[union-attr]
    found = doctor(model, optimizer).findings[0]
    assert found.where == "3 tensors: 1.running_var, 0.bias, 0.weight"
    assert found.what == "NaN in buffers, Inf in gradients, NaN in exp_avg_scale, NaN in exp_avg_sq_scale"


@pytest.mark.parametrize("factor", [math.nan, 1.0])
def test_watch_names_the_step_that_made_weights_nan(factor: float) -> None:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as watched:
        for step in range(3):
            optimizer.zero_grad()
            (model(torch.ones(1, 16)).sum() * (factor if step == 1 else 1.0)).backward()
            if step == 1 and factor == 1.0:
                optimizer.param_groups[0]["lr"] = math.inf
            optimizer.step()
    found = watched.diagnosis.findings[0]
    assert found.name == "values-not-finite" and watched.diagnosis.names.count(found.name) == 1
    grads = "not finite" if math.isnan(factor) else "finite"
    assert found.what.endswith(f"seen in weights after step 2, whose gradients were {grads}"), found.what


def test_watch_counts_updates_of_gradients_that_are_not_zero() -> None:
    model = nn.Linear(6, 1, bias=False, dtype=BF16)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0, 1.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with watch(model, optimizer) as watched:
        for _ in range(2):
            model.weight.grad = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]], dtype=BF16)
            optimizer.step()
    found = watched.diagnosis.findings[0]
    assert (found.name, found.stake) == ("updates-lost", "50.0 % of the updates in 2 steps change nothing"), found


# -------------------------------------------------------------------------------------------------- whose parameters


def test_copies_that_are_parameters_are_recognized_after_a_step() -> None:
    """Before it, they cannot be told from the parameters of another model with the same weights."""
    model = _net(BF16)
    masters = [nn.Parameter(one.detach().float()) for one in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    assert doctor(model, optimizer).names == ["optimizer-of-other-parameters"]
    with watch(model, optimizer) as watched:
        model(torch.ones(2, 16, dtype=BF16)).sum().backward()
        for one, master in zip(model.parameters(), masters, strict=True):
            master.grad = None if one.grad is None else one.grad.float()
        optimizer.step()
        for one, master in zip(model.parameters(), masters, strict=True):
            one.data.copy_(master)
        model.zero_grad()
    assert watched.diagnosis.ok and doctor(model, optimizer).ok, str(watched)


def test_a_model_without_an_optimizer_and_on_meta_tensors() -> None:
    assert doctor(_net(), None).ok
    with torch.device("meta"):
        model = nn.Linear(64, 64, dtype=BF16)
    assert doctor(model, torch.optim.AdamW(model.parameters())).names == ["moments-in-16-bits", "decay-lost"]


# ---------------------------------------------------------------------------------------------------- what watch leaves


def _trained(watching: bool) -> list[torch.Tensor]:
    model = _net()
    optimizer = halfstep.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = set(vars(scaler)), set(vars(schedule)), dict(vars(torch.nn.utils.clip_grad))
    with pytest.raises(KeyError), watch(model, optimizer, scaler, schedule) if watching else nullcontext():
        assert (dict(vars(torch.nn.utils.clip_grad)) != before[2]) == watching
        for step in range(3):
            inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
        raise KeyError
    assert (set(vars(scaler)), set(vars(schedule)), dict(vars(torch.nn.utils.clip_grad))) == before
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    return [parameter.detach() for parameter in model.parameters()]


def test_watch_changes_no_bit_and_leaves_nothing_behind() -> None:
    assert all(map(torch.equal, _trained(watching=False), _trained(watching=True)))


# ------------------------------------------------------------------------------------------------------ first_nonfinite


class Half(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.half() * 60000


def test_the_first_operation_that_overflows_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Half(), nn.Softmax(-1), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.fill_(1.0)  # type: ignore[operator, union-attr]
        model[0].bias.zero_()  # type: ignore[operator, union-attr]
    with first_nonfinite(model) as found:
        model[2](model[1](model[0](torch.ones(1, 4))))
    assert found and (found.module, found.kind, found.value) == ("1", "Half", "Inf")
    assert str(found) == "Inf from aten.mul.Tensor in 1 (Half); inputs: fp16 of shape (1, 4) up to 4"
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_operations_of_a_backward_and_in_place_are_named() -> None:
    weight = torch.zeros(3, requires_grad=True)
    with first_nonfinite(nn.Identity()) as found:
        weight.sqrt().sum().backward()
    assert (found.value, found.backward, found.module) == ("Inf", "SqrtBackward0", "")
    assert str(found).startswith("Inf from aten.div.Tensor in SqrtBackward0; inputs: ")
    with first_nonfinite(nn.Identity()) as found:
        torch.full((2,), 300.0, dtype=torch.float16).mul_(300)
    assert str(found) == "Inf from aten.mul_.Tensor in no module; inputs: fp16 of shape (2,) up to 300"


def test_intended_infinities_are_not_reported() -> None:
    """Masks of attention, and what follows from NaN inputs."""
    scores = torch.randn(1, 4, 8, 8)
    with first_nonfinite(nn.Identity()) as found:
        mask = torch.full((8, 8), float("-inf")).triu(1)
        (scores + mask).softmax(-1)
        scores.masked_fill(mask.isinf(), float("-inf")).softmax(-1)
        torch.where(mask.isinf(), torch.tensor(float("-inf")), scores[0, 0])
        nn.functional.scaled_dot_product_attention(scores, scores, scores, is_causal=True)
        torch.full((1,), float("nan")) * 2
    assert not found, str(found)
    assert str(found) == "no operation made NaN or Inf out of finite numbers"


# ---------------------------------------------------------------------------------------------------------- checkpoints


def _saved(folder: Path, **tensors: torch.Tensor) -> Diagnosis:
    file = folder / "checkpoint.pt"
    torch.save({name.replace("__", "."): value for name, value in tensors.items()}, file)
    return examine_checkpoint(read_all([file]))


def test_a_healthy_checkpoint_has_no_findings(tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    file = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    found = examine_checkpoint(read_all([file]))
    assert found.ok and found.examined.startswith(f"{file} with 16 tensors, "), str(found)


CHECKPOINTS: list[tuple[dict[str, torch.Tensor], str, str]] = [
    ({"weight": torch.tensor([1.0, float("nan")])}, "values-not-finite", "stays NaN or Inf"),
    ({"weight": torch.tensor([1e38, -math.inf])}, "values-not-finite", "stays NaN or Inf"),
    ({"state__exp_avg_sq": torch.tensor([1.0, -1e-9])}, "negative-second-moment", "is NaN"),
    ({"state__exp_avg_sq": torch.ones(4, dtype=BF16)}, "moments-in-16-bits", "steps shrank"),
    ({"exp_avg": torch.randn(1000).bfloat16().float()}, "state-was-rounded", "unless the optimizer keeps them in bf16"),
    ({"weight": torch.randn(1024).bfloat16().float()}, "weights-in-twice-the-bytes", "2 KiB of the file"),
    ({"weight": torch.empty(0)}, "tensors-without-elements", "does not contain the model"),
    ({"head": torch.arange(2048.0) / 3, "embedding": torch.arange(2048.0) / 3}, "saved-twice", "8 KiB; if they"),
]


@pytest.mark.parametrize(("tensors", "name", "stake"), CHECKPOINTS)
def test_faults_in_a_checkpoint_are_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], name: str, stake: str
) -> None:
    found = _saved(tmp_path, **tensors)
    assert found.names == [name] and stake in found.findings[0].stake, str(found)


@pytest.mark.parametrize("count", [1 << 40, (1 << 63) - 1])
def test_a_small_file_with_an_expanded_tensor_is_examined_quickly(tmp_path: Path, count: int) -> None:
    """What is read is the memory, which is what the file has."""
    found = _saved(tmp_path, ones=torch.ones(1).expand(count), rows=torch.tensor([1.0, math.nan]).expand(1 << 40, 2))
    assert found.examined.endswith("with 2 tensors, 12 B") and found.names == ["values-not-finite"]
    assert found.findings[0].what == "rows holds NaN"


# ---------------------------------------------------------------------------------------------------------- environment


def _machine(
    monkeypatch: pytest.MonkeyPatch, cache: Path, *, gpu: bool = False, triton: str = "3.7.1",
    torch_version: str = "2.13.0", cxx: bool = True, interpret: str = "0",
) -> None:  # fmt: skip
    """Pretend that this machine is so; `triton` is "" where it is not installed."""

    def version(name: str) -> str:
        if not triton:
            raise importlib.metadata.PackageNotFoundError(name)
        return triton

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(compiler, "compiler", lambda: ["c++"] if cxx else None)
    monkeypatch.setattr(compiler, "FOLDER", cache / "no wheel")
    monkeypatch.setenv("HALFSTEP_CACHE", str(cache / "kernels"))
    monkeypatch.setenv("TRITON_INTERPRET", interpret)


@pytest.mark.parametrize(
    ("kernels", "changed"),
    [("C++", {}), ("C++", {"triton": ""}), ("Triton", {"gpu": True}), ("Triton", {"gpu": True, "cxx": False})],
)
def test_a_good_environment_has_no_findings(
    kernels: str, changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(monkeypatch, tmp_path, **changed)
    assert examine_environment().ok and facts()["kernels"] == kernels


def test_libraries_of_a_wheel_need_neither_compiler_nor_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, tmp_path, cxx=False)
    monkeypatch.setattr(compiler, "FOLDER", tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert examine_environment().ok and facts()["kernels"] == "C++"


ENVIRONMENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"torch_version": "2.10.0+cu128"}, "version-too-old", "torch 2.10.0+cu128"),
    ({"triton": "3.5.1"}, "version-too-old", "triton 3.5.1"),
    ({"gpu": True, "triton": ""}, "no-triton", "triton"),
    ({"cxx": False}, "no-compiler", "C++"),
    ({}, "cache-not-writable", "kernels"),
    ({"interpret": "1"}, "kernels-interpreted", "TRITON_INTERPRET"),
]


@pytest.mark.parametrize(("changed", "name", "where"), ENVIRONMENTS)
def test_faults_of_an_environment_are_named(
    changed: dict[str, Any], name: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(monkeypatch, tmp_path, **changed)
    if name == "cache-not-writable":  # root may write everywhere
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    found = examine_environment()
    assert [(one.name, Path(one.where).name) for one in found.findings] == [(name, where)], str(found)


def test_each_finding_has_a_row_in_the_docs_and_a_case() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8").partition("## Variables")[0]
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)} == TEXTS.keys()
    names = {case.name for case in doctor_cases.BREAKS} | set(doctor_ranks.ISSUES.values())
    names |= {name for _, name, _ in CHECKPOINTS} | {name for _, name, _ in ENVIRONMENTS}
    assert TEXTS.keys() <= names
