"""The largest GPT that fits a given memory: 8-bit states over exact fp32 masters, and steps inside the backward.

python examples/largest.py --memory 4
python examples/largest.py --memory 4 --optimizer muon

Plans how many blocks fit into 4 GiB, trains them on Python source, and prints planned and actual memory.
"""

import argparse
import os
import resource
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Precision, shape

import halfstep
from halfstep.integrations.release import step_in_backward
from halfstep.numerics.planning import Plan, Transformer, plan

SEQUENCE = 128
BUCKET = 2**20
BF16 = Precision("bf16", torch.bfloat16, emulated=False)


def size_of(width: int, blocks: int) -> Transformer:
    return shape(blocks, width, width // 64, SEQUENCE)


def planned(name: str, width: int, blocks: int) -> Plan:
    layout = "halfstep-muon-split-8bit" if name == "muon" else "halfstep-split-8bit"
    return plan(model=size_of(width, blocks), optimizer=layout, precision="bf16", step_in_backward=BUCKET)


def fitting(name: str, width: int, memory: int) -> int:
    """The number of blocks that fit, leaving a fifth for activations and the allocator's cache."""
    blocks = 1
    while planned(name, width, blocks + 1).totals.peak <= 0.8 * memory:
        blocks += 1
    return blocks


def train(name: str, width: int, blocks: int, steps: int, batch: int) -> list[float]:
    size = size_of(width, blocks)
    model = GPT(size, BF16, seed=0, recompute=True).to(BF16.dtype)
    options: dict[str, Any] = {"lr": 1e-3, "state_dtype": "8bit", "max_grad_norm": 1.0}
    optimizer: torch.optim.Optimizer
    if name == "muon":
        optimizer = halfstep.Muon(halfstep.muon_groups(model, adamw=("bytes", "positions", "head")), **options)
    else:
        optimizer = halfstep.AdamW(model.parameters(), **options)
    step_in_backward(model, optimizer, bucket_bytes=BUCKET, clipping="previous")
    text = torch.tensor(list(Path(os.__file__).read_bytes()))
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - SEQUENCE, (batch,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([text[start : start + SEQUENCE + 1] for start in starts])
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()  # steps
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", type=float, default=1.0, help="GiB (default: 1)")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64 (default: 512)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 bytes per step (default: 4)")
    options = parser.parse_args()

    name, width = options.optimizer, options.width
    blocks = fitting(name, width, int(options.memory * 2**30))
    fits = planned(name, width, blocks)
    print(f"{blocks} blocks, {fits.parameters:,} parameters; planned: {fits.totals.peak / 2**20:,.0f} MiB")

    train(name, 64, 1, 1, 1)  # loads libraries and kernels, which are not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    losses = train(name, width, blocks, options.steps, options.batch)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # in KiB on Linux
    print(f"the process took {used / 2**10:,.0f} MiB, with activations")
    print(f"largest: loss {losses[0]:.4f} before, {losses[-1]:.4f} after")
    return 0 if losses[-1] < 0.9 * losses[0] else 1


if __name__ == "__main__":
    raise SystemExit(main())
