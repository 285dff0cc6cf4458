"""Bytes per parameter of halfstep's layouts and of other AdamW and Muon optimizers, measured on this machine.

python examples/bytes_per_parameter.py                            # all installed optimizers
python examples/bytes_per_parameter.py --out bytes.json --picture bytes.png

Trains linear layers without biases, whose activations are negligible. On a GPU, bytes are the allocator's peak over
three steps; on a CPU, the size of weights, gradients and optimizer states after a backward. `halfstep bench run adam`
measures times.
"""

import argparse
import gc
import json
import pkgutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from halfstep.cli import figures
from halfstep.cli.command_line import output_file, picture, whole
from halfstep.integrations.release import step_in_backward
from halfstep.numerics.planning import layout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
# Kinds of masters, and their colors.
WEIGHTS, EXACT, ROUNDED, NONE = "fp32 weights", "exact fp32 master", "24-bit master", "no master"
COLORS = {EXACT: "#1b6ca8", WEIGHTS: "#7f8c8d", ROUNDED: "#e08e0b"}
TORCH, TORCHS_MUON = ("torch.optim:AdamW", {"fused": True}), ("torch.optim:Muon", {})
ADAMW, MUON = "halfstep:AdamW", "halfstep:Muon"
EIGHT, THREE_BYTES = {"state_dtype": "8bit"}, {"master_weights": "split24"}
OPTIMIZERS = (
    ("torch AdamW, fp32 weights", WEIGHTS, *TORCH),
    ("torch AdamW", NONE, *TORCH),
    ("halfstep AdamW", EXACT, ADAMW, {}),
    ("halfstep, bf16 moments", EXACT, ADAMW, {"state_dtype": torch.bfloat16, "rounding": "stochastic"}),
    ("halfstep, 8-bit moments", EXACT, ADAMW, EIGHT),
    ("halfstep, 8 bits, steps in the backward", EXACT, ADAMW, EIGHT),
    ("halfstep, 8 bits, 24-bit master", ROUNDED, ADAMW, EIGHT | THREE_BYTES),
    ("flashoptim", ROUNDED, "flashoptim:FlashAdamW", {}),
    ("torch-optimi, Kahan sums", "16-bit correction", "optimi:AdamW", {"kahan_sum": True}),
    ("halfstep, 8 bits, no master", NONE, ADAMW, EIGHT | {"master_weights": None}),
    ("bitsandbytes AdamW8bit", NONE, "bitsandbytes.optim:AdamW8bit", {}),
    ("torchao AdamW8bit", NONE, "torchao.optim:AdamW8bit", {}),
    ("torch Muon, fp32 weights", WEIGHTS, *TORCHS_MUON),
    ("torch Muon", NONE, *TORCHS_MUON),
    ("halfstep Muon", EXACT, MUON, {}),
    ("halfstep Muon, 8-bit momentum", EXACT, MUON, EIGHT),
    ("halfstep Muon, 8 bits, 24-bit master", ROUNDED, MUON, EIGHT | THREE_BYTES),
)


def parts(value: Any) -> list[torch.Tensor]:
    """The tensors that hold the elements of a tensor: itself, or those inside a tensor subclass."""
    if hasattr(value, "__tensor_flatten__"):
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [value] if isinstance(value, torch.Tensor) else []


def measure(name: str, dtype: torch.dtype, optimizer: str, options: dict[str, Any], layers: int, width: int) -> float:
    gc.collect()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    before, peak = torch.cuda.memory_allocated() if ON_GPU else 0, 0
    linears = [torch.nn.Linear(width, width, bias=False, dtype=dtype, device=DEVICE) for _ in range(layers)]
    model = torch.nn.Sequential(*linears)
    tested = pkgutil.resolve_name(optimizer)(model.parameters(), lr=1e-4, **options)
    if name.endswith("in the backward"):
        step_in_backward(model, tested)
    x = torch.randn(1, width, dtype=dtype, device=DEVICE)
    for _ in range(3):  # the first one creates the state
        model(x).square().mean().backward()
        if not ON_GPU:
            grads = [linear.weight.grad for linear in linears]
            values = [*model.parameters(), *grads, *tree_leaves(dict(tested.state))]
            storages = [part.untyped_storage() for value in values for part in parts(value)]
            peak = max(peak, sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
            del grads, values, storages  # would keep them alive until the next step
        tested.step()
        tested.zero_grad()
    return ((torch.cuda.max_memory_allocated() - before) if ON_GPU else peak) / (layers * width * width)


def draw(path: Path, head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if row["bytes"] or row.get("planned")]
    amounts = [row["bytes"] or row["planned"] for row in rows]
    notes = [row["master"] + (", planned" if row["bytes"] is None else "") for row in rows]
    figure = figures.figure(8, 0.34 * len(rows) + 1.1)
    axes = figure.add_subplot()
    colors = [COLORS.get(row["master"], "#c9b3a5") for row in rows]
    bars = axes.barh([row["optimizer"] for row in rows], amounts, color=colors)
    axes.bar_label(bars, [f"{a:.2f}  {note}" for a, note in zip(amounts, notes, strict=True)], padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.45 * max(amounts)), xlabel=f"measured on {head['device']}, {head['date']}")
    axes.set_title("Bytes per parameter: weights, gradients and optimizer states", loc="left", fontsize=11)
    figures.tidy(axes, "x")
    figures.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--width", type=whole(1), default=4096 if ON_GPU else 1024, help="width of a layer (default: %(default)s)")
    add("--layers", type=whole(1), default=64 if ON_GPU else 8, help="number of layers (default: %(default)s)")
    add("--out", type=output_file, metavar="FILE", help="write the results as JSON")
    add("--picture", type=picture, metavar="FILE", help="draw them (needs matplotlib)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # other libraries' warnings
    rows: list[dict[str, Any]] = []
    for name, master, optimizer, choices in OPTIMIZERS:
        rows.append({"optimizer": name, "master": master, "bytes": None, "reason": ""})
        dtype = torch.float32 if master == WEIGHTS else torch.bfloat16
        try:
            rows[-1]["bytes"] = measure(name, dtype, optimizer, choices, options.layers, options.width)
        except Exception as error:
            if name.startswith(("halfstep", "torch ")):
                raise
            rows[-1]["reason"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            if name == "flashoptim":  # needs a GPU
                rows[-1]["planned"] = float(layout("flashoptim-24", "bf16").per_parameter())
        print(f"{name:40} {master:18}", rows[-1]["reason"] or f"{rows[-1]['bytes']:6.2f}", flush=True)
    head = {"device": torch.cuda.get_device_name() if ON_GPU else "CPU", "torch": torch.__version__}
    head |= {"date": time.strftime("%Y-%m-%d"), "parameters": options.layers * options.width**2}
    if options.out:
        options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    if options.picture:
        draw(options.picture, head, rows)


if __name__ == "__main__":
    main()
