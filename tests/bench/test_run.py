"""`halfstep bench run`: what it refuses, prints and writes."""

import inspect
import json
import textwrap
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from halfstep.__main__ import main as halfstep_main
from halfstep.bench import harness, run, timing
from halfstep.bench.cases import GROUPS, Sizes
from halfstep.bench.harness import OK, Result

TINY = Sizes(elements=2**10, columns=(16, 64), cast_elements=(64, 256), tensors=(1, 3), large=0, slow=False)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "sizes_for", lambda device_type, quick: TINY)
    monkeypatch.setattr(run, "COPY_BYTES", {"cpu": 2**16, "cuda": 2**16})
    monkeypatch.setattr(run, "SECONDS", {True: 0.0, False: 0.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sofmax"], "unknown group 'sofmax'; did you mean 'softmax'? Choose from softmax, log_probabilities, cast"),
        (["--processor-time"], "--processor-time measures one thread on a CPU; add --threads 1, or leave it out"),
        (["--threads", "0"], "argument --threads: expected an integer of at least 1, but got '0'"),
        (["--out", __file__], "File exists; pass a folder that can"),
    ],
)
def test_errors_name_the_value_and_what_is_allowed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert halfstep_main(["bench", "run", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_everything_is_measured_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert run.main(["--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["results.json"]
    written = json.loads((out / "results.json").read_text())
    about = {key: value for key, value in written.items() if key != "results"}
    assert set(about) == {
        *("halfstep", "torch", "triton", "python", "device", "threads", "date", "quick", "copy_gb_per_s")
    }
    assert about["halfstep"] == halfstep.__version__ and about["copy_gb_per_s"] > 0
    results = [Result(**row) for row in written["results"]]
    assert {result.group for result in results} == set(GROUPS)
    assert {field.name for field in fields(Result)} == set(written["results"][0])
    for result in results:
        assert (result.p50_us is not None) == (result.status == OK), result
        assert (result.reason == "") == (result.status == OK), result
    printed = capsys.readouterr().out
    for words in ("softmax forward, bf16", "AMP step, fp32", "halfstep full master", "torch-optimi", "of copy"):
        assert words in printed
    assert "liger-kernel: needs a GPU" in " ".join(printed.split())


def test_groups_choose_cases_and_json_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["cast", "--quick", "--json", "cast"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["quick"] is True
    assert {row["group"] for row in printed["results"]} == {"cast"}
    assert sum(row["operation"] == "cast" and row["provider"] == "halfstep" for row in printed["results"]) == 8


def test_cases_are_selected_by_part_of_their_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["adam", "cast", "--only", "fp32 master, 3 tensors", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert {(row["operation"], row["dtype"], row["size"]["tensors"]) for row in rows} == {
        ("adamw", "bf16, fp32 master", 3)
    }
    assert run.main(["cast", "--only", "fp64"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "--only 'fp64' is in the name of none of 12 cases, such as 'cast, fp32 to bf16, 64 elements'" in message
    assert "use a part of a name, which begins with cast, fp32 to bf16; cast, fp32 to fp16;" in message


def test_cases_of_other_modules_are_measured_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of the docstring of `harness`, and what else a module can be."""
    lines = inspect.getdoc(harness).partition("::\n")[2].partition("    results =")[0]  # type: ignore[union-attr]
    example = "import torch\nfrom halfstep.bench.harness import Case, Prepared\nmy_square = torch.square\n"
    example += textwrap.dedent(lines).replace("2**24", "2**10")
    (tmp_path / "my_cases.py").write_text(example + "\ndef cases(sizes):\n    return [case]\n")
    (tmp_path / "no_cases.py").write_text("def cases(sizes):\n    return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run.main(["--module", "my_cases", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [(row["group"], row["provider"], row["status"]) for row in rows] == [
        ("mine", "mine", OK),
        ("mine", "torch", OK),
    ]
    for module, reason in (
        ("no_module", "expected --module to be a module on Python's path, by dotted name, but got no_module"),
        ("json", "--module json: module 'json' has no attribute 'cases'; it needs a function cases()"),
        ("no_cases", "--module no_cases: its cases() lists nothing"),
    ):
        assert run.main(["--module", module]) == 2
        assert reason in capsys.readouterr().err


def test_processor_time_can_be_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A provider that waits without working is not charged for it."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    clocks = []
    monkeypatch.setattr(
        timing, "copy_gb_per_s", lambda clock, size: clocks.append(clock.seconds(lambda: time.sleep(0.01))) or 1.0
    )
    assert run.main(["cast", "--processor-time", "--threads", "1"]) == 0
    assert clocks[0] < 0.01
    assert "processor time" in capsys.readouterr().out


def test_a_wrong_halfstep_kernel_has_no_figure_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good: Callable[..., Any] = halfstep.cast
    monkeypatch.setattr(halfstep, "cast", lambda x, dtype: good(x, dtype) * 1.5)
    assert run.main(["cast"]) == 1
    captured = capsys.readouterr()
    lines = [line for line in captured.out.splitlines() if "halfstep (wrong: error" in line]
    assert len(lines) == 6, "three pairs of dtypes at two sizes; FP8 cannot be multiplied and fails"
    assert "cast, fp32 to bf16: halfstep wrong: error" in captured.err
    assert "halfstep failed" in captured.err
