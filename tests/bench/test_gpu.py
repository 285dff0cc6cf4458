"""`halfstep bench gpu` on the model of a GPU: what its checks detect, and what is on disk when it is killed."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from halfstep.bench import gpu, gpu_checks, harness, timing
from halfstep.bench.cases import GROUPS, Sizes, cases
from halfstep.kernels import backend

CPU = torch.device("cpu")
SOFTMAX = Sizes(2**10, (16, 64), (), (), 0, slow=False)


def test_without_a_gpu_it_says_what_to_use_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "no GPU" in message and "halfstep bench run" in message and "halfstep bench audit" in message
    assert not (tmp_path / "out").exists()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "CHECKED", Sizes(2**12, (100,), (99,), (1, 3), 0, slow=False))


@pytest.mark.parametrize("group", GROUPS)
def test_the_bits_of_every_halfstep_provider_are_compared(group: str) -> None:
    """On the CPU, whose kernels are C++."""
    ours = [name for case in cases((group,), gpu_checks.CHECKED) for name in case.providers if name[:8] == "halfstep"]
    assert gpu_checks.bits(group, CPU) == {"compared": len(ours)} and len(ours) >= 3


def test_a_one_bit_difference_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    values = gpu_checks._values

    def flipped(case: Any, provider: str, device: torch.device) -> Any:
        weights = values(case, provider, device)
        if backend.chosen() == "reference" and provider == "halfstep split24":
            weights[-1].view(torch.int32)[0, 7] ^= 1
        return weights

    monkeypatch.setattr(gpu_checks, "_values", flipped)
    with pytest.raises(AssertionError, match=r"bf16 moments, 1 tensors: halfstep split24.*reference's: values \[0\]"):
        gpu_checks.bits("adam", CPU)


def test_largest_cases_come_first_and_compiled_ones_last() -> None:
    cases = gpu_checks.timings(quick=True)
    compiled = [any(map(gpu_checks.compiles, case.providers)) for case in cases.values()]
    assert compiled == sorted(compiled) == [name.endswith(", compiled") for name in cases]
    assert 0 < sum(compiled) < len(cases) and next(iter(cases)).startswith("time of adamw")


def test_a_limited_time_goes_to_the_largest_cases_first() -> None:
    order = [(case.operation, case.size["columns"]) for case in gpu_checks.largest_first(cases(("softmax",), SOFTMAX))]
    forward, backward = "softmax forward", "softmax backward"
    assert order == [(name, columns) for columns in (64, 16) for name in (forward, forward, backward, backward)]


def statuses(out: Path) -> dict[str, str]:
    return {name: record["status"] for name, record in gpu_checks.records(out / "checks.jsonl").items()}


def test_the_outcome_of_each_check_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process of the command does: a measurement of halfstep on the CPU, and a check that fails."""
    measure, time_of = harness.measure, "time of adamw, fp32, 10 tensors"

    def measured(case: harness.Case, device: torch.device, **options: Any) -> list[harness.Result]:
        ours = {name: make for name, make in case.providers.items() if harness.ours(name)}
        return measure(replace(case, providers=ours), CPU, **options)

    monkeypatch.setattr(harness, "measure", measured)
    monkeypatch.setattr(timing, "clock_for", lambda device: timing.CpuClock())
    monkeypatch.setattr(
        gpu_checks, "sizes_for", lambda device, quick: Sizes(2**12, (256,), (2**10,), (1, 10), 0, False)
    )
    monkeypatch.setattr(gpu_checks.run, "SECONDS", {False: 0.0})
    monkeypatch.setattr(gpu_checks, "machine", lambda device: 1 / 0)
    monkeypatch.setattr(gpu_checks.ctypes, "CDLL", mock.MagicMock())
    gpu_checks.main([str(tmp_path / "checks.jsonl"), "0", "machine", time_of], CPU)
    assert statuses(tmp_path) == {"machine": "failed", time_of: "passed"}
    records = gpu_checks.records(tmp_path / "checks.jsonl")
    assert "ZeroDivisionError" in records["machine"]["error"]
    assert [result["provider"] for result in records[time_of]["detail"]["results"]] == ["halfstep"]


# The processes of the command, with other checks: some pass, one hangs, one ends its process.
PROCESS = """
import os, sys, time, torch
from halfstep.bench import gpu_checks
from halfstep.bench.gpu_checks import Check
runs = {
    "machine": lambda device: None,
    "dies": lambda device: os.kill(os.getpid(), 11) if os.environ.get("FAULTY") else None,
    "hangs": lambda device: time.sleep(600) if os.environ.get("FAULTY") else None,
    "last": lambda device: None,
}
gpu_checks.checks = lambda folder, quick: {name: Check(run, "", 1.0) for name, run in runs.items()}
gpu_checks.main(sys.argv[1:], torch.device("cpu"))
"""


def test_hanging_and_crashing_checks_do_not_prevent_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {"machine": "first", "dies": "bits", "hangs": "times", "last": "times"}
    checks = {name: gpu_checks.Check(lambda device: None, stage) for name, stage in stages.items()}
    monkeypatch.setattr(gpu_checks, "checks", lambda folder, quick: checks)
    monkeypatch.setattr(gpu, "PROCESS", [sys.executable, "-c", PROCESS])
    for name, answer in {"is_available": True, "current_device": 0, "get_device_name": "model of a GPU"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, answer=answer: answer)
    monkeypatch.setenv("FAULTY", "1")
    arguments = ["--out", str(tmp_path)]
    assert gpu.main(arguments) == 1
    assert statuses(tmp_path) == {"machine": "passed", "hangs": "stopped", "dies": "stopped", "last": "passed"}
    printed = capsys.readouterr().out
    assert "hangs: stopped, it took too long" in printed
    assert "dies: stopped, its process ended with -11" in printed
    assert "2 of 4 checks and times are left: the same command continues" in printed
    # A line that was cut off, and records of other code, do not count.
    with (tmp_path / "checks.jsonl").open("a") as file:
        file.write(json.dumps({"check": "hangs", "status": "passed", "code": "other"}) + '\n{"check": "hangs')
    assert gpu.main([*arguments, "--minutes", "0.001"]) == 1, "too short"
    monkeypatch.delenv("FAULTY")
    capsys.readouterr()
    assert gpu.main(arguments) == 0
    assert "model of a GPU: 2 of 4 checks" in capsys.readouterr().out
    assert statuses(tmp_path) == dict.fromkeys(checks, "passed")
