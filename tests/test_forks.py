"""Programs that tests/support/forks.py forks are as those that are started: words, folder, status and output."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import forks
import pytest

CODE = """
import os, sys, threading
print(sys.argv[1:], os.environ.get("HALFSTEP_SAMPLE"), os.getcwd(), "halfstep" in sys.modules, __name__)
print("to the other", file=sys.stderr)
threading.Thread(target=print, args=("from a thread",)).start()
sys.exit(3)
"""


def test_it_is_as_a_process_that_is_started(tmp_path: Path) -> None:
    started = subprocess.run(
        [sys.executable, "-c", CODE, "a", "1"],
        env={"HALFSTEP_SAMPLE": "now"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    forked = forks.run(["-c", CODE, "a", 1], {"HALFSTEP_SAMPLE": "now"}, tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (3, started.stdout, started.stderr)
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "script.py").write_text("import beside, sys; sys.exit(f'{__name__} {beside.NAME} {sys.argv[1]}')")
    done = forks.run([tmp_path / "script.py", "x"])
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "__main__ beside x\n")


def test_errors_signals_and_lateness_are_told() -> None:
    done = forks.run(["-c", "1 / 0"])
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert forks.run(["-c", "import os; os.abort()"]).returncode == -signal.SIGABRT
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run(["-c", "import time; time.sleep(100)"], timeout=0.1)
    program = forks.Program(["-c", "import time; print('here', flush=True); time.sleep(100)"])
    assert program.stdout.readline() == "here\n" and program.poll() is None
    program.send_signal(signal.SIGKILL)
    assert program.wait(10) == program.poll() == -signal.SIGKILL
