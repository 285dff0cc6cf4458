"""halfstep convert: checkpoints of earlier versions, models for other programs, and errors."""

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfstep.cli.convert import main
from halfstep.integrations import checkpoint


def test_checkpoints_are_converted_and_models_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(Path(__file__).parents[1] / "integrations" / "checkpoints_before.zip") as archive:
        archive.extractall(tmp_path)
    for old in ("step-00000002", "step-00000003.pt"):
        new = tmp_path / "new" / old.removesuffix(".pt")
        assert main([str(tmp_path / old), str(new)]) == 0
        assert capsys.readouterr().out == f"{new}\n"
    model = torch.nn.Linear(64, 2).bfloat16()
    assert checkpoint.load(tmp_path / "new" / "step-00000002", model=model)["tokens"] == 30
    assert torch.equal(checkpoint.load(new)["model"]["weight"], model.weight)
    assert main(["--model", str(tmp_path / "new" / "step-00000002"), str(tmp_path / "out")]) == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], model.weight)
    capsys.readouterr()
    for arguments, words in (
        ([str(tmp_path / "step-00000003.pt"), str(new)], "exists: pass a folder that does not"),
        ([str(tmp_path / "nowhere"), str(tmp_path / "x")], "cannot be converted: "),
        (["--model", str(new), str(tmp_path / "x")], "holds no model: save it with model="),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert words in error and error.startswith("halfstep convert: error: ") and error.count("\n") == 1
