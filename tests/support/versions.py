"""Run the tests with several versions of Python, torch, Triton and numpy, each in a virtual environment.

    python tests/support/versions.py --out out/versions                 # every row
    python tests/support/versions.py --out out/versions --row floor -- tests/numerics tests/kernels

Arguments after ``--`` are passed to pytest. A row whose interpreter is not on the path, or whose packages cannot be
installed, is reported and is not a failure. Each row writes its output to ``ROW.log`` in the folder of environments and
needs several GB there, because torch's wheels are CUDA builds.
"""

import argparse
import datetime
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Row:
    """One environment: its Python, and the requirements for pip."""

    name: str
    python: str
    torch: str
    triton: str
    numpy: str = ""

    def packages(self) -> list[str]:
        """The requirements for pip."""
        return [f"torch=={self.torch}", f"triton=={self.triton}", f"numpy{self.numpy}"]


# torch 2.11 comes with Triton 3.6, whose interpreter takes no numpy from 2.4 on.
ROWS = (
    Row("floor", "3.10", "2.11.0", "3.6.0", "==1.26.4"),
    Row("2.11", "3.12", "2.11.0", "3.6.0", "<2.4"),
    Row("pin on 3.10", "3.10", "2.13.0", "3.7.1"),
    Row("pin", "3.11", "2.13.0", "3.7.1"),
    Row("pin on 3.12", "3.12", "2.13.0", "3.7.1"),
    Row("pin on 3.13", "3.13", "2.13.0", "3.7.1"),
    Row("2.14", "3.11", "2.14.1", "3.8.0"),
    Row("newest", "3.13", "2.15.0", "3.9.0"),
)


def prepare(row: Row, folder: Path) -> str:
    """Create or complete the environment of `row`. Returns the reason if that is not possible."""
    python = shutil.which(f"python{row.python}")
    if python is None:
        return f"python{row.python} is not on the path"
    if not (folder / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *row.packages(), "-e", f"{ROOT}[test]"], capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or ["pip failed"])[-1] if done.returncode else ""


def run(row: Row, out: Path, arguments: list[str]) -> tuple[str, int]:
    """Install and test one row. Returns the outcome, and pytest's exit status (0 if it did not run)."""
    folder = (out / row.name.replace(" ", "-")).absolute()
    missing = prepare(row, folder)
    if missing:
        return f"not run: {missing}", 0
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "triton"), "HALFSTEP_CACHE": str(folder / "native")}
    # Unbuffered, and not `python -m pytest`, which would put this folder on Python's path.
    pytest = [str(folder / "bin" / "python"), "-u", str(folder / "bin" / "pytest")]
    # Other releases than those in constraints.txt deprecate other things, which is shown and fails no test.
    shown = [] if row.name.startswith("pin") else ["-W", "default"]
    command = [*pytest, "-q", "-m", "not exhaustive", "-p", "no:benchmark", *shown, *arguments]
    log = Path(f"{folder}.log")  # written as the tests go on, so that hours of them can be watched
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
    last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1].strip("= ")
    return f"{last} (status {done.returncode})", done.returncode


def main() -> int:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description="Run the tests on several versions of Python, torch and Triton.")
    parser.add_argument("--out", type=Path, default=Path("out/versions"), help="folder of environments and logs")
    parser.add_argument("--row", action="append", choices=names, help="only this row; may be repeated")
    parser.add_argument("arguments", nargs="*", metavar="PYTEST", help="what pytest is given, after --")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    print(f"{datetime.date.today()}, commit {commit.stdout.strip() or 'unknown'}: pytest {' '.join(given.arguments)}")
    print("| row | Python | torch | Triton | numpy | result |\n|---|---|---|---|---|---|", flush=True)
    statuses = []
    for row in ROWS:
        if given.row and row.name not in given.row:
            continue
        words, status = run(row, given.out, given.arguments)
        statuses.append(status)
        columns = (row.name, row.python, row.torch, row.triton, row.numpy.lstrip("=") or "newest", words)
        print(f"| {' | '.join(columns)} |", flush=True)
    return 1 if any(statuses) else 0


if __name__ == "__main__":
    sys.exit(main())
