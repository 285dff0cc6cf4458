"""Thousands of random faults on four ranks, in every topology: the ranks must always agree.

    python tests/support/soak.py --faults 10000 --out out/soak

Short trainings in each topology, with halfstep's and torch's optimizers in bf16, fp16 and fp32. In half of the steps,
the gradient of one rank gets an Inf, a NaN or a -Inf, before or after its reduction. topology_walk.py checks the
reaction of all ranks. `--scaler torch` uses torch.amp.GradScaler instead. The exit status is 1 if ranks ever disagreed,
or changed something in a skipped step.
"""

import argparse
import logging
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import rank_processes
import topologies
import topology_walk
import torch

import halfstep


def rank_main(rank: int, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # of FSDP: no accelerator, deprecated, no mixed precision
    logging.disable(logging.WARNING)

    def tell(done: int) -> None:
        if rank == 0:
            print(f"{done} of {options.faults} faults", file=sys.stderr)

    return topology_walk.random_faults(names, options.faults, options.seed, options.scaler == "torch", tell)


def merged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """One row per topology: the counts, which are the same on every rank, and all problems."""
    rows = {}
    for name, own in found[0].items():
        complaints = [one for rank in found for one in rank[name]["complaints"]]
        counts = {key: own[key] for key in ("faults", "steps")}
        if any({key: rank[name][key] for key in counts} != counts for rank in found):
            complaints.append(f"{name}: ranks counted differently")
        rows[name] = {**counts, "disagreements": len(complaints), "complaints": complaints[: topology_walk.KEPT]}
    return rows


def markdown(rows: dict[str, Any], seed: int, seconds: float) -> str:
    lines = ["| topology | faults | steps | disagreements |", "|---|---:|---:|---:|"]
    counts = ("faults", "steps", "disagreements")
    whole = {key: sum(row[key] for row in rows.values()) for key in counts}
    for name, row in {**rows, "**all**": whole}.items():
        lines.append(f"| {name} | {' | '.join(str(row[key]) for key in counts)} |")
    versions = f"halfstep {halfstep.__version__}, torch {torch.__version__}, python {platform.python_version()}"
    lines += ["", f"{time.strftime('%Y-%m-%d')}, {versions}, gloo, seed {seed}, {seconds:.0f} s."]
    return "\n".join([*lines, *(one for row in rows.values() for one in row["complaints"])]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=10_000, help="how many (default: 10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--topology", default="", help="only those whose name contains this")
    parser.add_argument("--scaler", choices=("halfstep", "torch"), default="halfstep")
    parser.add_argument("--out", type=Path, help="folder for soak.md")
    options = parser.parse_args(arguments)
    names = [name for name in topologies.TOPOLOGIES if options.topology in name]
    if not names:
        parser.error(f"--topology {options.topology!r} is in none of: {', '.join(topologies.TOPOLOGIES)}")
    if options.faults < 1:
        parser.error(f"expected --faults to be an integer of at least 1, but got {options.faults}")
    began = time.monotonic()
    rows = merged(rank_processes.run(rank_main, topologies.WORLD, names, options, fresh=True))
    text = markdown(rows, options.seed, time.monotonic() - began)
    print(text, end="")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "soak.md").write_text(text)
    return 1 if any(row["disagreements"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
