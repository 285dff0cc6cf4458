"""`halfstep.integrations.trainers.lightning` with the real library, in one process and on two ranks with gloo."""

import math
from typing import Any

import pytest
import torch
import trainer_tools as tools
from states import same_bits

import halfstep

pytestmark = tools.skip_without("lightning")
lightning_ranks = tools.imported("lightning_ranks")
ours = tools.imported("halfstep.integrations.trainers.lightning")


def test_checkpoints_of_the_plugins_of_lightning_load(found: dict[str, list[Any]]) -> None:
    """With torch's scaler, in both directions."""
    (rank,) = found["checkpoints"]
    assert rank == {
        "theirs in ours": [tools.SCALE / 4, tools.SCALE / 4, tools.STEPS],
        "ours in theirs": [tools.SCALE, tools.SCALE, tools.STEPS],
    }


@pytest.mark.parametrize("kind", ["16-mixed", "bf16-mixed"])
def test_hooks_between_backward_and_step_see_unscaled_gradients(found: dict[str, list[Any]], kind: str) -> None:
    (rank,) = found["hooks"]
    seen, state, _ = rank[f"{kind} Watching"]
    none, unseen, unwritten = rank[f"{kind} Regression"]
    assert none == [] and unwritten == [True]
    assert len(seen) == 1 and 1 < seen[0] < 2  # scaled it would be a thousand
    # The gradients are fp32 here, and the scale is a power of two.
    assert same_bits(state, unseen)


@pytest.mark.parametrize("kind", ["16-mixed", "bf16-mixed"])
def test_clipping_by_value_writes_unscaled_gradients(found: dict[str, list[Any]], kind: str) -> None:
    (rank,) = found["by value"]
    assert rank[kind] == pytest.approx(1e-3)


def test_default_scalers_are_ours() -> None:
    assert type(ours.MixedPrecision("16-mixed", "cpu").scaler) is halfstep.GradScaler
    assert type(ours.HalfPrecision("16-true", device="cpu").scaler) is halfstep.GradScaler
    assert ours.MixedPrecision("bf16-mixed", "cpu").scaler is None and ours.HalfPrecision("bf16-true").scaler is None
    for make in (
        lambda one: ours.MixedPrecision("16-mixed", "cpu", one),
        lambda one: ours.HalfPrecision("16-true", one),
    ):
        with pytest.raises(TypeError, match=r"Expected scaler to be a halfstep\.GradScaler, but got a GradScaler"):
            make(torch.amp.GradScaler("cpu"))


def test_the_lines_of_the_page_run() -> None:
    module = lightning_ranks.Regression("bf16-true")
    quiet = {f"enable_{part}": False for part in ("progress_bar", "model_summary", "checkpointing")}
    quiet |= {"max_epochs": 1, "logger": False, "accelerator": "cpu"}
    names = {**tools.page_names(), "module": module, "loader": lightning_ranks.loader(), "quiet": quiet}
    exec(tools.page_block("Lightning").replace("lightning.Trainer(", "lightning.Trainer(**quiet, "), names)
    assert module.network[0].weight.dtype == torch.bfloat16 and math.isfinite(module.losses[-1])
