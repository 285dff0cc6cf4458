"""Thousands of random faults on four ranks, over every topology: no two ranks may ever disagree.

    python tests/support/soak.py --faults 10000 --out out/soak

Short trainings, one topology after the other, with halfstep's and torch's optimizers in bf16, fp16 and fp32. In half of
the steps the gradient of one rank gets an Inf, a NaN or a -Inf, before its reduction or after it. What all ranks must
then have done is in topology_walk.py. `--scaler torch` runs torch.amp.GradScaler instead. The exit status is 1 if any
rank ever disagreed or changed what it had to leave.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import rank_processes
import topologies
import topology_ranks
import topology_walk
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import halfstep


def rank_main(rank: int, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    topology_ranks.quiet()
    console = Console(stderr=True)
    columns = TextColumn("faults"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=rank != 0 or not console.is_terminal) as progress:
        task = progress.add_task("faults", total=options.faults)

        told = 0

        def tell(done: int) -> None:
            nonlocal told
            progress.update(task, completed=done)
            if progress.disable and rank == 0 and done - told >= 500:
                told = done
                console.print(f"{done} of {options.faults} faults")

        return topology_walk.random_faults(names, options.faults, options.seed, options.scaler == "torch", tell)


def merged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """One row per topology: the counts, the same on every rank, and all complaints."""
    rows = {}
    for name, own in found[0].items():
        complaints = [one for rank in found for one in rank[name]["complaints"]]
        counts = {key: own[key] for key in ("faults", "steps")}
        if any({key: rank[name][key] for key in counts} != counts for rank in found):
            complaints.append(f"{name}: ranks counted differently")
        rows[name] = {**counts, "disagreements": len(complaints), "complaints": complaints[: topology_walk.KEPT]}
    return rows


def report(rows: dict[str, Any], options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"halfstep": halfstep.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "scaler": options.scaler,
        "seed": options.seed,
        "ranks": topologies.WORLD,
        "backend": "gloo",
        "seconds": round(seconds, 1),
        "faults": sum(row["faults"] for row in rows.values()),
        "steps": sum(row["steps"] for row in rows.values()),
        "disagreements": sum(row["disagreements"] for row in rows.values()),
        "topologies": rows,
    }


def markdown(result: dict[str, Any]) -> str:
    lines = ["| topology | faults | steps | disagreements |", "|---|---:|---:|---:|"]
    rows = {**result["topologies"], "**all**": result}
    lines += [f"| {name} | {row['faults']} | {row['steps']} | {row['disagreements']} |" for name, row in rows.items()]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines += ["", f"{result['date']}, {versions}, seed {result['seed']}, {result['seconds']:.0f} s."]
    return "\n".join(lines) + "\n"


def table(result: dict[str, Any]) -> Table:
    shown = Table(title=f"{result['faults']} faults, {result['steps']} steps, scaler of {result['scaler']}")
    shown.add_column("topology")
    for column in ("faults", "steps", "disagreements"):
        shown.add_column(column, justify="right")
    for name, row in result["topologies"].items():
        shown.add_row(name, str(row["faults"]), str(row["steps"]), str(row["disagreements"]))
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=10_000, help="how many (default: 10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--topology", default="", help="only those whose name contains this")
    parser.add_argument("--scaler", choices=("halfstep", "torch"), default="halfstep")
    parser.add_argument("--out", type=Path, help="folder for soak.json and soak.md")
    options = parser.parse_args(arguments)
    names = [name for name in topologies.TOPOLOGIES if options.topology in name]
    if not names:
        parser.error(f"--topology {options.topology!r} is in none of: {', '.join(topologies.TOPOLOGIES)}")
    if options.faults < 1:
        parser.error(f"expected --faults to be an integer of at least 1, but got {options.faults}")
    began = time.monotonic()
    rows = merged(rank_processes.run(rank_main, topologies.WORLD, names, options, fresh=True))
    result = report(rows, options, time.monotonic() - began)
    console = Console()
    console.print(table(result))
    for name, row in rows.items():
        for complaint in row["complaints"][:3]:
            console.print(f"{name}: {complaint}", style="red", markup=False)
    console.print(f"{result['faults']} faults in {result['seconds']:.0f} s, {result['disagreements']} disagreements.")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "soak.md").write_text(markdown(result))
    return 1 if result["disagreements"] else 0


if __name__ == "__main__":
    sys.exit(main())
