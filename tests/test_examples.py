"""Each script in examples/ is run as its first lines say, in two processes, and its training must have worked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from keeping import skip_where_gradients_cannot_be_kept

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def _run(script: Path, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=300, env=environment)


def test_there_is_one_for_each_way_to_train_on_several_gpus() -> None:
    assert {path.stem for path in EXAMPLES} >= {"ddp", "fsdp2", "zero1", "pipeline"}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_as_it_says_and_the_loss_falls(script: Path) -> None:
    assert f"\ntorchrun --nproc-per-node 2 examples/{script.name}\n" in script.read_text().partition('"""\n')[0]
    if "keep_reduced_gradients" in script.read_text():
        skip_where_gradients_cannot_be_kept()
    done = _run(script)
    assert done.returncode == 0, done.stderr[-3000:]
    # one rank prints, one line; what torch 2.8's gloo says is its own
    said = "".join(line for line in done.stdout.splitlines(keepends=True) if "[Gloo]" not in line)
    told = re.fullmatch(rf"{script.stem}: loss ([0-9.]+) before, ([0-9.]+) after\n", said)
    assert told is not None, done.stdout
    before, after = map(float, told.group(1, 2))
    assert after < 0.3 * before


def test_it_fails_where_training_does_not_work(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    text = (ROOT / "examples" / "ddp.py").read_text()
    assert text.count("scaler.step(optimizer)") == 1
    broken.write_text(text.replace("scaler.step(optimizer)", "scaler.unscale_(optimizer)").replace("scaler.clip", "# "))
    assert _run(broken, ranks=1).returncode != 0
