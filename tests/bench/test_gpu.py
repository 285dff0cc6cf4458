"""`halfstep bench gpu` as far as a machine without a GPU can tell: its parts, its time limits, what it writes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stream_model import Model

from halfstep.bench import gpu
from halfstep.kernels import backend

CPU = torch.device("cpu")

SUITE = """
import os, time
import pytest, torch

def test_a_passes():
    pass

def test_b_fails():
    assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="not today")
def test_c_is_skipped():
    pass

def test_d_hangs():
    time.sleep(600)

def test_e_after_the_hang():
    pass

def test_f_ends_the_process():
    os.kill(os.getpid(), 11)

def test_g_breaks_the_context():
    def lost():
        raise RuntimeError("an illegal memory access was encountered")
    torch.cuda.is_available, torch.cuda.synchronize = lambda: True, lost
    raise RuntimeError("CUDA error")

def test_h_in_a_fresh_process():
    assert not torch.cuda.is_available()
"""


def test_without_a_gpu_it_says_what_to_use_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "no GPU" in message and "halfstep bench run" in message and "halfstep bench host" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon"])
def test_bad_minutes_are_named(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", "x", "--minutes", value]) == 2
    assert f"{value!r} is not allowed; allowed are numbers of minutes above 0" in capsys.readouterr().err


@pytest.mark.skipif(not backend.interpreting(), reason="needs TRITON_INTERPRET=1")
def test_the_smoke_part_passes_under_the_interpreter() -> None:
    result = gpu.smoke(CPU)
    assert result["failed"] == []
    assert {name for name, check in result.items() if name != "failed"} == {"cast", "check", "softmax", "adam"}


def test_a_failing_check_is_recorded_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_expect", lambda equal, what: 1 / 0)
    result = gpu.smoke(CPU)
    assert result["failed"] == ["cast", "check", "adam"]
    assert result["softmax"]["status"] == "passed"
    assert "ZeroDivisionError" in result["cast"]["error"]


def test_whole_steps_have_the_bits_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STEP_SIZES", (1, 15, 1000, 4097, 0))
    assert gpu.steps(CPU)["failed"] == []


def test_steps_that_need_a_gpu_pass_on_a_model_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs between eager steps, two streams, and nothing waits: on the model these are the checks that a GPU gets."""
    monkeypatch.setattr(gpu, "STEP_SIZES", (1, 15, 300, 0))
    with Model("random") as model:
        result = gpu.steps(model.device)
    assert result["failed"] == []
    assert set(result) - {"failed"} == {
        "eager steps",
        "same bits as the reference",
        "no step waits for the device",
        "no way of unscaling and clipping waits",
        "CUDA graph replays the same bits",
        "CUDA graphs between eager steps",
        "steps on two streams",
    }


def test_steps_that_wait_fail_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STEP_SIZES", (1, 15, 40))
    usual = gpu._Training.step

    def waiting(training: Any) -> None:
        usual(training)
        training.scaler.get_scale()

    monkeypatch.setattr(gpu._Training, "step", waiting)
    with Model("late") as model:
        failed = gpu.steps(model.device)["failed"]
    assert failed == [
        "no step waits for the device",
        "no way of unscaling and clipping waits",
        "CUDA graph replays the same bits",
        "CUDA graphs between eager steps",
        "steps on two streams",
    ]


def test_a_bit_of_difference_between_two_trainings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STEP_SIZES", (1, 15, 1000))
    one, other = gpu._Training(CPU), gpu._Training(CPU)
    assert one.differences(other) == []
    other.optimizer.state[other.parameters[3]]["exp_avg"].view(torch.int32)[4] ^= 1
    other.parameters[4].detach().view(torch.int16)[2] ^= 1
    other.scaler.update(4096.0)
    assert [text.partition(" (")[0] for text in one.differences(other)] == [
        "parameter 4",
        "exp_avg of parameter 3",
        "master of parameter 4",  # which takes up the weight that was written
        "scale 2048.0 and 4096.0",
    ]


def test_tests_that_hang_or_break_the_gpu_do_not_keep_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_gpu.py").write_text(SUITE)
    monkeypatch.setattr(gpu, "TEST_SECONDS", 8)
    result = gpu.run_tests(120, tmp_path, tmp_path / "tests", processes=2, marker="not none")
    outcome = {test.rpartition("::")[2]: entry[0] for test, entry in result["tests"].items()}
    assert outcome == {
        "test_a_passes": "passed",
        "test_b_fails": "failed",
        "test_c_is_skipped": "skipped",
        "test_d_hangs": "unfinished",
        "test_e_after_the_hang": "passed",
        "test_f_ends_the_process": "unfinished",
        "test_g_breaks_the_context": "failed",
        "test_h_in_a_fresh_process": "passed",
    }
    assert (result["collected"], result["not_run"]) == (8, 0)
    messages = {entry["test"].rpartition("::")[2]: entry["message"] for entry in result["failed"]}
    assert "one is not two" in messages["test_b_fails"]
    assert "it hung or ended the process" in messages["test_d_hangs"]
    assert "The GPU's context was lost: an illegal memory access" in messages["test_g_breaks_the_context"]
    text = gpu._tests_text(result)
    assert text.startswith("2 failed, 3 passed, 1 skipped, 2 unfinished\n") and "UNFINISHED" in text
    assert "test_d_hangs" in "".join(path.read_text() for path in tmp_path.glob("*.traceback"))


