"""The command itself: which sub-command is chosen, and what it does with a stranger's words."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

import halfstep
from halfstep.__main__ import main
from halfstep.bench.train import cli


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_version_and_help_need_no_torch() -> None:
    code = (
        "import sys; from halfstep.__main__ import main; assert main(['--version']) == 0; "
        "assert main(['--help']) == 0; assert main(['trian']) == 2; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"halfstep {halfstep.__version__}\n")
    assert "unknown command 'trian'; did you mean 'train'?" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bench", "adit"], "unknown command 'bench adit'; did you mean 'bench audit'?"),
        (["qqq"], "unknown command 'qqq'; Allowed are bench, compare, decode"),
    ],
)
def test_unknown_commands_are_answered(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    assert expected in _refused(capsys, *words)


def test_every_command_has_a_main_and_passes_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in importlib.import_module("halfstep.__main__").COMMANDS:
        seen = []
        monkeypatch.setattr(f"{command.module}.main", lambda argv, seen=seen: (seen.append(argv), 7)[1])
        assert main([*command.words, "--x"]) == 7
        assert seen == [["--x"]]


def test_an_interrupt_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "halfstep: interrupted\n"


@pytest.mark.parametrize("words", [["plan", "--params", "7e9", "--json"], ["train", "--help"]])
def test_a_reader_that_has_seen_enough_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "halfstep", *words], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (0, "")
