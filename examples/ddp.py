"""DistributedDataParallel in fp16: gradients are divided by the number of ranks before they are summed in fp16.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
from ranks import Losses, batch, run
from torch.nn import GELU, Linear, Sequential
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.integrations.ddp import mean_in_fp16_hook


def train(rank: int, device: torch.device) -> Losses:
    torch.manual_seed(0)
    net = Sequential(Linear(32, 128), GELU(), Linear(128, 8)).to(device, torch.float16)
    model = DistributedDataParallel(net)
    model.register_comm_hook(model.process_group, mean_in_fp16_hook)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)  # keeps fp32 masters of the fp16 weights
    scaler = halfstep.GradScaler(device.type)

    for step in range(100):
        inputs, targets = batch(step, rank, device, torch.float16)
        loss = mse_loss(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)  # folded into the step: no pass over the gradients
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss.detach()


if __name__ == "__main__":
    run("ddp", train)
