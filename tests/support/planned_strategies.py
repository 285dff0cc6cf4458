"""The planner's result for a small GPT under each strategy, and counted messages in its terms."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import planned_bytes
from counted_bytes import Message

from halfstep.numerics.planning import Plan, plan

MODEL, CODED = planned_bytes.SHAPE, planned_bytes.CODED
_FP32 = {"precision": "fp32"}
# The arguments of `plan` beside the model; on two GPUs unless they say otherwise.
OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp, fp32": {"strategy": "ddp", **_FP32},
    "zero1-torch": {"strategy": "zero1-torch"},
    "zero1-torch, 8bit": {"strategy": "zero1-torch", "moments": "8bit", "model": CODED},
    "zero1-torch, torch": {"strategy": "zero1-torch", "optimizer": "torch-fused", **_FP32},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, fp16": {"strategy": "fsdp", "precision": "fp16"},
    "fsdp, 8bit": {"strategy": "fsdp", "moments": "8bit", "model": CODED},
    "fsdp, torch": {"strategy": "fsdp", "optimizer": "torch-fused", **_FP32},
    "fsdp, fp32 gathered as bf16": {"strategy": "fsdp", "precision": "amp-bf16"},
    "fsdp1": {"strategy": "fsdp1"},
    "hsdp": {"strategy": "hsdp", "gpus": 4, "shard": 2},
    "fsdp, muon": {"strategy": "fsdp", "optimizer": "halfstep-muon"},
    "fsdp, muon, 8bit": {"strategy": "fsdp", "optimizer": "halfstep-muon", "moments": "8bit", "model": CODED},
    "hsdp, muon": {"strategy": "hsdp", "gpus": 4, "shard": 2, "optimizer": "halfstep-muon"},
    "fsdp, muon on 4": {"strategy": "fsdp", "gpus": 4, "optimizer": "halfstep-muon"},
    "zero1-torch on 4": {"strategy": "zero1-torch", "gpus": 4},
    "fsdp on 4": {"strategy": "fsdp", "gpus": 4},
}


def made_for(name: str, rank: int) -> Plan:
    """The plan for the training of `planned_bytes.one_step`. `rank`: the global rank."""
    options = {"gpus": 2, "model": MODEL, **OPTIONS[name]}
    ways = options.get("shard", options["gpus"]) if options.get("strategy", "ddp") != "ddp" else 1
    return plan(batch=planned_bytes.BATCH, rank=rank % ways, **options)


def planned_memory(made: Plan) -> dict[str, int]:
    """Bytes of weights, gradients and each state. Another test counts DDP's buckets."""
    return {part.name: part.bytes for part in made.parts if part.phase == "always" and part.name != "buckets"}


def planned_messages(made: Plan) -> dict[str, int]:
    """Bytes that one rank sends in a step, by operation."""
    sent: Counter[str] = Counter()
    for each in made.communication:
        sent[each.name] += each.bytes
    return dict(sent)


def split(sent: list[tuple[Any, ...]]) -> tuple[dict[str, int], int]:
    """Bytes that one rank sends in a step by operation, and separately those of flag and norm, two fp64 numbers."""
    by_operation: dict[str, Fraction] = {}
    scaler = Fraction(0)
    for message in (Message(*each) for each in sent):
        if (message.dtype, message.elements) == ("float64", 2):
            scaler += message.sent
        else:
            by_operation[message.name] = by_operation.get(message.name, Fraction(0)) + message.sent
    return {name: math.ceil(size) for name, size in by_operation.items()}, math.ceil(scaler)
