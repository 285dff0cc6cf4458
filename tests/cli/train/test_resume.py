"""A resumed run has the bits of the uninterrupted one: in one process, under DDP, under FSDP2; and all three agree.

Each distributed run is made by two processes of its own on gloo; test_elastic.py has torchrun start them.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import differences, newest, train_together

from halfstep.__main__ import main
from halfstep.integrations import checkpoint

TEXT = Path(os.__file__).read_bytes()
OPTIONS = "--size nano --steps 12 --batch 4 --save-every 4 --growth-interval 3".split()
# fp16 overflows at this scale in the first steps, so the run skips and backs off, before and after step 8
HIGH = ("--init-scale", str(2.0**24))
# Two processes sum in another order than one, so next to the limit one may skip a step that the other takes. From here
# the scale grows three times without reaching the limit.
LOW = ("--init-scale", str(2.0**12))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_bytes(TEXT)
    return path


def _words(text: Path, out: Path, precision: str, strategy: str) -> list[str]:
    scale = HIGH if strategy == "single" and precision == "fp16" else LOW
    what = ["--data", str(text), "--out", str(out), "--precision", precision, "--strategy", strategy]
    return [*OPTIONS, *scale, *what]


def _start(text: Path, out: Path, precision: str, strategy: str, *more: str) -> None:
    words = [*_words(text, out, precision, strategy), *more]
    if strategy == "single":
        assert main(["train", *words]) == 0
    else:
        train_together(2, [words])


def _resumed_has_the_same_bits(text: Path, out: Path, precision: str, strategy: str, *more: str) -> dict[str, Any]:
    """Lose the last checkpoint of the finished run in `out`, resume from the one before, compare everything."""
    step, uninterrupted = newest(out, precision)
    assert step == 12
    uninterrupted_loss = json.loads((out / "report.json").read_text())["runs"][0]["final_val_loss"]
    shutil.rmtree(checkpoint.checkpoints(out / "checkpoints" / precision)[-1][1])
    (out / "report.json").unlink()
    assert newest(out, precision)[0] == 8
    _start(text, out, precision, strategy, "--resume", *more)
    step, resumed = newest(out, precision)
    assert step == 12
    assert differences(uninterrupted, resumed) == []
    assert json.loads((out / "report.json").read_text())["runs"][0]["final_val_loss"] == uninterrupted_loss
    return uninterrupted


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.exhaustive), "bf16", "fp16"])
def test_one_process_resumes_to_the_same_bits(text: Path, tmp_path: Path, precision: str) -> None:
    _start(text, tmp_path, precision, "single")
    state = _resumed_has_the_same_bits(text, tmp_path, precision, "single")
    if precision == "fp16":
        assert state["scaler"]["scale"] != 2.0**24 and state["history"]["skipped"].sum() > 0
        assert state["history"]["skipped"][8:].sum() > 0, "no skipped step after step 8"


def test_moments_in_8_bits_resume_to_the_same_bits(text: Path, tmp_path: Path) -> None:
    layout = ("--state-dtype", "8bit", "--master-weights", "split24")
    _start(text, tmp_path, "bf16", "single", *layout)
    state = _resumed_has_the_same_bits(text, tmp_path, "bf16", "single", *layout)
    first = state["optimizer"]["state"][0]
    assert first["exp_avg_codes"].numel() >= 4096 and first["master_remainder"].dtype == torch.int8
    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["training"]["state_dtype"], content["training"]["master_weights"]) == ("8bit", "split24")
    assert content["runs"][0]["optimizer_bytes_per_param"] < 5, "9 with fp32 moments, which vectors have"


def test_the_comparison_of_states_sees_one_bit(text: Path, tmp_path: Path) -> None:
    _start(text, tmp_path, "bf16", "single")
    _, one = newest(tmp_path, "bf16")
    _, other = newest(tmp_path, "bf16")
    assert differences(one, other) == []
    other["optimizer"]["state"][0]["master_remainder"][3, 5] ^= 1
    assert differences(one, other) == ["/optimizer/state/0/master_remainder"]


def test_a_finished_comparison_resumes_to_its_own_report(text: Path, tmp_path: Path) -> None:
    _start(text, tmp_path, "compare", "single")
    first = json.loads((tmp_path / "report.json").read_text())
    # one run is as if it had not been reached, one is cut in the middle, two are finished
    for _, path in checkpoint.checkpoints(tmp_path / "checkpoints" / "bf16-without-master"):
        shutil.rmtree(path)
    shutil.rmtree(checkpoint.checkpoints(tmp_path / "checkpoints" / "fp16")[-1][1])
    _start(text, tmp_path, "compare", "single", "--resume")
    second = json.loads((tmp_path / "report.json").read_text())
    for before, after in zip(first["runs"], second["runs"], strict=True):
        assert before["train_loss"] == after["train_loss"]
        assert before["validation"] == after["validation"]
        assert before["gradient_bytes_per_param"] == after["gradient_bytes_per_param"] > 0


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "fp16"), ("fsdp", "bf16")])
def test_two_processes_reach_the_loss_of_one_and_resume_to_the_same_bits(
    text: Path, tmp_path: Path, strategy: str, precision: str
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    _start(text, one, precision, "single", *LOW)
    _start(text, two, precision, strategy)
    alone, together = (json.loads((out / "report.json").read_text())["runs"][0] for out in (one, two))
    assert together["world_size"] == 2 and together["strategy"] == strategy
    assert together["final_val_loss"] == pytest.approx(alone["final_val_loss"], rel=5e-3)
    assert together["final_train_loss"] == pytest.approx(alone["final_train_loss"], rel=5e-3)
    assert together["train_loss"][0] == pytest.approx(alone["train_loss"][0], rel=1e-4)
    share = 0.5 if strategy == "fsdp" else 1.0
    for part in ("param", "gradient", "optimizer"):
        assert together[f"{part}_bytes_per_param"] == pytest.approx(share * alone[f"{part}_bytes_per_param"], rel=0.02)
    _resumed_has_the_same_bits(text, two, precision, strategy)
    # a checkpoint does not know how it was sharded: one process continues from it
    (_, path), _ = checkpoint.checkpoints(two / "checkpoints" / precision)
    _start(text, tmp_path / "other", precision, "single", *LOW, "--resume", str(path))
    other = json.loads((tmp_path / "other" / "report.json").read_text())["runs"][0]
    assert other["train_loss"][:8] == json.loads((two / "report.json").read_text())["runs"][0]["train_loss"][:8]
    assert other["final_val_loss"] == pytest.approx(alone["final_val_loss"], rel=5e-3)


def test_only_rank_0_prints_and_shards_count_as_shards(text: Path, tmp_path: Path) -> None:
    # without checkpoints: writing one would cut the parameters again that validation has put together
    first, second = train_together(2, [[*_words(text, tmp_path, "fp32", "fsdp"), "--save-every", "0"]])
    assert first.count("step 12/12") == first.count("report: ") == 1 and second == ""
    run = json.loads((tmp_path / "report.json").read_text())["runs"][0]
    sizes = [run[f"{part}_bytes_per_param"] for part in ("param", "gradient", "optimizer")]
    assert sizes == pytest.approx([2, 2, 4], rel=0.02)
