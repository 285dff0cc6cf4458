"""Each script in examples/ runs as its docstring says, in two processes, and its training must work."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import rank_processes

ROOT = Path(__file__).resolve().parents[1]
LARGEST = ROOT / "examples" / "largest.py"
BYTES = ROOT / "examples" / "bytes_per_parameter.py"
# train_gpt.py and its modules have tests of their own, in tests/examples.
OTHERS = {
    LARGEST,
    BYTES,
    *(ROOT / "examples" / f"{name}.py" for name in ("train_gpt", "corpus", "gpt", "report", "ranks")),
}
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - OTHERS)


# Prints a line if Python shuts down, which Gloo's threads can abort. Takes one step in so many of the training.
PROGRAM = """
import atexit, pathlib, re, sys
folder, name, one_in = sys.argv[1:]
sys.path.insert(0, folder)
atexit.register(print, "shut down")
text = pathlib.Path(folder, name).read_text()
text = re.sub(r"(for step in range)\\((\\d+)\\)", lambda found: f"{found[1]}({int(found[2]) // int(one_in)})", text)
exec(compile(text, name, "exec"), {"__name__": "__main__"})
"""


def _forked(script: Path, ranks: int, one_in: int) -> str:
    words = ["-c", PROGRAM, script.parent, script.name, one_in]
    # With a thread for each core, the threads of two ranks mostly wait for one another's time slices.
    with rank_processes.ports(1) as (port,):
        programs = [
            forks.Program(words, {**environment, "OMP_NUM_THREADS": "1"})
            for environment in rank_processes.environments(ranks, port)
        ]
        said = "".join(program.stdout.read() for program in programs)
        statuses = [program.wait() for program in programs]
    assert statuses == [0] * ranks, f"ended with {statuses}"
    return said


def test_each_way_to_train_on_several_gpus_has_an_example() -> None:
    assert {path.stem for path in EXAMPLES} >= {"ddp", "fsdp2", "zero1", "pipeline"}


@pytest.mark.parametrize("one_in", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_runs_as_documented_and_its_loss_falls(script: Path, one_in: int) -> None:
    assert f"\ntorchrun --nproc-per-node 2 examples/{script.name}\n" in script.read_text().partition('"""\n')[0]
    # With the variables that torchrun sets; examples/test_elastic.py runs it. One rank prints, one line.
    said = _forked(script, 2, one_in)
    told = re.fullmatch(rf"{script.stem}: loss ([0-9.]+) before, ([0-9.]+) after\n", said)
    assert told is not None, said
    before, after = map(float, told.group(1, 2))
    assert after < (0.3 if one_in == 1 else 0.5) * before


@pytest.mark.exhaustive
def test_the_largest_model_takes_what_is_planned() -> None:
    assert "\npython examples/largest.py --memory 4\n" in LARGEST.read_text().partition('"""\n')[0]
    # Few elements: a CPU without instructions for bf16 takes a hundred times as long for its products.
    words = [sys.executable, str(LARGEST), "--memory", "0.06", "--width", "256", "--steps", "3", "--batch", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.fullmatch(
        r"10 blocks, 8,038,912 parameters; planned: (\d+) MiB\n"
        r"the process took (\d+) MiB, with activations\n"
        r"largest: loss ([0-9.]+) before, ([0-9.]+) after\n",
        done.stdout,
    )
    assert told is not None, done.stdout
    planned, taken = int(told[1]), int(told[2])  # 0 where it is not known
    assert planned == 48 and (taken == 0 or planned <= taken < 1.5 * planned)


def test_bytes_per_parameter_are_those_of_the_layouts(tmp_path: Path) -> None:
    results, picture = tmp_path / "bytes.json", tmp_path / "bytes.png"
    arguments = ["--width", "256", "--layers", "2", "--out", str(results), "--picture", str(picture)]
    assert forks.run([BYTES, *arguments]).returncode == 0
    measured = {row["optimizer"]: row["bytes"] for row in json.loads(results.read_text())["rows"]}
    expected = {"torch AdamW, fp32 weights": 16.0, "torch AdamW": 8.0, "halfstep AdamW": 14.0, "torch Muon": 6.0}
    assert {name: round(measured[name], 2) for name in expected} == expected
    eight_bits = 2 + 2 + 2 * (1 + 3 / 64) + 2  # weight, remainder, codes and what 32 elements share, gradient
    assert abs(measured["halfstep, 8-bit moments"] - eight_bits) < 0.01
    assert abs(measured["halfstep, 8 bits, steps in the backward"] - (eight_bits - 2)) < 0.01
    assert abs(measured["halfstep Muon, 8-bit momentum"] - (2 + 2 + 1 + 1 / 32 + 2)) < 0.01
    assert picture.stat().st_size > 5000
