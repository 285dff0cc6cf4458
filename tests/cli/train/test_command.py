"""The command from its words to its files: what it leaves, what it refuses and how it says so."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import forks
import pytest
import torch

import halfstep
from halfstep.__main__ import main
from halfstep.cli.train import loop, report
from halfstep.cli.train.model import GPT, SIZES
from halfstep.cli.train.precision import Precision
from halfstep.integrations import checkpoint
from halfstep.numerics.scaling.overflow import Overflow

pytestmark = pytest.mark.sample(3)

TEXT = Path(os.__file__).read_bytes()  # some 40 kB of Python
KEYS = {
    "name",
    "precision",
    "strategy",
    "world_size",
    "optimizer",
    "steps",
    "final_train_loss",
    "final_val_loss",
    "skipped_steps",
    "final_scale",
    "param_bytes_per_param",
    "optimizer_bytes_per_param",
    "step_ms_p50",
    "optimizer_ms_p50",
    "tokens_per_s",
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_bytes(TEXT)
    return path


def _train(text: Path, out: Path, *more: object) -> int:
    words = ["--size", "nano", "--steps", 12, "--batch", 4, "--data", text, "--out", out, *more]
    return main(["train", *map(str, words)])


def _report(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "report.json").read_text())
    return content


# ------------------------------------------------------------------------------------------------------ what it leaves


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    (folder / "text.py").write_bytes(TEXT)
    # the scale starts where gradients overflow, so that there is a skipped step to report
    options = ("--precision", "compare", "--steps", 40, "--init-scale", 2.0**24, "--growth-interval", 10)
    assert _train(folder / "text.py", folder / "out", *options) == 0
    return folder / "out"


def test_compare_reports_four_runs_with_every_key(compared: Path) -> None:
    content = _report(compared)
    assert [run["name"] for run in content["runs"]] == ["fp32", "bf16", "fp16", "bf16 without master"]
    assert [run["optimizer"] for run in content["runs"]] == [
        "torch.optim.AdamW",
        "halfstep.AdamW",
        "halfstep.AdamW",
        "torch.optim.AdamW",
    ]
    for run in content["runs"]:
        assert run.keys() >= KEYS
        assert run["steps"] == len(run["train_loss"]) == 40
        assert run["final_val_loss"] < 4.5 < run["train_loss"][0]
        assert run["step_ms_p50"] > run["optimizer_ms_p50"] > 0
        assert run["tokens_per_s"] == pytest.approx(4 * 32 / run["step_ms_p50"] * 1000)
    assert content["versions"]["halfstep"] == halfstep.__version__
    assert content["unigram_entropy"] == pytest.approx(_entropy(TEXT))
    assert "emulated" in content["notes"][0]


def _entropy(text: bytes) -> float:
    return -sum(n / len(text) * math.log(n / len(text)) for n in map(text.count, range(256)) if n)


def test_bytes_per_parameter_are_those_of_the_layouts(compared: Path) -> None:
    sizes = {
        run["name"]: [run[f"{part}_bytes_per_param"] for part in ("param", "gradient", "optimizer")]
        for run in _report(compared)["runs"]
    }
    assert sizes == {
        "fp32": [4, 4, 8],
        "bf16": [2, 2, 10],  # remainder 2, moments 4 + 4
        "fp16": [2, 2, 12],  # master 4, moments 4 + 4
        "bf16 without master": [2, 2, 4],
    }


def test_the_same_start_and_batches_in_every_run(compared: Path) -> None:
    losses = [run["train_loss"] for run in _report(compared)["runs"]]
    for other in losses[1:]:
        assert other[0] == pytest.approx(losses[0][0], rel=2e-3)
    assert losses[1][20] == pytest.approx(losses[0][20], rel=2e-2)


def test_skipped_steps_are_those_where_the_scale_fell(compared: Path) -> None:
    runs = {run["name"]: run for run in _report(compared)["runs"]}
    fp16 = runs["fp16"]
    scales = [*fp16["scale"], fp16["final_scale"]]
    assert fp16["skipped_steps"] == len(fp16["skipped"]) > 0
    assert fp16["scale"][0] == 2.0**24
    for step in range(1, 40):
        assert (scales[step] < scales[step - 1]) == (step in fp16["skipped"])
    assert any(after > before for before, after in pairwise(scales))
    assert runs["bf16"]["overflow"] is None and runs["fp16"]["overflow"]["skipped"] == fp16["skipped_steps"]
    assert runs["bf16"]["final_scale"] is None and runs["bf16"]["skipped_steps"] == 0


def test_the_parameters_that_overflowed_are_named_everywhere(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(text, tmp_path / "out", "--precision", "fp16", "--init-scale", 2.0**24) == 0
    printed = capsys.readouterr().out
    run = _report(tmp_path / "out")["runs"][0]
    known, page = run["overflow"], (tmp_path / "out" / "report.html").read_text()
    assert known["steps"] == 12 and known["skipped"] == run["skipped_steps"] == len(run["skipped"]) > 0
    assert known["last_skipped"] == run["skipped"][-1]
    names = {name for name, _ in _nano().named_parameters()}
    assert known["parameters"] and {one["name"] for one in known["parameters"]} <= names
    assert {one["first_step"] for one in known["parameters"]} >= {run["skipped"][0]}
    assert max(one["last_step"] for one in known["parameters"]) == run["skipped"][-1]
    assert f"fp16: {known['skipped']} of 12 steps skipped, the last one step {run['skipped'][-1]}" in printed
    assert f"{known['skipped']} of 12 steps skipped." in page
    for one in known["parameters"]:
        assert 1 <= max(one["inf_steps"], one["nan_steps"]) <= known["skipped"]
        line = next(line for line in printed.splitlines() if line.split()[:1] == [one["name"]])
        assert line.endswith(f"first at step {one['first_step']}, last at {one['last_step']}")
        assert f"<td>{one['name']}</td>" in page


def _nano() -> torch.nn.Module:
    return GPT(SIZES["nano"], Precision.on("fp16", torch.device("cpu")), 0)


def test_the_parameter_that_was_spoiled_is_the_one_reported(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across a resume: its first step lies before, its last one after."""
    name = list(dict(_nano().named_parameters()))[3]
    step = halfstep.GradScaler.step
    calls = 0

    def spoiled(self: Any, optimizer: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (2, 5, 10):
            parameter = next(p for key, p in trainers[-1].plain.named_parameters() if key == name)
            parameter.grad.view(-1)[0] = math.nan if calls == 5 else math.inf
        return step(self, optimizer)

    trainers: list[loop.Trainer] = []
    init = loop.Trainer.__init__
    monkeypatch.setattr(loop.Trainer, "__init__", lambda self, *a: (trainers.append(self), init(self, *a))[1])
    monkeypatch.setattr(halfstep.GradScaler, "step", spoiled)
    options = ("--precision", "fp16", "--init-scale", 64, "--save-every", 6)
    assert _train(text, tmp_path / "out", *options) == 0
    whole = _report(tmp_path / "out")["runs"][0]["overflow"]
    assert whole == {
        "steps": 12,
        "skipped": 3,
        "last_skipped": 10,
        "parameters": [{"name": name, "inf_steps": 2, "nan_steps": 1, "first_step": 2, "last_step": 10}],
    }
    shutil.rmtree(checkpoint.checkpoints(tmp_path / "out" / "checkpoints" / "fp16")[-1][1])
    calls = 6
    assert _train(text, tmp_path / "out", *options, "--resume") == 0
    assert _report(tmp_path / "out")["runs"][0]["overflow"] == whole
    assert _train(text, tmp_path / "out", *options, "--resume") == 0, "nothing left to do"
    assert _report(tmp_path / "out")["runs"][0]["overflow"] == whole


def test_ranks_are_put_together_by_parameter() -> None:
    ranks = [[Overflow("a", 2, 0, 3, 7)], [Overflow("a", 1, 1, 2, 5), Overflow("b", 1, 0, 4, 4)], []]
    assert loop._over_ranks(ranks) == [Overflow("a", 2, 1, 2, 7), Overflow("b", 1, 0, 4, 4)]


def test_the_page_stands_alone_and_says_what_was_emulated(compared: Path) -> None:
    page = (compared / "report.html").read_text()

    class Reader(HTMLParser):
        sources: list[str] = []  # noqa: RUF012
        cells: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "iframe")
            self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

        def handle_data(self, data: str) -> None:
            self.cells.append(data)

    reader = Reader()
    reader.feed(page)
    assert len(reader.sources) == 1 and reader.sources[0].startswith("data:image/png;base64,")
    names = " and ".join(name for name in ("bf16", "fp16") if Precision.on(name, torch.device("cpu")).emulated)
    assert any(f"the {names} matrix products were emulated" in cell for cell in reader.cells)
    for run in _report(compared)["runs"]:
        assert f"{run['final_val_loss']:.4f}" in reader.cells
    assert (compared / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_all_else_is_written(
    picture: None, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _train(text, tmp_path / "out") == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["report.html", "report.json"]
    assert "no report.png: pictures need matplotlib, which is not installed: pip install" in capsys.readouterr().out


def test_the_table_shows_the_entropy_beside_the_losses(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(text, tmp_path / "out", "--precision", "fp32") == 0
    printed = capsys.readouterr().out
    run = _report(tmp_path / "out")["runs"][0]
    assert run["optimizer"] == "halfstep.AdamW"
    assert f"{run['final_val_loss']:.4f}" in printed
    assert f"{_entropy(TEXT):.4f}" in printed
    assert re.search(r"fp32: step 12/12 +loss [0-9.]+ +[0-9,]+ tokens/s", printed)


def test_a_run_learns(text: Path, tmp_path: Path) -> None:
    assert _train(text, tmp_path / "out", "--precision", "fp16", "--steps", 150, "--batch", 16) == 0
    content = _report(tmp_path / "out")
    assert content["runs"][0]["final_val_loss"] < content["unigram_entropy"] - 0.2


def test_a_loss_that_is_no_number_is_said_and_fails(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--lr", "1e30", "--warmup", 0, "--steps", 40, "--precision", "fp32", "--save-every", 4)
    assert _train(text, tmp_path / "out", *options) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"fp32: given up: the loss was not finite for 5 steps in a row, .* use a smaller --lr than 1e\+30", printed
    )
    content = (tmp_path / "out" / "report.json").read_text()
    read = json.loads(content, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert read["runs"][0]["final_val_loss"] is None


# ----------------------------------------------------------------------------------------------------- what it refuses


def _refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err and printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps", "0"], "argument --steps: expected an integer of at least 1, but got '0'"),
        (["--steps", "-3"], "but got '-3'"),
        (["--steps", "many"], "but got 'many'"),
        (["--batch", "1.5"], "but got '1.5'"),
        (["--lr", "0"], "argument --lr: expected a finite number above 0"),
        (["--lr", "-1e-3"], "but got '-1e-3'"),
        (["--lr", "nan"], "but got 'nan'"),
        (["--lr", "inf"], "but got 'inf'"),
        (["--weight-decay", "-0.1"], "argument --weight-decay"),
        (["--init-scale", "1000"], "expected a power of two"),
        (["--seed", "-1"], "argument --seed"),
        (["--save-every", "-1"], "argument --save-every"),
        (["--warmup", "12", "--steps", "12"], "expected --warmup to be from 0 to 11, below --steps, but got 12"),
        (["--precision", "fp8"], "argument --precision: unknown precision 'fp8'; did you mean 'fp"),
        (["--stpes", "3"], "unknown option --stpes; did you mean --steps?"),
        (["--save-evry=3"], "unknown option --save-evry=3; did you mean --save-every?"),
        (["--qqq"], "unknown option --qqq; see halfstep train --help"),
        (["--step", "3"], "did you mean --steps?"),  # no guessing from a prefix
        (["--data", "/no/such/file"], "--data /no/such/file does not exist; pass a file"),
        (["--out", "/dev/null/out"], "--out /dev/null/out cannot be written to: "),
        (["--resume"], "there is no checkpoint below"),
        (["--master-weights", "split24", "--precision", "fp16"], "expected --precision bf16 with --master-weights"),
        (
            ["--state-dtype", "8bit", "--precision", "compare"],
            "--state-dtype 8bit --master-weights auto with --precision compare, where torch's optimizer has neither; "
            "pass --precision bf16, fp32 or fp16",
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert expected in _refused(capsys, "train", "--size", "nano", "--out", tmp_path / "out", *words)
    assert not list(tmp_path.rglob("*.*"))


def test_short_text_names_its_length_and_what_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_bytes(b"x" * 65)
    error = _refused(capsys, "train", "--size", "nano", "--data", tmp_path / "text", "--out", tmp_path / "out")
    assert "expected at least 66 bytes (one window" in error


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_need_torchrun_and_the_line_to_type_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    error = _refused(capsys, "train", "--strategy", strategy, "--out", tmp_path / "out")
    assert f"--strategy {strategy} trains in several processes that torchrun starts; type: torchrun" in error
    assert f"torchrun --nproc-per-node 2 -m halfstep train --strategy {strategy}" in error


def test_torchruns_variables_in_part_or_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.delenv("MASTER_PORT")
    error = _refused(capsys, "train", "--strategy", "ddp", "--out", tmp_path / "out")
    assert (
        "which sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: here MASTER_ADDR, MASTER_PORT are" in error
    )
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    error = _refused(capsys, "train", "--strategy", "ddp", "--out", tmp_path / "out")
    assert "here MASTER_PORT is missing; type: torchrun" in error
    monkeypatch.setenv("MASTER_PORT", "1")
    for name, value in (("WORLD_SIZE", "many"), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "-3")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            error = _refused(capsys, "train", "--strategy", "ddp", "--out", tmp_path / "out")
        assert f"{name}={value}" in error and "to be integers, RANK and LOCAL_RANK from 0 to below WORLD" in error


def test_the_batch_must_divide_and_single_must_be_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    error = _refused(capsys, "train", "--strategy", "ddp", "--batch", 16, "--out", tmp_path / "out")
    assert "expected --batch, the global batch, to be a multiple of the 3 processes, but got 16" in error
    assert "--strategy single, but torchrun has started 3 processes; use --strategy ddp" in _refused(
        capsys, "train", "--out", tmp_path / "out"
    )
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == ""  # rank 0 has said it


# ---------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--size", "tiny"), "pass --size nano --lr 0.005, or start a new run with another --out"),
        (("--size", "tiny"), "size is 'tiny' and was 'nano'"),
        (
            ("--precision", "compare"),
            "and was 'halfstep.AdamW'; pass --precision fp32, or",
        ),
        (("--batch", 8), "batch is 8 and was 4; pass --batch 4"),
        (("--state-dtype", "8bit"), "state_dtype is '8bit' and was 'fp32'; pass --state-dtype fp32"),
        (("--seed", 5), "seed is 5 and was 0; pass --seed 0"),
        (("--steps", 24), "steps is 24 and was 12"),
        (("--lr", 1e-4), "lr is 0.0001 and was 0.005; pass --lr 0.005"),
        (("--precision", "fp16"), "there is no checkpoint below"),
    ],
)
def test_resuming_another_run_is_refused_and_nothing_touched(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, object], expected: str
) -> None:
    out = tmp_path / "out"
    precision = "fp32" if "compare" in options else "bf16"
    assert _train(text, out, "--save-every", 6, "--precision", precision) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert _train(text, out, "--save-every", 6, "--precision", precision, "--resume", *options) == 2
    assert expected in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_resuming_with_a_checkpoint_of_another_precision_or_text_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert _train(text, out, "--save-every", 6) == 0
    (_, newest) = checkpoint.checkpoints(out / "checkpoints" / "bf16")[-1]
    capsys.readouterr()
    assert _train(text, out, "--precision", "fp16", "--resume", newest) == 2
    assert "precision is 'fp16' and was 'bf16'; pass --precision bf16" in capsys.readouterr().err
    text.write_bytes(TEXT + b"#")
    assert _train(text, out, "--resume") == 2
    assert re.search(r"data is '?\w{12}…'? and was \w{12}…; pass --data with the same content", capsys.readouterr().err)


def test_a_damaged_checkpoint_is_named_with_the_good_one_and_that_one_works(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert _train(text, out, "--save-every", 6) == 0
    (_, good), (_, bad) = checkpoint.checkpoints(out / "checkpoints" / "bf16")
    damaged = max(bad.iterdir(), key=lambda file: file.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    capsys.readouterr()
    assert _train(text, out, "--save-every", 6, "--resume") == 2
    error = capsys.readouterr().err
    assert f"checkpoint {bad} cannot be used" in error and f"{good} is good" in error
    assert _train(text, out, "--save-every", 6, "--resume", good) == 0
    assert checkpoint.newest(out / "checkpoints" / "bf16") == bad  # written again


def test_a_folder_means_its_newest_checkpoint(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert _train(text, out, "--save-every", 4) == 0
    folder = out / "checkpoints" / "bf16"
    shutil.rmtree(checkpoint.checkpoints(folder)[-1][1])
    for given in (folder, folder.parent, out):
        capsys.readouterr()
        assert _train(text, tmp_path / "other", "--resume", given) == 0
        assert "bf16: continuing after step 8" in capsys.readouterr().out
    assert _train(text, tmp_path / "other", "--precision", "fp16", "--resume", out) == 2
    assert (
        f"--resume {out} is a folder without a checkpoint of halfstep train for precision 'fp16'; pass a checkpoint"
        in (capsys.readouterr().err)
    )


def test_edited_content_is_refused_in_one_line(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a checksum that fits: what a user's script, or anybody, has written."""
    out = tmp_path / "out"
    assert _train(text, out, "--save-every", 12, "--precision", "fp16") == 0
    ((step, path),) = checkpoint.checkpoints(out / "checkpoints" / "fp16")
    whole = checkpoint.load(path)
    edits: list[tuple[str, Any]] = [
        *((name, None) for name in loop.CONTENT),
        *((name, "\x1b[2J") for name in loop.CONTENT if name not in ("gradients", "rng", "cuda_rng")),
        ("step", -1),
        ("plan", {}),
        ("model", {}),
        ("optimizer", {"state": {}, "param_groups": []}),
        ("history", {"train_loss": 3}),
        ("rng", [torch.zeros(3)]),
        ("overflowed", [[{"name": 3}]]),
    ]
    for name, value in edits:
        edited = {key: kept for key, kept in whole.items() if key != name} | ({} if value is None else {name: value})
        checkpoint.save(path.parent, step, edited)
        capsys.readouterr()
        assert _train(text, out, "--precision", "fp16", "--resume") == 2, name
        printed = capsys.readouterr().err
        assert printed.startswith("halfstep train: error: ") and printed.count("\n") == 1, printed
        assert printed.rstrip("\n").isprintable()


def test_a_new_run_does_not_replace_the_checkpoints_of_an_old_one(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(text, tmp_path / "out", "--save-every", 6) == 0
    assert _train(text, tmp_path / "out", "--save-every", 6, "--seed", 1) == 2
    assert "already holds checkpoints, up to step 12" in capsys.readouterr().err


def test_names_of_files_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "\x1b]0;owned\x07\x1b[2J.py", tmp_path / "\x1b[8mout\nreport: "
    text.write_bytes(TEXT)
    assert _train(text, out, "--save-every", 6) == 0
    assert _train(text, out, "--save-every", 6) == 2
    printed = "".join(capsys.readouterr())
    assert (
        r"\x1b]0;owned\x07\x1b[2J.py: " in printed
        and rf"report: {tmp_path}/\x1b[8mout\nreport: /report.json" in printed
    )
    assert all(sign.isprintable() or sign == "\n" for sign in printed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_after_the_step_and_the_run_resumes(text: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    words = ["--size", "nano", "--steps", "1000000", "--batch", "4", "--data", str(text), "--out", str(out)]
    code = "import sys; from halfstep.__main__ import program; sys.exit(program())"
    errors = tmp_path / "errors"
    program = forks.Program(["-c", code, "train", *words, "--save-every", "100000"], errors=errors)
    with program.stdout:
        for line in program.stdout:
            if "bf16: step" in line:
                break
        program.send_signal(number)
        output = program.stdout.read()
    assert program.wait(timeout=60) == 128 + number
    assert "Traceback" not in errors.read_text()
    ((step, path),) = checkpoint.checkpoints(out / "checkpoints" / "bf16")
    assert f"stopped by {number.name} after step {step}; continue with: halfstep train" in output
    assert checkpoint.load(path)["step"] == step


def test_the_learning_rate_rises_falls_and_ends_near_zero() -> None:
    settings = loop.Settings("nano", 100, 4, 0, 1.0, 0.1, 10, 65536.0, 60)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == 1.0 and rates[55] == pytest.approx(0.5) and 0 < rates[99] < 1e-3


def test_smoothing_leaves_out_steps_without_a_loss() -> None:
    assert report._smooth([2.0, 4.0, None, 6.0], 2) == ([1, 2, 3, 4], [2.0, 3.0, 4.0, 6.0])
    assert report._smooth([None, None, 1.0], 1) == ([3], [1.0])
