"""Bytes per parameter of halfstep's layouts and of other AdamW and Muon optimizers, measured on this machine.

python examples/bytes_per_parameter.py                            # all installed optimizers
python examples/bytes_per_parameter.py --out bytes.json --picture bytes.png

Trains linear layers without biases, whose activations are negligible. On a GPU, bytes are the allocator's peak over
three steps; on a CPU, the size of weights, gradients and optimizer states after a backward. `halfstep bench run adam`
measures times.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

import halfstep
from halfstep.cli import figures
from halfstep.cli.command_line import output_file, picture
from halfstep.cli.numbers import whole
from halfstep.integrations.release import step_in_backward
from halfstep.numerics.planning import layout

BF16 = torch.bfloat16
EXACT, ROUNDED, NONE, WEIGHTS = "exact fp32 master", "24-bit master", "no master", "fp32 weights"


Make = Callable[[torch.nn.Module], Any]  # creates the optimizer of a model


def _optimizer(module: str, name: str = "AdamW", **options: Any) -> Make:
    return lambda model: getattr(import_module(module), name)(model.parameters(), lr=1e-4, **options)


def _stepping_in_the_backward(model: torch.nn.Module) -> Any:
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-4, state_dtype="8bit")
    step_in_backward(model, optimizer)
    return optimizer


_halfstep, _torch = partial(_optimizer, "halfstep"), _optimizer("torch.optim", fused=True)
_muon, _torchs_muon = partial(_halfstep, "Muon"), _optimizer("torch.optim", "Muon")
# Name, dtype of the weights, kind of master, and the optimizer.
OPTIMIZERS: tuple[tuple[str, torch.dtype, str, Make], ...] = (
    ("torch AdamW, fp32 weights", torch.float32, WEIGHTS, _torch),
    ("torch AdamW", BF16, NONE, _torch),
    ("halfstep AdamW", BF16, EXACT, _halfstep()),
    ("halfstep, bf16 moments", BF16, EXACT, _halfstep(state_dtype=BF16, rounding="stochastic")),
    ("halfstep, 8-bit moments", BF16, EXACT, _halfstep(state_dtype="8bit")),
    ("halfstep, 8 bits, steps in the backward", BF16, EXACT, _stepping_in_the_backward),
    ("halfstep, 8 bits, 24-bit master", BF16, ROUNDED, _halfstep(state_dtype="8bit", master_weights="split24")),
    ("flashoptim", BF16, ROUNDED, _optimizer("flashoptim", "FlashAdamW")),
    ("torch-optimi, Kahan sums", BF16, "16-bit correction", _optimizer("optimi", kahan_sum=True)),
    ("halfstep, 8 bits, no master", BF16, NONE, _halfstep(state_dtype="8bit", master_weights=None)),
    ("bitsandbytes AdamW8bit", BF16, NONE, _optimizer("bitsandbytes.optim", "AdamW8bit")),
    ("torchao AdamW8bit", BF16, NONE, _optimizer("torchao.optim", "AdamW8bit")),
    ("torch Muon, fp32 weights", torch.float32, WEIGHTS, _torchs_muon),
    ("torch Muon", BF16, NONE, _torchs_muon),
    ("halfstep Muon", BF16, EXACT, _muon()),
    ("halfstep Muon, 8-bit momentum", BF16, EXACT, _muon(state_dtype="8bit")),
    ("halfstep Muon, 8 bits, 24-bit master", BF16, ROUNDED, _muon(state_dtype="8bit", master_weights="split24")),
)

# Optimizers that need a GPU, and their layouts in `halfstep plan`, which are reported without one.
PLANNED = {"flashoptim": ("flashoptim-24", "bf16")}


def _storages(values: Iterable[Any]) -> dict[int, int]:
    """The address and size of the storages of all tensors, including those inside tensor subclasses."""
    sizes: dict[int, int] = {}
    for value in values:
        if isinstance(value, dict):
            sizes |= _storages(value.values())
        elif hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            sizes |= _storages(getattr(value, name) for name in names)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def measure(dtype: torch.dtype, make: Make, device: torch.device, layers: int, width: int) -> float:
    on_gpu, before, peak = device.type == "cuda", 0, 0
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    linear = partial(torch.nn.Linear, width, width, bias=False, dtype=dtype, device=device)
    model = torch.nn.Sequential(*(linear() for _ in range(layers)))
    optimizer = make(model)
    x = torch.randn(1, width, dtype=dtype, device=device)
    for _ in range(3):  # the first one creates the state
        model(x).square().mean().backward()
        if not on_gpu:
            grads = [parameter.grad for parameter in model.parameters()]
            peak = max(peak, sum(_storages([*model.parameters(), *grads, dict(optimizer.state)]).values()))
            del grads  # would keep them alive until the next step
        optimizer.step()
        optimizer.zero_grad()
    if on_gpu:
        peak = torch.cuda.max_memory_allocated() - before
    return peak / sum(parameter.numel() for parameter in model.parameters())


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw the bytes per parameter as bars, colored by the kind of master."""
    rows = [row for row in result["rows"] if row["bytes"] or row.get("planned")]
    colors = {EXACT: "#1b6ca8", WEIGHTS: "#7f8c8d", ROUNDED: "#e08e0b"}
    figure = figures.figure(8, 0.34 * len(rows) + 1.1)
    axes = figure.add_subplot()
    names, amounts = [row["optimizer"] for row in rows], [row["bytes"] or row["planned"] for row in rows]
    bars = axes.barh(names, amounts, color=[colors.get(row["master"], "#c9b3a5") for row in rows])
    notes = [row["master"] + (", planned" if row["bytes"] is None else "") for row in rows]
    labels = [f"{amount:.2f}  {note}" for amount, note in zip(amounts, notes, strict=True)]
    axes.bar_label(bars, labels, padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(amounts))
    axes.set_title("Bytes per parameter: weights, gradients and optimizer states", loc="left", fontsize=11)
    axes.set_xlabel(f"measured on {result['device']}, {result['date']}")
    figures.tidy(axes, "x")
    figures.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=whole(1), help="width of a layer (default: 4,096 on a GPU, else 1,024)")
    parser.add_argument("--layers", type=whole(1), help="number of layers (default: 64 on a GPU, else 8)")
    parser.add_argument("--out", type=output_file, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--picture", type=picture, metavar="FILE", help="draw them (needs matplotlib)")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    width, layers = options.width or (4096 if on_gpu else 1024), options.layers or (64 if on_gpu else 8)
    rows = []
    for name, dtype, master, make in track(OPTIMIZERS, "measuring", console=Console(stderr=True)):
        row: dict[str, Any] = {"optimizer": name, "master": master, "bytes": None, "reason": ""}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # peers' warnings
                row["bytes"] = measure(dtype, make, device, layers, width)
        except Exception as error:
            if name.startswith(("halfstep", "torch ")):
                raise
            # A peer failed: report it, and measure the others.
            row["planned"] = float(layout(*PLANNED[name]).per_parameter()) if name in PLANNED else None
            row["reason"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
        rows.append(row)
    result = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "parameters": layers * width * width,
        "rows": rows,
    }
    title = f"{result['parameters']:,} parameters, {result['device']}, torch {result['torch']}"
    table = Table("optimizer", "master", Column("bytes per parameter", justify="right"), title=title)
    for row in result["rows"]:
        table.add_row(row["optimizer"], row["master"], row["reason"] or f"{row['bytes']:.2f}")
    Console().print(table)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.picture:
        draw(options.picture, result)


if __name__ == "__main__":
    main()
