"""The pictures of docs/concepts.md, computed with halfstep, and that of links to the site. Run as a program, it writes
them to docs/images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import halfstep
from halfstep.integrations.release import step_in_backward

ROOT = Path(__file__).resolve().parents[2]
COLORS = {"exact": "#bbbbbb", "ours": "#1565c0", "lost": "#c62828", "random": "#2e7d32"}


def weights(steps: int, lr: float = 1e-4) -> dict[str, list[float]]:
    """A weight of 1 that Adam moves down by `lr` in each step, by the way in which it is kept."""
    ways: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "fp32": (torch.float32, {}),
        "bf16, split master: the master": (torch.bfloat16, {}),
        "bf16, split master: the weight": (torch.bfloat16, {}),
        "bf16 without a master, nearest": (torch.bfloat16, {"master_weights": None}),
        "bf16 without a master, stochastic": (torch.bfloat16, {"master_weights": None, "rounding": "stochastic"}),
    }
    found = {}
    for name, (dtype, options) in ways.items():
        weight = torch.nn.Parameter(torch.ones(1, dtype=dtype, device="cpu"))
        optimizer = halfstep.AdamW([weight], lr=lr, weight_decay=0.0, **options)
        found[name] = [1.0]
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            shown = optimizer.masters()[weight] if name.endswith("the master") else weight
            found[name].append(shown.detach().item())
    return found


def rounded(points: int, draws: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(numbers between two neighbors in bf16, each rounded to nearest, the mean of its stochastic roundings)."""
    x = torch.linspace(1.0, 1.0 + 2.0**-7, points, dtype=torch.float32, device="cpu")
    nearest = halfstep.cast(x, torch.bfloat16).float()
    every = [halfstep.cast(x, torch.bfloat16, rounding="stochastic", seed=seed).float() for seed in range(draws)]
    return x, nearest, torch.stack(every).mean(0)


def second_moments(steps: int) -> dict[str, list[float]]:
    """The mean of exp_avg_sq over a row, divided by its exact value, for equal gradients, by how it is kept."""
    ways: dict[str, dict[str, Any]] = {
        "bf16, nearest": {"state_dtype": torch.bfloat16, "rounding": "nearest"},
        "bf16, stochastic": {"state_dtype": torch.bfloat16, "rounding": "stochastic"},
        "8 bits, stochastic (default)": {"state_dtype": "8bit"},
    }
    gradient = torch.linspace(0.5, 1.0, 4096, dtype=torch.float32, device="cpu").view(1, -1)
    exact = gradient.double().square()
    found = {}
    for name, options in ways.items():
        weight = torch.nn.Parameter(torch.zeros(1, 4096, dtype=torch.float32, device="cpu"))
        optimizer = halfstep.AdamW([weight], lr=1e-3, **options)
        found[name] = []
        for step in range(1, steps + 1):
            weight.grad = gradient.clone()
            optimizer.step()
            moment = optimizer.canonical_state_dict()["state"][0]["exp_avg_sq"].double()
            found[name].append(float((moment / (exact * (1 - 0.999**step))).mean()))
    return found


def gradient_bytes(layers: int, width: int) -> dict[str, list[float]]:
    """MiB of gradients that exist after each gradient of a backward: with a step after it, and with steps inside it."""
    found: dict[str, list[float]] = {}
    for name in ("step after the backward", "steps inside the backward"):
        blocks = [torch.nn.Linear(width, width, bias=False, device="cpu", dtype=torch.bfloat16) for _ in range(layers)]
        model = torch.nn.Sequential(*blocks)
        optimizer = halfstep.AdamW(model.parameters(), lr=1e-3)
        seen: list[float] = []

        def count(_: torch.Tensor, model: torch.nn.Module = model, seen: list[float] = seen) -> None:
            storages = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
            seen.append(sum(storage.nbytes() for storage in storages) / 2**20)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(count)
        if name.startswith("steps"):
            step_in_backward(model, optimizer, bucket_bytes=4 * width * width)
        model(torch.ones(1, width, dtype=torch.bfloat16, device="cpu")).float().sum().backward()
        found[name] = seen
    return found


def main() -> None:
    """Draw all pictures."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "halfstep", "font.size": 9, "savefig.facecolor": "white"})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot

    def save(name: str) -> None:
        pyplot.savefig(ROOT / "docs" / "images" / name, metadata={"Date": None} if name.endswith("svg") else None)
        pyplot.close()

    def draw(name: str, xlabel: str, ylabel: str, lines: Any, *styles: Any, x: Any = None, **limits: Any) -> None:
        _, axes = pyplot.subplots(figsize=(6.4, 3.0), layout="constrained")
        for (label, values), style in zip(lines.items(), styles, strict=True):
            axes.plot(range(len(values)) if x is None else x, values, label=label, **style)
        axes.set(xlabel=xlabel, ylabel=ylabel, **limits)
        axes.legend(frameon=False, fontsize=8)
        save(f"concept_{name}.svg")

    exact, ours, lost, random = ({"color": color} for color in COLORS.values())
    wide, dotted, marked = {"lw": 5}, {"ls": ":"}, {"marker": "."}
    draw("masters", "step", "weight", weights(200), exact | wide, ours, ours | dotted, lost, random)
    x, nearest, mean = rounded(65, 200)
    lines = {"x": x, "to nearest": nearest, "stochastic, mean of 200": mean}
    styles = exact | wide, lost | {"drawstyle": "steps-mid"}, ours | marked | {"ls": "none"}
    draw("rounding", "x, from a bf16 number to the next", "x rounded to bf16", lines, *styles, x=x)
    moments = second_moments(3000)
    draw("moments", "step", "second moment / exact", moments, lost, random | {"lw": 4}, ours, ylim=(0, 1.1))
    amounts = gradient_bytes(16, 512)
    draw("release", "gradients computed", "MiB of gradients", amounts, lost | marked, ours | marked, x=range(1, 17))

    rows = json.loads((ROOT / "bench" / "results" / "cpu" / "bytes_per_parameter.json").read_text())["rows"]
    totals = {
        row["optimizer"]: row["bytes"]
        for row in rows
        if row["master"] in ("fp32 weights", "exact fp32 master") and "Muon" not in row["optimizer"]
    }
    pyplot.rcParams.update({"font.size": 20, "savefig.dpi": 100, "figure.constrained_layout.w_pad": 0.3})
    pyplot.rcParams.update({"axes.spines.bottom": False, "figure.constrained_layout.h_pad": 0.3})
    figure, axes = pyplot.subplots(figsize=(12, 6.3), layout="constrained")
    colors = [COLORS["ours" if name.startswith("halfstep") else "exact"] for name in totals]
    axes.bar_label(axes.barh(list(totals), list(totals.values()), color=colors), fmt="%.2f", padding=8)
    axes.set(xlim=(0, 18), xticks=[])
    axes.invert_yaxis()
    figure.suptitle("halfstep: half-precision training for PyTorch", **ours, fontsize=34)
    figure.supxlabel("bytes per parameter, with gradients and an fp32 master; measured on a CPU", fontsize=20)
    save("card.png")


if __name__ == "__main__":
    main()
