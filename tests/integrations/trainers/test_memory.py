"""Saving a run with moments in 8 bits takes no memory beside weights and state, in any trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
from counted_bytes import Peak, storage_bytes
from trainer_tools import imported, skip_without

import halfstep

WIDTH, ALLOWED = 512, 0.01  # of what weights and state take; states of random generators are a part of that
OPTIONS: dict[str, Any] = {"state_dtype": "8bit", "rounding": "stochastic"}


def prepared() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))).bfloat16()
    return model, halfstep.AdamW(model.parameters(), **OPTIONS)


def stepped(model: torch.nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], Any]) -> None:
    backward(model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def accelerate(folder: Path) -> tuple[Any, Any, Callable[[], Any]]:
    imported("accelerate_ranks").reset()
    accelerator = imported("halfstep.integrations.trainers.accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*prepared())
    stepped(model, optimizer, accelerator.backward)
    return model, optimizer.optimizer, lambda: accelerator.save_state(str(folder))


def fabric(folder: Path) -> tuple[Any, Any, Callable[[], Any]]:
    fabric = imported("halfstep.integrations.trainers.fabric").Fabric(
        accelerator="cpu", devices=1, precision="bf16-true"
    )
    model, optimizer = fabric.setup(*prepared())
    stepped(model, optimizer, fabric.backward)
    state = {"model": model, "optimizer": optimizer}
    return model, optimizer.optimizer, lambda: fabric.save(folder / "saved.ckpt", state)


def lightning(folder: Path) -> tuple[Any, Any, Callable[[], Any]]:
    ranks = imported("lightning_ranks")
    module = ranks.Regression("bf16-true")
    module.network = torch.nn.Sequential(torch.nn.Linear(8, WIDTH), prepared()[0], torch.nn.Linear(WIDTH, 4))
    module.configure_optimizers = lambda: halfstep.AdamW(module.parameters(), **OPTIONS)
    trainer = ranks.trainer_of(folder, ranks.plugin_for("bf16-true"), epochs=1)
    trainer.fit(module, ranks.loader())
    return module, trainer.optimizers[0], lambda: trainer.save_checkpoint(folder / "saved.ckpt")


def transformers(folder: Path) -> tuple[Any, Any, Callable[[], Any]]:
    ranks = imported("transformers_ranks")
    model = ranks.language_model(width=WIDTH).bfloat16()
    options = {"max_steps": 1, "save_steps": 100, "optim_args": "state_dtype=8bit, rounding=stochastic"}
    trainer = ranks.trainer_of(folder, "bf16", model=model, **options)
    trainer.train()
    return model, trainer.optimizer.optimizer, lambda: trainer._save_checkpoint(model, trial=None)


def peak_while_saving(save: Callable[[], Any], model: Any, optimizer: Any) -> float:
    """As a part of what weights and state take."""
    states = list(optimizer.state.values())
    assert any(state["exp_avg"].dtype == torch.uint8 for state in states)
    with Peak() as counted:
        save()
    return counted.peak / storage_bytes([list(model.parameters()), states])


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(accelerate, marks=skip_without("accelerate")),
        pytest.param(fabric, marks=skip_without("lightning")),
        pytest.param(lightning, marks=skip_without("lightning")),
        pytest.param(transformers, marks=skip_without("transformers", "trl", "peft")),
    ],
    ids=lambda trainer: trainer.__name__,
)
def test_saving_takes_no_memory(trainer: Callable[[Path], tuple[Any, Any, Any]], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, save = trainer(tmp_path)
        assert peak_while_saving(save, model, optimizer) <= ALLOWED


@skip_without("torchtitan")
def test_saving_takes_no_memory_in_torchtitan(tmp_path: Path) -> None:
    ((peak, size),) = rank_processes.run(imported("torchtitan_ranks").saved_in_8_bits, 1, str(tmp_path))
    assert peak <= ALLOWED * size
