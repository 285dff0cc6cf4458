"""ZeRO-1: weights replicated on every rank, masters and moments sharded over the ranks.

torchrun --nproc-per-node 2 examples/zero1.py
"""

import torch
from ranks import Losses, batch, run
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import GELU, Linear, Sequential
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import halfstep


def train(rank: int, device: torch.device) -> Losses:
    torch.manual_seed(0)
    net = Sequential(Linear(32, 128), GELU(), Linear(128, 8)).to(device, torch.float16)
    model = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=halfstep.AdamW, lr=1e-2)
    scaler = halfstep.GradScaler(device.type)

    for step in range(100):
        inputs, targets = batch(step, rank, device, torch.float16)
        loss = mse_loss(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss.detach()


if __name__ == "__main__":
    run("zero1", train)