def test_tests_end_when_their_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_gpu.py").write_text(
        "import time\ndef test_a():\n    time.sleep(600)\ndef test_b():\n    pass\n"
    )
    start = time.monotonic()
    result = gpu.run_tests(8, tmp_path, tmp_path / "tests", processes=1, marker="not none")
    assert time.monotonic() - start < 60
    assert result["not_run"] == 1
    assert [entry["outcome"] for entry in result["failed"]] == ["unfinished", "not run"]


def test_missing_tests_or_pytest_are_said_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no tests in this installation" in gpu.run_tests(1, tmp_path, tmp_path, 1)["skipped"]
    (tmp_path / "test_gpu.py").write_text("")
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    result = gpu.run_tests(1, tmp_path, tmp_path, 1)
    assert result == {"skipped": "pytest is not installed: the tests were not run"}
    assert gpu._tests_text(result) == "pytest is not installed: the tests were not run\n"


def test_a_part_over_its_limit_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    code = "import time; print('begun', flush=True); time.sleep(600)"
    status, seconds = gpu.run_part([sys.executable, "-c", code], 3.0, log)
    assert status is None and seconds < 30
    assert "begun" in log.read_text()
    part = gpu._verdict("smoke", status, seconds, 3.0, {}, log)
    assert (part["status"], part["why"]) == ("failed", "it was ended at its time limit")
    assert "begun" in part["output_tail"]


PARTS = ["environment", "smoke", "steps", "tests", "benchmark step,adam", "benchmark softmax"]
PARTS += ["benchmark cast,unscale", "report"]


@pytest.mark.parametrize("failing", [None, *PARTS])
def test_a_run_goes_on_after_a_failure_within_its_time(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def run_part(command: Any, limit: float, log: Path) -> tuple[int | None, float]:
        limits.append(limit)
        folder = Path(command[command.index("--out") + 1])
        stage, argument = (command[command.index(option) + 1] for option in ("--stage", "--argument"))
        name = f"{stage} {argument}" if stage == "benchmark" else stage
        with open(log, "a") as file:
            file.write(f"words of {name}\n")
        if name == failing:
            return None, 0.1
        if stage == "report":
            for file_name in ("benchmark.json", "table.md", "roofline.png", "step.png"):
                (Path(argument) / file_name).write_text("")
        (folder / f"{stage}.json").write_text('{"failed": []}')
        return 0, 0.1

    monkeypatch.setattr(gpu, "run_part", run_part)
    out = tmp_path / "out"
    out.mkdir()
    assert gpu._run(out, 450.0) == (0 if failing is None else 1)
    report = json.loads((out / "results.json").read_text())
    assert report["failed"] == ([] if failing is None else [failing])
    assert [part["part"] for part in report["parts"]] == PARTS
    names = {path.name for path in out.iterdir()}
    assert {"results.json", "environment.json", "tests.txt", "log.txt"} <= names
    assert len(names) <= 8
    if failing is not None:
        (bad,) = [part for part in report["parts"] if part["status"] == "failed"]
        assert bad["why"] == "it was ended at its time limit"
        assert f"words of {failing}" in bad["output_tail"]
    assert max(limits) <= 450


def test_the_benchmark_measures_the_largest_first_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "CASE_SECONDS", 0.01)
    file = tmp_path / "benchmark-cast.json"
    found = gpu.benchmark(CPU, ["cast"], 0.0, file, quick=True)
    assert found["cases"] == 0 and found["left_out"] > 3 and not file.exists()
    with pytest.raises(RuntimeError, match="measured nothing"):
        gpu.draw_report(tmp_path, tmp_path)
    found = gpu.benchmark(CPU, ["cast"], 2.0, file, quick=True)
    assert found["failed"] == [] and found["cases"] >= 1
    rows = json.loads(file.read_text())["results"]
    assert rows and rows[-1]["provider"]
    out = tmp_path / "out"
    out.mkdir()
    gpu.draw_report(tmp_path, out)
    assert {"benchmark.json", "table.md"} <= {path.name for path in out.iterdir()}
    assert len(list(out.iterdir())) <= 4
    assert len(json.loads((out / "benchmark.json").read_text())["results"]) == len(rows)


def test_order_of_the_benchmark() -> None:
    cases = [
        SimpleNamespace(operation=operation, dtype="bf16", size=size) for operation in ("a", "b") for size in (1, 2, 3)
    ]
    assert [(cases[at].operation, cases[at].size) for at in gpu._largest_first(cases)] == [
        ("a", 3),
        ("b", 3),
        ("a", 2),
        ("b", 2),
        ("a", 1),
        ("b", 1),
    ]


def test_the_environment_names_versions_and_no_machine() -> None:
    found = gpu.environment()
    assert found["torch"] == torch.__version__
    assert found["devices"] == [] or found["devices"][0]["memory_bytes"] > 0
    assert not {"host", "hostname", "user", "path"} & set(found)
