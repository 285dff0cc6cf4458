"""The command itself: subcommands, exit status, interrupts, closed pipes, and help."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.__main__ import main
from halfstep.cli import plan


def test_every_command_has_a_main_and_passes_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in importlib.import_module("halfstep.__main__").COMMANDS:
        seen = []
        monkeypatch.setattr(f"{command.module}.main", lambda argv, *_, seen=seen: (seen.append(argv), 7)[1])
        assert main([*command.name.split(), "--x"]) == 7
        assert seen == [["--x"]]


def test_an_interrupt_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "main", interrupted)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "halfstep: interrupted\n"


@pytest.mark.parametrize(
    ("words", "buffered"),
    [("plan --params 7e9 --json", ""), ("plan --help", "1"), ("--version", ""), ("bench --help", "1")],
)
def test_a_pipe_closed_by_its_reader_is_not_an_error(words: str, buffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command, environment = (
        [sys.executable, "-m", "halfstep", *words.split()],
        {**os.environ, "PYTHONUNBUFFERED": buffered},
    )
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


NAMES = [command.name for command in importlib.import_module("halfstep.__main__").COMMANDS]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [40, 80])
def test_help_is_legible(
    name: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = []
    for words in ([*name.split(), "--help"], ["help", *name.split()]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        shown.append(capsys.readouterr().out)
    text = shown[0]
    assert text == shown[1] and text.startswith(f"usage: halfstep {name}")
    assert "`" not in text and "default: None" not in text
    long = [line for line in text.splitlines() if len(line) > columns]
    whole = (line.split() for line in long if not line.strip().startswith(("[", "-")))
    assert all(len(words) == 1 for words in whole), "only an option or a word that is longer than the screen"


@pytest.mark.parametrize("words", ["format", "--version"])
def test_a_closed_standard_output_is_reported_at_once(words: str, tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "halfstep", words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "halfstep: error: standard output is closed; send it to a file, or to /dev/null\n"
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "halfstep", "encode", "x"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (2, ""), "a closed standard error is no standard output"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("words", ["encode 2.5", "encode 2.5 --json"])
def test_every_command_reports_output_that_cannot_be_written(words: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "halfstep", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    error = "error: standard output cannot be written: No space left on device\n"
    assert done.stderr == f"halfstep {words.split()[0]}: {error}"


@pytest.mark.parametrize("words", ["why 1.0001 fp16 e4m3", "compare fp16 bf16", "plan --params 7e9", "--version"])
def test_answers_that_need_no_torch_do_not_import_it(words: str, tmp_path: Path) -> None:
    heavy = {"torch", "numpy", "ml_dtypes", "matplotlib", "triton", "halfstep.numerics.formats.codec"}
    heavy |= {"rich"} if words == "--version" else set()
    code = f"import sys; from halfstep.__main__ import main; main({words.split()}); print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "set()")
