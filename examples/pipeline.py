"""A pipeline in fp16, one stage per rank: an overflow in any stage makes all stages skip the step.

torchrun --nproc-per-node 2 examples/pipeline.py
"""

import torch
import torch.distributed as dist
from ranks import Losses, run
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import GELU, Linear, Sequential
from torch.nn.functional import mse_loss

import halfstep

MICROBATCHES = 4


def batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Synthetic data for learning a function of 32 inputs, the same on every rank."""
    inputs = torch.randn(128, 32, generator=torch.Generator().manual_seed(step))
    targets = torch.tanh(inputs.roll(1, dims=1) + inputs)
    return inputs.to(device, torch.float16), targets.to(device)


def train(rank: int, device: torch.device) -> Losses:
    """Train, and yield the losses on the last stage, nothing on the others."""
    size = dist.get_world_size()
    torch.manual_seed(rank)
    model = Sequential(Linear(32, 128), GELU(), Linear(128, 32)).to(device, torch.float16)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    # The optimizer cannot tell that other ranks have other stages. The group combines overflows and norms over them.
    scaler = halfstep.GradScaler(device.type, process_group=dist.group.WORLD)

    def scaled_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return scaler.scale(mse_loss(outputs.float(), targets))

    schedule = Schedule1F1B(PipelineStage(model, rank, size, device), MICROBATCHES, loss_fn=scaled_loss)
    for step in range(150):
        inputs, targets = batch(step, device)
        scale, losses = scaler.scale(torch.ones((), device=device)), []  # also creates the scale on every stage
        schedule.step(*[inputs] * (rank == 0), target=targets, losses=losses)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if rank == size - 1:  # only the last stage computes the loss
            yield torch.stack(losses).mean() / scale


if __name__ == "__main__":
    run("pipeline", train)
