"""kill -9 of either rank in the middle of a save: the other ends with an error, and the last good checkpoint loads."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import forks
import save_shards_forever
import torch
from rank_processes import free_ports

import halfstep
from halfstep.integrations import checkpoint


def _job(folder: Path) -> list[forks.Program]:
    (port,) = free_ports(1)
    return [forks.Program([save_shards_forever.__file__, rank, port, folder]) for rank in range(2)]


def test_the_last_good_one_loads_and_the_other_rank_does_not_hang(tmp_path: Path) -> None:
    jobs = [(tmp_path / str(killed), killed, _job(tmp_path / str(killed))) for killed in (0, 1)]
    for number, (folder, killed, ranks) in enumerate(jobs):
        announced = -1
        for _ in range(3):  # both kinds of save have been seen, the next is under way
            announced = int(
                next(line for line in ranks[killed].stdout if not line.startswith("[Gloo]"))
            )  # torch 2.8's own
        time.sleep(0.013 * number)
        ranks[killed].send_signal(signal.SIGKILL)
        ended = ranks[1 - killed].stdout.read().splitlines()[-1]
        ranks[killed].wait()
        assert ended.startswith("ended: ") and "earlier checkpoints are untouched" in ended, ended
        found = checkpoint.checkpoints(folder)
        assert found[-1][0] >= announced
        for step, path in found:
            model = save_shards_forever.model_of()
            optimizer = halfstep.AdamW(model.parameters())
            assert checkpoint.load(path, model=model, optimizer=optimizer) == {"step": step}
            assert torch.equal(model.weight, torch.full_like(model.weight, float(step)))
        model = save_shards_forever.model_of()
        checkpoint.save(folder, 10**9, model=model)
        assert not list(folder.glob(".*")), "what was left is cleared"
