"""`halfstep bench host`: the count of launches is exact, whatever the machine; times are only there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep.bench import host_cost

needs_stub = pytest.mark.skipif(
    sys.platform != "linux" or host_cost._c_compiler() is None, reason="needs Linux and a C compiler"
)


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str, int], dict[str, Any]]:
    pytest.importorskip("triton")
    measured = host_cost.measure(counts=(1, 3), seconds=0.01)
    return {(row["provider"].split()[0], row["job"], row["tensors"]): row for row in measured}


@needs_stub
def test_every_job_of_ours_is_measured(rows: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    ours = {key: row for key, row in rows.items() if key[0] == "halfstep"}
    assert {job for _, job, _ in ours} == {
        "adamw",
        "adamw, moved",
        "amp step",
        "amp step, moved",
        "cast",
        "check",
        "softmax",
    }
    for key, row in ours.items():
        assert row["problem"] == "", key
        assert 0 < row["low_us"] <= row["host_us"] <= row["high_us"], key


@needs_stub
@pytest.mark.parametrize(("job", "launches"), [("adamw", 2), ("check", 2), ("amp step", 5), ("cast", 1)])
def test_our_launches_do_not_grow_with_the_tensors(
    job: str, launches: int, rows: dict[tuple[str, str, int], dict[str, Any]]
) -> None:
    assert rows["halfstep", job, 1]["launches"] == rows["halfstep", job, 3]["launches"] == launches
    # The results of a list that is cast lie elsewhere each time, and where is sent; one tensor alone needs no table.
    assert rows["halfstep", job, 1]["torch_kernels"] == 0
    assert rows["halfstep", job, 3]["torch_kernels"] == (1 if job == "cast" else 0)


@needs_stub
@pytest.mark.parametrize(("module", "provider"), [("optimi", "torch-optimi"), ("flashoptim", "flashoptim")])
def test_peers_launch_once_per_tensor(
    module: str, provider: str, rows: dict[tuple[str, str, int], dict[str, Any]]
) -> None:
    pytest.importorskip(module)
    for tensors in (1, 3):
        row = rows[provider, "adamw", tensors]
        assert (row["problem"], row["launches"]) == ("", tensors)


def test_the_kernels_that_are_timed_are_those_that_a_gpu_runs() -> None:
    pytest.importorskip("triton")
    code = (
        "from halfstep.bench import host_cost; host_cost._take_cpu_tensors()\n"
        "import torch\n"
        "from halfstep.kernels import backend, rounding\n"
        "print(rounding.INTERPRETED.value, backend.resolve(torch.device('cpu'), 'cast'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.returncode) == ("False triton\n", 0), done.stderr


@needs_stub
def test_the_stub_stays_in_its_own_process(rows: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    from halfstep.kernels import backend

    assert backend.chosen() == "auto"
    assert "StubbedDriver" not in {type(driver).__name__ for driver in vars(backend.triton.runtime.driver).values()}
    assert "halfstep-host" not in Path("/proc/self/maps").read_text()


def test_a_missing_compiler_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert host_cost.main(["--tensors", "1"]) == 1
    message = capsys.readouterr().err
    assert "no C compiler found (CC is 'no-such-compiler'" in message
    assert "install it or point CC at one" in message


def test_a_bad_number_is_named_with_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert host_cost.main(["--tensors", "0"]) == 2
    assert "argument --tensors: expected an integer of at least 1, but got '0'" in capsys.readouterr().err


def test_the_command_prints_every_row_and_fails_where_one_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"provider": "a 1", "job": "adamw", "tensors": 1000, "host_us": 1234.4, "launches": 2, "torch_kernels": 1}
    bad = {"provider": "b 2", "job": "adamw", "tensors": 1000, "problem": "ValueError: no"}
    monkeypatch.setattr(host_cost, "measure", lambda *a: [{**good, "problem": ""}, bad])
    assert host_cost.main([]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "| job | provider | 1,000 |",
        "|---|---|---|",
        "| adamw | a 1 | 1,234 µs, 2 + 1 |",
        "| adamw | b 2 | failed |",
    ]
    assert printed.err.strip() == "b 2 adamw at 1,000 tensors: ValueError: no"
    monkeypatch.setattr(host_cost, "measure", lambda *a: [{**good, "problem": ""}])
    assert host_cost.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["host_us"] == 1234.4
