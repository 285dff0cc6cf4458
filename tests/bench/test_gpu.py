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

from halfstep.bench import gpu, gpu_checks
from halfstep.bench.cases import Sizes

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "bench_gpu_on_model.py"
AMP = ("AMP steps", "AMP steps, gradients moved", "AMP steps, captured", "AMP steps on two streams")


def test_without_a_gpu_it_says_what_to_use_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "no GPU" in message and "halfstep bench run" in message and "halfstep bench audit" in message
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("check", AMP)
def test_amp_steps_pass_on_a_model_of_a_gpu_and_fail_where_they_wait(
    check: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "STEP_SIZES", (1, 15, 40, 0))
    run, step = gpu_checks.checks(Path(), True)[check].run, gpu_checks.Training.step

    def waiting(training: Any) -> None:
        step(training)
        training.scaler.get_scale()

    if waits:
        monkeypatch.setattr(gpu_checks.Training, "step", waiting)
        with Model("late") as model, pytest.raises(RuntimeError, match=r"synchronizing|previous error during capture"):
            run(model.device)
    else:
        with Model("random") as model:
            run(model.device)


def test_a_bit_of_difference_between_two_trainings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "STEP_SIZES", (1, 15, 1000))
    one, other = gpu_checks.Training(CPU), gpu_checks.Training(CPU)
    assert gpu_checks.different(one.state(), other.state()) == []
    other.optimizer.state[other.parameters[3]]["exp_avg"].view(torch.int32)[4] ^= 1
    other.parameters[4].detach().view(torch.int16)[2] ^= 1
    other.scaler.update(4096.0)
    # The master takes up the weight that was written.
    expected = {"value of parameter 4", "exp_avg of parameter 3", "scale"}
    names = gpu_checks.different(one.state(), other.state())
    assert expected <= set(names) and {name.split(" of ")[-1] for name in names} <= {
        "parameter 3",
        "parameter 4",
        "scale",
    }


def test_a_bit_of_difference_in_one_layout_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "SHAPES", ((17,), (5,), (5, 0), (63, 65), (7,), (2, 2500)))
    assert gpu_checks.adam(torch.bfloat16, "split24", CPU) == {"layouts": 6}
    trained, calls = gpu_checks._trained, []

    def other(device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        tensors = trained(device, dtype, options)
        if options["state_dtype"] == "8bit" and not options["amsgrad"] and not calls:
            tensors["exp_avg of parameter 5"].view(-1)[7] ^= 1
            calls.append(options)
        return tensors

    monkeypatch.setattr(gpu_checks, "_trained", other)
    message = r"not the reference's: \[.*'split24', 'state_dtype': '8bit'.*: \['exp_avg of parameter 5'\]"
    with pytest.raises(AssertionError, match=message):
        gpu_checks.adam(torch.bfloat16, "split24", CPU)


def test_every_kind_of_master_and_state_is_checked() -> None:
    masters = {master for _, master in gpu_checks.MASTERS}
    assert masters == {"auto", "split", "split24", "full", None}
    states = {
        (options["state_dtype"], options["rounding"]) for master in masters for options in gpu_checks.layouts(master)
    }
    assert {dtype for dtype, _ in states} == {torch.float32, torch.bfloat16, "8bit"}
    assert ("8bit", "stochastic") in states and {rounding for _, rounding in states} == {"nearest", "stochastic"}


def test_the_largest_come_first_and_what_compiles_last() -> None:
    cases = gpu_checks.timings(quick=True)
    compiled = [any(map(gpu_checks.compiles, case.providers)) for case in cases.values()]
    assert compiled == sorted(compiled) == [name.endswith(", compiled") for name in cases]
    assert 0 < sum(compiled) < len(cases) and next(iter(cases)).startswith("time of adamw")


def test_kernels_are_compiled_by_doing_every_job_of_a_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "sizes_for", lambda device, quick: Sizes(2**12, (256,), (2**10,), (1, 10), 0))
    done: list[tuple[str, str]] = []
    monkeypatch.setattr(gpu_checks.harness, "check", lambda case, inputs, name: done.append((case.operation, name)))
    gpu_checks.checks(Path(), quick=True)["kernels for the times of unscale"].run(torch.device("cpu"))
    assert set(done) >= {("check", "halfstep"), ("unscale", "halfstep"), ("check", "torch foreach")}
    assert "torch.compile" not in {name for _, name in done}


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
    names = killed_after_each_step(tmp_path / "out", r"^machine$|NaN|captured$|^time of adamw, fp32, 10 tensors$")
    assert names[:3] == ["machine", "NaN patterns", "AMP steps, captured"] and names[3].startswith("time of adamw")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["device"] == "model of a GPU" and results["left_out"] == 0
    assert [result["provider"] for result in results["results"]] == ["halfstep"]


@pytest.mark.exhaustive
def test_the_whole_command_killed_after_each_of_its_steps(tmp_path: Path) -> None:
    names = killed_after_each_step(tmp_path / "out", r"^(?!time of|kernels for)|^time of adamw, fp32, 10 tensors$")
    assert names[:3] == ["machine", "NaN patterns", "root and quotient"]
    assert "tests marked gpu" in names and sum(name.startswith("bits of Adam") for name in names) == 7
    assert names == list(dict.fromkeys(names))


def test_a_check_that_hangs_and_one_that_ends_its_process_do_not_keep_others_from_running(tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = {"BENCH_GPU_ONLY": "^machine|NaN|root|streams$"}
    faults = {"BENCH_GPU_HANGS": "NaN patterns", "BENCH_GPU_LIMIT": "15", "BENCH_GPU_DIES": "root and quotient"}
    process = command(out, **settings, **faults)
    text = process.communicate()[0]
    assert process.returncode == 1, text
    assert outcomes(out) == [
        ("machine", "passed"),
        ("NaN patterns", "stopped"),
        ("root and quotient", "stopped"),
        ("AMP steps on two streams", "passed"),
    ]
    assert re.search(r"NaN patterns: stopped, it took more than 15 s", text)
    assert "root and quotient: stopped, its process ended with status -11" in text
    # A line that was cut off, and records of other code, do not count.
    with (out / "checks.jsonl").open("a") as file:
        file.write(json.dumps({"check": "NaN patterns", "status": "passed", "code": "other"}) + '\n{"check": "root and')
    process = command(out, **settings)
    assert "2 of 4 checks" in process.communicate()[0] and process.returncode == 0
    records = gpu_checks.records(out / "checks.jsonl")
    assert {name: record["status"] for name, record in records.items()} == dict.fromkeys(records, "passed")
    assert len(records) == 4


def test_minutes_bound_the_whole_command(tmp_path: Path) -> None:
    process = command(tmp_path / "out", minutes=0.5, BENCH_GPU_ONLY="^machine|NaN", BENCH_GPU_HANGS="NaN patterns")
    assert "1 of 2 checks and times are left: the same command continues" in process.communicate(timeout=120)[0]
    assert outcomes(tmp_path / "out") == [("machine", "passed")]
