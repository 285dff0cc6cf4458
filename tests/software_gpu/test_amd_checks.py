"""Errors of the AMD machine: for each fault, a small kernel that is refused and a correct one that is not."""

import pytest
import torch
from software_gpu.gpu import SoftwareGPU
from software_gpu.snippets import wave_kernel


def run(machine: SoftwareGPU, body: str, *tensors: torch.Tensor, threads: int = 64, **options: int) -> None:
    given = [*tensors, *[tensors[0]] * (4 - len(tensors))]
    machine.run_text(wave_kernel(body, threads=threads), *given, threads=threads, **options)


BUFFER = """
	s_mov_b32 s14, RECORDS
	s_mov_b32 s12, s4
	s_and_b32 s13, s5, 0xffff
	buffer_load_dword v3, v1, s[12:15], 0 offen
	buffer_store_dword v2, v1, s[12:15], 0 offen
	s_mov_b32 s14, 0x1000
	s_mov_b32 s12, s6
	s_and_b32 s13, s7, 0xffff
	buffer_store_dword v3, v1, s[12:15], 0 offen"""


def test_a_buffer_reads_zeros_past_its_end(machine: SoftwareGPU) -> None:
    held, read = torch.full((32,), 7, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    run(machine, BUFFER.replace("RECORDS", "0x80"), held, read)
    assert held.tolist() == list(range(32)) and read.tolist() == [7] * 32 + [0] * 32
    with pytest.raises(RuntimeError, match=r"an access that a buffer's end cuts in two"):
        run(machine, BUFFER.replace("RECORDS", "0x7e"), held, read)
    with pytest.raises(RuntimeError, match=r"thread 32: load of 4 bytes at .*, in no live allocation"):
        run(machine, BUFFER.replace("RECORDS", "0x84"), held, read)


EXCHANGE = """
	v_lshlrev_b32_e32 v4, 2, v0
	v_xor_b32_e32 v5, DISTANCE, v4
	ds_write_b32 v4, v0
	BARRIER
	ds_read_b32 v6, v5
	global_store_dword v1, v6, s[4:5]"""


def test_shared_memory_needs_barriers(machine: SoftwareGPU) -> None:
    """Between waves; the lanes of one are in step."""
    options = {"threads": 128, "shared_bytes": 512}
    result = torch.empty(128, dtype=torch.int32)
    run(machine, EXCHANGE.replace("DISTANCE", "4").replace("BARRIER", ""), result, **options)
    assert result.tolist() == [at ^ 1 for at in range(128)]
    far = EXCHANGE.replace("DISTANCE", "0x100")
    run(machine, far.replace("BARRIER", "s_barrier"), result, **options)
    assert result.tolist() == [at ^ 64 for at in range(128)]
    with pytest.raises(RuntimeError, match="load of byte 256 of shared memory, which nobody wrote to"):
        run(machine, far.replace("BARRIER", ""), result, **options)
    twice = far.replace("BARRIER", "s_barrier") + "\n\tv_mov_b32_e32 v9, 0xaaaa\n\tds_write_b32 v4, v9"
    with pytest.raises(RuntimeError, match=r"thread 64: load of byte 0 of shared memory, which thread 0 wrote with no"):
        run(machine, twice, result, **options)
    with pytest.raises(RuntimeError, match="store of 4 bytes at 256 of shared memory, of which the block has 256"):
        run(machine, far.replace("BARRIER", "s_barrier"), result, threads=128, shared_bytes=256)


def test_a_barrier_that_a_wave_misses_is_refused(machine: SoftwareGPU) -> None:
    body = "\tv_readfirstlane_b32 s12, v0\n\ts_cmp_lg_u32 s12, 0\n\ts_cbranch_scc1 .LEND\n\ts_barrier\n.LEND:"
    with pytest.raises(RuntimeError, match="a barrier that wave 1 never reaches"):
        run(machine, body, torch.zeros(4, dtype=torch.int32), threads=128)
