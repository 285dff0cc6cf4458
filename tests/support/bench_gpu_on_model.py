"""`halfstep bench gpu` without a GPU: its checks run on the model of a GPU's streams, and on the software GPU.

    python tests/support/bench_gpu_on_model.py --out DIR [OPTIONS of halfstep bench gpu]

Its processes start this program in place of ``halfstep.bench.gpu_checks``. Checks of instructions run on the software
GPU, on a sample of the numbers; kernels and AMP steps on the model, with smaller tensors; times are taken on the CPU.
The tests marked gpu are two.
``BENCH_GPU_HANGS`` names a check that hangs, ``BENCH_GPU_DIES`` one that ends its process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

INSTRUCTIONS = ("NaN patterns", "root and quotient")
NAME = "model of a GPU"


def run_process(argv: Sequence[str]) -> None:
    """What `halfstep.bench.gpu_checks.main` does, for checks of one kind."""
    if argv[2] in INSTRUCTIONS:
        from software_gpu import gpu

        gpu.install("sm_100")
    else:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from halfstep.bench import gpu_checks, gpu_instructions, harness, timing
    from halfstep.bench.cases.sizes import Sizes

    tiny = Sizes(2**12, (256,), (2**10,), (1, 10), 0, slow=False)
    cpu = torch.device("cpu")

    def started(name: str) -> None:
        if name == os.environ.get("BENCH_GPU_HANGS"):
            time.sleep(600)
        if name == os.environ.get("BENCH_GPU_DIES"):
            os.kill(os.getpid(), 11)

    def checks(folder: Any) -> dict[str, Any]:
        return {
            name: lambda device, name=name, check=check: (started(name), check(device))[1]
            for name, check in usual(folder).items()
        }

    usual = gpu_checks.checks
    of_a_gpu = {
        "get_device_properties": lambda device=None: SimpleNamespace(
            name=NAME, major=10, minor=0, total_memory=1 << 26, multi_processor_count=1, L2_cache_size=1 << 20
        ),
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (10, 0),
    }
    samples = {
        "COPY_BYTES": {"cuda": 1 << 20},
        "SECONDS": {False: 0.0},
    }
    with mock.patch.multiple(torch.cuda, **of_a_gpu), mock.patch.multiple(gpu_checks.run, **samples):
        gpu_checks.checks = checks
        gpu_checks.sizes_for = lambda device, quick: tiny
        gpu_checks.STEP_SIZES = (1, 15, 300, 0)  # type: ignore[assignment]
        gpu_checks.SHAPES = ((32, 144), (17,), (5, 0), (63, 65), (7,), (2, 2500))  # type: ignore[assignment]
        timing.clock_for = lambda device: timing.CpuClock()
        root, count = gpu_instructions.root_and_quotient, 2048
        gpu_instructions.root_and_quotient = lambda device, paired, moments=2, least=2**-49: root(
            device, paired, count=count, moments=2, least=least
        )
        measure = harness.measure
        harness.measure = lambda case, device, **options: measure(
            replace(case, providers={name: make for name, make in case.providers.items() if harness.ours(name)}),
            cpu,
            **options,
        )
        if argv[2] in INSTRUCTIONS or argv[2].startswith("time of"):
            gpu_checks.main(argv, cpu)
            return
        from stream_model import Model

        with Model("late", size=1 << 26) as model:
            gpu_checks.main(argv, model.device)


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns its exit status."""
    import torch

    from halfstep.bench import gpu, gpu_checks
    from halfstep.bench.cases.sizes import Sizes

    os.environ.setdefault("PYTEST_ADDOPTS", "-k 'captured_amp_step or waits_for_nothing'")
    gpu.PROCESS = [sys.executable, __file__, "--process"]
    gpu_checks.sizes_for = lambda device, quick: Sizes(2**12, (256,), (2**10,), (1, 10), 0, slow=False)
    known = {"is_available": lambda: True, "current_device": lambda: 0, "get_device_name": lambda device=None: NAME}
    with mock.patch.multiple(torch.cuda, **known):
        return gpu.main(argv)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        run_process(sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
