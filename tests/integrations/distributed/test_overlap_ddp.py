"""The check in the backward under DistributedDataParallel, in three processes: the same bits, and no pass at `step`."""

from __future__ import annotations

from typing import Any

import overlap_ranks
import pytest
import rank_processes
import torch
import torch.multiprocessing
from overlap_ranks import SETTINGS, TAMPERS, assert_same_training

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return rank_processes.run(overlap_ranks.run, overlap_ranks.WORLD)


@pytest.mark.parametrize("name", SETTINGS)
def test_training_has_the_bits_of_ddp_without_a_hook(ranks: Found, name: str) -> None:
    for rank in ranks[:2]:
        bare, overlap = rank[name]["bare"], rank[name]["overlap"]
        assert_same_training(bare, overlap)
        assert any(bare["skipped"]) and not all(bare["skipped"])
        assert bare["report"], "the report names what overflowed"


@pytest.mark.parametrize("name", SETTINGS)
def test_no_pass_is_left_after_the_backward(ranks: Found, name: str) -> None:
    setting = SETTINGS[name]
    optimizers = setting.get("optimizers", 1)
    kept_unused = name == "unused parameters, kept"  # a gradient that nobody has touched is in no bucket
    for rank in ranks[:2]:
        bare, overlap = rank[name]["bare"], rank[name]["overlap"]
        assert set(bare["passes"]) == {optimizers}
        if kept_unused:
            assert overlap["passes"][0] == 0 and overlap["passes"][3] == 1
            continue
        assert set(overlap["passes"]) == {0}
        assert set(overlap["gathered"]) == {optimizers} and set(bare["gathered"]) == {0}


def test_the_hook_alone_has_the_same_bits(ranks: Found) -> None:
    for rank in ranks[:2]:
        assert_same_training(rank["plain"]["bare"], rank["plain"]["hook"])


@pytest.mark.parametrize("name", ["fp16", "bf16", "a hook of one's own", "a hook of one's own, views"])
def test_other_hooks_train_as_without_the_check(ranks: Found, name: str) -> None:
    for rank in ranks[:2]:
        assert_same_training(rank[name]["hook"], rank[name]["overlap"])
        assert set(rank[name]["overlap"]["passes"]) == {0} and set(rank[name]["hook"]["passes"]) == {1}
    if name in ("fp16", "bf16"):
        pairs = zip(ranks[0][name]["overlap"]["weights"], ranks[0]["plain"]["bare"]["weights"], strict=True)
        assert any(not torch.equal(one, other) for one, other in pairs), "they do compress"


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("name", TAMPERS)
def test_gradients_changed_before_the_step_are_checked_again(ranks: Found, name: str, view: bool) -> None:
    for rank in ranks[:2]:
        found = rank[f"{name}, views {view}"]
        assert_same_training(found["bare"], found["overlap"])
        # If one is gone, those that are left were checked.
        assert set(found["overlap"]["passes"]) == ({0} if name == "set to None" else set(found["bare"]["passes"]))
        assert set(found["bare"]["passes"]) == ({0} if name == "unscaled and clipped" else {1})


def test_three_ranks_divide_as_ddp_does(ranks: Found) -> None:
    for rank in ranks:
        for name, found in rank["three ranks"].items():
            assert_same_training(found["bare"], found["overlap"])
            assert set(found["overlap"]["passes"]) == {0}, name
    kept = ranks[0]["three ranks"]
    one, other = (kept[f"views True, to_none {none}, early_zero False"]["bare"]["weights"] for none in (True, False))
    assert any(not torch.equal(a, b) for a, b in zip(one, other, strict=True)), "the two ways to divide differ"


def test_ranks_that_have_joined_send_zeros(ranks: Found) -> None:
    for rank in ranks[:2]:
        pairs = zip(rank["joined"]["bare"], rank["joined"]["overlap"], strict=True)
        assert all(torch.equal(bare, overlap) for bare, overlap in pairs)
    assert all(torch.equal(*pair) for pair in zip(*(rank["joined"]["overlap"] for rank in ranks[:2]), strict=True))


def test_ranks_agree(ranks: Found) -> None:
    for name in SETTINGS:
        one, other = (rank[name]["overlap"] for rank in ranks[:2])
        for key in ("norms", "weights"):
            for a, b in zip(one[key], other[key], strict=True):
                assert torch.equal(a, b) or a.isnan().all(), (name, key)
        assert one["scales"] == other["scales"]


def test_hooks_divide_before_they_round(ranks: Found) -> None:
    for rank in ranks[:2]:
        found = rank["hostile"]
        assert torch.equal(found["none"][:3], torch.tensor([35000.0, 6e-8, 2.0]))
        assert found["fp16"][:3].tolist() == [35008.0, 2.0**-23, 2.0], "35000 and 3e-8 to nearest"
        assert found["bf16"][0].item() == 35072.0 and found["bf16"][2].item() == 2.0
        assert found["bf16"][1].item() == pytest.approx(6e-8, rel=2**-8)
        assert found["torch"][0].item() == float("inf"), "torch casts first"
        for name in ("none", "fp16", "bf16"):
            assert found[name][3:5].isnan().all(), "infinities of both signs and NaN stay"
        assert found["fp16"][5].item() == float("inf")
        assert found["bf16"][5].isfinite() and found["none"][5].isfinite()


def test_each_gradient_is_read_once_after_the_backward_and_written_never(ranks: Found) -> None:
    """By the optimizer itself."""
    for rank in ranks[:2]:
        assert rank["traffic"] == {"bare": [[2], [0]], "overlap": [[1], [0]]}


def test_errors_name_the_remedy(ranks: Found) -> None:
    errors = ranks[0]["errors"]
    assert errors["no model of theirs"].startswith("TypeError: model is a Linear; allowed is a torch.nn.parallel.Dist")
    assert "wrap the model in it first" in errors["no model of theirs"]
    assert "halfstep.integrations.fsdp.overlap_overflow_check" in errors["no model of theirs"]
    assert errors["twice"].startswith("RuntimeError: model has the communication hook 'overlap_hook'; allowed is none")
    assert "pass a hook of yours as hook=" in errors["twice"]
    assert errors["their scaler"].startswith("TypeError: scaler is a torch.amp.grad_scaler.GradScaler; allowed is half")
    assert errors["a name"] == ("ValueError: hook is 'fp8'; allowed are 'none', 'fp16', 'bf16' or a communication hook")
    assert errors["a number"] == "TypeError: hook is a int; allowed are 'none', 'fp16', 'bf16' or a function"
