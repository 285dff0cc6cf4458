"""The command itself: which sub-command is chosen, and what it does with a stranger's words."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep
from halfstep.__main__ import main
from halfstep.cli.train import command as train


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
        (["qqq"], "unknown command 'qqq'; choose from bench, compare, convert"),
    ],
)
def test_unknown_commands_are_answered(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    assert expected in _refused(capsys, *words)


@pytest.mark.parametrize("rank", [None, "0"])
def test_a_rank_ends_before_python_shuts_down(rank: str | None) -> None:
    """Gloo's threads, which torch may keep after the process group, abort a Python that shuts down."""
    code = (
        "import atexit, sys; from halfstep.__main__ import program; atexit.register(print, 'shut down'); "
        "sys.argv[1:] = ['trian']; print('before', end=' '); sys.exit(program())"
    )
    environment = {**os.environ} if rank is None else {**os.environ, "RANK": rank}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "before shut down\n" if rank is None else "before ")
    assert "unknown command 'trian'" in done.stderr


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

    monkeypatch.setattr(train, "main", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "halfstep: interrupted\n"


CTRL_C_DURING_AN_IMPORT = """
import runpy, signal, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == wanted:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                if name == "numpy":  # torch's C++ goes on without numpy
                    raise ImportError
                raise

script, wanted, *sys.argv[1:] = sys.argv[1:]
sys.meta_path.insert(0, Finder)
if script == "module":
    runpy.run_module("halfstep", run_name="__main__")
from halfstep.__main__ import program
sys.exit(program())
"""


@pytest.mark.parametrize("script", ["module", "console script"])
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("halfstep.cli.command_line", ["--version"]),  # what the program imports before it reads its arguments
        ("argparse", ["--version"]),
        ("halfstep.cli.terminal", ["--version"]),
        ("halfstep.cli.formats.format", ["format", "bf16"]),
        ("torch", ["inspect", "x.pt"]),
        ("numpy", ["inspect", "x.pt"]),
        ("difflib", ["trian"]),
    ],
)
def test_an_interrupted_import_ends_without_a_traceback(script: str, module: str, words: list[str]) -> None:
    code = [sys.executable, "-c", CTRL_C_DURING_AN_IMPORT, script, module, *words]
    done = subprocess.run(code, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "halfstep: interrupted\n")


def test_an_interrupted_end_has_no_traceback() -> None:
    code = (
        "import atexit, signal, sys; from halfstep.__main__ import program; "
        "atexit.register(signal.raise_signal, signal.SIGINT); sys.argv[1:] = ['--version']; sys.exit(program())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "halfstep: interrupted\n")
    assert done.stdout == f"halfstep {halfstep.__version__}\n"


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", ["plan --params 7e9 --json", "plan --help", "--help", "--version", "bench --help"])
def test_a_pipe_closed_by_its_reader_is_not_an_error(words: str, buffered: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "halfstep", *words.split()],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
        )
    assert (done.returncode, done.stderr) == (0, "")


COMMANDS = importlib.import_module("halfstep.__main__").COMMANDS
NAMES = [" ".join(command.words) for command in COMMANDS]
# What each command needs so that only the mistake is wrong.
NEEDED = {
    "encode": ["1"], "decode": ["0x1"], "why": ["1", "fp16"], "compare": ["fp16", "bf16"], "ladder": ["--out", "x.png"],
    "plan": ["--params", "7e9"], "inspect": ["x.pt"],
}  # fmt: skip


