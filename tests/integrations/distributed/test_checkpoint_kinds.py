"""Checkpoints of FSDP1, torch's AdamW and CPU offload resume with the same bits, even if written in a thread."""

from typing import Any

import checkpoint_kinds
import pytest
import rank_processes
import torch
import torch.multiprocessing
from states import differences


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_processes.run(checkpoint_kinds.run, checkpoint_kinds.WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    return checkpoint_kinds.reference()


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("kind", checkpoint_kinds.KINDS)
def test_fsdp1s_full_and_sharded_state_dicts_hold_the_bits_of_one_process(
    ranks: list[dict[str, Any]], expected: list[dict[str, Any]], kind: str, use_orig_params: bool
) -> None:
    for rank in ranks:
        found = rank["FSDP1"][kind, use_orig_params]
        assert differences(expected[0], found["saved"]) == []
        assert differences(expected[0], found["loaded"]) == []
        assert differences(expected[1], found["end"]) == []


@pytest.mark.parametrize("number", range(len(checkpoint_kinds.WRAPS)))
def test_checkpoints_load_from_each_kind_into_the_next_with_the_same_bits(
    ranks: list[dict[str, Any]], expected: list[dict[str, Any]], number: int
) -> None:
    """Steps that were made while a checkpoint was written in the background did not reach it."""
    names = checkpoint_kinds.WRAPS
    pair = f"{names[number]} -> {names[(number + 1) % len(names)]}"
    for rank in ranks:
        assert differences(expected[0], rank["between"][pair]["loaded"]) == []
        assert differences(expected[1], rank["between"][pair]["end"]) == []


@pytest.mark.parametrize("way", ["ours", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_torchs_adamw_saved_under_fsdp2_goes_on_under_ours(
    ranks: list[dict[str, Any]], dtype: torch.dtype, way: str
) -> None:
    saved, end = checkpoint_kinds.reference(dtype, begun_by=torch.optim.AdamW)
    for rank in ranks:
        found = rank["torch"][str(dtype), way]
        assert differences(saved, found["saved"]) == []
        assert differences(saved["model"], found["loaded"]["model"]) == []
        for name, entry in saved["optimizer"].items():
            loaded = dict(found["loaded"]["optimizer"][name])
            if dtype == torch.bfloat16:
                assert torch.equal(loaded.pop("master"), saved["model"][name].float()), "the master is the weight"
            assert differences({key: value.float() for key, value in entry.items()}, loaded) == []
        assert found["lr"] == 1e-2
        assert differences(end, found["end"]) == []
