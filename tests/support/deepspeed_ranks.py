"""A rank that trains with DeepSpeed and an optimizer of halfstep, for tests/integrations/trainers/test_deepspeed.py."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from trainer_tools import LR, MAX_NORM, SAVED, STEPS, batch, error, network, same_bits, state_of

import halfstep

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed

IN_BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
RUNS = {**{f"ZeRO-{stage}": (stage, IN_BF16) for stage in (1, 2, 3)}, "with copies": (1, {"enabled": True})}


def engine_of(name: str, seed: int) -> tuple[Any, Any]:
    stage, bf16 = RUNS[name]
    model = network(seed).bfloat16()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=halfstep.AdamW(model.parameters(), lr=LR),
        config={
            "train_micro_batch_size_per_gpu": 16,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": MAX_NORM,
            "bf16": bf16,
        },
    )
    return engine, optimizer.optimizer


def steps(engine: Any, numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        inputs, targets = batch(step, dist.get_rank())
        loss = error(engine(inputs.bfloat16()), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def whole(folder: Path, name: str) -> dict[str, Any]:
    engine, optimizer = engine_of(name, 0)
    losses = steps(engine, range(SAVED))
    engine.save_checkpoint(str(folder / name), tag="saved")
    rest = steps(engine, range(SAVED, STEPS))
    inputs, targets = batch(0)
    fit = [error(one(inputs.bfloat16()), targets).item() for one in (network().bfloat16(), engine)]
    again, resumed = engine_of(name, 1)
    again.load_checkpoint(str(folder / name), tag="saved")
    same = steps(again, range(SAVED, STEPS)) == rest
    return {
        "losses": losses + rest,
        "fit": fit,
        "weights": sorted({str(one.dtype) for group in optimizer.param_groups for one in group["params"]}),
        "elements": sum(one.numel() for group in optimizer.param_groups for one in group["params"]),
        "masters": sorted({str(one["master"].dtype) for one in optimizer.state.values() if "master" in one}),
        "optimizer": type(optimizer) is halfstep.AdamW,
        "resumed": same and same_bits(state_of(optimizer), state_of(resumed)),
    }


def run(rank: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with mock.patch("deepspeed.comm.torch.build_shm_op", lambda: None):  # faster communication, compiled on the spot
        deepspeed.init_distributed("gloo")
    return {name: whole(Path(folder), name) for name in RUNS}
