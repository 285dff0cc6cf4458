"""``halfstep bench step``: the optimizer step on this machine, against torch's fused AdamW doing the same job.

The job: bf16 parameters with bf16 gradients and exact fp32 masters. Ours is one call. torch's is what it takes with
`torch.optim.AdamW(fused=True)`: copy the gradients to fp32, step the fp32 masters, copy them back to the bf16 weights.

Both run in turn in one process; the ratio is taken pair by pair and its median printed (``timing.py``). Bytes are
counted, not measured: per parameter ours moves 26 (split master) or 28 (full), torch's 6 + 28 + 6 = 40. No time is
printed before the masters of both agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from halfstep.bench import timing
from halfstep.cli.command_line import Parser, run
from halfstep.cli.numbers import whole
from halfstep.cli.terminal import Progress, ruled, terminal
from halfstep.integrations.optim import AdamW

MASTERS = ("split", "full")
BYTES = {"split": 26, "full": 28, "torch": 40}
# A few units in the last place after a handful of steps: torch rounds the decayed weight once more per step.
AGREEMENT = 2.0**-20


def measure(total: int, tensors: int, layout: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """Time `rounds` pairs of steps over `total` parameters in `tensors` tensors."""
    size = total // tensors
    generator = torch.Generator(device).manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32, device=device).bfloat16()

    ours = [torch.nn.Parameter(normal()) for _ in range(tensors)]
    visible = [p.detach().clone() for p in ours]
    masters = [torch.nn.Parameter(p.detach().float()) for p in ours]
    low, high = [normal() for _ in ours], [torch.empty_like(master) for master in masters]
    for p, master, grad, wide in zip(ours, masters, low, high, strict=True):
        p.grad, master.grad = grad, wide
    masters_as_tensors = [master.detach() for master in masters]
    mine = AdamW(ours, lr=1e-3, master_weights=layout)  # type: ignore[arg-type]
    torchs = torch.optim.AdamW(masters, lr=1e-3, fused=True)

    @torch.no_grad()
    def job_of_torch() -> None:
        torch._foreach_copy_(high, low)
        torchs.step()
        torch._foreach_copy_(visible, masters_as_tensors)

    for _ in range(3):
        mine.step()
        job_of_torch()
    state = mine.state_dict()["state"]
    for index, master in enumerate(masters):
        torch.testing.assert_close(state[index]["master"], master.detach(), rtol=AGREEMENT, atol=AGREEMENT)
    our_time, its_time = timing.rounds(timing.clock_for(device), [mine.step, job_of_torch], least=rounds, most=rounds)
    return {
        "tensors": tensors,
        "layout": layout,
        "halfstep_ms": 1e3 * timing.percentile(our_time, 0.5),
        "torch_ms": 1e3 * timing.percentile(its_time, 0.5),
        "ratio": timing.paired(our_time, its_time),
        "bytes_ratio": BYTES[layout] / BYTES["torch"],
    }


def _parser() -> Parser:
    parser = Parser(
        "bench step", "Time the optimizer step on this machine against torch's fused AdamW doing the same job."
    )
    parser.add_argument("--parameters", type=whole(10_000), default=2**24, metavar="N", help="in all (default: 16 Mi)")
    parser.add_argument("--rounds", type=whole(1), default=15, metavar="N", help="pairs of steps measured")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _run(options: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [(tensors, layout) for tensors in (1, 100, 10_000) for layout in MASTERS]
    rows: list[dict[str, Any]] = []
    with Progress(len(cases)) as progress:
        for tensors, layout in cases:
            progress.show(len(rows), f"{tensors:,} tensors, {layout} master")
            rows.append(measure(options.parameters, tensors, layout, options.rounds, device))
    if options.json:
        print(json.dumps({"device": device.type, "parameters": options.parameters, "rows": rows}, indent=2))
        return 0
    header = ("tensors", "master", "halfstep ms", "torch fused + copies ms", "ratio", "bytes moved, ratio")
    cells = [
        (
            f"{row['tensors']:,}",
            row["layout"],
            f"{row['halfstep_ms']:.1f}",
            f"{row['torch_ms']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['bytes_ratio']:.2f}",
        )
        for row in rows
    ]
    screen = terminal()
    title = f"Optimizer step, {options.parameters:,} bf16 parameters, fp32 masters, {device.type}"
    screen.show([*screen.title(title), *ruled(header, cells, [True] * len(header), screen)], sys.stdout)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench step`` with the arguments `argv`. Returns the exit status."""
    return run(_parser(), argv, _run)
