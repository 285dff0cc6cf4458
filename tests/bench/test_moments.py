"""The benchmark of moments of few bits: every provider beside float64, and the trainings of each layout."""

from __future__ import annotations

import os

import pytest

from halfstep.__main__ import main
from halfstep.bench import moments
from halfstep.cli.train.data import read_corpus


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
    """A row without its library says so; 8 bits change the loss, but little."""
    monkeypatch.setattr(moments.needs.__globals__["importlib"].util, "find_spec", lambda name: None)
    for name in ("bf16, stochastic", "8 bits"):
        monkeypatch.delitem(moments.TRAINED, name)
    words = ["--size", "nano", "--steps", "3", "--seeds", "2", "--data", os.__file__]
    assert main(["bench", "moments", "--train", *words]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["moments", "seed 0", "seed 1", "against fp32", "mean, standard error"]
    assert [row[0] for row in rows[2:]] == list(moments.TRAINED)
    (fp32, coded), missing = rows[2:4], rows[4:]
    assert fp32[3:] == ["+0.00 %, +0.00 %", "+0.00 % ± 0.00 %"] and fp32[1] != fp32[2]
    for seed in (1, 2):
        assert float(coded[seed]) == pytest.approx(float(fp32[seed]), rel=0.01)
    assert coded[1:3] != fp32[1:3]
    first, second = (100 * (float(coded[seed]) / float(fp32[seed]) - 1) for seed in (1, 2))
    mean, error = (float(part.strip(" %")) for part in coded[4].split("±"))
    # The losses are shown to four digits, which is 0.002 % of them each.
    assert mean == pytest.approx((first + second) / 2, abs=0.01) and error == pytest.approx(
        abs(first - second) / 2, abs=0.01
    )
    assert [row[1:] for row in missing] == [["not installed", "", "", ""]] * 2


def test_fp32_weights_have_no_24_bit_masters(capsys: pytest.CaptureFixture[str]) -> None:
    corpus = read_corpus(os.__file__, 32)
    found = moments.final_loss("8 bits, 24-bit master", "fp32", "nano", 1, 0, corpus, print)
    assert found == "fp32 weights have no master" and not capsys.readouterr().out


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "moments", "--train", "--size", "huge"]) == 2
    assert "argument --size: unknown size 'huge'; choose from nano, tiny" in capsys.readouterr().err
    assert main(["bench", "moments", "--train", "--data", "/nowhere"]) == 2
    assert "--data /nowhere does not exist; pass a file" in capsys.readouterr().err
