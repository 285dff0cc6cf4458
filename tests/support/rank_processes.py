"""Ranks that start in milliseconds: each is forked from one process per run, which has torch imported already.

Importing torch with its distributed parts takes seconds of processor time, and `torch.multiprocessing.spawn` takes them
for every rank of every test.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing.forkserver
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import gloo
import torch
import torch.distributed as dist
import torch.multiprocessing

# None of them starts a thread, which a fork would not copy, or changes torch, as torch.testing._internal does.
# halfstep is not among them: what it reads from the environment when it is imported may differ from test to test.
PRELOADED = [
    "pytest",  # what spawned ranks import as the main module
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def run(function: Callable[..., Any], world: int, *arguments: Any, join: bool = True, fresh: bool = False) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on each of `world` ranks: anything that `torch.load` takes as data.

    The ranks have this process's environment and the variables of torchrun. With `join` they are a process group on
    gloo. With `fresh` each is an interpreter of its own, whose sets have an order of their own.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; with its traceback. The others are ended.
    """
    (port,) = free_ports(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    if not fresh:
        # numpy's linear algebra would start threads when it is imported.
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            multiprocessing.forkserver.set_forkserver_preload(PRELOADED)
            multiprocessing.forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank,
            (environment, function.__module__, function.__qualname__, arguments, world if join else 0, folder),
            nprocs=world,
            start_method="spawn" if fresh else "forkserver",
        )
        return [torch.load(_answer(folder, rank), weights_only=True) for rank in range(world)]


def _answer(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.pt"


def _rank(
    rank: int, environment: dict[str, str], module: str, name: str, arguments: tuple[Any, ...], world: int, folder: str
) -> None:
    """One of them. The function is imported here, once the environment is the one it is to see."""
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    gc.freeze()  # no collection need walk what was imported before
    if world:
        gloo.start(rank, world, timedelta(seconds=300))
    result = getattr(importlib.import_module(module), name)(rank, *arguments)
    torch.save(result, _answer(folder, rank))
    if world:
        # A rank that leaves while another still talks to it, or while its mesh lives in a reference cycle, aborts it.
        del result
        gc.collect()
        dist.barrier()
    # The results are on disk. torch's threads sometimes abort while the interpreter shuts down ("terminate called
    # without an active exception"), which is not what is tested.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
