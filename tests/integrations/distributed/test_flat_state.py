"""Flat optimizer states, as torchtitan saves them, from each wrapping into each; and models sharded too late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flat_ranks
import pytest
import rank_processes
import torch
import torch.multiprocessing
from flat_ranks import LAYOUTS

Made = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A folder with the checkpoints of all wrappings, and what each of two ranks found."""
    folder = Path(tmp_path_factory.mktemp("flat"))
    for layout in LAYOUTS:
        path = folder / f"single, {layout}"
        torch.save(flat_ranks.save(path, "single", layout), path.with_suffix(".pt"))
    return folder, rank_processes.run(flat_ranks.run, flat_ranks.WORLD, folder)


def test_two_ranks_load_every_flat_state_with_every_bit(made: Made) -> None:
    pairs = [flat_ranks.loaders(layout, saver) for layout in LAYOUTS for saver in flat_ranks.wrappings_of(layout)]
    for rank in made[1]:
        assert rank["wrong"] == [] and rank["compared"] == sum(map(len, pairs))


@pytest.mark.parametrize(
    ("saver", "layout"), [(saver, layout) for layout in LAYOUTS for saver in flat_ranks.wrappings_of(layout)]
)
def test_one_process_loads_every_flat_state_with_every_bit(made: Made, saver: str, layout: str) -> None:
    path = made[0] / f"{saver}, {layout}"
    saved = torch.load(path.with_suffix(".pt"), weights_only=True)
    loaded = flat_ranks.load(path, "single", layout)
    assert saved.keys() == loaded.keys() and "0.weight.master" in saved
    for key, value in saved.items():
        assert torch.equal(loaded[key], value), key


def test_an_optimizer_made_before_the_model_was_sharded_says_so_once(made: Made) -> None:
    for rank in made[1]:
        (said,) = rank["said"]
        assert said.startswith("none of the 2 parameters of this optimizer has a gradient, while DTensors of the same")
        assert said.endswith("it trains nothing; make the optimizer after fully_shard")
