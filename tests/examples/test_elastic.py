"""Under torchrun --max-restarts, a run whose rank is killed continues, and ends with the bits of an undisturbed one.

The processes are real, and so is ``kill -9``.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import train_gpt
from train_runs import differences, newest, report

LAUNCH = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 2".split()
OPTIONS = "--strategy ddp --precision fp16 --size nano --steps 20 --batch 4 --save-every 4".split()


def _words(text: Path, out: Path) -> list[str]:
    return [*OPTIONS, "--data", str(text), "--out", str(out)]


def _worker(launcher: int, rank: int) -> int:
    """The process id of a rank that torchrun has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        if f"LOCAL_RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")


def _train(text: Path, out: Path, kill: dict[str, int]) -> str:
    """Run to the end; whenever a line holds a key of `kill`, kill that rank, once each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    errors = (out.parent / f"{out.name}.errors").open("w+")
    process = subprocess.Popen(
        [sys.executable, *LAUNCH, train_gpt.__file__, *_words(text, out)],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
    )
    kill = dict(kill)
    printed = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            printed += line
            for words in [words for words in kill if words in line]:
                os.kill(_worker(process.pid, kill.pop(words)), signal.SIGKILL)
        returned = process.wait(timeout=60)
    finally:
        process.kill()
    errors.seek(0)
    assert returned == 0, printed + errors.read()[-3000:]
    assert not kill, f"never came to {kill}: {printed}"
    return printed


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_killed_rank_is_restarted_and_the_loss_is_the_same(text: Path, tmp_path: Path) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    assert "restarted" not in _train(text, calm, {})
    printed = _train(text, killed, {"fp16: step 10/20": 0})  # the rank that saves, some steps after it has
    assert "processes restarted by torchrun, restart 1: continuing\nfp16: continuing after step " in printed
    assert printed.count("step 20/20") == printed.count("report: ") == 1, "only rank 0 prints"
    starts = [line.split()[-1] for line in printed.splitlines() if "continuing after step" in line]
    assert starts in (["8"], ["12"])  # it may have come to save once more
    assert report(killed)["final_val_loss"] == report(calm)["final_val_loss"]
    assert report(killed)["train_loss"] == report(calm)["train_loss"]
    assert differences(newest(calm, "fp16")[1], newest(killed, "fp16")[1]) == []
    assert json.loads((killed / "report.json").read_text())["restarts"] == 1
    assert json.loads((calm / "report.json").read_text())["restarts"] == 0


@pytest.mark.parametrize(("restarts", "nodes", "apart"), [(0, 1, False), (2, 1, True), (2, 2, False)])
def test_restarted_ranks_do_not_meet_where_the_dead_ones_left_their_addresses(
    restarts: int, nodes: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps one
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "GROUP_WORLD_SIZE": nodes, "MASTER_PORT": kept.port}
    place |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": restarts}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    here = train_gpt.connect()
    assert here.mean(torch.tensor(3.0)) == 3 and dist.get_world_size() == 1
    left = [key for key in kept.list_keys() if not key.startswith("init/")]
    dist.destroy_process_group()
    assert left and {f"restart {restarts}/" in key for key in left} == {apart}, left
