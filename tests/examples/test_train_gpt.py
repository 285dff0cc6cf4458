"""examples/train_gpt.py from the command line to its files: the report, early stopping, signals, and errors."""

import json
import math
import os
import re
import shutil
import signal
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import report as reports
import torch
import train_gpt
from corpus import read_corpus
from gpt import GPT, SIZES, Precision
from train_runs import differences, newest, options, report, train, train_together

import halfstep
from halfstep.integrations import checkpoint
from halfstep.numerics.planning import plan
from halfstep.numerics.statistics.counts import Statistics

CPU = torch.device("cpu")
SCRIPT = Path(train_gpt.__file__)
TEXT = Path(os.__file__).read_bytes()


def _train(text: Path, out: Path, *more: object) -> int:
    return train("--size", "nano", "--steps", 12, "--batch", 4, "--data", text, "--out", out, *more)


# ------------------------------------------------------------------------------------------------------ what it writes


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "text.py").write_bytes(TEXT)
    # the scale starts where gradients overflow, so that there is a skipped step to report
    more = ("--precision", "compare", "--steps", 40, "--init-scale", 2.0**24, "--growth-interval", 10)
    assert _train(folder / "text.py", folder / "out", *more) == 0
    return folder / "out"


def _runs(folder: Path) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in json.loads((folder / "report.json").read_text())["runs"]}


def test_a_run_that_ends_with_nan_is_reported(text: Path, tmp_path: Path) -> None:
    words = ("--precision", "fp32", "--steps", 4, "--warmup", 0, "--lr", 1e30)
    assert _train(text, tmp_path, *words) == 0
    run = _runs(tmp_path)["fp32"]
    assert run["final_train_loss"] is run["final_val_loss"] is None and run["steps"] == 4
    assert run["validation"] == [] and run["best_val_loss"] is None


def test_a_validation_that_is_nan_is_never_the_best() -> None:
    history = {"validation": [[1, math.nan], [2, 3.0], [3, 2.5], [4, math.nan]]}
    assert train_gpt.Trainer.best(SimpleNamespace(history=history)) == (3, 2.5, 1)  # type: ignore[arg-type]


def test_compare_reports_four_runs(compared: Path) -> None:
    assert sorted(os.listdir(compared)) == ["report.html", "report.json"]
    content, runs = json.loads((compared / "report.json").read_text()), _runs(compared)
    weights = sum(p.numel() for p in GPT(SIZES["nano"], Precision.on("fp32", CPU), 0).parameters())
    # Bytes of weights, gradients and state: bf16 has a remainder of 2 bytes, fp16 a master of 4, and both fp32 moments.
    sizes = {"fp32": (4, 4, 8), "bf16": (2, 2, 10), "fp16": (2, 2, 12), "bf16 without master": (2, 2, 4)}
    assert list(runs) == list(sizes)
    for name, run in runs.items():
        assert run["optimizer"] == ("halfstep.AdamW" if name in ("bf16", "fp16") else "torch.optim.AdamW")
        assert run["steps"] == len(run["train_loss"]) == 40
        assert [finding["name"] for finding in run["findings"]] == ["moments-in-16-bits"] * name.endswith("master")
        assert run["final_val_loss"] < 4.5 < run["train_loss"][0]
        assert run["train_loss"][0] == pytest.approx(runs["fp32"]["train_loss"][0], rel=2e-3)  # the same start
        assert run["step_ms_p50"] > run["optimizer_ms_p50"] > 0 and run["mfu"] is None
        assert run["tokens_per_s"] == pytest.approx(4 * 32 / run["step_ms_p50"] * 1000)
        bytes_each = [run[f"{part}_bytes_per_param"] for part in ("param", "gradient", "optimizer")]
        assert bytes_each == [*sizes[name]] and run["memory"][0] == [0, sizes[name][0] * weights, 0, 0]
        assert run["memory"][1] == [1, *(size * weights for size in sizes[name])]
    assert runs["bf16"]["train_loss"][20] == pytest.approx(runs["fp32"]["train_loss"][20], rel=2e-2)
    entropy = -sum(n / len(TEXT) * math.log(n / len(TEXT)) for n in map(TEXT.count, range(256)) if n)
    assert content["unigram_entropy"] == pytest.approx(entropy)
    assert content["machine"]["halfstep"] == halfstep.__version__


