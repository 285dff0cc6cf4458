"""halfstep doctor: the machine, checkpoints, JSON, and the exit status."""

import json
from pathlib import Path

import pytest
import torch

from halfstep.cli.doctor import main
from halfstep.kernels import compiler


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a GPU and without a compiler, and with variables that serve tests."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(compiler, "compiler", lambda: None)
    monkeypatch.setattr(compiler, "FOLDER", Path("no wheel"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.usefixtures("machine")
def test_findings_of_the_machine_are_printed_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["this environment: 2 findings", "", "warning: no-compiler", "  where   C++"]
    assert "warning: kernels-interpreted" in lines and f"  torch    {torch.__version__}" in lines
    assert main(["--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["facts"]["torch"] == torch.__version__
    names = [finding["name"] for finding in content["diagnoses"][0]["findings"]]
    assert names == ["no-compiler", "kernels-interpreted"]


@pytest.mark.usefixtures("machine")
def test_findings_of_a_checkpoint_set_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "good.pt"
    torch.save({"weight": torch.ones(3) / 3}, file)
    assert main([str(file)]) == 0
    assert capsys.readouterr().out == f"{file} with 1 tensor, 12 B: no findings\n\n"
    torch.save({"weight": torch.tensor([float("inf")])}, file)
    assert main([str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("1 finding") and "error: values-not-finite" in lines
