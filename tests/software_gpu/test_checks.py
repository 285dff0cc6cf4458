"""Errors of the machine: for each fault, a small kernel that is refused and a correct one that is not."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from software_gpu.gpu import SoftwareGPU
from software_gpu.snippets import kernel

STORE = "\tst.global.b32 [ %rd10 + 0 ], { %r10 };"
LOAD = "\tld.global.b32 { %r1 }, [ %rd10 + 0 ];"
SHARED = "\tshl.b32 \t%r5, %r10, 2;\n\tst.shared.b32 [ %r5 + 0 ], %r10;"
MEETING = "\tsetp.lt.s32 \t%p1, %r10, 5;\n\t@%p1 bra \t$L__BB0_2;\n\tbar.sync \t0;\n$L__BB0_2:"
OTHERS_MEET = MEETING.replace(" 5;", " 32;").replace("setp.lt", "setp.ge")
FIRST = "\tsub.s64 \t%rd10, %rd10, %rd14;\n"  # all threads of all blocks at the first element
PAIRS = "\tld.global.v2.b32 { %r1, %r2 }, [ %rd10 + 0 ];"
SHUFFLE = "\tsetp.lt.s32 \t%p1, %r10, 16;\n\t@%p1 shfl.sync.bfly.b32 \t%r1, %r10, DISTANCE, 31, MEMBERS;"
# Lanes exchange numbers through shared memory, and then write what they read, or other numbers, there.
EXCHANGE = """
	shl.b32 	%r5, %r10, 2;
	xor.b32 	%r6, %r5, DISTANCE;
	st.shared.b32 [ %r5 + 0 ], %r10;
	BARRIER
	ld.shared.b32 	%r7, [%r6];
	st.global.b32 [ %rd10 + 0 ], { %r7 };"""
OTHERS, WARP, BLOCK = "\n\tst.shared.b32 [ %r5 + 0 ], %r12;", "bar.warp.sync \t-1;", "bar.sync \t0;"


def exchange(distance: int, barrier: str, after: str = "") -> str:
    return EXCHANGE.replace("DISTANCE", str(distance)).replace("BARRIER", barrier) + after


def shuffle(distance: int, members: int) -> str:
    return SHUFFLE.replace("DISTANCE", str(distance)).replace("MEMBERS", str(members))


def run(machine: SoftwareGPU, body: str, tensor: torch.Tensor, wide: int = 4, **options: int) -> None:
    machine.run_text(kernel(body, wide), *[tensor] * 4, **options)


WHERE = r"tested, PTX line \d+ \(\?, (ld|st)\.global\.b32\), block 0, thread 31"
UNORDERED = r"shared memory, which thread \d+ (read|wrote) with no barrier"
NOBODY = "which nobody wrote to"
TWO_WARPS, TWO_BLOCKS = {"threads": 64, "shared_bytes": 256}, {"grid": 2}
# The kernel; the elements of its tensor, of 4 bytes or of 2; the launch; and the error, or "".
LAUNCHES: list[tuple[str, int, dict[str, int], str]] = [
    *((access, 32, {}, "") for access in (LOAD, STORE)),
    (LOAD, 31, {}, WHERE + r": load of 4 bytes at 0x\w+, in no live .* 124 bytes, ends 0"),
    (STORE, 31, {}, WHERE + r": store of 4 bytes at 0x\w+, in no live .* 124 bytes, ends 0"),
    (LOAD.replace("+ 0", "+ 2"), 32, {}, r"thread 0: load of 4 bytes at 0x\w+ is not aligned to them"),
    (LOAD.replace("+ 0", "+ -4"), 32, {}, r"load of 4 bytes at 0x\w+, in no live allocation"),
    (PAIRS, 200, {"wide": 8}, ""),
    (PAIRS.replace("+ 0", "+ 4"), 200, {"wide": 8}, r"thread 0: load of 8 bytes at 0x\w+ is not aligned to them"),
    (exchange(4, BLOCK), 64, TWO_WARPS, ""),
    (exchange(4, ""), 64, TWO_WARPS, "shared memory, which thread 1 wrote with no"),
    (exchange(128, ""), 64, TWO_WARPS, NOBODY),
    (exchange(128, BLOCK, "\n\t" + BLOCK + OTHERS), 64, TWO_WARPS, ""),
    (exchange(128, BLOCK, OTHERS), 64, TWO_WARPS, UNORDERED),
    # A barrier of the warp orders its own lanes only.
    (exchange(4, WARP), 64, TWO_WARPS, ""),
    (exchange(4, WARP + "\n\t" + WARP, OTHERS), 64, TWO_WARPS, "store to byte .*" + UNORDERED),
    (exchange(128, WARP), 64, TWO_WARPS, NOBODY),
    ("\tst.shared.b32 [global_smem], %r11;", 32, {"shared_bytes": 4}, ""),
    ("\tst.shared.b32 [global_smem], %r10;", 32, {"shared_bytes": 4}, "to which thread 0 stored another"),
    (SHARED, 32, {"shared_bytes": 128}, ""),
    (SHARED, 32, {"shared_bytes": 124}, "store of 4 bytes at 124 of shared memory, of which the block has 124"),
    (SHARED.replace("+ 0", "+ 2"), 32, {"shared_bytes": 200}, "at 2 of shared memory is not aligned"),
    ("\tld.shared.b32 \t%r5, [global_smem];", 32, {"shared_bytes": 128}, f"load of byte 0 of shared memory, {NOBODY}"),
    (MEETING, 64, {"threads": 64}, "a barrier that a part of the warp reaches without the rest"),
    (OTHERS_MEET, 64, {"threads": 64}, "a barrier that warp 1 never reaches"),
    (FIRST + STORE.replace("%r10", "%r12"), 64, TWO_BLOCKS, ""),  # equal values: harmless
    (FIRST + STORE.replace("%r10", "%r11"), 64, TWO_BLOCKS, "block 1, thread 0: .* of block 0 stored another"),
    (f"{STORE}\n{FIRST}{LOAD}", 64, TWO_BLOCKS, "load of byte 0 .* of 256, which block 0 writes in the same"),
    (shuffle(8, 65535), 32, {}, ""),
    (shuffle(8, -1), 32, {}, "a shuffle that not all its members reach together"),
    (shuffle(16, 65535), 32, {}, "a shuffle from lane 16, which does not run"),
]


@pytest.mark.parametrize(("body", "size", "options", "error"), LAUNCHES, ids=[row[3] or "runs" for row in LAUNCHES])
def test_faults_are_refused(machine: SoftwareGPU, body: str, size: int, options: dict[str, int], error: str) -> None:
    expected: Any = pytest.raises(RuntimeError, match=error) if error else nullcontext()
    with expected:
        run(machine, body, torch.full((size,), 7, dtype=torch.int32), **options)


def test_the_last_element_may_be_cut_off(machine: SoftwareGPU) -> None:
    with pytest.raises(RuntimeError, match=r"thread 31: load of 4 bytes at 0x\w+ reaches 2 bytes past .* of 126"):
        run(machine, LOAD, torch.zeros(63, dtype=torch.int16))


@pytest.mark.parametrize("distance", [4, 128])  # within a warp, and between two
def test_numbers_are_exchanged_and_added(machine: SoftwareGPU, distance: int) -> None:
    result = torch.empty(64, dtype=torch.int32)
    run(machine, exchange(distance, BLOCK), result, **TWO_WARPS)
    assert result.tolist() == [at ^ distance // 4 for at in range(64)]
    run(machine, FIRST + "\tatom.global.gpu.acq_rel.add.u32 %r1, [ %rd10 + 0 ], %r12;", result.zero_(), grid=2)
    assert result.tolist() == [64 * 32] + [0] * 63


def test_a_load_of_uninitialized_or_freed_memory_is_refused(machine: SoftwareGPU) -> None:
    tensor = torch.empty(32, dtype=torch.int32)
    address = tensor.data_ptr()
    with pytest.raises(RuntimeError, match=rf"thread 0: load of 4 bytes at .*, byte 0 of .* of 128, {NOBODY}"):
        run(machine, LOAD, tensor)
    tensor[:16] = 0
    with pytest.raises(
        RuntimeError, match=r"thread 16: load of 4 bytes .*, byte 64 of an allocation of 128, which nob"
    ):
        run(machine, LOAD, tensor)
    run(machine, STORE, tensor)
    run(machine, LOAD, tensor)
    del tensor
    with pytest.raises(RuntimeError, match="in no live allocation"):
        machine.run_text(kernel(LOAD), *[address] * 4)


def test_a_store_to_read_only_memory_is_refused(machine: SoftwareGPU) -> None:
    tensor = torch.zeros(32, dtype=torch.int32)
    with machine.read_only(tensor):
        run(machine, LOAD, tensor)
        with pytest.raises(RuntimeError, match="store of 4 bytes at byte 0 of an allocation of 128 that is only to be"):
            run(machine, STORE, tensor)
    run(machine, STORE, tensor)
