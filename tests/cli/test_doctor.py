"""halfstep doctor: the machine, checkpoints, JSON, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from halfstep.cli.doctor import main
from halfstep.integrations.doctor.environment import Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a GPU, on which two findings are made."""
    there = Machine({"SLURM_NTASKS": "2"}, versions={"torch": "2.13.0"}, shared_memory=64 << 20)
    monkeypatch.setattr(Machine, "here", lambda: there)


@pytest.mark.usefixtures("machine")
def test_findings_of_the_machine_are_printed_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["this environment: 2 findings", "", "error: ranks-not-set", "  where   SLURM_NTASKS=2"]
    assert "warning: little-shared-memory" in lines and "  torch       2.13.0" in lines
    assert main(["--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["facts"]["torch"] == "2.13.0"
    names = [finding["name"] for finding in content["diagnoses"][0]["findings"]]
    assert names == ["ranks-not-set", "little-shared-memory"]


@pytest.mark.usefixtures("machine")
def test_findings_of_a_checkpoint_set_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "good.pt"
    torch.save({"weight": torch.ones(3) / 3}, file)
    assert main([str(file)]) == 0
    assert capsys.readouterr().out == f"{file} with 1 tensor, 12 B: no findings\n\n"
    torch.save({"weight": torch.tensor([float("inf")])}, file)
    assert main([str(file), "--env"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("1 finding") and "error: values-not-finite" in lines and "error: ranks-not-set" in lines
