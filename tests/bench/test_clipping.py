"""The benchmark of clipping in the backward: each row of the table, and that spikes and limits have an effect."""

from __future__ import annotations

import os

import pytest

from halfstep.__main__ import main
from halfstep.bench import clipping
from halfstep.cli.train.data import read_corpus


def test_spikes_change_what_is_not_clipped_exactly() -> None:
    corpus = read_corpus(os.__file__, 32)
    found = {
        (mode, every): clipping.final_loss(mode, corpus, "nano", 6, 0, every, 1e4, limit=1e-3)
        for mode in clipping.MODES
        for every in (None, 2)
    }
    assert all(2 < loss < 7 for loss in found.values())
    # Exactly clipped, a spike has the norm of any other step.
    assert found["exact", 2] == pytest.approx(found["exact", None], rel=1e-3)
    assert abs(found["previous", 2] - found["exact", 2]) > 2 * abs(found["exact", 2] - found["exact", None])
    assert len(set(found.values())) >= 5


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size", "nano", "--steps", "2", "--seeds", "2", "--every", "2", "--data", os.__file__]
    assert main(["bench", "clipping", *words]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["validation loss", "seed 0", "seed 1"]
    kinds = ("no spikes", "1,000 times the loss in one of 2 steps")
    assert [row[0] for row in rows[2:]] == [f"{mode}, {kind}" for kind in kinds for mode in clipping.MODES]
    assert all(float(cell) > 2 for row in rows[2:] for cell in row[1:])


def test_data_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "clipping", "--data", "/nowhere"]) == 2
    assert capsys.readouterr().err == (
        "halfstep bench clipping: error: --data /nowhere does not exist; pass a file, or a folder with files, of any "
        "kind\n"
    )
