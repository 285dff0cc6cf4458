"""Access to installed peers, and the reasons why a peer cannot do a job."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from halfstep.bench.cases import Sizes
from halfstep.bench.harness import Unavailable


def needs_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("needs a GPU")


def needs(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # what a library raises that looks for a GPU or a compiler when it is imported
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            raise Unavailable("not installed") from error
        raise Unavailable(f"does not import here: {str(error).strip().splitlines()[0]}") from error


def compiled(function: Callable[..., Any], sizes: Sizes, tensors: int = 1) -> Callable[..., Any]:
    """`torch.compile` with static shapes, after discarding everything that earlier cases compiled."""
    if not sizes.slow:
        raise Unavailable("compiles for seconds: run without --quick")
    if tensors > sizes.compiled:
        # Dynamo unrolls loops over lists.
        raise Unavailable(f"compiles too long for more than {sizes.compiled} tensors")
    torch._dynamo.reset()
    result: Callable[..., Any] = torch.compile(function, dynamic=False)
    return result


def loops(sizes: Sizes, tensors: int) -> None:
    """Raise if a Python loop over `tensors` tensors is too slow for this run."""
    if tensors > sizes.looped:
        raise Unavailable(f"loops too long over more than {sizes.looped:,} tensors")
