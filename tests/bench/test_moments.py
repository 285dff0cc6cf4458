"""The benchmark of moments of few bits: every provider beside float64, and the trainings of each layout."""

from __future__ import annotations

import os

import pytest

from halfstep.__main__ import main
from halfstep.bench import moments


@pytest.mark.parametrize("kind", moments.GRADIENTS)
def test_stochastic_moments_are_right_in_the_mean_and_those_to_nearest_are_not(kind: str) -> None:
    found = moments.errors(kind, 300, ("8 bits, nearest", "8 bits (default)"))
    (nearest, _), (default, off) = found.values()  # type: ignore[misc]
    assert abs(default - 1) < 0.03 and 0.01 < off < 0.4
    assert abs(nearest - 1) > 0.05 or "falling" in kind, "these fall too fast to stop in 300 steps"


def test_the_table_has_a_row_for_each_kind_and_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments.needs.__globals__["importlib"].util, "find_spec", lambda name: None)
    assert main(["bench", "moments", "--steps", "2"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert [row[0].strip() for row in rows] == ["gradients", "---", *moments.GRADIENTS]
    assert [row[-1].strip() for row in rows[2:]] == ["not installed"] * len(moments.GRADIENTS)
    assert all(len(row[1].split(",")) == 2 for row in rows[2:])


def test_trainings_are_compared_with_fp32_moments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(moments.LAYOUTS, "8 bits")
    found = moments.losses([0], ["--size", "nano", "--steps", "2", "--batch", "32", "--data", os.__file__])
    assert list(found) == list(moments.LAYOUTS)
    (base,), *others = found.values()
    assert all(one == pytest.approx(base, rel=0.01) and one != base for (one,) in others)
    monkeypatch.setattr(moments, "losses", lambda seeds, arguments: {name: [2.0, 4.0] for name in moments.LAYOUTS})
    assert main(["bench", "moments", "--train", "--seeds", "2"]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["moments", "seed 0", "seed 1", "against fp32"]
    assert rows[2:] == [[name, "2.0000", "4.0000", "+0.00 %, +0.00 %"] for name in moments.LAYOUTS]
