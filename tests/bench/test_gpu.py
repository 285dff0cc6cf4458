"""`halfstep bench gpu` on the model of a GPU: what its checks find, and what is on the disk when it is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_model import Model

import halfstep
from halfstep.bench import gpu, gpu_checks
from halfstep.bench.cases import GROUPS, Sizes, cases
from halfstep.kernels import backend

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
SOFTMAX = Sizes(2**10, (16, 64), (), (), 0, slow=False)
PROGRAM = ROOT / "tests" / "support" / "bench_gpu_on_model.py"


def test_without_a_gpu_it_says_what_to_use_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "no GPU" in message and "halfstep bench run" in message and "halfstep bench audit" in message
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------------------- checks


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "CHECKED", Sizes(2**12, (100,), (99,), (1, 3), 0, slow=False))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("way", gpu_checks.WAYS)
def test_steps_pass_on_a_model_of_a_gpu_and_fail_where_they_wait(
    way: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, step = gpu_checks.checks(Path(), True)[f"bits of steps {way}"].run, halfstep.GradScaler.step

    def waiting(scaler: Any, optimizer: Any) -> None:
        step(scaler, optimizer)
        scaler.get_scale()

    if waits:
        monkeypatch.setattr(halfstep.GradScaler, "step", waiting)
        with Model("late") as model, pytest.raises(RuntimeError, match=r"synchronizing|previous error during capture"):
            run(model.device)
    else:
        with Model("random") as model:
            assert run(model.device) == {"compared": 6}


@pytest.mark.parametrize("group", GROUPS)
def test_the_bits_of_every_job_of_ours_are_compared(group: str) -> None:
    """On the CPU, whose kernels are C++."""
    ours = [name for case in cases((group,), gpu_checks.CHECKED) for name in case.providers if name[:8] == "halfstep"]
    assert gpu_checks.bits(group, None, CPU) == {"compared": len(ours)} and len(ours) >= 4


def test_a_bit_of_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    values = gpu_checks._values

    def flipped(case: Any, provider: str, device: torch.device, calls: Any) -> list[Any]:
        (weights,) = values(case, provider, device, calls)
        if backend.chosen() == "reference" and provider == "halfstep split24":
            weights[-1].view(torch.int32)[0, 7] ^= 1
        return [weights]

    monkeypatch.setattr(gpu_checks, "_values", flipped)
    with pytest.raises(AssertionError, match=r"bf16 moments, 1 tensors: halfstep split24.*reference's: values \[0\]"):
        gpu_checks.bits("adam", None, CPU)


def test_the_largest_come_first_and_what_compiles_last() -> None:
    cases = gpu_checks.timings(quick=True)
    compiled = [any(map(gpu_checks.compiles, case.providers)) for case in cases.values()]
    assert compiled == sorted(compiled) == [name.endswith(", compiled") for name in cases]
    assert 0 < sum(compiled) < len(cases) and next(iter(cases)).startswith("time of adamw")


def test_a_limited_time_goes_to_the_largest_cases_first() -> None:
    order = [(case.operation, case.size["columns"]) for case in gpu_checks.largest_first(cases(("softmax",), SOFTMAX))]
    forward, backward = "softmax forward", "softmax backward"
    assert order == [(name, columns) for columns in (64, 16) for name in (forward, forward, backward, backward)]


# -------------------------------------------------------------------------------------------------------- on the disk


def command(out: Path, minutes: float = 30, **variables: str) -> subprocess.Popen[str]:
    # As from a checkout that is not installed.
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'support'}", **variables}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), "--out", str(out), "--minutes", str(minutes)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out.parent,
    )  # fmt: skip


def outcomes(out: Path) -> list[tuple[str, str]]:
    file = out / "checks.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(line["check"], line["status"]) for line in lines]


def killed_after_each_step(out: Path, only: str) -> list[str]:
    """Start the command again and again, and kill it when it says that the second step of this call begins."""
    calls: list[str] = []
    while True:
        process = command(out, BENCH_GPU_ONLY=only)
        begun: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith(" ...\n"):
                begun.append(line.removesuffix(" ...\n"))
            if len(begun) == 2:
                process.send_signal(signal.SIGKILL)
                break
        process.communicate()
        calls += begun[:1]
        assert outcomes(out) == [(name, "passed") for name in calls], "what was done is on the disk, once"
        if len(begun) < 2:
            return calls


def test_what_was_done_is_on_the_disk_when_the_command_is_killed(tmp_path: Path) -> None:
    names = killed_after_each_step(tmp_path / "out", "^machine$|^time of adamw, fp32, 10 tensors$")
    assert names[0] == "machine" and names[1].startswith("time of adamw")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["device"] == "model of a GPU" and results["left_out"] == 0
    assert [result["provider"] for result in results["results"]] == ["halfstep"]


@pytest.mark.exhaustive
def test_a_check_that_hangs_and_one_that_ends_its_process_do_not_keep_others_from_running(tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = {"BENCH_GPU_ONLY": "^machine|bits of cast|captured|streams$"}
    faults = {"BENCH_GPU_HANGS": "bits of cast", "BENCH_GPU_LIMIT": "8", "BENCH_GPU_DIES": "bits of steps captured"}
    process = command(out, **settings, **faults)
    text = process.communicate()[0]
    assert process.returncode == 1, text
    assert outcomes(out) == [
        ("machine", "passed"),
        ("bits of cast", "stopped"),
        ("bits of steps captured", "stopped"),
        ("bits of steps on two streams", "passed"),
    ]
    assert re.search(r"bits of cast: stopped, it took more than 8 s", text)
    assert "bits of steps captured: stopped, its process ended with status -11" in text
    # A line that was cut off, and records of other code, do not count.
    with (out / "checks.jsonl").open("a") as file:
        file.write(json.dumps({"check": "bits of cast", "status": "passed", "code": "other"}) + '\n{"check": "bits of')
    process = command(out, **settings)
    assert "2 of 4 checks" in process.communicate()[0] and process.returncode == 0
    records = gpu_checks.records(out / "checks.jsonl")
    assert {name: record["status"] for name, record in records.items()} == dict.fromkeys(records, "passed")
    assert len(records) == 4


@pytest.mark.exhaustive
def test_minutes_bound_the_whole_command(tmp_path: Path) -> None:
    process = command(
        tmp_path / "out", minutes=0.3, BENCH_GPU_ONLY="^machine|bits of cast", BENCH_GPU_HANGS="bits of cast"
    )
    assert "1 of 2 checks and times are left: the same command continues" in process.communicate(timeout=120)[0]
    assert outcomes(tmp_path / "out") == [("machine", "passed")]
