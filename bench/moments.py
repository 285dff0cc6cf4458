"""``halfstep bench moments``: the error of moments of few bits, and what it does to a training.

Without ``--train``, optimizers take ``--steps`` steps with the same gradients, and their second moments are divided by
those of float64: the mean of the ratios, and the root mean square of their difference from 1. bitsandbytes and torchao
take their own steps, if they are installed. flashoptim's kernels need a GPU, so its moments are coded by its rule
(`flashoptim.optimizers.quantize`) in plain torch after each step.

With ``--train``, ``halfstep train`` runs with each layout of moments and each seed, and the table has the validation
losses.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import halfstep
from halfstep.bench.cases.installed import needs
from halfstep.bench.harness import Unavailable
from halfstep.cli.command_line import Parser, run
from halfstep.cli.numbers import whole
from halfstep.cli.train import command

BETA1, BETA2 = 0.9, 0.999
ELEMENTS = 4096
# Gradients of a step from numbers of different sizes, normal numbers, and the share of steps taken.
GRADIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "constant": lambda base, noise, part: base,
    "normal": lambda base, noise, part: base * noise,
    "normal, falling to 10^-4 of their size": lambda base, noise, part: base * noise * 10.0 ** (-4 * part),
    "normal, 100 times as large in 1 % of the steps": lambda base, noise, part: (
        base * noise * (100.0 if part % 0.1 < 0.001 else 1.0)
    ),
}
LAYOUTS = {"fp32": ("fp32", "auto"), "8 bits": ("8bit", "auto"), "8 bits, 24-bit master": ("8bit", "split24")}

# What takes a step with a gradient, and what returns the second moment.
Job = tuple[Callable[[torch.Tensor], None], Callable[[], torch.Tensor]]


def _steps_of(optimizer: Any, parameter: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
    def step(grad: torch.Tensor) -> None:
        parameter.grad = grad
        optimizer.step()

    return step


def _ours(**options: Any) -> Job:
    parameter = torch.nn.Parameter(torch.zeros(1, ELEMENTS))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "group 0 rounds moments of 8 bits to nearest")
        optimizer = halfstep.AdamW([parameter], lr=1e-30, betas=(BETA1, BETA2), **options)
    return _steps_of(optimizer, parameter), lambda: optimizer.state_dict()["state"][0]["exp_avg_sq"].flatten()


def _bitsandbytes() -> Job:
    bnb = needs("bitsandbytes")
    parameter = torch.nn.Parameter(torch.zeros(1, ELEMENTS))
    optimizer = bnb.optim.AdamW8bit([parameter], lr=1e-30, betas=(BETA1, BETA2), weight_decay=0.0)

    def second() -> torch.Tensor:
        state = optimizer.state[parameter]
        codes, scales, table = (state[key] for key in ("state2", "absmax2", "qmap2"))
        found: torch.Tensor = bnb.functional.dequantize_blockwise(codes, absmax=scales, code=table, blocksize=256)
        return found.flatten()

    return _steps_of(optimizer, parameter), second


def _torchao() -> Job:
    optim = needs("torchao", "torchao.optim")
    parameter = torch.nn.Parameter(torch.zeros(1, ELEMENTS))
    optimizer = optim.AdamW8bit([parameter], lr=1e-30, betas=(BETA1, BETA2), weight_decay=0.0)
    return _steps_of(optimizer, parameter), lambda: optimizer.state[parameter]["exp_avg_sq"].dequantize().flatten()


def _flashoptim() -> Job:
    """Its second moment: the root in groups of 32, 8 bits of the largest one, which is an fp16 number."""
    codes, scales = torch.zeros(ELEMENTS // 32, 32), torch.zeros(ELEMENTS // 32, 1)

    def second() -> torch.Tensor:
        return (codes / 255.0 * scales).square().flatten()

    def step(grad: torch.Tensor) -> None:
        root = (second() * BETA2 + grad.flatten() * grad.flatten() * (1 - BETA2)).sqrt().view(codes.shape)
        largest = root.amax(1, keepdim=True).clamp(min=1e-12)
        codes.copy_((root / largest * 255.0 + 0.5).floor())
        scales.copy_(largest.half())

    return step, second


PROVIDERS: dict[str, Callable[[], Job]] = {
    "bf16, nearest": lambda: _ours(state_dtype=torch.bfloat16),
    "bf16, stochastic": lambda: _ours(state_dtype=torch.bfloat16, rounding="stochastic"),
    "8 bits, nearest": lambda: _ours(state_dtype="8bit", rounding="nearest"),
    "8 bits (default)": lambda: _ours(state_dtype="8bit"),
    "flashoptim's rule": _flashoptim,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
}


def errors(kind: str, steps: int, names: Sequence[str] = tuple(PROVIDERS)) -> dict[str, tuple[float, float] | str]:
    """By provider, the mean of the ratios of second moments to those of float64 and their distance from 1, or a reason.

    Args:
        kind: a name of `GRADIENTS`.
        steps: the number of steps.
        names: the providers.
    """
    generator = torch.Generator().manual_seed(0)
    base = torch.exp2(-6 * torch.rand(ELEMENTS, generator=generator))
    exact = torch.zeros(ELEMENTS, dtype=torch.float64)
    jobs: dict[str, Job] = {}
    found: dict[str, tuple[float, float] | str] = {}
    for name in names:
        try:
            jobs[name] = PROVIDERS[name]()
        except Unavailable as reason:
            found[name] = str(reason)
    for number in range(steps):
        grad = GRADIENTS[kind](base, torch.randn(ELEMENTS, generator=generator), number / steps)
        exact += (1 - BETA2) * (grad.double().square() - exact)
        for step, _ in jobs.values():
            step(grad.view(1, ELEMENTS).clone())
    for name, (_, second) in jobs.items():
        ratio = second().double() / exact
        found[name] = ratio.mean().item(), (ratio - 1).square().mean().sqrt().item()
    return {name: found[name] for name in names}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(found: tuple[float, float] | str) -> str:
    if isinstance(found, str):
        return found
    return ", ".join(f"{number:,.0f}" if number >= 100 else f"{number:#.2g}" for number in found)


def losses(seeds: Sequence[int], arguments: Sequence[str]) -> dict[str, list[float]]:
    """The validation loss of each layout after training in bf16 with each seed and further `arguments`."""
    found: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for seed in seeds:
        for name, (state_dtype, master) in LAYOUTS.items():
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                words = ["--precision", "bf16", "--seed", str(seed), "--out", folder, *arguments]
                if command.main([*words, "--state-dtype", state_dtype, "--master-weights", master]):
                    raise RuntimeError(f"the training with {name} moments and seed {seed} failed")
                report = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
            found[name].append(report["runs"][0]["final_val_loss"])
    return found


def _parser() -> Parser:
    parser = Parser(
        "bench moments", "Compare moments of few bits with float64, and trainings with them with fp32 moments."
    )
    parser.add_argument("--steps", type=whole(1), metavar="N", help="steps (default: 10,000; with --train 300)")
    parser.add_argument("--train", action="store_true", help="train with fp32 and 8-bit moments instead")
    parser.add_argument("--seeds", type=whole(1), default=3, metavar="N", help="seeds of --train, from 0 (default: 3)")
    parser.add_argument("--size", default="tiny", metavar="NAME", help="size of the model of --train (default: tiny)")
    return parser


def _run(options: argparse.Namespace) -> int:
    """Print a Markdown table."""
    if options.train:
        seeds = range(options.seeds)
        found = losses(seeds, ["--size", options.size, "--steps", str(options.steps or 300)])
        print(_line(["moments", *(f"seed {seed}" for seed in seeds), "against fp32"]))
        print(_line(["---"] * (len(seeds) + 2)))
        for name, values in found.items():
            against = [100 * (one / base - 1) for one, base in zip(values, found["fp32"], strict=True)]
            print(_line([name, *(f"{one:.4f}" for one in values), ", ".join(f"{one:+.2f} %" for one in against)]))
        return 0
    print(_line(["gradients", *PROVIDERS]))
    print(_line(["---"] * (len(PROVIDERS) + 1)))
    for kind in GRADIENTS:
        print(_line([kind, *map(_cell, errors(kind, options.steps or 10_000).values())]), flush=True)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench moments`` with the arguments `argv`. Returns the exit status."""
    return run(_parser(), argv, _run)
