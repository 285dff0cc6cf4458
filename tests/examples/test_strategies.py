"""Every strategy trains to the loss of one process, resumes to the same bits, and continues under another strategy.

All runs of two processes are made one after the other in the same two processes.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import differences, make_small, newest, report, train, train_together

from halfstep.integrations import checkpoint

# From this scale it grows twice without reaching the limit, next to which the order of sums would decide.
OPTIONS = "--size nano --steps 4 --batch 8 --init-scale 4096 --growth-interval 2 --save-every 2".split()
STEP = "checkpoints/{precision}/step-00000002"
TWO = {
    "ddp": "--strategy ddp --precision fp16",
    "ddp, fp32": "--strategy ddp --precision fp32 --accumulate 2",
    "zero1": "--strategy zero1 --precision fp16",
    "zero1, bf16": "--strategy zero1 --precision bf16 --accumulate 4 --checkpointing",
    "fsdp": "--strategy fsdp --precision bf16",
    "fsdp, recomputed": "--strategy fsdp --precision bf16 --checkpointing",
}
RESUMED = ["zero1", "fsdp"]
CONTINUED = {
    "ddp to fsdp": ("ddp", "--strategy fsdp --precision fp16"),
    "zero1 to ddp": ("zero1", "--strategy ddp --precision fp16"),
}
PARTS = ("param", "gradient", "optimizer")


def _precision(words: str) -> str:
    return words.split()[words.split().index("--precision") + 1]


class Runs:
    """The folder of all runs, their words in `words`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.words = folder, dict[str, str]()

    def out(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-").replace(",", "")

    def all_words(self, name: str, words: str, resumed: str | None = None) -> list[str]:
        self.words[name] = words
        file = [] if resumed is None else ["--resume", str(self.saved(resumed))]
        return [*OPTIONS, *words.split(), "--data", os.__file__, "--out", str(self.out(name)), *file]

    def saved(self, name: str) -> Path:
        return self.out(name) / STEP.format(precision=_precision(self.words[name]))

    def state(self, name: str) -> dict[str, Any]:
        step, state = newest(self.out(name), _precision(self.words[name]))
        assert step == 4
        return state

    def report(self, name: str) -> dict[str, Any]:
        return report(self.out(name))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, list[str]]:
    """All runs, and what each of the two ranks printed."""
    made = Runs(tmp_path_factory.mktemp("strategies"))
    orders = [made.all_words(name, words) for name, words in TWO.items()]
    orders += [made.all_words(f"{name}, resumed", TWO[name], name) for name in RESUMED]
    orders += [made.all_words(name, words, start) for name, (start, words) in CONTINUED.items()]
    printed = train_together(2, orders)
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        for precision in ("fp32", "fp16", "bf16"):
            assert train(*made.all_words(precision, f"--precision {precision}")) == 0
        words = "--precision fp32 --accumulate 4 --checkpointing"
        assert train(*made.all_words("fp32, 4 parts", words)) == 0
        assert train(*made.all_words("fsdp to single", "--precision bf16", "fsdp")) == 0
    return made, printed


def _agree(run: dict[str, Any], alone: dict[str, Any]) -> None:
    assert run["final_val_loss"] == pytest.approx(alone["final_val_loss"], rel=5e-3)
    assert run["final_train_loss"] == pytest.approx(alone["final_train_loss"], rel=5e-3)
    assert run["train_loss"][0] == pytest.approx(alone["train_loss"][0], rel=1e-4)


def test_the_loss_is_that_of_one_process(runs: tuple[Runs, list[str]]) -> None:
    made, _ = runs
    for name in [*TWO, "fp32, 4 parts"]:
        precision = _precision(made.words[name])
        run, alone = made.report(name), made.report(precision)
        _agree(run, alone)
        # Shards and parts are counted once, copies not again.
        if precision != "fp32":
            elements, expected = (of["gradients"]["statistics"]["total"]["elements"] for of in (run, alone))
            assert elements == expected
    # in fp32 in every step
    for name in ("ddp, fp32", "fp32, 4 parts"):
        assert made.report(name)["train_loss"] == pytest.approx(made.report("fp32")["train_loss"], rel=2e-5)


