"""``halfstep bench moments``: the error of moments of few bits, and what it does to a training.

Without ``--train``, optimizers take ``--steps`` steps with the same gradients, and their second moments are divided by
those of float64: the mean of the ratios, and the root mean square of their difference from 1. bitsandbytes and torchao
take their own steps, if they are installed. flashoptim's kernels need a GPU, so its moments are coded by its rule
(`flashoptim.optimizers.quantize`) in plain torch after each step.

With ``--train``, the model of ``halfstep train`` is trained with each kind of moments and each seed, those of
bitsandbytes and torchao too if they are installed, and the table has the validation losses. Chance alone moves the loss
of a long run by some tenths of a percent, so the last column has the mean of all seeds and its standard error.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import halfstep
from halfstep.bench.cases.installed import needs
from halfstep.bench.harness import Unavailable
from halfstep.cli.command_line import Parser, run
from halfstep.cli.numbers import whole
from halfstep.cli.terminal import Progress
from halfstep.cli.train import loop
from halfstep.cli.train.data import Corpus, DataError, read_corpus
from halfstep.cli.train.model import SIZES
from halfstep.cli.train.world import ThisRank

BETA1, BETA2 = 0.9, 0.999
ELEMENTS = 4096
WINDOWS = 1024  # of validation text; with the 128 of ``halfstep train``, which of them are drawn matters more
# Gradients of a step from numbers of different sizes, normal numbers, and the share of steps taken.
GRADIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "constant": lambda base, noise, part: base,
    "normal": lambda base, noise, part: base * noise,
    "normal, falling to 10^-4 of their size": lambda base, noise, part: base * noise * 10.0 ** (-4 * part),
    "normal, 100 times as large in 1 % of the steps": lambda base, noise, part: (
        base * noise * (100.0 if part % 0.1 < 0.001 else 1.0)
    ),
}

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
    return _steps_of(optimizer, parameter), lambda: optimizer.canonical_state_dict()["state"][0]["exp_avg_sq"].flatten()


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


def errors(
    kind: str, steps: int, names: Sequence[str] = tuple(PROVIDERS), show: Callable[[int], None] = lambda step: None
) -> dict[str, tuple[float, float] | str]:
    """By provider, the mean of the ratios of second moments to those of float64 and their distance from 1, or a reason.

    Args:
        kind: a name of `GRADIENTS`.
        steps: the number of steps.
        names: the providers.
        show: is called with the number of steps that are done.
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
        show(number + 1)
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


