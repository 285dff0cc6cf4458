"""Run a function on the ranks of a process group, each a process that forks.py forks."""

import faulthandler
import gc
import importlib
import logging
import os
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import forks
import torch
import torch.distributed as dist
import torch.multiprocessing


@contextmanager
def ports(count: int) -> Iterator[list[int]]:
    """Ports on which ranks can listen, and which the system gives to nobody else meanwhile.

    A socket that is bound but does not listen keeps each. torch's stores can listen beside it since both set
    SO_REUSEADDR.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [one.getsockname()[1] for one in sockets]


def environments(world: int, port: int) -> list[dict[str, str]]:
    """The environment of each rank: that of this process and the variables of torchrun."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world}
    places = [{**place, "LOCAL_WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
    return [{**os.environ, **{name: str(value) for name, value in one.items()}} for one in places]


def run(function: Callable[..., Any], world: int, *arguments: Any, join: bool = True, fresh: bool = False) -> list[Any]:
    """The results of ``function(rank, *arguments)`` on each of `world` ranks. They must be data for `torch.load`.

    The ranks have the environment of this process and the variables of torchrun. With `join` they form a process group
    with gloo. With `fresh` each is a new interpreter, with another order of sets.

    torch's threads for gloo can crash (seen once, in malloc), which is not what is tested: where a signal ends a rank,
    all ranks run once more, and the end of the session tells (`CRASHES`). If a rank raises, the others are ended.
    """
    try:
        return _run(function, world, arguments, join, fresh)
    except torch.multiprocessing.ProcessExitedException as error:
        if error.signal_name not in ("SIGSEGV", "SIGABRT", "SIGBUS"):
            raise
        CRASHES.append(f"{function.__module__}.{function.__qualname__}: {error}; {error.__notes__[0]}")
    return _run(function, world, arguments, join, fresh)


CRASHES: list[str] = []  # of ranks, in this process


def _run(function: Callable[..., Any], world: int, arguments: tuple[Any, ...], join: bool, fresh: bool) -> list[Any]:
    if not fresh:
        forks.serve()
    with tempfile.TemporaryDirectory() as folder, ports(1) as (port,):
        places = environments(world, port)
        try:
            torch.multiprocessing.start_processes(
                _rank,
                (places, function.__module__, function.__qualname__, arguments, world if join else 0, folder),
                nprocs=world,
                start_method="spawn" if fresh else "forkserver",
            )
        except torch.multiprocessing.ProcessExitedException as error:
            stacks = _stacks(folder, error.error_index)
            error.__notes__ = [stacks.read_text() if stacks.exists() else "no stacks"]  # add_note is of Python 3.11
            raise
        return [torch.load(_answer(folder, rank), weights_only=True) for rank in range(world)]


def run_cases(rank: int, modules: list[str], table: str = "CASES") -> dict[str, dict[str, str]]:
    """Run the cases in a table of modules. Returns, by module and case, "" or the end of the traceback on this rank."""
    warnings.simplefilter("ignore")  # of FSDP: no accelerator, deprecated, no mixed precision
    logging.disable(logging.WARNING)
    found: dict[str, dict[str, str]] = {module: {} for module in modules}
    for module, answers in found.items():
        for name, case in getattr(importlib.import_module(module), table, {}).items():
            try:
                case()
                answers[name] = ""
            except Exception:
                answers[name] = traceback.format_exc()[-3000:]
    return found


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of ``function(0, *arguments)`` in a process of its own, without the variables of torchrun."""
    (result,) = run(_alone, 1, function.__module__, function.__qualname__, arguments, join=False)
    return result


def _alone(rank: int, module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    for variable in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"):
        os.environ.pop(variable, None)
    return getattr(importlib.import_module(module), name)(rank, *arguments)


def _answer(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.pt"


def _stacks(folder: str, rank: int) -> Path:
    """Where a rank that crashes writes the stacks of its threads."""
    return Path(folder) / f"rank{rank}.stacks"


def _rank(
    rank: int,
    environments: list[dict[str, str]],
    module: str,
    name: str,
    arguments: tuple[Any, ...],
    world: int,
    folder: str,
) -> None:
    """One rank. It imports the function after its environment is set."""
    faulthandler.enable(open(_stacks(folder, rank), "w"))
    os.environ.clear()
    os.environ.update(environments[rank])
    torch.set_num_threads(1)
    gc.freeze()  # so that collections do not visit what was imported before
    if world:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=300))
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
