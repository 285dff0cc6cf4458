"""`halfstep bench step`: what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from halfstep.bench import optimizer_step


def test_every_case_is_measured_and_its_masters_agree_with_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    assert optimizer_step.main(["--parameters", "10000", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["tensors"], row["layout"]) for row in rows] == [
        (tensors, layout) for tensors in (1, 100, 10_000) for layout in ("split", "full")
    ]
    assert all(row["halfstep_ms"] > 0 and row["torch_ms"] > 0 and row["ratio"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("option", "value", "least"), [("--rounds", "0", 1), ("--rounds", "x", 1), ("--parameters", "9999", 10_000)]
)
def test_a_bad_number_is_named_with_what_is_allowed(
    option: str, value: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimizer_step.main([option, value]) == 2
    assert f"argument {option}: expected an integer of at least {least}, but got {value!r}" in capsys.readouterr().err