def _one_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2, words
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, printed
    assert printed.err.isprintable() or printed.err.rstrip("\n").isprintable()
    assert "usage" not in printed.err
    return printed.err


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_answered_with_the_nearest(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("--jsno", "--helpp=3"):
        found = _one_line(capsys, *name.split(), *NEEDED.get(name, []), given)
        assert found.startswith(f"halfstep {name}: error: unknown option {given}; ")
        assert f"see halfstep {name} --help for those there are" in found
    assert "did you mean --help?" in found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # an argument where none is taken
        ("train foo", "unexpected argument 'foo'; halfstep train takes options only: see halfstep train --help"),
        ("train fp16", "unexpected argument 'fp16'; did you mean --precision fp16? halfstep train takes options only"),
        ("plan 7e9", "unexpected argument '7e9'; halfstep plan takes options only"),
        ("bench audit x", "unexpected argument 'x'"),
        ("bench gpu --out x x", "unexpected argument 'x'"),
        ("ladder fp16", "the following arguments are required: --out; see halfstep ladder --help"),
        ("ladder fp61 --out x.png", "argument FORMAT: unknown format 'fp61'; did you mean 'fp64'? Choose from"),
        # a value that is missing, or too many
        ("plan --params", "argument --params: expected one argument; see halfstep plan --help"),
        ("inspect", "the following arguments are required: FILE; see halfstep inspect --help"),
        ("bench run --quick=3", "argument --quick: takes no value, and was given '3'"),
        # an unknown choice
        ("train --precision fp17", "unknown precision 'fp17'; did you mean 'fp16'? Choose from fp32, bf16"),
        ("train --strategy fsd", "unknown strategy 'fsd'; did you mean 'fsdp'? Choose from single, ddp"),
        ("inspect x --sort siez", "unknown sort 'siez'; did you mean 'size'? Choose from size, lost"),
        ("bench run sofmax", "argument GROUP: unknown group 'sofmax'; did you mean 'softmax'? Choose from softmax"),
        ("plan --model gtp2", "but got 'gtp2': did you mean 'gpt2'?"),
        # numbers: negative, NaN, huge, none
        ("plan --params -3", "argument --params: expected an integer of at least 1, such as 7e9"),
        ("plan --params nan", "but got 'nan'"),
        ("plan --params 7e9 --batch 0", "argument --batch: expected an integer of at least 1, but got '0'"),
        ("plan --params 7e9 --gpus 0", "argument --gpus: expected integers of at least 1, such as 8 or"),
        ("plan --params 7e9 --gpus 8,x", "such as 8 or 8,64, but got '8,x'"),
        ("format ''", "unknown format ''; choose from fp64"),
        ("plan --params 7e9 --rank -1", "argument --rank: expected an integer of at least 0, but got '-1'"),
        ("plan --params 7e9 --step-ms inf", "argument --step-ms: expected a number above 0, but got 'inf'"),
        ("inspect x --limit -1", "argument --limit: expected an integer of at least 0, 0 for all, but got '-1'"),
        ("inspect x --scale nan", "argument --scale: expected a number from 2^-126 to 2^126"),
        ("train --steps 1e400", "argument --steps: expected an integer of at least 1, but got '1e400'"),
        ("train --lr nan", "argument --lr: expected a finite number above 0"),
        (f"train --seed {10**30}", "but got '1000000000000000000000000000000'"),
        ("bench run --minutes -inf", "argument --minutes: expected a number above 0, but got '-inf'"),
        ("bench gpu --out x --minutes 0", "argument --minutes: expected a number above 0, but got '0'"),
        ("bench audit --jobs 0", "argument --jobs: expected an integer of at least 1, but got '0'"),
        # files and folders
        ("plan --params 7e9 --out no/x.png", "argument --out: 'no/x.png' cannot be written: No such file or directory"),
        ("plan --params 7e9 --out d.png", "argument --out: 'd.png' cannot be written: Is a directory"),
        ("inspect x --out f/x.png", "argument --out: 'f/x.png' cannot be written: Not a directory; pass a file in a"),
        ("ladder --out x.bmp", "argument --out: expected a file name ending in .png, .svg, .pdf"),
        ("inspect nowhere.pt", "nowhere.pt cannot be read: No such file or directory; pass a checkpoint"),
        ("inspect empty.pt", "empty.pt is empty; pass a checkpoint, a file of torch.save or a safetensors file"),
        ("inspect f.pt", "f.pt is not a file of torch.save, or is damaged: "),
        ("inspect ''", "argument FILE: expected a path, but got ''"),
        ("inspect d.png", "d.png is a folder, and no checkpoint, or is damaged: "),
        ("train --out f --steps 3", "--out f cannot be written to: it is a file; pass a folder that can"),
        ("train --data nowhere", "--data nowhere does not exist; pass a file"),
        ("train --data ''", "argument --data: expected a path, but got ''"),
        ("train --out ''", "argument --out: expected a path, but got ''"),
        ("bench run --out ''", "argument --out: expected a path, but got ''"),
        ("bench gpu --out ''", "argument --out: expected a path, but got ''"),
        ("bench run --out f", "--out f cannot be written to: it is a file; pass a folder that can"),
        ("bench audit --bounds nowhere", "argument --bounds: 'nowhere' does not exist; pass a file that can be read"),
        ("bench audit --bounds d.png", "argument --bounds: 'd.png' is a folder; pass a file that can be read"),
        ("bench audit --bounds f", "expected f to be written by `halfstep bench audit --record`: JSONDecodeError"),
        ("bench audit --markdown f", "--markdown f: it must contain the markers '<!-- compiled kernels: generated"),
        ("bench audit --markdown no", "argument --markdown: 'no' does not exist; pass a file that can be read"),
        ("bench audit --record no/x", "argument --record: 'no/x' cannot be written: No such file or directory"),
        # commands
        ("help plam", "unknown command 'plam'; did you mean 'plan'? Choose from bench, compare"),
        ("bench rum", "unknown command 'bench rum'; did you mean 'bench run'? Choose from bench audit"),
    ],
)  # fmt: skip
def test_what_is_wrong_gets_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("f", "kept"), ("f.pt", "x"), ("empty.pt", "")):
        Path(name).write_text(content)
    Path("d.png").mkdir()
    assert said in _one_line(capsys, *shlex.split(words))
    assert sorted(os.listdir()) == ["d.png", "empty.pt", "f", "f.pt"] and Path("f").read_text() == "kept"


