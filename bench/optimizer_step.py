"""``halfstep bench step``: the time of an optimizer step on this machine, compared with other optimizers.

The job is a step of bf16 parameters with bf16 gradients and exact fp32 masters. halfstep does it in one call. The other
optimizers step fp32 tensors, so their times include the copies of the gradients to fp32 and of the masters to the bf16
weights. They are `torch.optim.AdamW(fused=True)` and, on a CPU where DeepSpeed is installed, ``DeepSpeedCPUAdam``, the
optimizer of offloaded training.

All are timed in interleaved rounds in one process, and ratios are medians of the ratios in each round (``timing.py``).
Bytes are counted, not measured: per parameter, halfstep moves 26 (split master) or 28 (full master), the others
6 + 28 + 6 = 40. The masters of all optimizers are compared before any time is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch

from halfstep.bench import timing
from halfstep.bench.cases.installed import needs
from halfstep.bench.harness import Unavailable, first_line
from halfstep.cli.command_line import Parser, run
from halfstep.cli.numbers import whole
from halfstep.cli.terminal import Progress, ruled, terminal
from halfstep.integrations.optim import AdamW

TENSORS, MASTERS = (1, 100, 10_000), ("split", "full")
BYTES = {"split": 26, "full": 28, "torch": 40}
# A few units in the last place after a handful of steps: torch rounds the decayed weight once more per step.
AGREEMENT = 2.0**-20
LEARNING_RATE, DECAY = 1e-3, 1e-2


Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def _torch_adamw(masters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=DECAY, fused=True)


def _deepspeed_adamw(masters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Compiles the optimizer, with ninja, when it is first created.

    Raises:
        Unavailable: DeepSpeed is not installed, or does not compile here.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with redirect_stdout(sys.stderr):  # for its logger
        module = needs("deepspeed", "deepspeed.ops.adam")
        try:
            made: torch.optim.Optimizer = module.DeepSpeedCPUAdam(masters, lr=LEARNING_RATE, weight_decay=DECAY)
        except (RuntimeError, OSError) as error:
            raise Unavailable(f"does not compile here: {first_line(error)}") from error
    return made


def peers(device: torch.device, say: Callable[[str], None]) -> dict[str, Make]:
    """The other optimizers, by name. `say` is called with a message about each one that is left out."""
    found: dict[str, Make] = {"torch": _torch_adamw}
    if device.type == "cpu":
        try:
            _deepspeed_adamw([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))])
            found["deepspeed"] = _deepspeed_adamw
        except Unavailable as why:
            say(f"Not measured: DeepSpeedCPUAdam: {why}.")
    return found


class _WithCopies:
    """A step of fp32 masters, with the copies from bf16 gradients before it and to bf16 weights after it."""

    def __init__(self, make: Make, weights: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        self.masters = [torch.nn.Parameter(weight.float()) for weight in weights]
        self._tensors = [master.detach() for master in self.masters]
        self._visible = [weight.clone() for weight in weights]
        self._low, self._high = grads, [torch.empty_like(master) for master in self.masters]
        for master, wide in zip(self.masters, self._high, strict=True):
            master.grad = wide
        self._optimizer = make(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_(self._high, self._low)
        self._optimizer.step()
        torch._foreach_copy_(self._visible, self._tensors)


def measure(
    total: int, tensors: int, layout: str, rounds: int, device: torch.device, others: dict[str, Make]
) -> dict[str, Any]:
    """Time steps of halfstep and of `others`, of `total` parameters in `tensors` tensors, in `rounds` rounds."""
    size = total // tensors
    generator = torch.Generator(device).manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32, device=device).bfloat16()

    ours = [torch.nn.Parameter(normal()) for _ in range(tensors)]
    weights, grads = [p.detach().clone() for p in ours], [normal() for _ in ours]
    for p, grad in zip(ours, grads, strict=True):
        p.grad = grad
    mine = AdamW(ours, lr=LEARNING_RATE, weight_decay=DECAY, master_weights=layout)  # type: ignore[arg-type]
    theirs = {name: _WithCopies(make, weights, grads) for name, make in others.items()}
    for _ in range(3):
        mine.step()
        for other in theirs.values():
            other.step()
    for other in theirs.values():
        for own, master in zip(mine.masters().values(), other.masters, strict=True):
            torch.testing.assert_close(own, master.detach(), rtol=AGREEMENT, atol=AGREEMENT)
    calls: list[Callable[[], Any]] = [mine.step, *(other.step for other in theirs.values())]
    our_time, *their_times = timing.rounds(timing.clock_for(device), calls, least=rounds, most=rounds)
    row: dict[str, Any] = {
        "tensors": tensors,
        "layout": layout,
        "halfstep_ms": 1e3 * timing.percentile(our_time, 0.5),
        "bytes_ratio": BYTES[layout] / BYTES["torch"],
    }
    for name, its_time in zip(theirs, their_times, strict=True):
        row[f"{name}_ms"] = 1e3 * timing.percentile(its_time, 0.5)
        row["ratio" if name == "torch" else f"{name}_ratio"] = timing.paired(our_time, its_time)
    return row


def _parser() -> Parser:
    parser = Parser(
        "bench step",
        "Time the optimizer step on this machine, and the same step with torch's fused AdamW and, on a CPU where "
        "DeepSpeed is installed, DeepSpeedCPUAdam.",
    )
    parser.add_argument(
        "--parameters", type=whole(10_000), default=2**24, metavar="N", help="number of parameters (default: 16 Mi)"
    )
    parser.add_argument("--rounds", type=whole(1), default=15, metavar="N", help="number of rounds")
    parser.add_argument("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _run(options: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [(tensors, layout) for tensors in TENSORS for layout in MASTERS]
    if options.threads:
        torch.set_num_threads(options.threads)
    others = peers(device, lambda line: print(line, file=sys.stderr))
    rows: list[dict[str, Any]] = []
    with Progress(len(cases)) as progress:
        for tensors, layout in cases:
            progress.show(len(rows), f"{tensors:,} tensors, {layout} master")
            rows.append(measure(options.parameters, tensors, layout, options.rounds, device, others))
    if options.json:
        print(json.dumps({"device": device.type, "parameters": options.parameters, "rows": rows}, indent=2))
        return 0
    titles = {"torch": "torch fused + copies ms", "deepspeed": "DeepSpeedCPUAdam + copies ms"}
    header = ["tensors", "master", "halfstep ms"]
    for name in others:
        header += [titles[name], "ratio"]
    header.append("bytes moved, ratio")
    cells = []
    for row in rows:
        line = [f"{row['tensors']:,}", row["layout"], f"{row['halfstep_ms']:.1f}"]
        for name in others:
            ratio = row["ratio" if name == "torch" else f"{name}_ratio"]
            line += [f"{row[f'{name}_ms']:.1f}", f"{ratio:.2f}"]
        cells.append([*line, f"{row['bytes_ratio']:.2f}"])
    screen = terminal()
    title = f"Optimizer step, {options.parameters:,} bf16 parameters, fp32 masters, {device.type}"
    screen.show([*screen.title(title), *ruled(header, cells, [True] * len(header), screen)], sys.stdout)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench step`` with the arguments `argv`. Returns the exit status."""
    return run(_parser(), argv, _run)
