"""A recorded launch is what Triton would compile, and recording leaves nothing behind."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

# Triton's own: under the interpreter, which may be on here, the kernels' asks nothing.
from triton.language.target_info import cuda_capability_geq
from triton.runtime.jit import JITFunction

from halfstep.bench.audit.launches import Launch, Variant, recorded, recording
from halfstep.kernels import backend


def _kernel(x, y, scale, n, stride, flag, BLOCK: triton.language.constexpr):  # type: ignore[no-untyped-def]
    pass


def _other(x, BLOCK: triton.language.constexpr):  # type: ignore[no-untyped-def]
    pass


def _asks(x):  # type: ignore[no-untyped-def]
    if cuda_capability_geq(8, 9):
        triton.language.store(x, 123)
    else:
        triton.language.store(x, 456)


KERNEL: Any = JITFunction(_kernel)
OTHER: Any = JITFunction(_other)
DIVISIBLE = ["tt.divisibility", 16]


def launch(**changes: Any) -> None:
    x = torch.empty(64, dtype=torch.bfloat16, device="cpu")
    y = torch.empty(65, dtype=torch.uint8, device="cpu")[1:]
    arguments = {"x": x, "y": y, "scale": 0.5, "n": 64, "stride": 1, "flag": None, **changes}
    KERNEL[(1,)](**arguments, BLOCK=1024, num_warps=8, num_stages=2, enable_fp_fusion=False)


def variant(call: Any = launch, kernel: Any = KERNEL, index: int = 0) -> Variant:
    return Variant(kernel, "a variant", call, index=index)


def known(recorded: Launch) -> dict[str, list[list[Any]]]:
    return {recorded.kernel.arg_names[position]: found for (position,), found in recorded.attributes.items() if found}


def test_a_recorded_launch_is_what_triton_makes_of_the_arguments() -> None:
    found = recorded(variant(), "sm_90")
    assert found.kernel is KERNEL
    constants = dict.fromkeys(("stride", "flag", "BLOCK"), "constexpr")
    assert found.signature == {"x": "*bf16", "y": "*u8", "scale": "fp32", "n": "i32", **constants}
    assert found.constants == {(4,): 1, (5,): None, (6,): 1024}
    assert found.constant("BLOCK") == 1024
    assert known(found) == {"x": [DIVISIBLE], "n": [DIVISIBLE]}, "y begins off a boundary"
    options = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": False}
    assert options.items() <= found.options.items()
    large = recorded(variant(lambda: launch(n=1 << 40, stride=17, flag=True)), "sm_90")
    assert (large.signature["n"], large.signature["stride"]) == ("i64", "i32")
    assert large.constants == {(6,): 1024}
    of_amd = recorded(variant(), "gfx942")
    assert known(of_amd)["x"] == [DIVISIBLE, ["tt.pointer_range", 32]], "below 2 GB AMD's buffer instructions reach it"


def test_launchers_see_the_target_and_recording_leaves_nothing_behind() -> None:
    def state() -> tuple[Any, ...]:
        return dict(vars(triton.runtime.driver)), triton.knobs.runtime.jit_cache_hook, backend.chosen()

    before, taken = state(), backend.TAKES_CPU_TENSORS
    seen = []
    for target in ("sm_90", "gfx942"):
        with pytest.raises(ZeroDivisionError), recording(target):
            launch()
            seen.append((backend.most_warps(torch.device("cpu")), backend.chosen(), backend.TAKES_CPU_TENSORS))
            raise ZeroDivisionError
    assert seen == [(32, "triton", True), (32 if backend.INTERPRET else 16, "triton", True)]
    assert state() == before and backend.TAKES_CPU_TENSORS is taken


def test_the_indexed_launch_is_returned() -> None:
    def several() -> None:
        x = torch.empty(16, dtype=torch.float32, device="cpu")
        for block in (1, 2, 4):
            OTHER[(1,)](x, BLOCK=block)
            launch()

    blocks = [recorded(variant(several, OTHER, index), "sm_90").constant("BLOCK") for index in (0, 1, 2, -1)]
    assert blocks == [1, 2, 4, 4]
    assert recorded(variant(several), "sm_90").kernel is KERNEL
    with pytest.raises(
        RuntimeError, match="variant 'a variant' to reach _other at least 4 times, but it did so 3 times"
    ):
        recorded(variant(several, OTHER, 3), "sm_90")
    with pytest.raises(RuntimeError, match="to reach _other at least 1 times, but it did so 0 times"):
        recorded(variant(launch, OTHER, -1), "sm_90")


def test_a_kernel_that_queries_its_gpu_is_compiled_for_the_target() -> None:
    asks: Any = JITFunction(_asks)
    x = torch.empty(64, dtype=torch.int32, device="cpu")
    for target, stored, other in (("sm_80", "456", "123"), ("sm_90", "123", "456")):
        ptx = recorded(variant(lambda: asks[(1,)](x), asks), target).compile(target).asm["ptx"]
        assert re.search(rf"\b{stored}\b", ptx) and not re.search(rf"\b{other}\b", ptx)
