"""How many threads C++ kernels use, also in forked processes."""

from __future__ import annotations

import os

import torch

_in_parallel = False  # whether OpenMP may have started threads in this process
_without_threads = False  # whether this process was forked from one with such threads


def threads() -> int:
    """As many as torch uses, or 1 in a process that was forked after kernels had run in parallel."""
    global _in_parallel
    if _without_threads:
        return 1
    count = torch.get_num_threads()
    _in_parallel = _in_parallel or count > 1
    return count


def _after_fork() -> None:
    """In a forked process, use one thread: OpenMP would wait forever for threads that only the parent process has. This
    concerns our kernels and torch, whose operations build the tables.
    """
    global _without_threads
    if _in_parallel:
        _without_threads = True
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
