"""`tests/support/run_gpu_tests.py`: a test that hangs or breaks the GPU's context does not keep others from running."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import run_gpu_tests

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


def test_tests_that_hang_or_break_the_gpu_do_not_keep_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_gpu.py").write_text(SUITE)
    monkeypatch.setattr(run_gpu_tests, "TEST_SECONDS", 8)
    result = run_gpu_tests.run_tests(120, tmp_path, tmp_path / "tests", processes=2, marker="not none")
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
    text = run_gpu_tests.text_of(result)
    assert text.startswith("2 failed, 3 passed, 1 skipped, 2 unfinished\n") and "UNFINISHED" in text
    assert "test_d_hangs" in "".join(path.read_text() for path in tmp_path.glob("*.traceback"))


def test_tests_end_when_their_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_gpu.py").write_text(
        "import time\ndef test_a():\n    time.sleep(600)\ndef test_b():\n    pass\n"
    )
    start = time.monotonic()
    result = run_gpu_tests.run_tests(8, tmp_path, tmp_path / "tests", processes=1, marker="not none")
    assert time.monotonic() - start < 60
    assert result["not_run"] == 1
    assert [entry["outcome"] for entry in result["failed"]] == ["unfinished", "not run"]


@pytest.mark.parametrize("failed", [[], [{"test": "test_b", "outcome": "failed", "message": "one is not two"}]])
def test_the_outcome_is_written_and_is_the_exit_status(
    failed: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[float] = []

    def run_tests(seconds: float, folder: Path, tests: Path, processes: int) -> dict[str, Any]:
        assert folder.is_dir() and any(tests.rglob("test_gpu.py")) and processes == 3
        limits.append(seconds)
        return {"counts": {"passed": 2}, "failed": failed, "tests": {"test_a": ["passed", 0.5]}}

    monkeypatch.setattr(run_gpu_tests, "run_tests", run_tests)
    out = tmp_path / "a" / "b"
    assert run_gpu_tests.main(["--out", str(out), "--minutes", "2", "--processes", "3"]) == bool(failed)
    assert limits == [120.0] and capsys.readouterr().out == "2 passed\n"
    assert ("FAILED test_b\none is not two" in (out / "tests.txt").read_text()) is bool(failed)
    assert json.loads((out / "tests.json").read_text())["failed"] == failed
