"""`halfstep bench step`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from halfstep.bench import optimizer_step


def test_every_case_is_measured_and_its_masters_agree_with_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    assert optimizer_step.main(["--parameters", "10000", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["tensors"], row["layout"]) for row in rows] == [
        (tensors, layout) for tensors in (1, 100, 10_000) for layout in ("split", "full")
    ]
    assert all(row["halfstep_ms"] > 0 and row["torch_ms"] > 0 and row["ratio"] > 0 for row in rows)


DEEPSPEED = """
import torch

class DeepSpeedCPUAdam(torch.optim.AdamW):
    def __init__(self, *args, **options):
        print("a line of its logger")
        {first}
        super().__init__(*args, **options)
"""


def install_deepspeed(folder: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """A package by that name whose optimizer is torch's, after doing something first."""
    package = folder / "deepspeed" / "ops"
    package.mkdir(parents=True)
    for place in (folder / "deepspeed", package):
        (place / "__init__.py").write_text("")
    (package / "adam.py").write_text(DEEPSPEED.format(first=first))
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(optimizer_step, "TENSORS", (1, 3))


def test_deepspeed_is_measured_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_deepspeed(tmp_path, monkeypatch, "pass")
    assert optimizer_step.main(["--parameters", "10000", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]  # which its logger has left alone
    assert len(rows) == 4 and all(row["deepspeed_ms"] > 0 and row["deepspeed_ratio"] > 0 for row in rows)
    assert optimizer_step.main(["--parameters", "10000", "--rounds", "1"]) == 0
    assert "DeepSpeedCPUAdam + copies ms" in " ".join(capsys.readouterr().out.split())


def test_deepspeed_that_does_not_compile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_deepspeed(tmp_path, monkeypatch, 'raise RuntimeError("Ninja is required")')
    assert optimizer_step.main(["--parameters", "10000", "--rounds", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert not any("deepspeed_ms" in row for row in json.loads(captured.out)["rows"])
    reason = "does not compile here: RuntimeError: Ninja is required"
    assert f"Not measured: DeepSpeedCPUAdam: {reason}.\n" in captured.err


def test_a_wrong_peer_gets_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_deepspeed(tmp_path, monkeypatch, 'options["lr"] = 2e-3')
    with pytest.raises(AssertionError, match="not close"):
        optimizer_step.main(["--parameters", "10000", "--rounds", "1"])


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [("--rounds", "0", 1), ("--rounds", "x", 1), ("--parameters", "9999", 10_000), ("--threads", "0", 1)],
)
def test_a_bad_number_is_named_with_what_is_allowed(
    option: str, value: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimizer_step.main([option, value]) == 2
    assert f"argument {option}: expected an integer of at least {least}, but got {value!r}" in capsys.readouterr().err
