"""The instruction checks of `halfstep bench gpu`, on samples: they pass, and find what is wrong."""

from __future__ import annotations

import pytest
import torch
from software_gpu.gpu import SoftwareGPU

from halfstep.bench import gpu_instructions
from halfstep.bench.gpu_instructions import COUNT, FIRST, nan_patterns, root_and_quotient

CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["f32", "f32x2"])
def paired(request: pytest.FixtureRequest, machine: SoftwareGPU) -> bool:
    if request.param and machine.target != "sm_100":
        pytest.skip("from sm_100 on")
    return bool(request.param)


def test_nan_patterns_are_the_one_that_kernels_assume(paired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = nan_patterns(CPU, paired)
    assert set(counts) == {"add", "sub", "mul", "fma"} and min(counts.values()) > 1000
    monkeypatch.setattr(gpu_instructions, "NAN", 0x7FC00000)
    with pytest.raises(AssertionError, match=r"pattern of NaN: add of .* is 0x7fffffff"):
        nan_patterns(CPU, paired)


@pytest.mark.parametrize("inexact", [-1, 0, 1])
def test_roots_and_quotients_are_rounded_correctly_whatever_the_approximations(
    paired: bool, machine: SoftwareGPU, inexact: int
) -> None:
    # The last two v have a root of 2 - 2^-23, the one divisor whose reciprocal a correction may leave a unit off
    # (Markstein): there the quotient depends on the GPU's approximation, as that of ptxas's own div.rn does.
    last = FIRST + COUNT - 2048 - 2 * (inexact != 0)
    with machine.set(inexact=inexact):
        for first in (FIRST, FIRST + COUNT // 3, FIRST + COUNT // 2 - 1024, last):
            assert root_and_quotient(CPU, paired, first, 2048, 4) == {"pairs": 8192}
        assert root_and_quotient(CPU, paired, FIRST, 1024, 1, least=float("inf")) == {"pairs": 1024}


def test_a_root_without_its_correction_is_found(
    paired: bool, machine: SoftwareGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = "fma.rn.f32x2 %ss, %tt, %hh, %ss" if paired else "fma.rn.f32 %s, %t, %h, %s"
    wrong = "mov.b64 %ss, %ss" if paired else "mov.b32 %s, %s"
    assembly = gpu_instructions.UPDATES.value[0, False, paired]
    assert assembly.count(right) == (4 if paired else 8)
    monkeypatch.setattr(machine, "edit", lambda text: text.replace(right, wrong))
    with (
        machine.set(inexact=1),
        pytest.raises(AssertionError, match="quotients have other bits, the first of the v 0x3f"),
    ):
        root_and_quotient(CPU, paired, FIRST, 2048, 4)
