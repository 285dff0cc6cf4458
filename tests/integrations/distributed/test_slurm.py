"""The batch scripts of docs/distributed.md, with stand-ins for SLURM's commands that start processes here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rank_processes import ports

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = re.findall(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs" / "distributed.md").read_text(), re.S)
FIRST = 20000  # the least port of the scripts, which add the remainder of the job's number by it

SRUN = """#!/bin/bash
# Starts the tasks of two machines, and fails if one of them does.
started=()
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % SLURM_NTASKS_PER_NODE)) "$@" &
    started+=($!)
done
for process in "${started[@]}"; do wait "$process" || exit 1; done
"""
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames $SLURM_JOB_NODELIST" ] && printf 'localhost\\nelsewhere\\n'
"""
TRAIN = r"""import os, torch, halfstep
import torch.distributed as dist
from halfstep.integrations.doctor.environment import examine_environment
found = [one.name for one in examine_environment().findings if one.severity == "error"]
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.ParameterList([weight]))
optimizer = halfstep.AdamW([weight], lr=0.5)
grad = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(grad)
weight.grad = grad.bfloat16()
optimizer.step()
line = f"rank {os.environ['RANK']} of {dist.get_world_size()} grad {grad[0].item()} {found}\n"
os.write(1, line.encode())  # at once: both ranks write to one pipe
os._exit(0)  # as docs/distributed.md says
"""


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _submit(script: str, port: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """The batch script of a job whose number makes it use `port`, run in `folder`."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("job.sh", script)):
        _program(folder / name, text)
    (folder / "train.py").write_text(TRAIN)
    for name in ("python", "torchrun"):
        words = ["-m", "torch.distributed.run"] if name == "torchrun" else []
        _program(folder / name, f'#!/bin/bash\nexec "{sys.executable}" {" ".join(words)} "$@"\n')
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": str(port - FIRST), "SLURM_NNODES": "2"}
    tasks = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "1"}
    environment = {**os.environ, **slurm, **tasks, "PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return subprocess.run(["bash", "job.sh"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.exhaustive  # two cold starts of Python for each
@pytest.mark.parametrize("number", [pytest.param(0, id="torchrun"), pytest.param(1, id="one task per GPU")])
def test_a_batch_script_starts_ranks_that_train_together(number: int, tmp_path: Path) -> None:
    assert len(SCRIPTS) == 2
    with ports(100) as kept:
        port = next(port for port in kept if FIRST <= port < 2 * FIRST)
        done = _submit(SCRIPTS[number], port, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert [line.split(" grad")[0] for line in lines] == ["rank 0 of 2", "rank 1 of 2"]
    assert all("grad 3.0" in line for line in lines)
    # The stand-ins run both machines on this one, whose name is localhost.
    assert all(line.endswith("['master-is-local']") for line in lines), lines
