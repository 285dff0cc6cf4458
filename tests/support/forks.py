"""Start Python programs in milliseconds, by forking one process per run that has already imported torch.

Importing torch with torch.distributed takes seconds of processor time in every new process.
"""

import atexit
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any
from unittest import mock

# None of them starts a thread, which a fork would not copy, or changes torch, as torch.testing._internal does.
# halfstep is not among them: what it reads from the environment when it is imported may differ from test to test.
PRELOADED = [
    "pytest",  # what forked processes import as the main module
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]


def serve() -> None:
    """Start the process from which others are forked, if it is not running."""
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # or numpy's linear algebra starts threads at its import
        multiprocessing.forkserver.set_forkserver_preload(PRELOADED)
        multiprocessing.forkserver.ensure_running()


class Program:
    """A running ``python *words``, like `subprocess.Popen`, with its standard output in `stdout`.

    `words` begin with a script or with -c and code. The environment is this process's, or `env`. With `errors`,
    standard error goes to that file.
    """

    def __init__(
        self,
        words: Sequence[object],
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        errors: Path | None = None,
    ) -> None:
        serve()
        read, write = multiprocessing.Pipe(duplex=False)
        place = str(Path.cwd() if cwd is None else cwd), None if errors is None else str(errors)
        arguments = write, list(map(str, words)), dict(os.environ if env is None else env), *place
        self.process = multiprocessing.get_context("forkserver").Process(target=_main, args=arguments, daemon=True)
        self.process.start()
        write.close()
        self.stdout: IO[str] = os.fdopen(os.dup(read.fileno()), errors="replace")
        read.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        """The exit status, or None while the program runs, like `subprocess.Popen.poll`."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.process.exitcode


def run(
    words: Sequence[object], env: Mapping[str, str] | None = None, cwd: Path | str | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a `Program` to its end, like `subprocess.run` with captured text."""
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "errors"
        program = Program(words, env, cwd, errors)
        late = threading.Timer(timeout, program.process.kill)
        late.start()
        with program.stdout:
            output = program.stdout.read()
        status = program.wait()
        if not late.is_alive():
            raise subprocess.TimeoutExpired(list(words), timeout, output)
        late.cancel()
        return subprocess.CompletedProcess(words, status, output, errors.read_text(errors="replace"))


def _main(output: Any, words: list[str], environment: dict[str, str], folder: str, errors: str | None) -> None:
    atexit._clear()  # what the process that forked this one does at its exit, such as saving its own coverage
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.dup2(output.fileno(), 1)
    output.close()
    if errors is not None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    first, *rest = words
    try:
        if first == "-c":
            code, *rest = rest
            sys.argv = ["-c", *rest]
            module = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(module))
        else:
            sys.argv = [first, *rest]
            sys.path.insert(0, str(Path(first).parent))
            runpy.run_path(first, run_name="__main__")
    finally:
        # Of what ends an interpreter, that which Python code can see; torch's teardown is not.
        atexit._run_exitfuncs()
        sys.stdout.flush()
