"""kill -9 of either rank during a save: the other rank raises an error, and the last good checkpoint loads."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
import save_shards_forever
import torch
from rank_processes import ports

import halfstep
from halfstep.integrations import checkpoint


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[tuple[Path, list[forks.Program]]]]:
    """Two jobs: the folder that each saves to, and its two ranks."""
    with ports(2) as kept:
        yield [
            (folder, [forks.Program([save_shards_forever.__file__, rank, port, folder]) for rank in range(2)])
            for port, folder in zip(kept, (tmp_path / "first", tmp_path / "second"), strict=True)
        ]


def test_the_last_good_checkpoint_loads_and_the_other_rank_does_not_hang(
    jobs: list[tuple[Path, list[forks.Program]]],
) -> None:
    for killed, (folder, ranks) in enumerate(jobs):
        announced = -1
        for _ in range(3):  # both kinds of save have been seen, the next is under way
            announced = int(next(ranks[killed].stdout))
        time.sleep(0.013 * killed)
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
