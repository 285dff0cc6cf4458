"""Reinforcement learning in fp16 under FSDP2, as in verl: one scaler decides for all ranks, and nothing is patched.

torchrun --nproc-per-node 2 examples/reinforcement.py

Actions are sampled with the same fp16 weights that are trained. In bf16, with 3 mantissa bits less, the probabilities
of sampler and trainer differ more, which can make such training collapse (arXiv 2510.26788). Masters are in fp32.

`score` gives the log-probabilities of the rollout, of the reference policy and of training, at the temperature of the
samples. Its bits depend on neither the batch nor, with ``exact=True``, the device: where the logits agree, the ratio of
the first update is 1, which is asserted. The model must compute the same logits too, as the same layers on the same
batch do here. In training, the backward writes the gradient over the logits, the largest tensor of a language model.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from ranks import Losses, run
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import GELU, Linear, Sequential

import halfstep
from halfstep.integrations.fsdp import keep_reduced_gradients

ACTIONS, SAMPLES, TEMPERATURE = 8, 16, 0.9
OF_KL, OF_ENTROPY = 1e-3, 1e-3  # weights in the loss


def prompts(step: int, rank: int, device: torch.device) -> torch.Tensor:
    """States, different on each rank, each for 16 samples. The correct action is the index of the largest of the first
    eight values."""
    states = torch.randn(64, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return states.to(device, torch.float16).repeat_interleave(SAMPLES, 0)


def score(logits: torch.Tensor, actions: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """The log-probabilities of actions, and the entropies of their distributions."""
    row = halfstep.log_probabilities(logits, actions, TEMPERATURE, entropy=True, exact=True, **options)
    return row.log_probabilities, row.entropy


@torch.no_grad()
def rollout(model: torch.nn.Module, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An action for each state, its log-probability, its advantage in the group of its prompt, and the mean reward."""
    logits = model(states)
    actions = torch.distributions.Categorical(logits=logits.float() / TEMPERATURE).sample()
    parts = zip(logits.split(100), actions.split(100), strict=True)  # other batches than in training
    old = torch.cat([score(*part)[0] for part in parts])
    rewards = (actions == states[:, :ACTIONS].argmax(1)).float()
    groups = rewards.view(-1, SAMPLES)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return actions, old, advantages.flatten(), rewards.mean()


def train(rank: int, device: torch.device) -> Losses:
    torch.manual_seed(0)
    model = Sequential(Linear(16, 64), GELU(), Linear(64, ACTIONS)).to(device, torch.float16)
    reference = copy.deepcopy(model).requires_grad_(False)
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
        anchor = score(reference(states), actions)[0]
        for update in range(2):  # the second update is off-policy
            new, entropy = score(model(states), actions, inplace_backward=True)
            assert update > 0 or torch.equal(new, old)  # all bits
            ratio = (new - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            kl = (anchor - new).exp() - (anchor - new) - 1  # unbiased and never negative (Schulman, "k3")
            loss = (OF_KL * kl - OF_ENTROPY * entropy - gain).mean()
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)  # no unscale_: gradients are not written
            scaler.step(optimizer)  # all ranks step, or none
            scaler.update()
            optimizer.zero_grad()
        dist.all_reduce(reward)
        yield 1 - reward / dist.get_world_size()


if __name__ == "__main__":
    run("reinforcement", train)
