"""`halfstep.integrations.trainers.torchft` with the real library: two replicas, gloo and a lighthouse."""

from __future__ import annotations

import math
import types
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
    batch,
    error,
    imported,
    network,
    page_block,
    page_names,
    same_bits,
    scaler_for,
    skip_without,
    state_of,
)

import halfstep

pytestmark = skip_without("torchft")
torchft_ranks = imported("torchft_ranks")
ours = imported("halfstep.integrations.trainers.torchft")

STRATEGIES = ("two replicas",)
RUNS = ["bf16", "fp16"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of each replica, by run."""
    folder = str(tmp_path_factory.mktemp("torchft"))
    replicas = rank_processes.run(torchft_ranks.run, 2, folder, join=False)
    return {kind: [one[kind] for one in replicas] for kind in RUNS}


def not_taken(replica: int, kind: str) -> list[bool]:
    """Which steps were skipped, or refused."""
    taken = {torchft_ranks.REFUSED} | ({torchft_ranks.ALONE} if replica else set())
    return [step in taken or (kind == "fp16" and step == BROKEN) for step in range(STEPS)]


@pytest.mark.parametrize("kind", RUNS)
def test_it_trains(found: dict[str, list[Any]], kind: str) -> None:
    for replica in found[kind]:
        before, after = replica["fit"]
        assert after < 0.8 * before and same_bits(replica["state"], found[kind][0]["state"])
        assert replica["commits"] == STEPS - 1


def test_masters_are_split(found: dict[str, list[Any]]) -> None:
    for replica in found["bf16"]:
        assert replica["masters"] == ["torch.int16"]


def test_the_scaler_scales(found: dict[str, list[Any]]) -> None:
    for replica in found["fp16"]:
        assert replica["scaler"]["scale"] == SCALE / 2


@pytest.mark.parametrize("kind", RUNS)
def test_clipping_writes_no_gradient(found: dict[str, list[Any]], kind: str) -> None:
    for number, replica in enumerate(found[kind]):
        assert replica["unwritten"] == [True] * STEPS
        norms = [norm for norm, skip in zip(replica["norms"], not_taken(number, kind), strict=True) if not skip]
        assert min(norms) > MAX_NORM and math.isfinite(max(norms))
    assert found[kind][0]["norms"][0] == found[kind][1]["norms"][0]


@pytest.mark.parametrize("kind", RUNS)
def test_all_ranks_skip_an_overflow(found: dict[str, list[Any]], kind: str) -> None:
    """A refused commit is a skipped step too, of the replicas that refuse it."""
    for number, replica in enumerate(found[kind]):
        assert replica["skipped"] == not_taken(number, kind)
        held = [held for held, skip in zip(replica["held"], not_taken(number, kind), strict=True) if skip]
        assert held == [True] * len(held) and not replica["held"][0]


@pytest.mark.parametrize("kind", RUNS)
def test_a_skip_holds_the_schedule(found: dict[str, list[Any]], kind: str) -> None:
    for number, replica in enumerate(found[kind]):
        skips, rates = not_taken(number, kind), replica["rates"]
        for step in range(1, torchft_ranks.ALONE + 1):
            assert rates[step] == rates[step - 1] * (1 if skips[step] else 0.5)
    assert found[kind][0]["rates"][-1] == found[kind][1]["rates"][-1] == LR * 0.5 ** (STEPS - 1 - (kind == "fp16"))


@pytest.mark.parametrize("kind", RUNS)
def test_resumed_bit_for_bit(found: dict[str, list[Any]], kind: str) -> None:
    """The second replica starts from the first's state, and recovers from it after the commit that only it refused."""
    first, second = found[kind]
    assert (first["recovered"], second["recovered"]) == (0, 2)
    assert same_bits(first["state"], second["state"]) and first["scaler"] == second["scaler"]


@pytest.mark.parametrize("kind", RUNS)
def test_the_log_has_scale_and_skips(found: dict[str, list[Any]], kind: str) -> None:
    for number, replica in enumerate(found[kind]):
        refused = [(step >= torchft_ranks.REFUSED) + number * (step >= torchft_ranks.ALONE) for step in range(STEPS)]
        assert [one.pop("refused_commits") for one in replica["log"]] == refused
        skips = [float(step >= BROKEN) for step in range(STEPS)]
        scaled = [{"loss_scale": SCALE / 2**skip, "skipped_steps": skip} for skip in skips]
        assert replica["log"] == (scaled if kind == "fp16" else [{}] * STEPS)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_refused_commit_leaves_no_trace(kind: str) -> None:
    """The next steps are those of an optimizer that was not asked."""
    answers = iter([False, True, False, True])
    manager = types.SimpleNamespace(should_commit=lambda: next(answers), start_quorum=lambda: None)
    ways = []
    for refusing in (True, False):
        model = network().to(torchft_ranks.DTYPES[kind])
        optimizer = halfstep.AdamW(model.parameters(), lr=LR)
        scaler = scaler_for(kind)
        given = manager if refusing else types.SimpleNamespace(should_commit=lambda: True, start_quorum=lambda: None)
        wrapper = ours.OptimizerWrapper(given, optimizer, scaler, MAX_NORM)
        for step in range(4):
            if step % 2 == 0 and not refusing:
                continue
            wrapper.zero_grad()
            loss = error(model(batch(step)[0].to(torchft_ranks.DTYPES[kind])), batch(step)[1])
            (loss if scaler is None else scaler.scale(loss)).backward()
            wrapper.step()
            assert wrapper.step_was_skipped == (step % 2 == 0)
        ways.append([state_of(optimizer), None if scaler is None else scaler.state_dict(), wrapper.grad_norm])
    assert same_bits(*ways)


def test_errors_name_the_argument_and_the_remedy() -> None:
    optimizer = halfstep.AdamW(network().parameters())
    with pytest.raises(TypeError, match=r"Expected scaler to be a halfstep\.GradScaler, but got a GradScaler"):
        ours.OptimizerWrapper(None, optimizer, torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="Expected max_norm to be a finite number above 0, but got 0"):
        ours.OptimizerWrapper(None, optimizer, max_norm=0)
    with pytest.raises(ValueError, match="Expected closure to be None, but got one"):
        ours.OptimizerWrapper(None, optimizer).step(lambda: 0.0)


def test_the_lines_of_the_page_run() -> None:
    names = page_names()
    names["manager"] = types.SimpleNamespace(should_commit=lambda: True, start_quorum=lambda: None)
    names["schedule"].optimizer.step()  # it warns otherwise
    exec(page_block("torchft"), names)
    assert type(names["optimizer"]) is ours.OptimizerWrapper
    assert names["optimizer"].scaler_metrics()["refused_commits"] == 0
