"""What PyTorch's tests of `torch.distributed.checkpoint.state_dict` ask of torch's optimizers, asked of ours."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

pytest.importorskip("torch.testing._internal.distributed.common_state_dict", exc_type=ImportError)
import state_dict_ranks


def test_two_ranks_agree_with_one_process_in_every_case(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(state_dict_ranks.run, (port, str(tmp_path)), nprocs=state_dict_ranks.WORLD)
    for rank in range(state_dict_ranks.WORLD):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert found["wrong"] == [] and found["ran"] == len(state_dict_ranks.cases())


@pytest.mark.parametrize("layout", state_dict_ranks.LAYOUTS)
@pytest.mark.parametrize("cls", state_dict_ranks.CLASSES)
def test_one_process_without_a_group(cls: Any, layout: str) -> None:
    state_dict_ranks.without_a_group(cls, layout)