def test_each_rank_has_its_part_of_the_state(runs: tuple[Runs, list[str]]) -> None:
    made, _ = runs
    whole = [made.report("fp16")[f"{part}_bytes_per_param"] for part in PARTS]
    sizes = {name: [made.report(name)[f"{part}_bytes_per_param"] for part in PARTS]
             for name in ("ddp", "zero1", "fsdp")}  # fmt: skip
    assert sizes["ddp"] == whole == [2, 2, 12]
    assert sizes["zero1"][:2] == [2, 2] and sizes["zero1"][2] == pytest.approx(6, rel=0.05)
    assert sizes["fsdp"] == pytest.approx([1, 1, 5], rel=0.02)


def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(runs: tuple[Runs, list[str]]) -> None:
    for name in RESUMED:
        assert differences(runs[0].state(name), runs[0].state(f"{name}, resumed")) == [], name


@pytest.mark.parametrize("name", [*CONTINUED, "fsdp to single"])
def test_another_strategy_continues(runs: tuple[Runs, list[str]], name: str) -> None:
    made, _ = runs
    start = CONTINUED[name][0] if name in CONTINUED else name.split()[0]
    before, after = made.report(start), made.report(name)
    assert after["train_loss"][:2] == before["train_loss"][:2]
    assert after["steps"] == len(after["train_loss"]) == 4
    _agree(after, made.report(_precision(made.words[name])))
    whole = made.state(_precision(made.words[name]))["optimizer"]["state"]
    state = made.state(name)["optimizer"]["state"]
    assert state.keys() == whole.keys()
    for number, entry in state.items():
        assert {key: (v.shape, v.dtype) for key, v in entry.items()} == {
            key: (v.shape, v.dtype) for key, v in whole[number].items()
        }


def test_options_that_save_memory_change_no_bit(runs: tuple[Runs, list[str]]) -> None:
    state = runs[0].state
    assert differences(state("ddp"), state("zero1")) == []
    assert differences(state("ddp"), state("zero1 to ddp")) == []
    assert differences(state("fsdp, recomputed"), state("fsdp")) == []


def test_only_rank_0_prints_and_says_how_the_run_was_laid_out(runs: tuple[Runs, list[str]]) -> None:
    made, (first, second) = runs
    assert first.count("report: ") == len(TWO) + len(RESUMED) + len(CONTINUED) and second == ""
    content = json.loads((made.out("zero1, bf16") / "report.json").read_text())
    layout = [content["options"][name] for name in ("strategy", "accumulate", "checkpointing")]
    assert layout == ["zero1", 4, True] and (content["processes"], content["restarts"]) == (2, 0)
    page = (made.out("zero1, bf16") / "report.html").read_text()
    assert all(f"&quot;{words}" in page for words in ("strategy&quot;: &quot;zero1&quot;", "checkpointing&quot;: true"))


def _lose_the_last(out: Path, precision: str) -> None:
    shutil.rmtree(checkpoint.checkpoints(out / "checkpoints" / precision)[-1][1])


@pytest.mark.parametrize(
    ("precision", "more"),
    [
        pytest.param("fp32", (), marks=pytest.mark.exhaustive),
        ("bf16", ("--state-dtype", "8bit", "--master-weights", "split24")),
        # fp16 overflows at this scale in the first steps, so the run skips and backs off, before and after step 8
        ("fp16", ("--init-scale", 2.0**24)),
    ],
)
def test_one_process_resumes_to_the_same_bits(
    text: Path, tmp_path: Path, precision: str, more: tuple[object, ...]
) -> None:
    out = tmp_path / "out"
    words = ["--size", "nano", "--steps", 12, "--batch", 4, "--save-every", 4, "--growth-interval", 3, "--data", text]
    words += ["--precision", precision, "--out", out, *more]
    assert train(*words) == 0
    whole, run = newest(out, precision)[1], report(out)
    _lose_the_last(out, precision)
    assert train(*words, "--resume") == 0
    state = newest(out, precision)[1]
    assert differences(whole, state) == []
    for name in ("final_val_loss", "gradients", "gradient_bytes_per_param", "skipped"):
        assert report(out)[name] == run[name]
    if precision == "fp16":
        assert state["history"]["skipped"][:8].sum() > 0 and state["history"]["skipped"][8:].sum() > 0
    if precision == "bf16":
        first = state["optimizer"]["state"][0]
        assert first["exp_avg_codes"].numel() >= 4096 and first["master_remainder"].dtype == torch.int8
        assert run["optimizer_bytes_per_param"] < 5, "9 with fp32 moments, which vectors have"
        first["master_remainder"][3, 5] ^= 1
        assert differences(whole, state) == ["/optimizer/state/0/master_remainder"]
