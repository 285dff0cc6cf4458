"""DistributedDataParallel in fp16: gradients are divided by the number of ranks before they are summed in fp16.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn import GELU, Linear, Sequential
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.integrations.ddp import mean_in_fp16_hook


def batch(step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Synthetic data, different on each rank: a function of 32 inputs to learn."""
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    targets = torch.tanh(inputs[:, :8] + inputs[:, 8:16])
    return inputs.to(device, torch.float16), targets.to(device)


def train(rank: int, device: torch.device) -> list[float]:
    torch.manual_seed(0)
    net = Sequential(Linear(32, 128), GELU(), Linear(128, 8)).to(device, torch.float16)
    model = DistributedDataParallel(net)
    model.register_comm_hook(model.process_group, mean_in_fp16_hook)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)  # keeps fp32 masters of the fp16 weights
    scaler = halfstep.GradScaler(device.type)

    losses = []
    for step in range(100):
        inputs, targets = batch(step, rank, device)
        loss = mse_loss(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)  # folded into the step: no pass over the gradients
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def main() -> int:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank = dist.get_rank()
    losses = train(rank, device)
    if rank == 0:
        print(f"ddp: loss {losses[0]:.4f} before, {losses[-1]:.4f} after")
    dist.barrier()  # if a rank left early, its closed connections would be errors on the others
    return 0 if losses[-1] < losses[0] / 2 else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # Gloo's threads can block the end of their group, and abort a Python that shuts down
