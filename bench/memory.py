"""``halfstep bench memory``: bytes per parameter of a training, planned, counted, and taken by the process.

Each row trains a stack of linear layers in bf16 (or fp32 where the row says so) for three steps in a process of its
own, without a GPU. *Counted* are the storages of weights and optimizer state after the steps, and the most bytes of
gradients at any time in a backward. *Process* is the growth of the largest resident size since before the model was
made, which Linux reports in ``/proc``: in addition to what is counted, it contains activations, temporary tensors and
what the allocator keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import halfstep
from halfstep.bench.cases.installed import needs
from halfstep.bench.harness import Unavailable
from halfstep.cli.command_line import Parser, run
from halfstep.cli.numbers import whole
from halfstep.cli.terminal import Progress
from halfstep.integrations.offload import OffloadedAdamW
from halfstep.integrations.release import step_in_backward
from halfstep.numerics.planning import plan, unit

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
STEPS = 3
Optimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class Training(NamedTuple):
    """A way to train.

    Attributes:
        make: makes its optimizer.
        layout: its name in `halfstep.numerics.planning`; empty if it is not planned.
        dtype: of the parameters.
        release: whether it steps in the backward.
        offload: whether it is planned with ``offload=True``.
    """

    make: Optimizer
    layout: str = ""
    dtype: torch.dtype = torch.bfloat16
    release: bool = False
    offload: bool = False


def _ours(**options: Any) -> Optimizer:
    return lambda parameters: halfstep.AdamW(parameters, lr=1e-4, **options)


_EIGHT: dict[str, Any] = {"state_dtype": "8bit"}
_SPLIT24: dict[str, Any] = {"master_weights": "split24", "rounding": "stochastic", **_EIGHT}
_BF16: dict[str, Any] = {"state_dtype": torch.bfloat16, "rounding": "stochastic"}
ROWS = {
    "torch, fp32": Training(lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), "torch-fused", torch.float32),
    "torch, bf16": Training(lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), "torch-fused"),
    "bitsandbytes AdamW8bit": Training(lambda p: needs("bitsandbytes").optim.AdamW8bit(p, lr=1e-4)),
    "torchao AdamW8bit": Training(lambda p: needs("torchao", "torchao.optim").AdamW8bit(p, lr=1e-4)),
    "fp32": Training(_ours(), "halfstep", torch.float32),
    "split": Training(_ours(), "halfstep-split"),
    "split, released": Training(_ours(), "halfstep-split", release=True),
    "split, bf16 moments": Training(_ours(**_BF16), "halfstep-split-bf16"),
    "split, bf16 moments, released": Training(_ours(**_BF16), "halfstep-split-bf16", release=True),
    "split, 8-bit moments": Training(_ours(**_EIGHT), "halfstep-split-8bit"),
    "split, 8-bit moments, released": Training(_ours(**_EIGHT), "halfstep-split-8bit", release=True),
    "split24, 8-bit moments": Training(_ours(**_SPLIT24), "halfstep-split24-8bit"),
    "split24, 8-bit moments, released": Training(_ours(**_SPLIT24), "halfstep-split24-8bit", release=True),
    "split, offloaded": Training(lambda p: OffloadedAdamW(p, lr=1e-4), "halfstep-split", offload=True),
}


def _plain(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values, and those that wrapper subclasses such as torchao's hold."""
    for one in values:
        if hasattr(one, "__tensor_flatten__"):
            yield from _plain(getattr(one, name) for name in one.__tensor_flatten__()[0])
        elif isinstance(one, torch.Tensor):
            yield one


def _bytes_of(values: Iterable[Any]) -> int:
    storages = [one.untyped_storage() for one in _plain(values)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def _resident(key: str) -> int | None:
    """A size of this process in bytes: ``VmRSS`` or, since `_forget_peak`, ``VmHWM``. None without Linux."""
    if not STATUS.exists():
        return None
    lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)


def _forget_peak() -> bool:
    try:
        CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _model(parameters: int, width: int, dtype: torch.dtype) -> nn.Module:
    layers = -(-parameters // (width * width + width))
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.Tanh()) for _ in range(layers)))


