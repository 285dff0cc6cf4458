"""What halfstep train reports of gradients: counted in some steps, resumed, over ranks, shown everywhere."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from halfstep.__main__ import main
from halfstep.cli.train import data, loop, report
from halfstep.cli.train.world import ThisRank
from halfstep.integrations import checkpoint
from halfstep.numerics.statistics.counts import Statistics

STEPS = 22


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_bytes(Path(os.__file__).read_bytes())
    return path


def train(text: Path, out: Path, *more: object) -> dict[str, Any]:
    words = ["--size", "nano", "--steps", STEPS, "--batch", 4, "--data", text, "--out", out, *more]
    assert main(["train", *map(str, words)]) == 0
    content: dict[str, Any] = json.loads((out / "report.json").read_text())
    return content


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_what_is_reported_is_what_the_gradients_were(
    precision: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Statistics] = []
    step = halfstep.AdamW.step
    trainers: list[loop.Trainer] = []
    init = loop.Trainer.__init__
    monkeypatch.setattr(loop.Trainer, "__init__", lambda self, *a: (trainers.append(self), init(self, *a))[1])

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = trainers[-1]
        if trainer.step in (0, 10, 20):
            scale = 1.0 if trainer.scaler is None else trainer.scaler.get_scale()
            # In fp32, or dividing by the scale would round fp16 again.
            named = {name: parameter.grad.float() / scale for name, parameter in trainer.plain.named_parameters()}
            seen.append(halfstep.statistics(named, precision, errors=False))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(halfstep.AdamW, "step", watched)
    run = train(text, tmp_path / "out", "--precision", precision, "--init-scale", 2.0**10)["runs"][0]
    monkeypatch.undo()
    found = run["gradients"]
    assert (found["format"], found["steps"], len(seen)) == (precision, 3, 3)
    expected = (seen[0] + seen[1] + seen[2]).at(found["scale"])
    assert found["scale"] == (run["final_scale"] or 1.0)
    assert found["total"] == json.loads(json.dumps(expected.total.as_dict()))
    assert [row["name"] for row in found["worst"]] == [row.name for row in expected.worst(5)]
    assert found["advice"]["scale"] == halfstep.advise_scale(expected, precision).scale


def test_a_resumed_run_reports_the_same(text: Path, tmp_path: Path) -> None:
    options = ("--precision", "fp16", "--save-every", 8)
    whole = train(text, tmp_path / "out", *options)["runs"][0]["gradients"]
    for _, path in checkpoint.checkpoints(tmp_path / "out" / "checkpoints" / "fp16")[1:]:
        shutil.rmtree(path)
    assert train(text, tmp_path / "out", *options, "--resume")["runs"][0]["gradients"] == whole
    assert whole["steps"] == 3


def test_the_page_and_the_picture_show_them(picture: None, text: Path, tmp_path: Path) -> None:
    content = train(text, tmp_path / "out", "--precision", "fp16")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<h2>Gradients, fp16</h2>" in page
    assert "Counted in 3 steps, at the last scale of" in page
    for row in content["runs"][0]["gradients"]["worst"]:
        assert f"<td>{row['name']}</td>" in page
    assert "fp16 suffices" in page
    fp32 = train(text, tmp_path / "fp32", "--precision", "fp32")
    assert fp32["runs"][0]["gradients"] is None
    assert "<h2>Gradients" not in (tmp_path / "fp32" / "report.html").read_text()
    pytest.importorskip("matplotlib")
    assert len(report.picture(content)) > 1.1 * len(report.picture(fp32)), "another row"


def test_shards_are_added_up_and_copies_are_not(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = loop.Settings("nano", STEPS, 4, 0, 1e-3, 0.1, 0, 2.0**10, 100)
    corpus = data.read_corpus(text, settings.context)
    trainer = loop.Trainer(loop.Run("fp16", "fp16"), settings, corpus, ThisRank("single", torch.device("cpu")))
    trainer.advance()
    alone = trainer.gradients()
    assert alone["steps"] == 1

    class Two:
        """Two ranks, of which the other one has counted what this one has."""

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def objects(self, value: Any) -> list[Any]:
            return [value, value]

    # Plain tensors on the first rank, copies of them on the second, and shards.
    for rank, shards, times in ((0, False, 2), (1, False, 0), (1, True, 2)):
        if shards:
            monkeypatch.setattr(loop, "counts_here", lambda parameter, world: True)
        trainer.world = Two(rank)
        assert trainer.gradients()["total"]["elements"] == times * alone["total"]["elements"]
        assert trainer.gradients()["steps"] == 1