def test_the_report_starts_with_the_printed_text_and_is_self_contained(compared: Path) -> None:
    runs, page = _runs(compared), (compared / "report.html").read_text()
    outcome = page.partition('<p class="outcome">')[2].partition("</p>")[0]
    change = 100 * (runs["bf16"]["final_val_loss"] / runs["fp32"]["final_val_loss"] - 1)
    shown = f"{change:+.2f}".replace("-", "\N{MINUS SIGN}")
    assert outcome.startswith(f"bf16 with halfstep: {shown} % validation loss at 14 B per parameter; fp16 with ")
    assert "; bf16 without master: " in outcome and " at 8 B. In fp32: " in outcome
    assert page.index('class="outcome"') < page.index("<table")
    assert not re.search('(src|href)="(?!#)|<(link|iframe|script)|url\\((?!#)|import', page)
    assert page.count("<svg") == 6  # with the last values below the curves
    assert all(f">{name} {run['final_val_loss']:.4f}<" in page for name, run in runs.items())
    names = " and ".join(name for name in ("bf16", "fp16") if Precision.on(name, CPU).emulated)
    assert f"the {names} matrix products were emulated" in page
    assert all(f"<td>{run['final_val_loss']:.4f}</td>" in page for run in runs.values())


def test_without_matplotlib_the_report_says_what_is_missing(compared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = reports.page(json.loads((compared / "report.json").read_text()))
    assert "pictures need matplotlib" in page and "<svg" not in page and "<table>" in page


def test_skipped_steps_and_overflows_are_those_where_the_scale_fell(compared: Path) -> None:
    runs, page = _runs(compared), (compared / "report.html").read_text()
    run, overflow = runs["fp16"], runs["fp16"]["overflow"]
    scales = [*run["scale"], run["final_scale"]]
    assert run["skipped_steps"] == overflow["skipped"] == len(run["skipped"]) > 0 and run["scale"][0] == 2.0**24
    for step in range(1, 40):
        assert (scales[step] < scales[step - 1]) == (step in run["skipped"])
    assert any(after > before for before, after in pairwise(scales))
    assert runs["bf16"]["overflow"] is runs["bf16"]["final_scale"] is None and runs["bf16"]["skipped_steps"] == 0
    names = {name for name, _ in GPT(SIZES["nano"], Precision.on("fp16", CPU), 0).named_parameters()}
    assert overflow["parameters"] and {entry["name"] for entry in overflow["parameters"]} <= names
    assert min(entry["first_step"] for entry in overflow["parameters"]) == run["skipped"][0]
    assert max(entry["last_step"] for entry in overflow["parameters"]) == run["skipped"][-1]
    assert f"fp16: {overflow['skipped']} of 40 steps skipped" in page
    assert all(f"  {entry['name']} " in page for entry in overflow["parameters"])


def _trainer(text: Path, precision: str, **settings: Any) -> train_gpt.Trainer:
    corpus = read_corpus(text, 32)
    return train_gpt.Trainer(train_gpt.Run(precision, precision), options(**settings), corpus, train_gpt.World(CPU))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_what_is_reported_is_what_the_gradients_were(precision: str, text: Path) -> None:
    trainer = _trainer(text, precision, steps=22, init_scale=2.0**10)
    counted: list[Statistics] = []

    def count(*arguments: Any) -> None:
        if trainer.step in (0, 10, 20):
            scale = 1.0 if trainer.scaler is None else trainer.scaler.get_scale()
            # In fp32, or dividing by the scale would round fp16 again.
            named = {name: parameter.grad.float() / scale for name, parameter in trainer.plain.named_parameters()}
            counted.append(halfstep.statistics(named, precision, errors=False))

    trainer.optimizer.register_step_pre_hook(count)
    for _ in range(22):
        trainer.advance()
    trainer.flush()
    run = trainer.row()
    gradients, scale = run["gradients"], trainer.history["scale"][-1] if trainer.scaler is not None else 1.0
    assert (gradients["steps"], gradients["collected"], len(counted)) == (22, 3, 3)
    expected = (counted[0] + counted[1] + counted[2]).at(scale)
    found, counts = gradients["statistics"], expected.as_dict()
    tensors = [{**row, "dtype": "float32"} for row in found["tensors"]]  # in which they were counted here
    assert (found["scale"], found["total"], tensors) == (scale, counts["total"], counts["tensors"])
    assert gradients["advice"]["scale"] == halfstep.advise_scale(expected, precision).scale
    assert gradients["text"].startswith(f"gradients of 3 of 22 steps\n{expected}\n{precision}: scale")


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_bytes_and_flops_are_those_that_are_planned(precision: str, lora: int, text: Path) -> None:
    trainer = _trainer(text, precision, lora=lora)
    trainer.advance()
    trainer.flush()
    row, planned = (trainer.row(), plan(model=SIZES["nano"], precision=precision, lora=lora or None, batch=4))
    parts = {part.name: part.bytes for part in planned.parts}
    states = sum(parts[name] for name in ("remainder", "exp_avg", "exp_avg_sq") if name in parts)
    sizes = [row[f"{part}_bytes_per_param"] for part in ("param", "gradient", "optimizer")]
    weights = parts["weights"] + parts.get("frozen weights", 0)
    expected = [size / planned.parameters for size in (weights, parts["gradients"], states)]
    assert row["trained_parameters"] * (2 if precision == "bf16" else 4) == parts["gradients"]
    assert row["parameters"] == planned.parameters and sizes == pytest.approx(expected, rel=1e-12)
    assert planned.work is not None and row["mfu"] is None, "there is no datasheet of a CPU"
    assert row["flops_per_s"] * row["step_ms_p50"] / 1000 == pytest.approx(planned.work.training)


def test_the_table_is_printed(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(text, tmp_path / "out", "--precision", "fp32") == 0
    printed = capsys.readouterr().out
    run = report(tmp_path / "out")
    assert run["optimizer"] == "halfstep.AdamW" and run["gradients"] is None
    assert re.search(rf"fp32: step 12/12 +loss [0-9.]+ +validation {run['final_val_loss']:.4f} +[0-9,]+ tok", printed)
    assert re.search(rf"fp32 +halfstep.AdamW +[0-9.]+ +{run['final_val_loss']:.4f} ", printed)
    assert re.search(r"Unigram entropy of the text \(.*\): [0-9.]{6}\. MFU", printed)


def test_a_non_finite_loss_is_reported_and_fails(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--lr", "1e30", "--warmup", 0, "--steps", 40, "--precision", "fp32", "--save-every", 4)
    assert _train(text, tmp_path, *more) == 1
    expected = r"fp32: given up: the loss was not finite for 5 steps in a row, .* use a smaller --lr than 1e\+30"
    assert re.search(expected, capsys.readouterr().out)
    content = (tmp_path / "report.json").read_text()
    read = json.loads(content, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert read["runs"][0]["final_val_loss"] is None


def test_training_ends_when_the_validation_loss_no_longer_falls(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([3.0, 2.5, 2.6, 2.4, 2.4, 2.7, 1.0])

    def validate(self: train_gpt.Trainer) -> None:
        self.history["validation"].append([self.step, next(losses)])

    monkeypatch.setattr(train_gpt.Trainer, "validate", validate)
    assert _train(text, tmp_path, "--steps", 40, "--validate-every", 3, "--patience", 2) == 0
    assert "bf16: ended early at step 18; the best validation loss is 2.4000, at step 12" in capsys.readouterr().out
    run = report(tmp_path)
    assert (run["steps"], run["stopped_early"], run["best_step"], run["best_val_loss"]) == (18, True, 12, 2.4)


def test_adapters_train_beside_frozen_weights_on_one_rank_and_on_two(tmp_path: Path) -> None:
    """The base stays as it is, the loss is that of one process, resuming keeps the bits, and the sum is a base."""
    words = ["--size", "nano", "--steps", 4, "--batch", 4, "--save-every", 2]
    assert train(*words, "--data", os.__file__, "--out", tmp_path / "base") == 0
    words += ["--data", torch.__file__, "--base", tmp_path / "base", "--lora", 4]
    assert train(*words, "--out", tmp_path / "single") == 0
    train_together(2, [[*words, "--strategy", name, "--out", tmp_path / name] for name in ("fsdp", "zero1")])
    expected, before = report(tmp_path / "single"), train_gpt.read_base(tmp_path / "base", "nano")
    assert expected["trained_parameters"] == 2 * 4 * ((32 + 96) + (32 + 32) + (32 + 128) + (128 + 32))
    assert expected["findings"] == []
    for name in ("single", "fsdp", "zero1"):
        assert report(tmp_path / name)["final_val_loss"] == pytest.approx(expected["final_val_loss"], rel=2e-3)
        weights = newest(tmp_path / name, "bf16")[1]["model"]
        assert [key for key, weight in before.items() if not torch.equal(weights[key], weight)] == [], name
    after = train_gpt.read_base(tmp_path / "single", "nano")
    up = "blocks.0.up.weight"
    assert after.keys() == before.keys() and not torch.equal(after[up], before[up])
    _, whole = newest(tmp_path / "single", "bf16")
    shutil.rmtree(tmp_path / "single" / "checkpoints" / "bf16" / "step-00000004")
    assert train(*words, "--out", tmp_path / "single", "--resume") == 0
    assert differences(whole, newest(tmp_path / "single", "bf16")[1]) == []
    with pytest.raises(checkpoint.CheckpointError, match="size is tiny and was nano"):
        train_gpt.read_base(tmp_path / "base", "tiny")


# ----------------------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps", "0"], "at least 1, but got '0'"),
        (["--init-scale", "1000"], "expected a power of two"),
        (["--warmup", "12", "--steps", "12"], "--warmup 12 is not below --steps 12"),
        (["--step", "3"], "unknown option --step; did you mean --steps? leave it out"),  # no guessing from a prefix
        (["--data", "/no/such/file"], "--data /no/such/file does not exist; pass a file"),
        (["--resume"], "there is no checkpoint below"),
        (["--resume", "x", "--precision", "compare"], "--resume PATH with --precision compare; pass --resume alone"),
        (["--master-weights", "split24", "--precision", "fp16"], "expected --precision bf16 with --master-weights"),
        (["--state-dtype", "8bit", "--precision", "compare"], "where torch's optimizer has neither; pass --precision"),
        (["--strategy", "ddp"], "type: torchrun --nproc-per-node 2 examples/train_gpt.py --strategy ddp"),
        (["--lora", "4"], "--lora 4 without --base, whose frozen weights it adapts"),
        (["--base", "x", "--init", "gpt2"], "--init with --base, whose weights replace those drawn; pass one of them"),
        (["--base", "tests/examples"], "holds checkpoints of 0 runs; pass one checkpoint"),
        (["--accumulate", "3"], "to be a multiple of 3 (1 processes times --accumulate 3), but got 16"),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert train("--size", "nano", "--out", tmp_path / "out", *words) == 2
    printed = capsys.readouterr()
    assert expected in printed.err and printed.out == "" and "Traceback" not in printed.err
    assert not list(tmp_path.rglob("*.*"))


def test_resuming_another_run_is_refused_and_nothing_touched(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert _train(text, out, "--save-every", 6) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    for more, expected in (
        (("--resume", "--size", "tiny"), "size is tiny and was nano, lr is 0.003 and was 0.005"),
        (("--resume", "--data", __file__), "data is "),
        (("--resume", "--precision", "fp16"), "there is no checkpoint below"),
        (("--precision", "fp16", "--resume", out), f"--resume {out} has no checkpoint of 'fp16'; pass a checkpoint"),
        ((), "step-00000012 already exists; pass --resume to continue, or another --out"),
    ):
        assert _train(text, out, "--save-every", 6, *more) == 2
        assert expected in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert _train(text, tmp_path / "other", "--resume", out) == 0
    assert "bf16: continuing after step 12" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_after_the_step_and_the_run_resumes(text: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    words = [SCRIPT, "--size", "nano", "--steps", 1_000_000, "--batch", 4, "--data", text, "--out", out]
    words += ["--save-every", 100_000, "--validate-every", 2]
    errors = tmp_path / "errors"
    program = forks.Program(words, errors=errors)
    with program.stdout:
        for line in program.stdout:
            if "bf16: step" in line:
                break
        program.send_signal(number)
        output = program.stdout.read()
    assert program.wait(timeout=60) == 128 + number
    assert "Traceback" not in errors.read_text()
    ((step, path),) = checkpoint.checkpoints(out / "checkpoints" / "bf16")
    assert f"stopped by {number.name} after step {step}; continue with --resume" in output
    assert checkpoint.load(path)["step"] == step
