"""A replica that trains with torchft and the wrapper of halfstep, for tests/integrations/trainers/test_torchft.py."""

from __future__ import annotations

import logging
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from trainer_tools import (
    BROKEN,
    DTYPES,
    LR,
    MAX_NORM,
    SCALE,
    STEPS,
    batch,
    broken_backward,
    error,
    gradients,
    masters_of,
    network,
    same_bits,
    scaler_for,
    state_of,
)

import halfstep
from halfstep.integrations.trainers.torchft import OptimizerWrapper

REFUSED, ALONE = 3, 4  # the steps that both replicas refuse, and that one refuses, which recovers from the other


def train(rank: int, kind: str, lighthouse: str) -> dict[str, Any]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    scaler = scaler_for(kind, init_scale=SCALE * 4**rank)  # it gets the scale from it too
    module = network(rank).to(DTYPES[kind])  # the second replica gets the first one's weights
    inner = halfstep.AdamW(module.parameters(), lr=LR)

    def state_dict() -> dict[str, Any]:
        state = {"module": module.state_dict(), "optimizer": inner.state_dict(), "schedule": schedule.state_dict()}
        return state if scaler is None else {**state, "scaler": scaler.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        for name, one in {"module": module, "optimizer": inner, "schedule": schedule, "scaler": scaler}.items():
            if one is not None:
                one.load_state_dict(state[name])
        found["recovered"] += 1

    found: dict[str, Any] = {"recovered": 0}
    found.update({name: [] for name in ("losses", "skipped", "rates", "unwritten", "log", "norms", "held")})
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"{kind}{rank}",
        hostname="localhost",
    )
    model = DistributedDataParallel(manager, module)
    optimizer = OptimizerWrapper(manager, inner, scaler, MAX_NORM)
    for step in range(STEPS):
        inputs, targets = batch(step, rank)
        before = [one.detach().clone() for one in module.parameters()]
        optimizer.zero_grad()
        loss = error(model(inputs.to(DTYPES[kind])), targets)
        with broken_backward(list(module.parameters())[:1], step == BROKEN and rank == 1 and kind == "fp16"):
            (loss if scaler is None else scaler.scale(loss)).backward()
        if step == REFUSED or (step == ALONE and rank == 1):
            manager.report_error(RuntimeError("a fault of this replica"))
        written = gradients(module.parameters())
        optimizer.step()
        found["unwritten"].append(same_bits(written, gradients(module.parameters())))
        found["held"].append(same_bits(before, [one.detach() for one in module.parameters()]))
        found["skipped"].append(optimizer.step_was_skipped)
        found["norms"].append(None if optimizer.grad_norm is None else optimizer.grad_norm.item())
        if not optimizer.step_was_skipped:
            schedule.step()
        found["rates"].append(inner.param_groups[0]["lr"])
        found["log"].append(optimizer.scaler_metrics())
        found["losses"].append(loss.item())
    found["commits"] = manager.current_step()
    found["masters"] = masters_of(inner)
    found["state"] = state_of(inner)
    found["scaler"] = None if scaler is None else scaler.state_dict()
    inputs, targets = batch(0)
    found["fit"] = [error(one(inputs.to(DTYPES[kind])), targets).item() for one in (network().to(DTYPES[kind]), module)]
    manager.shutdown(wait=False)
    return found


def run(rank: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    place = Path(folder) / "lighthouse"
    found = {}
    if rank == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=100, quorum_tick_ms=20)
        place.with_suffix(".new").write_text(lighthouse.address())
        place.with_suffix(".new").rename(place)
    while not place.exists():
        time.sleep(0.05)
    for kind in DTYPES:
        found[kind] = train(rank, kind, place.read_text())
    (Path(folder) / f"done{rank}").touch()
    while not all((Path(folder) / f"done{one}").exists() for one in range(2)):
        time.sleep(0.05)  # the first replica has the lighthouse
    return found
