"""`halfstep bench gpu` without a GPU: its checks run on the model of a GPU's streams.

    python tests/support/bench_gpu_on_model.py --out DIR [OPTIONS of halfstep bench gpu]

Its processes start this program in place of ``halfstep.bench.gpu_checks``. Tensors are small, two of the tests marked
gpu run, and times are taken on the CPU, of halfstep alone. Environment variables: ``BENCH_GPU_ONLY`` is a regular
expression for the checks and times to run, ``BENCH_GPU_HANGS`` names a check that hangs, ``BENCH_GPU_LIMIT`` its limit
in seconds, and ``BENCH_GPU_DIES`` one that ends its process.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

NAME = "model of a GPU"


def _run(name: str, check: Callable[[Any], Any], device: Any) -> Any:
    if name == os.environ.get("BENCH_GPU_HANGS"):
        time.sleep(600)
    if name == os.environ.get("BENCH_GPU_DIES"):
        os.kill(os.getpid(), 11)
    return check(device)


def replace_checks() -> None:
    """Of the checks, keep those that the environment names, on smaller tensors."""
    import torch

    from halfstep.bench import gpu_checks, harness, timing
    from halfstep.bench.cases import Sizes

    only = re.compile(os.environ.get("BENCH_GPU_ONLY", ""))
    limits = {os.environ.get("BENCH_GPU_HANGS"): float(os.environ.get("BENCH_GPU_LIMIT", "600"))}
    checks, measure = gpu_checks.checks, harness.measure

    def measured(case: harness.Case, device: Any, **options: Any) -> list[harness.Result]:
        ours = {name: make for name, make in case.providers.items() if harness.ours(name)}
        return measure(replace(case, providers=ours), torch.device("cpu"), **options)

    def chosen(folder: Any, quick: bool) -> dict[str, gpu_checks.Check]:
        return {  # a machine of the tests can be slow
            name: check._replace(run=partial(_run, name, check.run), limit=limits.get(name, 600.0))
            for name, check in checks(folder, quick).items()
            if only.search(name)
        }

    gpu_checks.CHECKED = Sizes(2**12, (100,), (99,), (1, 3), 0, slow=False)
    gpu_checks.sizes_for = lambda device, quick: Sizes(2**12, (256,), (2**10,), (1, 10), 0, slow=False)
    gpu_checks.checks = chosen
    gpu_checks.run.COPY_BYTES, gpu_checks.run.SECONDS = {"cuda": 1 << 20}, {False: 0.0}
    timing.clock_for = lambda device: timing.CpuClock()
    harness.measure = measured


def run_process(argv: Sequence[str]) -> None:
    """What `halfstep.bench.gpu_checks.main` does."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from stream_model import Model

    from halfstep.bench import gpu_checks

    properties = SimpleNamespace(
        name=NAME, major=10, minor=0, total_memory=1 << 26, multi_processor_count=1, L2_cache_size=1 << 20
    )
    answers = {
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: NAME,
    }
    replace_checks()
    with mock.patch.multiple(torch.cuda, **answers), Model("late", size=1 << 26) as model:
        gpu_checks.main(argv, model.device)


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns its exit status."""
    import torch

    from halfstep.bench import gpu

    os.environ.setdefault("PYTEST_ADDOPTS", "-k 'captured_amp_step or waits_for_nothing'")
    gpu.PROCESS = [sys.executable, __file__, "--process"]
    replace_checks()
    answers = {"is_available": lambda: True, "current_device": lambda: 0, "get_device_name": lambda device=None: NAME}
    with mock.patch.multiple(torch.cuda, **answers):
        return gpu.main(argv)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        run_process(sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
