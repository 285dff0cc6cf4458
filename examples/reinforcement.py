"""Reinforcement learning in fp16 under FSDP2, as in verl: one scaler decides for all ranks, and nothing is patched.

torchrun --nproc-per-node 2 examples/reinforcement.py

Actions are sampled with the same fp16 weights that are trained. In bf16, with 3 mantissa bits less, the probabilities
of sampler and trainer differ more, which can make such training collapse (arXiv 2510.26788). Masters are in fp32.

Log-probabilities are those of `halfstep.log_probabilities` in both. Its bits depend on neither the batch nor, with
``exact=True``, the device: where the logits agree, the ratio of the first update is 1, which is asserted. The model
must compute the same logits too, as the same layers on the same batch do here.
"""

import torch
import torch.distributed as dist
from ranks import Losses, run
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import GELU, Linear, Sequential

import halfstep
from halfstep.integrations.fsdp import keep_reduced_gradients

ACTIONS, SAMPLES = 8, 16


def prompts(step: int, rank: int, device: torch.device) -> torch.Tensor:
    """States, different on each rank. The correct action is the index of the largest of the first eight values."""
    states = torch.randn(64, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return states.to(device, torch.float16)


def score(logits: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    return halfstep.log_probabilities(logits.expand(*actions.shape, -1), actions, exact=True).log_probabilities


def rollout(model: torch.nn.Module, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sampled actions for each state, their log probabilities, their advantages, and the mean reward."""
    with torch.no_grad():
        logits = model(states)
    drawn = torch.distributions.Categorical(logits=logits.float()).sample((SAMPLES,))
    actions, old = drawn.T, score(logits, drawn).T
    rewards = (actions == states[:, :ACTIONS].argmax(1, keepdim=True)).float()
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return actions, old, advantages, rewards.mean()


def train(rank: int, device: torch.device) -> Losses:
    torch.manual_seed(0)
    model = Sequential(Linear(16, 64), GELU(), Linear(64, ACTIONS)).to(device, torch.float16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    keep_reduced_gradients(model)  # sums of ranks in fp32 do not overflow
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    scaler = halfstep.GradScaler(device.type)
    torch.manual_seed(rank)  # ranks draw different samples

    for step in range(80):
        states = prompts(step, rank, device)
        actions, old, advantages, reward = rollout(model, states)
        for update in range(2):  # the second update is off-policy
            new = score(model(states).unsqueeze(1), actions)
            assert update > 0 or torch.equal(new, old)  # all bits, though rollout scored another batch
            ratio = (new - old).exp()
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)  # no unscale_: gradients are not written
            scaler.step(optimizer)  # all ranks step, or none
            scaler.update()
            optimizer.zero_grad()
        dist.all_reduce(reward)
        yield 1 - reward / dist.get_world_size()


if __name__ == "__main__":
    run("reinforcement", train)