def _train(model: nn.Module, row: Training, width: int) -> tuple[torch.optim.Optimizer, int]:
    """The optimizer after some steps, and the most bytes of gradients in a backward."""
    optimizer = row.make(model.parameters())
    most = [0]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: most.append(_bytes_of(one.grad for one in model.parameters()))
        )
    if row.release:
        step_in_backward(model, optimizer)  # type: ignore[arg-type]
    for _ in range(STEPS):
        model(torch.ones(8, width, dtype=row.dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, max(most)


def measured(name: str, parameters: int, width: int) -> dict[str, Any]:
    """Bytes of a row in this process: ``counted``, ``process`` (or None), ``planned`` (or None), and ``parameters``."""
    row = ROWS[name]
    _train(_model(64 * 64, 64, row.dtype), row, 64)  # loads what the first step needs
    cleared, before = _forget_peak(), _resident("VmRSS")
    model = _model(parameters, width, row.dtype)
    optimizer, gradients = _train(model, row, width)
    peak = _resident("VmHWM")
    own = list(model.parameters())
    state = [value for one in optimizer.state.values() for value in one.values()]
    hosts = [one for group in optimizer.param_groups for one in group["params"]] if row.offload else []
    counted = _bytes_of([*own, *hosts, *state]) + gradients
    if row.offload:  # the memory of the gradients on the host, which stays
        counted += _bytes_of(hosts)
    planned = None
    if row.layout:
        made = plan(
            units=[unit("all", [one.shape for one in own])],
            precision="fp32" if row.dtype == torch.float32 else "bf16",
            optimizer=row.layout,
            step_in_backward=25 * 2**20 if row.release else None,
            offload=row.offload,
        )
        planned = made.totals.state + made.part("gradients").bytes * (row.release or row.offload) + made.totals.host
    return {
        "parameters": sum(one.numel() for one in own),
        "counted": counted,
        # Linux counts pages per thread and adds them up late, so that a peak may read below what it began at.
        "process": max(peak - before, 0) if cleared and peak is not None and before is not None else None,
        "planned": planned,
    }


def _in_process(name: str, parameters: int, width: int) -> dict[str, Any] | str:
    """What `measured` returns, from a process of its own; or why it cannot be measured."""
    words = ["bench", "memory", "--row", name, "--params", str(parameters), "--width", str(width)]
    done = subprocess.run([sys.executable, "-m", "halfstep", *words], capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"the row {name!r} failed:\n{done.stderr}")
    found: dict[str, Any] | str = json.loads(done.stdout)
    return found


def _parser() -> Parser:
    parser = Parser("bench memory", "Train with every layout of the optimizer, and count the bytes it takes.")
    parser.add_argument(
        "--params", type=whole(1), default=100_000_000, metavar="N", help="least parameters (default: 1e8)"
    )
    parser.add_argument("--width", type=whole(1), default=2048, metavar="N", help="of each layer (default: 2048)")
    parser.add_argument("--row", choices=ROWS, metavar="NAME", help="measure one row in this process, and print JSON")
    return parser


def _run(options: argparse.Namespace) -> int:
    """Print a Markdown table, or the JSON of one row."""
    if options.row is not None:
        try:
            found: dict[str, Any] | str = measured(options.row, options.params, options.width)
        except Unavailable as reason:
            found = str(reason)
        print(json.dumps(found))
        return 0
    print("| bytes per parameter | planned | counted | process |\n|---|---|---|---|")
    progress = Progress(len(ROWS))
    for number, name in enumerate(ROWS):
        progress.show(number, name)
        cells = _in_process(name, options.params, options.width)
        progress.clear()
        if isinstance(cells, str):
            shown = [cells, "", ""]
        else:
            each = cells["parameters"]
            shown = [
                "" if cells[key] is None else f"{cells[key] / each:.2f}" for key in ("planned", "counted", "process")
            ]
        print(f"| {name} | {' | '.join(shown)} |", flush=True)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench memory`` with the arguments `argv`. Returns the exit status."""
    return run(_parser(), argv, _run)
