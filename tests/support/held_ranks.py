"""Ranks that save the optimizer's state as it is held and load it in other layouts and topologies.

For test_checkpoint_topologies.py. The processes and topologies are those of checkpoint_ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_ranks import TOPOLOGIES, Block, World, contents, differing, matrix, step

import halfstep
from halfstep.integrations import checkpoint

STEPS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "split": {},
    "split, bf16": {"state_dtype": torch.bfloat16, "rounding": "stochastic"},
    "split, 8 bits": {"state_dtype": "8bit"},
    "split24, 8 bits, amsgrad": {"master_weights": "split24", "state_dtype": "8bit", "amsgrad": True},
    "full": {"master_weights": "full"},
    "none, 8 bits": {"master_weights": None, "state_dtype": "8bit"},
}
CUTS_BLOCKS = "TP x FSDP"  # two ranks cut the 240 columns of `down`, and so a block of each row
Pair = tuple[str, str, str, str]  # saved layout and topology, loaded layout and topology


def topology_that_saves(layout: str) -> str:
    """A topology for each layout; none of 8 bits where blocks are cut."""
    names = ["FSDP2 4", "TP x FSDP", "FSDP2 2", "HSDP 2x2", "DDP 2", "single"]
    return names[list(LAYOUTS).index(layout)]


def topology_that_loads(saved: str, layout: str) -> str:
    """Each layout is loaded in all topologies, from one layout in each; 8 bits again not where blocks are cut."""
    names, layouts = list(TOPOLOGIES), list(LAYOUTS)
    name = names[(layouts.index(saved) + layouts.index(layout)) % len(names)]
    return "FSDP2 2" if name == CUTS_BLOCKS and "8 bits" in layout else name


PAIRS: list[Pair] = [(a, topology_that_saves(a), b, topology_that_loads(a, b)) for a in LAYOUTS for b in LAYOUTS]
# Each layout is saved once and loaded once.
SAMPLE = [PAIRS[6 * number + (number + 1) % 6] for number in range(6)]


def made(world: World, layout: str, topology: str, seed: int = 0) -> tuple[torch.nn.Module, halfstep.AdamW]:
    torch.manual_seed(seed)
    model: torch.nn.Module = torch.nn.Sequential(Block(20, 240, 18), torch.nn.Linear(18, 1)).to(torch.bfloat16)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    model = world.wrap(model, topology)
    return model, halfstep.AdamW(model.parameters(), lr=1e-2, **LAYOUTS[layout])


def cross(rank: int, folder: Path, world: World, pairs: list[Pair]) -> dict[Pair, list[str]]:
    """What differs between a load of the state as it is held and one of the canonical state, by pair."""
    for layout in dict.fromkeys(pair[0] for pair in pairs):
        topology = topology_that_saves(layout)
        if rank < TOPOLOGIES[topology]:
            model, optimizer = made(world, layout, topology)
            for number in range(STEPS):
                step(model, optimizer, number)
            parts: Any = {"model": model, "optimizer": optimizer, "process_group": world.group(topology)}
            pending = checkpoint.save(
                folder / layout / "held", STEPS, optimizer_state="held", asynchronous=True, **parts
            )
            checkpoint.save(folder / layout / "canonical", STEPS, optimizer_state="canonical", **parts)
            pending.result()
        dist.barrier()
    found = {}
    for pair in pairs:
        saved, _, layout, topology = pair
        if rank < TOPOLOGIES[topology]:
            loaded = []
            for form in ("held", "canonical"):
                model, optimizer = made(world, layout, topology, seed=1)
                checkpoint.load(
                    folder / saved / form / f"step-{STEPS:08d}",
                    model=model,
                    optimizer=optimizer,
                    process_group=world.group(topology),
                )
                at_once = contents(model, optimizer)
                step(model, optimizer, STEPS)
                loaded.append([at_once, contents(model, optimizer)])
            found[pair] = differing(loaded[1], loaded[0])
        dist.barrier()
    return found


def run_both(rank: int, folder: Path, layouts: list[str], pairs: list[Pair], every: bool) -> dict[str, Any]:
    """What differs between topologies, with each layout, and between layouts, by pair."""
    world = World()
    return {
        "topologies": {layout: matrix(rank, folder / layout, world, layout, every) for layout in layouts},
        "layouts": cross(rank, folder / "layouts", world, pairs),
    }
