"""FLOPs of a step, and those that the device can do, for the share that a training uses (MFU)."""

from __future__ import annotations

import time
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from halfstep.cli.train.model import VOCABULARY, Size
from halfstep.numerics.planning import CARDS, Transformer
from halfstep.numerics.planning.work import training_flops

_EDGES, _TRIES = (256, 1024), 5


class Peak(NamedTuple):
    """FLOP/s of a device for matrix products, and where the number is from."""

    flops: float
    source: str


def shape_of(size: Size) -> Transformer:
    """The model of ``halfstep train`` as the planner describes models."""
    return Transformer(size.layers, size.width, size.heads, VOCABULARY, size.context, biases=False, dropout=False)


def step_flops(size: Size, batch: int, lora: int) -> int:
    """FLOPs of the matrix products in forward and backward over a batch, with adapters of rank `lora`, or 0."""
    return training_flops(shape_of(size), batch, size.context, lora)


@cache
def peak(device: torch.device, dtype: torch.dtype, threads: int) -> Peak:
    """The most FLOP/s of a device for matrix products in a dtype.

    For GPUs in the planner's table, those of the datasheet, for bf16 and fp16. Otherwise the best of some products is
    measured, in this dtype and in fp32, since libraries for CPUs may compute 16-bit products more slowly.

    Args:
        device: the device.
        dtype: of the matrices.
        threads: number of threads of torch, on which a measurement on the CPU depends.
    """
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device).lower()
        for card in sorted(CARDS.values(), key=lambda card: -len(card.name)):  # "l40s" before "l4"
            model, _, memory = card.name.partition("-")
            if card.flops and model in name.replace(" ", "") and (not memory or f"{memory}gb" in name):
                return Peak(card.flops, card.source)
    best = max(_measured(device, one, edge) for one in {dtype, torch.float32} for edge in _EDGES)
    return Peak(best, "measured: the fastest of some matrix products on this device")


def _measured(device: torch.device, dtype: torch.dtype, edge: int) -> float:
    """The FLOP/s of the fastest of some linear layers with a square matrix."""
    x, weight = (torch.ones(edge, edge, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(_TRIES):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        linear(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2.0 * edge**3 / best
