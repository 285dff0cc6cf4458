"""The table of docs/layouts.md: the largest model of each layout on a card. Run as a program, it writes it there."""

from pathlib import Path

import generated

from halfstep.numerics.planning import card, plan, usable
from halfstep.numerics.planning.catalog import Card

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layouts.md"
BLOCK = "largest models"

# What is trained with, and the layout and precision of `halfstep plan`.
ROWS = {
    "torch's AdamW, fp32 weights, autocast": ("torch", "amp-bf16"),
    "the default": ("halfstep-split", "bf16"),
    '`state_dtype=torch.bfloat16`, `rounding="stochastic"`': ("halfstep-split-bf16", "bf16"),
    '`state_dtype="8bit"`': ("halfstep-split-8bit", "bf16"),
    '`state_dtype="8bit"`, `master_weights="split24"`': ("halfstep-split24-8bit", "bf16"),
}
MEMORIES = {"24 GB": "rtx4090", "80 GB": "h100", "141 GB": "h200", "192 GB": "b200"}


def _largest(optimizer: str, precision: str, gpu: Card, gpus: int) -> str:
    where = {"gpus": gpus, "strategy": "fsdp"} if gpus > 1 else {}
    fitting, step = 0, 2**40
    while step := step // 2:
        peak = plan(fitting + step, optimizer=optimizer, precision=precision, **where).totals.peak
        fitting += step * (peak <= usable(gpu))
    return f"{fitting / 1e9:.2g}" if fitting < 1e10 else f"{fitting / 1e9:.0f}"


def table() -> str:
    """The rows, in billions of parameters."""
    cards = [card(name) for name in MEMORIES.values()]
    heads = ["options of `halfstep.AdamW`", *MEMORIES, *(f"8 of {memory}, FSDP2" for memory in MEMORIES)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for title, (optimizer, precision) in ROWS.items():
        cells = [_largest(optimizer, precision, gpu, gpus) for gpus in (1, 8) for gpu in cards]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    generated.write(BLOCK, table(), PAGE)
