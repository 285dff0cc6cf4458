"""Validation loss of small GPTs trained by Muon: ours in several layouts, and torch's in fp32 and in bf16.

python tests/support/muon_training.py --seeds 3 --steps 1500 --size nano [--device cuda]
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch

import halfstep

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from corpus import Corpus, read_corpus
from gpt import GPT, RATES, SIZES, Precision

BATCH = 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "halfstep, split": {},
    "halfstep, split, bf16": {"state_dtype": torch.bfloat16},
    "halfstep, split, 8 bits": {"state_dtype": "8bit"},
    "halfstep, split24, 8 bits": {"state_dtype": "8bit", "master_weights": "split24"},
}
NAMES = ("torch, fp32", *LAYOUTS, "torch, bf16")


def optimizers_of(model: torch.nn.Module, name: str, lr: float, seed: int) -> list[torch.optim.Optimizer]:
    groups = halfstep.muon_groups(model, adamw=("bytes", "positions", "head"), weight_decay=0.0)
    if name in LAYOUTS:
        return [halfstep.Muon(groups, lr=lr, seed=seed, **LAYOUTS[name])]
    matrices, others = (group["params"] for group in groups)
    return [
        torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.999), weight_decay=0.0),
    ]


def loss(corpus: Corpus, size: str, name: str, seed: int, steps: int, device: torch.device) -> float:
    torch.manual_seed(seed)
    form = SIZES[size]
    dtype = "fp32" if name.endswith("fp32") else "bf16"
    precision = Precision.on(dtype, device)
    model = GPT(form, precision, seed=seed).to(device, precision.dtype)
    optimizers = optimizers_of(model, name, RATES[size], seed)
    for step in range(steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RATES[size] * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        model.zero_grad()
        batch = corpus.batch(seed, step, range(BATCH), form.seq)
        model(*(tokens.to(device) for tokens in batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        parts = [corpus.validation(range(row, row + 64), 1024, form.seq) for row in range(0, 1024, 64)]
        losses = [model(*(tokens.to(device) for tokens in part)) for part in parts]
    result = float(torch.stack(losses).double().mean())
    print(f"{name}, seed {seed}: {result:.4f}", file=sys.stderr, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--size", choices=SIZES, default="nano")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--only", choices=NAMES, nargs="*", default=NAMES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = read_corpus(None, SIZES[options.size].seq)
    print("loss by seed, relative to torch in fp32", flush=True)
    first: list[float] = []
    for name in options.only:
        losses = [
            loss(corpus, options.size, name, seed, options.steps, options.device) for seed in range(options.seeds)
        ]
        first = losses if name == NAMES[0] else first
        if not first:  # there is nothing to compare with
            print(f"{name:28}", *(f"{value:.4f}" for value in losses), flush=True)
            continue
        relative = [value / reference - 1 for value, reference in zip(losses, first, strict=True)]
        mean = sum(relative) / len(relative)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in relative) / max(len(relative) - 1, 1))
        error = deviation / math.sqrt(len(relative))
        print(f"{name:28}", *(f"{value:.4f}" for value in losses), f"{mean:+.2%} ± {error:.2%}", flush=True)


if __name__ == "__main__":
    main()