def test_a_file_without_permission_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bounds.json"
    path.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    found = _one_line(capsys, "bench", "audit", "--counts", str(path))
    assert f"argument --counts: '{path}' cannot be read: Permission denied; pass a file that can be read" in found


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


def test_the_list_of_commands_fits_the_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (40, 80, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        for words in (["help"], ["--help"], ["help", "bench"], ["bench", "--help"]):
            assert main(words) == 0
            lines = capsys.readouterr().out.splitlines()
            assert max(map(len, lines)) <= columns
        assert sum(bool(re.match(r"  halfstep bench \w+", line)) for line in lines) == 3


@pytest.mark.parametrize("words", [["format"], ["plan", "--params", "7e9"], ["train", "--steps", "3"], ["--version"]])
def test_a_closed_standard_output_is_said_at_once(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "halfstep", *words]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr == "halfstep: error: standard output is closed; send it to a file, or to /dev/null\n"
    assert list(tmp_path.iterdir()) == []


def test_a_closed_standard_error_is_no_standard_output() -> None:
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "halfstep", "encode", "x"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_output_that_nobody_takes_is_said_of_every_command() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "halfstep", "plan", "--params", "7e9"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "halfstep plan: error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "words",
    [
        "format", "format fp16", "encode 2.5 -f fp16 bf16 e4m3", "decode 0x4100", "why 1.0001 fp16",
        "compare fp16 bf16", "plan --params 7e9 --gpus 8", "plan --model gpt2 --compare layouts", "inspect x.pt",
    ],
)  # fmt: skip
def test_tables_on_a_narrow_screen_keep_every_word(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    torch.save({"encoder.layers.0.self_attention.in_proj.weight": torch.ones(3), "bias": torch.zeros(2)}, "x.pt")
    monkeypatch.setenv("COLUMNS", "40")
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= (40 if not words.startswith(("why", "compare")) else 44), max(lines, key=len)
    if not words.startswith("inspect"):  # which shortens names
        assert "…" not in text
