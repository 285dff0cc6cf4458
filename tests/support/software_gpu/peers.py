"""Cross-entropy of peers beside ours, for sm_90 without a GPU: machine instructions, bytes and memory per logit.

    python -m software_gpu.peers    # in tests/support, with liger-kernel and quack-kernels installed

The cases are those of `halfstep bench run`. Triton's kernels run on the software GPU. quack's are compiled by CuTe, and
counted in the machine code, which has no loops. Memory is what torch allocates beside the logits at the peak of a call
whose kernels are compiled but do not run.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch

from . import gpu
from .counts import machine_code, summary

ROWS, COLUMNS = 16, 65536
KEPT = {"CUTE_DSL_ARCH": "sm_90a", "QUACK_ARCH": "90", "QUACK_CACHE_ENABLED": "0", "CUTE_DSL_KEEP": "cubin"}


def of_machine_code(sass: str) -> tuple[float, float]:
    """Instructions, and bytes of 128-bit accesses, per 16-bit logit of a kernel without loops that copies 8 at a time.

    The padding after the kernel is not counted, and neither are predicates.
    """
    code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)", sass[: sass.rindex("EXIT") + 4], re.MULTILINE)
    loads, stores = (sum(name.startswith(kind) and name.endswith("128") for name in code) for kind in ("LDGSTS", "STG"))
    return len(code) / (8 * loads), 16 * (loads + stores) / (8 * loads)


def quack() -> list[tuple[float, float]]:
    """Those of the forward and the backward, which from then on do nothing."""
    import triton

    counted = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(KEPT, CUTE_DSL_DUMP_DIR=folder)
        from cutlass import BFloat16, Int64
        from quack.cross_entropy import CrossEntropy, CrossEntropyBackward

        file = Path(folder) / "kernel"
        for kernel in (
            CrossEntropy.compile(BFloat16, Int64, None, COLUMNS, True, False, None, None),
            CrossEntropyBackward.compile(BFloat16, Int64, COLUMNS, None),
        ):
            file.write_bytes(kernel.__cubin__)
            command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(file)]
            counted.append(of_machine_code(subprocess.check_output(command, text=True)))
    CrossEntropy.compile = CrossEntropyBackward.compile = staticmethod(lambda *_: lambda *_: None)
    return counted


def main() -> None:
    from halfstep.bench.audit.launches import recording
    from halfstep.bench.cases import Sizes, log_probabilities
    from halfstep.bench.harness import Case
    from halfstep.bench.timing import Call, CpuClock
    from halfstep.kernels.backend import backend

    log_probabilities.needs_gpu = lambda device: None
    of_quack = quack()
    cases = [
        case
        for case in log_probabilities.cases(Sizes(ROWS * COLUMNS, (COLUMNS,), (), (), 0))
        if case.dtype == "bf16" and case.operation != "cross-entropy backward"
    ]

    def call(provider: str, case: Case) -> Call:
        return case.providers[provider](case.prepare(torch.device("cpu"))).call

    with recording("sm_90"):
        memory = {
            provider: [CpuClock().extra_bytes(call(provider, case)) for case in cases]
            for provider in cases[0].providers
        }
    machine, logits = gpu.install("sm_90"), ROWS * COLUMNS
    print("| | forward: instructions | bytes | memory | training: instructions | bytes | memory |")
    print(f"|---|{'---:|' * 6}")
    with machine.set(keep=True, counting=True, races=False), backend("triton"):
        for provider, peaks in memory.items():
            cells: list[float] = []
            for case, kernels, peak in zip(cases, (of_quack[:1], of_quack), peaks, strict=True):
                machine.launches.clear()
                call(provider, case)()
                if provider == "quack":
                    cells += [sum(each) for each in zip(*kernels, strict=True)]
                elif machine.launches:
                    cells.append(machine_code(machine, machine.launches, logits))
                    cells.append(32 * summary(machine.launches, logits)["sectors"])
                else:  # torch's own
                    cells += [float("nan")] * 2
                cells.append(peak / logits)
            print(f"| {provider} | {' | '.join(f'{cell:.1f}' for cell in cells)} |")


if __name__ == "__main__":
    main()
