"""Streams and CUDA graphs, as host code must look at them, and numbers of the host on their way to a device.

**A graph owns its tables.** What is recorded into a graph runs at each replay, and between replays come eager calls,
other captures and whatever the caller frees. So:

1. A capture reads nothing that eager calls keep for one another (tables, scratch, answers), and marks nothing: that
   something "was copied" is noted where the copy runs, never where it is recorded.
2. What captured work needs beside the tensors it works on is made in the capture, in the graph's own memory, and filled
   by captured copies or launches. No eager call gets to see it.
3. Captured copies read pinned memory that nobody writes again and that is kept as long as the graph (`upload`).
4. Eager calls and graphs share what training goes on from (parameters, moments, step counts, the scale), and that stays
   where it is: it exists before a capture, and what has been captured is written in place from then on.

**A table belongs to one stream.** What is kept from call to call is written and read on one stream: two streams may
call the same function at the same time.

**The host does not wait.** Numbers go through pinned memory (`upload`); an index is on the device or a slice, never a
list, which would be copied from memory that is not pinned.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

# What captured copies read, by the graph, and where torch cannot tell which graph it is, for good.
_of_graphs: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()
_for_good: list[torch.Tensor] = []


def capturing(device: torch.device) -> bool:
    """Whether launches on the current stream of `device` are recorded into a CUDA graph and not run."""
    if device.type != "cuda":
        return False
    if device.index is None or device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int:
    """A number that identifies the current stream of `device`; 0 for devices without streams."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def upload(numbers: torch.Tensor, device: torch.device, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copy numbers of the host to a device; on a GPU through pinned memory, in the current stream, without a wait.

    During a capture the copy is the graph's. What it reads lives as long as the graph; with a torch that does not say
    which graph it is (``CUDAGraph.get_currently_capturing_graph``), as long as the process.

    Args:
        numbers: on the CPU; not written later.
        device: where to.
        out: a tensor there to write to, of the same shape and dtype.

    Returns:
        `out`, or a new tensor, which for the CPU is `numbers`.
    """
    if device.type != "cuda":
        return numbers.to(device) if out is None else out.copy_(numbers)
    pinned = numbers.pin_memory()
    if capturing(device):
        _keep(pinned)
    if out is None:
        out = torch.empty(numbers.shape, dtype=numbers.dtype, device=device)
    return out.copy_(pinned, non_blocking=True)


def _keep(pinned: torch.Tensor) -> None:
    """Hold memory as long as the graph that is being captured."""
    find = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", None)
    try:
        graph = None if find is None else find()
    except RuntimeError:  # the capture was not begun by torch
        graph = None
    # The caller's own object, and none that is made for the answer and gone after it.
    if isinstance(graph, torch.cuda.CUDAGraph):
        _of_graphs.setdefault(graph, []).append(pinned)
    else:
        _for_good.append(pinned)
