"""`halfstep bench gpu` as far as a machine without a GPU can tell: its checks, its arguments, what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_model import Model

from halfstep.bench import gpu, gpu_checks
from halfstep.kernels import backend

CPU = torch.device("cpu")


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
    assert f"expected a number above 0, but got {value!r}" in capsys.readouterr().err


@pytest.mark.skipif(not backend.interpreting(), reason="needs TRITON_INTERPRET=1")
def test_the_smoke_part_passes_under_the_interpreter() -> None:
    result = gpu_checks.smoke(CPU)
    assert result["failed"] == []
    assert {name for name, check in result.items() if name != "failed"} == {"cast", "check", "softmax", "adam"}


def test_a_failing_check_is_recorded_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "_expect", lambda equal, what: 1 / 0)
    result = gpu_checks.smoke(CPU)
    assert result["failed"] == ["cast", "check", "adam"]
    assert result["softmax"]["status"] == "passed"
    assert "ZeroDivisionError" in result["cast"]["error"]


def test_whole_steps_have_the_bits_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "STEP_SIZES", (1, 15, 1000, 4097, 0))
    assert gpu_checks.steps(CPU)["failed"] == []


def test_steps_that_need_a_gpu_pass_on_a_model_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs between eager steps, two streams, and nothing waits: on the model these are the checks that a GPU gets."""
    monkeypatch.setattr(gpu_checks, "STEP_SIZES", (1, 15, 300, 0))
    with Model("random") as model:
        result = gpu_checks.steps(model.device)
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
    monkeypatch.setattr(gpu_checks, "STEP_SIZES", (1, 15, 40))
    usual = gpu_checks._Training.step

    def waiting(training: Any) -> None:
        usual(training)
        training.scaler.get_scale()

    monkeypatch.setattr(gpu_checks._Training, "step", waiting)
    with Model("late") as model:
        failed = gpu_checks.steps(model.device)["failed"]
    assert failed == [
        "no step waits for the device",
        "no way of unscaling and clipping waits",
        "CUDA graph replays the same bits",
        "CUDA graphs between eager steps",
        "steps on two streams",
    ]


def test_a_bit_of_difference_between_two_trainings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "STEP_SIZES", (1, 15, 1000))
    one, other = gpu_checks._Training(CPU), gpu_checks._Training(CPU)
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


def test_the_environment_names_versions_and_no_machine() -> None:
    found = gpu.environment()
    assert found["torch"] == torch.__version__
    assert found["devices"] == [] or found["devices"][0]["memory_bytes"] > 0
    assert not {"host", "hostname", "user", "path"} & set(found)


@pytest.mark.parametrize("failing", [None, "smoke", "steps", "figures"])
def test_a_run_goes_on_after_a_failure(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[list[str]] = []

    def part(name: str) -> Any:
        def checked(device: torch.device) -> dict[str, Any]:
            bad = name == failing
            return {"a check": {"status": "failed" if bad else "passed", "seconds": 0.1}, "failed": [name] * bad}

        checked.__name__ = name
        return checked

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu, "environment", lambda: {"torch": torch.__version__})
    for name in ("smoke", "steps"):
        monkeypatch.setattr(gpu_checks, name, part(name))
    monkeypatch.setattr(gpu.run, "main", lambda argv: measured.append(argv) or int(failing == "figures"))
    assert gpu.main(["--out", str(tmp_path), "--minutes", "2"]) == (0 if failing is None else 1)
    assert measured == [["--out", str(tmp_path), "--minutes", "2.0"]]
    written = json.loads((tmp_path / "checks.json").read_text())
    assert written["failed"] == ([failing] if failing in ("smoke", "steps") else [])
    assert written["environment"] == {"torch": torch.__version__}
    assert capsys.readouterr().out.count("a check") == 2
