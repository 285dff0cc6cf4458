"""The optimizer on shards of FSDP1 and FSDP2: the bits of one process, and gradients as they were reduced."""

from __future__ import annotations

from typing import Any

import pytest
import rank_processes
import shard_ranks
import torch
import torch.multiprocessing
from keeping import skip_where_gradients_cannot_be_kept
from torch.distributed.fsdp import FSDPModule

from halfstep.integrations import fsdp


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    skip_where_gradients_cannot_be_kept()
    return rank_processes.run(shard_ranks.run, shard_ranks.WORLD)


def _differing(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    assert expected.keys() == found.keys()
    return [
        name for name, value in expected.items() if value.dtype != found[name].dtype or not value.equal(found[name])
    ]


@pytest.mark.parametrize("keep", [True, False])
def test_fsdp2_with_split_masters_has_the_bits_of_one_process_that_sums_in_the_same_order(
    ranks: list[dict[str, Any]], keep: bool
) -> None:
    """So all that separates it from one large batch is the order of summation, rounding between the parts included."""
    expected = shard_ranks.alone(keep, [0, 1])
    in_one = shard_ranks.alone(keep, [0, 1], in_one=True)
    for rank in ranks:
        assert _differing(expected, rank["trained"][keep]) == []
        # One process in which the parts change places, or whose batch is not divided, is as far away.
        for name, value in rank["trained"][keep].items():
            assert 0 < (value - in_one[name]).abs().max() < shard_ranks.STEPS * 1e-2 * 2**-6


def test_without_keeping_the_masters_are_others(ranks: list[dict[str, Any]]) -> None:
    assert len(_differing(ranks[0]["trained"][True], ranks[0]["trained"][False])) == 4


def test_cpu_offload_has_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert _differing(rank["trained"][True], rank["offloaded"]) == []


@pytest.mark.parametrize("backwards", [1, 2])
def test_kept_gradients_have_only_the_error_of_an_fp32_sum(ranks: list[dict[str, Any]], backwards: int) -> None:
    """Against the exact sum, in fp64, of what each rank found; without keeping, 2^-9 of it is lost."""
    model = shard_ranks.model_of(torch.bfloat16)
    parts = [
        torch.autograd.grad(shard_ranks.loss(model, shard_ranks.batch(step, part)), list(model.parameters()))
        for step in range(backwards)
        for part in range(shard_ranks.WORLD)
    ]
    lost = 0.0
    for rank in ranks:
        kept, rounded = rank["reduced"][True, backwards], rank["reduced"][False, backwards]
        assert kept["dtypes"] == ["torch.float32"] and rounded["dtypes"] == ["torch.bfloat16"]
        for index, (name, value) in enumerate(kept["values"].items()):
            exact = torch.stack([part[index].double() for part in parts]).sum(0) / shard_ranks.WORLD
            size = torch.stack([part[index].double().abs() for part in parts]).sum(0) / shard_ranks.WORLD
            assert ((value.double() - exact).abs() <= backwards * 2**-23 * size).all()
            error = (rounded["values"][name].double() - exact).abs()
            assert (error <= backwards * 2**-8 * size).all()
            lost = max(lost, float((error / exact.abs()).max()))
    assert lost > 2**-10, "rounding to bf16 loses something here, so keeping is seen"


def test_keeping_costs_two_bytes_a_parameter_of_the_shard(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["reduced"][True, 1]["bytes"] == 2 * rank["reduced"][False, 1]["bytes"]


@pytest.mark.parametrize("way", ["offloaded", "hybrid"])
def test_kept_gradients_are_the_same_with_cpu_offload_and_under_hsdp(ranks: list[dict[str, Any]], way: str) -> None:
    for rank in ranks:
        assert rank[f"reduced {way}"]["dtypes"] == ["torch.float32"]
        assert _differing(rank["reduced"][True, 1]["values"], rank[f"reduced {way}"]["values"]) == []


def test_scaler_norm_and_step_see_the_kept_gradients(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["overflow"]["scales"] == [8.0, 4.0, 4.0]
        for expected, found in rank["overflow"]["norms"]:
            assert found == pytest.approx(expected, rel=2**-20)  # fp32 summation order


def test_what_cannot_be_kept_is_refused(ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ranks:
        whole, in_bf16 = rank["refused"]
        assert (
            "Expected model to have a module sharded by FSDP2, but got none" in whole and "fully_shard(model)" in whole
        )
        assert (
            "Expected reduce_dtype of module '' to be torch.float32, but got None: shard it with "
            "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        ) in in_bf16
        assert "MixedPrecisionPolicy(reduce_dtype=torch.float32)" in in_bf16

    class Other(FSDPModule):
        def _get_fsdp_state(self) -> Any:
            return type("State", (), {"_fsdp_param_groups": [object()]})()

    model = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    monkeypatch.setattr(model, "named_modules", lambda: [("", object.__new__(Other))])
    with pytest.raises(RuntimeError, match="FSDP2 stores its dtypes elsewhere"):
        fsdp.keep_reduced_gradients(model)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fsdp1s_flat_parameters_have_the_bits_of_one_process(
    ranks: list[dict[str, Any]], dtype: torch.dtype, use_orig_params: bool
) -> None:
    expected = shard_ranks.plain(dtype)
    found = [rank["flat"][str(dtype), use_orig_params] for rank in ranks]
    for one in found:
        assert _differing(expected, one["weights"]) == []
    if use_orig_params:  # views into one buffer, wherever it was cut
        assert sum(one["misaligned"] for one in found) >= 3 and sum(one["empty"] for one in found) >= 3
