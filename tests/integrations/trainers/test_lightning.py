"""`halfstep.integrations.trainers.lightning` with the real library, in one process and on two ranks with gloo."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import rank_processes
import torch
from trainer_tools import (
    BROKEN,
    LR,
    MAX_NORM,
    SCALE,
    STEPS,
    imported,
    own_loop,
    page_block,
    page_names,
    same_bits,
    skip_without,
)

import halfstep

pytestmark = skip_without("lightning")
lightning = imported("lightning")
lightning_ranks = imported("lightning_ranks")
ours = imported("halfstep.integrations.trainers.lightning")

STRATEGIES = ("one process", "DDP", "FSDP2")
KINDS = ("bf16-true", "16-true", "bf16-mixed", "16-mixed")
RUNS = [f"{strategy} {kind}" for strategy in STRATEGIES for kind in KINDS]
FP16 = [run for run in RUNS if " 16" in run]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of each rank, by run."""
    folder = str(tmp_path_factory.mktemp("lightning"))
    alone = rank_processes.alone(lightning_ranks.run, folder, "lightning")
    ranks = rank_processes.run(lightning_ranks.run, 2, folder, "lightning")
    return {
        **{(f"one process {name}" if name in KINDS else name): [one] for name, one in alone.items()},
        **{(f"DDP {name}" if name in KINDS else name): [one[name] for one in ranks] for name in ranks[0]},
    }


@pytest.mark.parametrize("run", RUNS)
def test_it_trains(found: dict[str, list[Any]], run: str) -> None:
    for rank in found[run]:
        before, after = rank["fit"]
        assert after < 0.7 * before and rank["steps"] == STEPS
        assert rank["sharded"] == run.startswith("FSDP2")
        assert rank["sharded"] or same_bits(rank["state"], found[run][0]["state"])


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_the_bits_are_those_of_a_loop_of_our_own(found: dict[str, list[Any]], kind: str) -> None:
    (rank,) = found["one process bf16-true" if kind == "bf16" else "one process 16-true"]
    own = own_loop(kind)
    assert rank["rates"] == own["rates"]
    assert same_bits(rank["state"], own["state"])


@pytest.mark.parametrize("run", [run for run in RUNS if "bf16-true" in run])
def test_masters_are_split(found: dict[str, list[Any]], run: str) -> None:
    for rank in found[run]:
        assert rank["masters"] == ["torch.int16"] and rank["weights"] == ["torch.bfloat16"]


@pytest.mark.parametrize("run", FP16)
def test_the_scaler_scales(found: dict[str, list[Any]], run: str) -> None:
    for rank in found[run]:
        assert rank["scale"] == SCALE / 2


@pytest.mark.parametrize("run", RUNS)
def test_clipping_writes_no_gradient(found: dict[str, list[Any]], run: str) -> None:
    for rank in found[run]:
        assert rank["unwritten"] == [True] * STEPS


@pytest.mark.parametrize("run", FP16)
def test_all_ranks_skip_an_overflow(found: dict[str, list[Any]], run: str) -> None:
    for rank in found[run]:
        assert rank["skipped"] == [step == BROKEN for step in range(STEPS)]


@pytest.mark.parametrize("run", RUNS)
def test_a_skip_holds_the_schedule(found: dict[str, list[Any]], run: str) -> None:
    taken = [step + 1 - (run in FP16 and step >= BROKEN) for step in range(STEPS)]
    for rank in found[run]:
        assert rank["rates"] == [LR * 0.5**count for count in taken]


@pytest.mark.parametrize("run", RUNS)
def test_resumed_bit_for_bit(found: dict[str, list[Any]], run: str) -> None:
    for rank in found[run]:
        assert rank["resumed"] and rank["resumed_rest"] and rank["resumed_scaler"]
        assert rank["resumed_scale"] == rank["scale"]


@pytest.mark.parametrize("run", RUNS)
def test_the_export_has_the_weights(found: dict[str, list[Any]], run: str) -> None:
    for rank in found[run]:
        assert rank["exported"]


@pytest.mark.parametrize("run", RUNS)
def test_the_log_has_scale_and_skips(found: dict[str, list[Any]], run: str) -> None:
    skips = [float(step >= BROKEN) for step in range(STEPS)]
    wanted = [{"loss_scale": SCALE / 2**skip, "skipped_steps": skip} for skip in skips]
    assert found[run][0]["log"] == (wanted if run in FP16 else [{}] * STEPS)


def test_checkpoints_of_the_plugins_of_lightning_load(found: dict[str, list[Any]]) -> None:
    """With torch's scaler, in both directions."""
    (rank,) = found["checkpoints"]
    assert rank == {"theirs in ours": [SCALE / 4, SCALE / 4, STEPS], "ours in theirs": [SCALE, SCALE, STEPS]}


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


def test_the_plugins_have_the_names_of_lightning() -> None:
    """Under which it stores their state."""
    theirs = lightning.pytorch.plugins
    assert ours.MixedPrecision.__qualname__ == theirs.MixedPrecision.__qualname__
    assert issubclass(ours.MixedPrecision, theirs.MixedPrecision)
    assert issubclass(ours.HalfPrecision, theirs.HalfPrecision)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_plugins_are_copied(copied: Any) -> None:
    plugin = ours.MixedPrecision("16-mixed", "cpu", scaler=halfstep.GradScaler("cpu", init_scale=SCALE))
    assert copied(plugin).state_dict() == plugin.state_dict() and plugin.state_dict()["scale"] == SCALE


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


def test_the_lines_of_the_page_run(tmp_path: Any) -> None:
    names = {**page_names(), "module": lightning_ranks.Regression("bf16-true"), "loader": lightning_ranks.loader()}
    exec(
        page_block("Lightning").replace("lightning.Trainer(", "lightning.Trainer(**quiet, "),
        {
            **names,
            "quiet": {
                "max_epochs": 1,
                "logger": False,
                "accelerator": "cpu",
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": False,
            },
        },
    )
    assert names["module"].network[0].weight.dtype == torch.bfloat16
    assert math.isfinite(names["module"].losses[-1]) and MAX_NORM