class _Rates(dict[str, Any]):
    """A parameter group whose learning rate is a tensor that is filled, as torchao demands."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr":
            self["lr"].fill_(value)
        else:
            super().__setitem__(key, value)


def _trained_by_torchao(groups: Any, lr: float) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = needs("torchao", "torchao.optim").AdamW8bit(groups, lr=lr, betas=loop.BETAS)
    made.param_groups = [_Rates(group) for group in made.param_groups]
    return made


def _trained_by_us(**options: Any) -> Callable[[Any, float], torch.optim.Optimizer]:
    return lambda groups, lr: halfstep.AdamW(groups, lr=lr, betas=loop.BETAS, **options)


# What makes the optimizer of a training. Those of the other libraries have no masters of bf16 weights.
TRAINED: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "fp32": _trained_by_us(),
    "bf16, stochastic": _trained_by_us(state_dtype=torch.bfloat16, rounding="stochastic"),
    "8 bits": _trained_by_us(state_dtype="8bit"),
    "8 bits, 24-bit master": _trained_by_us(state_dtype="8bit", master_weights="split24", rounding="stochastic"),
    "bitsandbytes": lambda groups, lr: needs("bitsandbytes").optim.AdamW8bit(groups, lr=lr, betas=loop.BETAS),
    "torchao": _trained_by_torchao,
}


class _TrainingWith(loop.Trainer):
    """A run of ``halfstep train`` with a given optimizer."""

    def __init__(self, make: Callable[[Any, float], torch.optim.Optimizer], *arguments: Any) -> None:
        self._make = make
        super().__init__(*arguments)

    def _optimizer(self) -> torch.optim.Optimizer:
        return self._make(self._groups(), self.settings.lr)


def final_loss(
    name: str, precision: str, size: str, steps: int, seed: int, corpus: Corpus, show: Callable[[int], None]
) -> float | str:
    """The validation loss after a training of ``halfstep train``'s model, or why it cannot be trained.

    Args:
        name: a name of `TRAINED`.
        precision: ``"bf16"`` or ``"fp32"``.
        size: a name of `SIZES`.
        steps: number of steps.
        seed: of the weights, the batches and the stochastic rounding.
        corpus: the text.
        show: is called with the number of steps that are done.
    """
    if "master" in name and precision == "fp32":
        return "fp32 weights have no master"
    lr, device = SIZES[size].lr, torch.device("cpu")
    settings = loop.Settings(size, steps, 16, seed, lr, 0.1, steps // 10, 1.0, 60)
    try:
        training = _TrainingWith(
            TRAINED[name], loop.Run(precision, precision), settings, corpus, ThisRank("single", device)
        )
    except Unavailable as reason:
        return str(reason)
    for step in range(steps):
        training.advance()
        training.flush()
        show(step + 1)
    return training.validate(WINDOWS)


def _parser() -> Parser:
    parser = Parser(
        "bench moments", "Compare moments of few bits with float64, and trainings with them with fp32 moments."
    )
    add = parser.add_argument
    add("--steps", type=whole(1), metavar="N", help="steps (default: 10,000; with --train 300)")
    add("--train", action="store_true", help="train with fp32 moments and with those of few bits instead")
    add("--seeds", type=whole(1), default=3, metavar="N", help="seeds of --train, from 0 (default: 3)")
    add("--size", choices=SIZES, default="tiny", metavar="NAME", help="size of the model of --train (default: tiny)")
    add("--precision", choices=("bf16", "fp32"), default="bf16", help="of the weights of --train (default: bf16)")
    add("--data", metavar="PATH", help="text of --train: a file or folder (default: the Python standard library)")
    return parser


def _mean(numbers: Sequence[float]) -> str:
    """The mean of some percentages and its standard error, if there are any and several."""
    error = f" ± {statistics.stdev(numbers) / len(numbers) ** 0.5:.2f} %" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):+.2f} %{error}" if numbers else ""


def _train(options: argparse.Namespace) -> int:
    corpus = read_corpus(options.data, SIZES[options.size].context)
    steps, seeds = options.steps or 300, range(options.seeds)
    print(_line(["moments", *(f"seed {seed}" for seed in seeds), "against fp32", "mean, standard error"]))
    print(_line(["---"] * (len(seeds) + 3)))
    progress = Progress(len(TRAINED) * len(seeds) * steps)
    base: list[float] = []
    done = 0
    for name in TRAINED:
        found: list[float | str] = []
        for seed in seeds:
            text, before = f"{name}, seed {seed}", done
            found.append(
                final_loss(
                    *(name, options.precision, options.size, steps, seed, corpus),
                    lambda step, before=before, text=text: progress.show(before + step, text),  # type: ignore[misc]
                )
            )
            done += steps
        progress.clear()
        losses = [one for one in found if not isinstance(one, str)]
        base = base or losses
        against = [100 * (one / other - 1) for one, other in zip(losses, base, strict=False)]
        cells = [f"{one:.4f}" for one in losses] or [str(found[0]), *[""] * (len(seeds) - 1)]
        print(_line([name, *cells, ", ".join(f"{one:+.2f} %" for one in against), _mean(against)]), flush=True)
    return 0


def _run(options: argparse.Namespace) -> int:
    """Print a Markdown table."""
    if options.train:
        return _train(options)
    steps = options.steps or 10_000
    print(_line(["gradients", *PROVIDERS]))
    print(_line(["---"] * (len(PROVIDERS) + 1)))
    with Progress(len(GRADIENTS) * steps) as progress:
        for number, kind in enumerate(GRADIENTS):
            found = errors(kind, steps, show=lambda step, at=number * steps, kind=kind: progress.show(at + step, kind))  # type: ignore[misc]
            progress.clear()
            print(_line([kind, *map(_cell, found.values())]), flush=True)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench moments`` with the arguments `argv`. Returns the exit status."""
    return run(_parser(), argv, _run, (DataError,))
