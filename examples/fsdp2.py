"""FSDP2 in bf16: each rank steps its shards in place, 14 bytes per parameter, divided among the ranks.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import GELU, Linear, Sequential
from torch.nn.functional import mse_loss

import halfstep
from halfstep.integrations.fsdp import keep_reduced_gradients


def batch(step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Synthetic data, different on each rank: a function of 32 inputs to learn."""
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    targets = torch.tanh(inputs[:, :8] + inputs[:, 8:16])
    return inputs.to(device, torch.bfloat16), targets.to(device)


def train(rank: int, device: torch.device) -> list[float]:
    torch.manual_seed(0)
    model = Sequential(Linear(32, 128), GELU(), Linear(128, 8)).to(device, torch.bfloat16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    keep_reduced_gradients(model)  # the fp32 sums, which the masters can use
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)  # bf16 needs no scaler

    losses = []
    for step in range(100):
        inputs, targets = batch(step, rank, device)
        loss = mse_loss(model(inputs).float(), targets)
        loss.backward()
        optimizer.step()
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
        print(f"fsdp2: loss {losses[0]:.4f} before, {losses[-1]:.4f} after")
    dist.barrier()  # if a rank left early, its closed connections would be errors on the others
    return 0 if losses[-1] < losses[0] / 2 else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # Gloo's threads can block the end of their group, and abort a Python that shuts down
