"""Faults seeded into the compiled kernels: each is refused by the machine or changes a result.

Only lines that run are changed. Kinds of which some can change nothing in a kernel are not asked of it: the guard of a
store or load of shared memory that all threads make with one value, a barrier that Triton puts twice, a maximum or a
flag of which half is enough, a comparison with a bound that no number here meets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from kernel_cases import CASES, Case, difference
from software_gpu import faults
from software_gpu.gpu import SoftwareGPU

import halfstep

EACH = 3  # faults of a kind in one kernel


def run(case: Case, seed: int, backend: str) -> list[torch.Tensor]:
    with halfstep.backend(backend):
        return case.run(seed)


def lines_run(machine: SoftwareGPU, case: Case) -> dict[str, set[int]]:
    """PTX or assembly of each kernel of a case to the lines of it that ran."""
    texts: list[str] = []
    lines: dict[str, set[int]] = {}
    machine.edit = lambda text: texts.append(text) or text  # type: ignore[func-returns-value]
    machine.launches.clear()
    try:
        with machine.set(keep=True):
            run(case, 0, "triton")
    finally:
        machine.edit = lambda text: text
    for text, launch in zip(texts, machine.launches, strict=True):
        assert launch.counts is not None
        program = launch.program
        lines.setdefault(text, set()).update(program.lines[at] for at in launch.counts[:, 0].nonzero()[0])
    return lines


def seeded(lines: dict[str, set[int]], kinds: tuple[str, ...]) -> Iterator[tuple[str, str, int, str, str]]:
    """(kernel, kind, line, the text without and with the fault), spread over each kernel."""
    for text, ran in lines.items():
        kernel = re.search(r"(?:\.entry |\.amdhsa_kernel )(\w+)", text)[1]  # type: ignore[index]
        for kind in kinds:
            found = list(faults.seeded(text, kind, ran))
            for line, broken in found[:: max(1, len(found) // EACH)][:EACH]:
                yield kernel, kind, line, text, broken


def caught(machine: SoftwareGPU, case: Case, text: str, broken: str, expected: list[torch.Tensor]) -> str:
    """What gave a fault away, or nothing."""
    machine.edit = lambda given: broken if given == text else given
    try:
        return difference(case, run(case, 1, "triton"), expected)
    except RuntimeError as error:
        return str(error)
    finally:
        machine.edit = lambda given: given


GUARDS = ("guard of a load dropped", "guard of a store dropped")
PLACES = ("store left out", "stride doubled", "alignment promised that is not there", "parameter of the neighbour")
SUMS = ("sign of a sum changed", "product made a sum")

# By case: the kernel, and kinds of which it shows every one.
SHOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "cast list": ("multi_cast_kernel", (*GUARDS, *PLACES, *SUMS, "branch turned round")),
    "cast list wide": ("multi_cast_kernel", (*GUARDS, *PLACES, "branch turned round")),
    "check bf16": ("check_kernel", ("barrier removed", *PLACES, *SUMS, GUARDS[0], "branch turned round")),
    "unscale bf16": ("check_kernel", ("barrier removed", *GUARDS, *PLACES)),
    "check of many": ("finish_kernel", ("barrier removed", GUARDS[0], "stride doubled")),
    "adam split": ("adam_kernel", (*GUARDS, *PLACES, *SUMS, "branch turned round")),
    "adam full fp16": ("adam_kernel", (*GUARDS, *PLACES)),
    "adam stochastic": ("adam_kernel", (*GUARDS, *PLACES)),
    "statistics with errors": ("count_kernel", ("atomic operation left out", *PLACES[1:])),
    "softmax masked": ("forward_row_kernel", PLACES),
    "softmax strided": ("forward_strided_kernel", ("barrier removed", *PLACES[:3])),
}


AMD_PLACES = ("store left out", "stride doubled")
AMD_SHOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "cast list": ("multi_cast_kernel", AMD_PLACES),
    "cast list wide": ("multi_cast_kernel", (*AMD_PLACES, "end of a buffer moved")),
    "check bf16": ("check_kernel", ("barrier removed", *AMD_PLACES, *SUMS)),
    "check of extremes": ("check_kernel", ("exchange with the lane itself",)),
    "unscale bf16": ("check_kernel", ("barrier removed", *AMD_PLACES)),
    "adam split": ("adam_kernel", (*AMD_PLACES, SUMS[0], "guard dropped", "end of a buffer moved")),
    "adam stochastic": ("adam_kernel", AMD_PLACES),
    "statistics with errors": ("count_kernel", ("atomic operation left out",)),
    "softmax masked": ("forward_row_kernel", AMD_PLACES),
}


def only_for(machine: SoftwareGPU, target: str) -> None:
    """What is tested here is the machine: the code for one target of each kind is enough."""
    if machine.target != target:
        pytest.skip(f"seeds its faults into the code for {target}")


def assert_all_caught(machine: SoftwareGPU, name: str, wanted: str, kinds: tuple[str, ...]) -> None:
    case = CASES[name]
    expected = run(case, 1, "reference")
    assert difference(case, run(case, 1, "triton"), expected) == ""
    missed, count = [], 0
    for kernel, kind, line, text, broken in seeded(lines_run(machine, case), kinds):
        if kernel == wanted:
            run(case, 0, "triton")  # so that nothing right is left in memory that outlives a call
            count += 1
            if not caught(machine, case, text, broken, expected):
                missed.append(f"{kind}, line {line}: {text.splitlines()[line - 1].strip()}")
    assert count >= len(kinds)
    assert not missed, "\n".join([f"{len(missed)} of {count} faults in {wanted} changed nothing", *missed])


@pytest.mark.parametrize("name", SHOWN)
def test_every_seeded_fault_is_caught(machine: SoftwareGPU, name: str) -> None:
    only_for(machine, "sm_90")
    assert_all_caught(machine, name, *SHOWN[name])


@pytest.mark.parametrize("name", AMD_SHOWN)
def test_every_seeded_fault_is_caught_on_amd(machine: SoftwareGPU, name: str) -> None:
    only_for(machine, "gfx942")
    assert_all_caught(machine, name, *AMD_SHOWN[name])


@pytest.mark.parametrize("name", ["cast list wide", "check bf16", "adam split", "softmax"])
def test_a_grid_one_block_short(machine: SoftwareGPU, name: str) -> None:
    if machine.target not in ("sm_90", "gfx942"):
        pytest.skip("one target of each kind is enough")
    case = CASES[name]
    expected = run(case, 1, "reference")
    run(case, 0, "triton")
    machine.short = 1
    try:
        assert caught(machine, case, "", "", expected)
    finally:
        machine.short = 0
