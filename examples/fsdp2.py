"""FSDP2 in bf16: each rank steps its shards in place, with 14 bytes per parameter sharded over the ranks.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
from ranks import Losses, batch, run
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import GELU, Linear, Sequential
from torch.nn.functional import mse_loss

import halfstep
from halfstep.integrations.fsdp import keep_reduced_gradients, send_gradients_in_16_bits


def train(rank: int, device: torch.device) -> Losses:
    torch.manual_seed(0)
    model = Sequential(Linear(32, 128), GELU(), Linear(128, 8)).to(device, torch.bfloat16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    keep_reduced_gradients(model)  # the fp32 sums, which the masters can use
    send_gradients_in_16_bits(model)  # instead of the same values in fp32
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)  # bf16 needs no scaler

    for step in range(100):
        inputs, targets = batch(step, rank, device, torch.bfloat16)
        loss = mse_loss(model(inputs).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


if __name__ == "__main__":
    run("fsdp2", train)
