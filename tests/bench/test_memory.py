"""The benchmark of memory: what is counted equals what is planned, and each row runs in a process of its own."""

from __future__ import annotations

import json

import pytest

from halfstep.__main__ import main
from halfstep.bench import memory


@pytest.mark.parametrize("name", [name for name, row in memory.ROWS.items() if row.layout])
def test_what_is_counted_is_planned(name: str) -> None:
    found = memory.measured(name, 60_000, 100)  # no whole number of layers of 10,100
    row = memory.ROWS[name]
    if row.release or row.offload:  # what is planned of the gradients is a bound
        assert 0 < found["counted"] <= found["planned"]
    else:
        assert found["counted"] == found["planned"]
    assert found["parameters"] == 6 * 10_100 and (found["process"] is None or found["process"] >= 0)


def test_the_table_has_a_row_for_each_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(memory.ROWS):
        if name not in ("bitsandbytes AdamW8bit", "split"):
            monkeypatch.delitem(memory.ROWS, name)
    monkeypatch.setattr(memory.needs.__globals__["importlib"].util, "find_spec", lambda name: None)
    assert main(["bench", "memory", "--row", "bitsandbytes AdamW8bit", "--params", "100", "--width", "9"]) == 0
    assert json.loads(capsys.readouterr().out) == "not installed"
    monkeypatch.delitem(memory.ROWS, "bitsandbytes AdamW8bit")
    assert main(["bench", "memory", "--params", "1000000", "--width", "500"]) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["bytes per parameter", "planned", "counted", "process"]
    assert [line[:3] for line in lines[2:]] == [["split", "14.00", "14.00"]]
    assert float(lines[2][3]) > 12


def test_an_unknown_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Names with commas are quoted."""
    assert main(["bench", "memory", "--row", "whole"]) == 2
    error = capsys.readouterr().err
    assert "argument --row: unknown row 'whole'; choose from '" in error and "'torch, fp32'" in error
