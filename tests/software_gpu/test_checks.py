"""Errors of the machine: for each fault, a small kernel that is refused and a correct one that is not."""

import pytest
import torch
from software_gpu.gpu import COUNTS, SoftwareGPU
from software_gpu.snippets import kernel


def run(machine: SoftwareGPU, body: str, tensor: torch.Tensor, *others: torch.Tensor, **options: int) -> None:
    tensors = [tensor, *others]
    machine.run_text(kernel(body), *tensors, *[tensor] * (4 - len(tensors)), **options)


STORE = "\tst.global.b32 [ %rd10 + 0 ], { %r10 };"
LOAD = "\tld.global.b32 { %r1 }, [ %rd10 + 0 ];"


@pytest.mark.parametrize("access", [LOAD, STORE])
def test_an_access_past_the_end_is_refused(machine: SoftwareGPU, access: str) -> None:
    run(machine, access, torch.zeros(32, dtype=torch.int32))
    word = "load" if access is LOAD else "store"
    where = r"tested, PTX line \d+ \(\?, (ld|st)\.global\.b32\), block 0, thread 31"
    with pytest.raises(RuntimeError, match=rf"{where}: {word} of 4 bytes at 0x\w+, in no live .* 124 bytes, ends 0"):
        run(machine, access, torch.zeros(31, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=rf"thread 31: {word} of 4 bytes at 0x\w+ reaches 2 bytes past .* of 126"):
        run(machine, access, torch.zeros(63, dtype=torch.int16))
    with pytest.raises(RuntimeError, match=rf"{word} of 4 bytes at 0x\w+, in no live allocation"):
        run(machine, access.replace("+ 0", "+ -4"), torch.zeros(32, dtype=torch.int32))


def test_an_access_to_freed_memory_is_refused(machine: SoftwareGPU) -> None:
    tensor = torch.zeros(32, dtype=torch.int32)
    address = tensor.data_ptr()
    machine.run_text(kernel(LOAD), *[address] * 4)
    del tensor
    with pytest.raises(RuntimeError, match="in no live allocation"):
        machine.run_text(kernel(LOAD), *[address] * 4)


@pytest.mark.parametrize("wide", [2, 4])
def test_a_misaligned_access_is_refused(machine: SoftwareGPU, wide: int) -> None:
    names = ", ".join(f"%r{at}" for at in range(1, wide + 1))
    body = f"\tld.global.v{wide}.b32 {{ {names} }}, [ %rd10 + 0 ];"
    tensors = [torch.zeros(200, dtype=torch.int32)] * 4
    machine.run_text(kernel(body, 4 * wide), *tensors)
    with pytest.raises(RuntimeError, match=rf"thread 0: load of {4 * wide} bytes at 0x\w+ is not aligned to them"):
        machine.run_text(kernel(body.replace("+ 0", "+ 4"), 4 * wide), *tensors)


def test_a_load_of_uninitialized_memory_is_refused(machine: SoftwareGPU) -> None:
    tensor = torch.empty(32, dtype=torch.int32)
    with pytest.raises(
        RuntimeError, match=r"thread 0: load of 4 bytes at .*, byte 0 of .* of 128, which nobody wrote to"
    ):
        run(machine, LOAD, tensor)
    tensor[:16] = 0
    with pytest.raises(
        RuntimeError, match=r"thread 16: load of 4 bytes .*, byte 64 of an allocation of 128, which nob"
    ):
        run(machine, LOAD, tensor)
    run(machine, STORE, tensor)
    run(machine, LOAD, tensor)


def test_a_store_to_read_only_memory_is_refused(machine: SoftwareGPU) -> None:
    tensor = torch.zeros(32, dtype=torch.int32)
    with machine.read_only(tensor):
        run(machine, LOAD, tensor)
        with pytest.raises(RuntimeError, match="store of 4 bytes at byte 0 of an allocation of 128 that is only to be"):
            run(machine, STORE, tensor)
    run(machine, STORE, tensor)


EXCHANGE = """
	shl.b32 	%r5, %r10, 2;
	xor.b32 	%r6, %r5, DISTANCE;
	st.shared.b32 [ %r5 + 0 ], %r10;
	BARRIER
	ld.shared.b32 	%r7, [%r6];
	st.global.b32 [ %rd10 + 0 ], { %r7 };"""


@pytest.mark.parametrize("distance", [4, 128])  # within a warp, and between two
def test_shared_memory_needs_barriers(machine: SoftwareGPU, distance: int) -> None:
    body = EXCHANGE.replace("DISTANCE", str(distance))
    result = torch.empty(64, dtype=torch.int32)
    options = {"threads": 64, "shared_bytes": 256}
    run(machine, body.replace("BARRIER", "bar.sync \t0;"), result, **options)
    assert result.tolist() == [at ^ distance // 4 for at in range(64)]
    other = 1 if distance == 4 else 0
    expected = f"shared memory, which thread {other} wrote with no" if distance == 4 else "which nobody wrote to"
    with pytest.raises(RuntimeError, match=expected):
        run(machine, body.replace("BARRIER", ""), result, **options)
    again = body.replace("BARRIER", "bar.sync \t0;") + "\n\tst.shared.b32 [ %r5 + 0 ], %r11;"
    ordered = again.replace("\tst.shared.b32 [ %r5 + 0 ], %r11", "\tbar.sync \t0;\n\tst.shared.b32 [ %r5 + 0 ], %r11")
    run(machine, ordered, result, **options)
    with pytest.raises(RuntimeError, match=r"byte \d+ of shared memory, which thread \d+ (read|wrote) with no barrier"):
        run(machine, again.replace("%r11", "%r12"), result, **options)


def test_a_barrier_of_the_warp_orders_its_own_lanes_only(machine: SoftwareGPU) -> None:
    body = EXCHANGE.replace("BARRIER", "bar.warp.sync \t-1;")
    result = torch.empty(64, dtype=torch.int32)
    run(machine, body.replace("DISTANCE", "4"), result, threads=64, shared_bytes=256)
    assert result.tolist() == [at ^ 1 for at in range(64)]
    twice = body.replace("\tld.shared", "\tbar.warp.sync \t-1;\n\tld.shared") + "\n\tst.shared.b32 [ %r5 + 0 ], %r12;"
    with pytest.raises(
        RuntimeError, match=r"store to byte \d+ of shared memory, which thread \d+ read with no barrier"
    ):
        run(machine, twice.replace("DISTANCE", "4"), result, threads=64, shared_bytes=256)
    with pytest.raises(RuntimeError, match="which nobody wrote to"):
        run(machine, body.replace("DISTANCE", "128"), result, threads=64, shared_bytes=256)


def test_two_values_for_one_place_in_shared_memory(machine: SoftwareGPU) -> None:
    tensor = torch.zeros(32, dtype=torch.int32)
    run(machine, "\tst.shared.b32 [ 0 + 0 ], %r11;".replace("0 + 0", "global_smem"), tensor, shared_bytes=4)
    with pytest.raises(
        RuntimeError, match="thread 1: store to byte 0 of shared memory, to which thread 0 stored another"
    ):
        run(machine, "\tst.shared.b32 [global_smem], %r10;", tensor, shared_bytes=4)


def test_an_access_past_shared_memory_is_refused(machine: SoftwareGPU) -> None:
    body = "\tshl.b32 \t%r5, %r10, 2;\n\tst.shared.b32 [ %r5 + 0 ], %r10;"
    tensor = torch.zeros(32, dtype=torch.int32)
    run(machine, body, tensor, shared_bytes=128)
    with pytest.raises(RuntimeError, match="store of 4 bytes at 124 of shared memory, of which the block has 124"):
        run(machine, body, tensor, shared_bytes=124)
    with pytest.raises(RuntimeError, match="at 2 of shared memory is not aligned"):
        run(machine, body.replace("+ 0", "+ 2"), tensor, shared_bytes=200)
    with pytest.raises(RuntimeError, match="load of byte 0 of shared memory, which nobody wrote to"):
        run(machine, "\tld.shared.b32 \t%r5, [global_smem];", tensor, shared_bytes=128)


def test_a_barrier_that_some_threads_miss_is_refused(machine: SoftwareGPU) -> None:
    tensor = torch.zeros(64, dtype=torch.int32)
    lanes = "\tsetp.lt.s32 \t%p1, %r10, 5;\n\t@%p1 bra \t$L__BB0_2;\n\tbar.sync \t0;\n$L__BB0_2:"
    with pytest.raises(RuntimeError, match="a barrier that a part of the warp reaches without the rest"):
        run(machine, lanes, tensor, threads=64)
    with pytest.raises(RuntimeError, match="a barrier that warp 1 never reaches"):
        run(machine, lanes.replace(" 5;", " 32;").replace("setp.lt", "setp.ge"), tensor, threads=64)


def test_blocks_that_share_a_byte(machine: SoftwareGPU) -> None:
    tensor = torch.zeros(64, dtype=torch.int32)
    base = "\tsub.s64 \t%rd10, %rd10, %rd14;\n"  # all threads of all blocks at the first element
    run(machine, f"{base}\tst.global.b32 [ %rd10 + 0 ], {{ %r12 }};", tensor, grid=2)  # equal values: harmless
    with pytest.raises(
        RuntimeError, match=r"block 1, thread 0: store to byte 0 .* thread 31 of block 0 stored another"
    ):
        run(machine, f"{base}\tst.global.b32 [ %rd10 + 0 ], {{ %r11 }};", tensor * 0 + 7, grid=2)
    with pytest.raises(RuntimeError, match="load of byte 0 of an allocation of 256, which block 0 writes in the same"):
        run(machine, f"{STORE}\n{base}{LOAD}", tensor, grid=2)
    run(machine, f"{base}\tatom.global.gpu.acq_rel.add.u32 %r1, [ %rd10 + 0 ], %r12;", tensor.zero_(), grid=2)
    assert tensor.tolist() == [64 * 32] + [0] * 63


def test_a_shuffle_from_a_lane_that_does_not_run(machine: SoftwareGPU) -> None:
    body = "\tsetp.lt.s32 \t%p1, %r10, 16;\n\t@%p1 shfl.sync.bfly.b32 \t%r1, %r10, DISTANCE, 31, MEMBERS;"
    tensor = torch.zeros(32, dtype=torch.int32)
    run(machine, body.replace("DISTANCE", "8").replace("MEMBERS", "65535"), tensor)
    with pytest.raises(RuntimeError, match="a shuffle that not all its members reach together"):
        run(machine, body.replace("DISTANCE", "8").replace("MEMBERS", "-1"), tensor)
    with pytest.raises(RuntimeError, match="a shuffle from lane 16, which does not run"):
        run(machine, body.replace("DISTANCE", "16").replace("MEMBERS", "65535"), tensor)


def counted_of(machine: SoftwareGPU, body: str, begins: str, wide: int = 4) -> dict[str, int]:
    """What is counted of the last instruction whose name begins so."""
    tensors = [torch.zeros(32 * 128, dtype=torch.int32)] * 4
    with machine.set(keep=True, counting=True):
        machine.run_text(kernel(body, wide), *tensors, shared_bytes=32 * 128)
    launch = machine.launches.pop()
    last = [at for at, name in enumerate(launch.program.opcodes) if name.startswith(begins)][-1]
    assert launch.counts is not None
    return dict(zip(COUNTS, launch.counts[last].tolist(), strict=True))


def test_sectors_lines_and_bank_conflicts_are_counted(machine: SoftwareGPU) -> None:
    """Sectors, lines and bank conflicts of patterns whose numbers are known."""

    def counted(body: str, wide: int = 4) -> dict[str, int]:
        return counted_of(machine, body, "st." if "\tst." in body else "ld.global", wide)

    close = counted(LOAD)
    assert [close[key] for key in ("threads", "warps", "requests", "sectors", "least", "lines")] == [32, 1, 1, 4, 4, 2]
    apart = counted(LOAD, wide=128)
    assert [apart[key] for key in ("requests", "sectors", "least", "lines")] == [1, 32, 4, 32]
    assert counted(STORE)["lines"] == 1
    guarded = counted(f"\tsetp.lt.s32 \t%p1, %r10, 8;\n\t@%p1 {LOAD.strip()}")
    assert [guarded[key] for key in ("threads", "warps", "sectors")] == [8, 1, 1]
    for stride, ways in ((4, 1), (8, 2), (16, 4), (128, 32), (0, 1)):
        body = f"\tmul.lo.s32 \t%r5, %r10, {stride};\n\tst.shared.b32 [ %r5 + 0 ], %r11;"
        assert counted(body)["wavefronts"] == ways, stride
    same = "\tst.shared.b32 [global_smem], %r11;\n\tbar.sync \t0;\n\tatom.shared.add.u32 \t%r5, [global_smem], %r11;"
    assert counted_of(machine, same, "atom")["wavefronts"] == 32  # one after the other
    wide = "\tshl.b32 \t%r5, %r10, 4;\n\tst.shared.v4.b32 [ %r5 + 0 ], { %r11, %r11, %r11, %r11 };"
    assert counted(wide)["wavefronts"] == 4  # 512 bytes at 128 a time
