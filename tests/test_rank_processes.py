"""The ports on which the ranks of tests meet."""

from __future__ import annotations

import socket

import pytest
import rank_processes
import torch.distributed as dist


def test_the_system_gives_a_port_to_nobody_else_while_ranks_can_listen_there() -> None:
    with rank_processes.ports(1) as (port,):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert dist.TCPStore("127.0.0.1", port).get("key") == b"value"
