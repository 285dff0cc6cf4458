"""Every layout of a parameter: planned, allocated and saved bytes, names and dtypes."""

import math
from typing import Any

import layouts
import pytest
import torch
from counted_bytes import storage_bytes
from oracles import BF16, FP16, FP32
from states import parameters_of, train

import halfstep
from halfstep.numerics.planning import layout
from halfstep.numerics.state_layout import ADAM, StateLayout
from halfstep.numerics.state_layout import FP32 as STORED_FP32

# Matrices with codes, in rows of whole blocks and with a short last block; and what has none: vectors, few elements.
SHAPES = ((40, 130), (16, 9, 32), (4096, 1), (4096,), (63, 65), (8, 512), (9, 7), (5, 7, 0), (0, 9), ())
CODED = (True, True, True, False, False, True, False, False, False, False)
# Bytes per element of the master or remainder, and of each moment, and the precision of `halfstep plan`.
MASTERS = {"fp32": 0, "split": 2, "split24": 1, "full": 4, "fp16": 4, "none": 0, "fp16, none": 0}
MOMENTS = {"": 4, "bf16": 2, "8 bits": 1}
PLANNED = {"split": "split", "split24": "split24", "full": "full", "none": "stochastic", "fp16, none": "stochastic"}
PRECISIONS = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}


def _names(name: str) -> tuple[str, str]:
    """The names of the master and of the moments in that of a layout."""
    master, _, moments = name.rpartition(", ")
    return (master, moments) if moments in MOMENTS else (name, "")


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_allocated_and_saved_bytes_are_the_same(name: str, amsgrad: bool) -> None:
    dtype, options = layouts.LAYOUTS[name]
    parameters = parameters_of(dtype, SHAPES)
    optimizer = halfstep.AdamW(parameters, amsgrad=amsgrad, **options)
    train(optimizer, range(1))
    master, moments = map(lambda table, key: table[key], (MASTERS, MOMENTS), _names(name))
    names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * amsgrad]
    saved, expected = optimizer.state_dict()["state"], 0
    for index, (parameter, coded) in enumerate(zip(parameters, CODED, strict=True)):
        coded &= moments == 1
        state, size = optimizer.state[parameter], parameter.numel()
        blocks = len(parameter) * -(-math.prod(parameter.shape[1:]) // 32) if coded else 0
        each = 4 if moments == 1 and not coded else moments
        expected += 4 + size * (master + each * len(names)) + blocks * (2 * len(names) - 1)
        dtypes = {"step": FP32} | {key: {4: FP32, 2: BF16, 1: torch.uint8}[each] for key in names}
        if coded:
            dtypes |= {f"{key}_scale": torch.uint8 if key == "exp_avg" else torch.int16 for key in names}
        if master:
            dtypes["master"] = {4: FP32, 2: torch.int16, 1: torch.int8}[master]
        assert {key: value.dtype for key, value in state.items()} == dtypes
        held = {f"{key}_codes" if coded and key in names else key for key in state}
        assert set(saved[index]) == ({*held, "master_remainder"} - {"master"} if master in (1, 2) else held)
        # Nothing is copied or converted.
        addresses = ({value.data_ptr(): value.nbytes for value in entry.values()} for entry in (state, saved[index]))
        assert next(addresses) == next(addresses)
    assert storage_bytes([*optimizer.state.values()]) == expected
    canonical = optimizer.canonical_state_dict()["state"].values()
    assert all(
        value.dtype == FP32 and not key.endswith("_scale") for entry in canonical for key, value in entry.items()
    )


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_the_planner_and_the_audit_count_by_the_layout(name: str) -> None:
    """Of large matrices, per element: a step moves what `halfstep plan` says, but the scales of codes."""
    dtype, options = layouts.LAYOUTS[name]
    group: dict[str, Any] = {"master_weights": "auto", "state_dtype": FP32, "rounding": "auto", **options}
    held = StateLayout.of(torch.empty(64, 64, dtype=dtype, device="meta"), group, ADAM)
    master, moments = _names(name)
    optimizer = "halfstep" + (f"-{PLANNED[master]}" if master in PLANNED else "")
    row = layout(optimizer, PRECISIONS[dtype], moments=moments.replace("8 bits", "8bit") or "fp32")
    assert dict(row.states()) == held.formats
    scales = sum(2 * (stored.per_parameter - stored.width) for stored in held.formats.values())
    assert sum(held.moved()) + row.gradients.width == row.moved_per_step() - scales
    small = StateLayout.of(torch.empty(63, 64, dtype=dtype, device="meta"), group, ADAM)
    assert small.formats["exp_avg"] == (STORED_FP32 if held.coded else held.formats["exp_avg"])
