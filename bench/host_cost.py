"""``halfstep bench host``: the time and launches that a step costs the host, measured without a GPU.

**Real** are the library under test, Triton's launch path (argument binding and specialization, cache lookup, grid,
hooks) and Triton's launcher in C, which reads the address of every tensor and packs the arguments. Triton and ptxas
compile the kernels for sm_90.

**Stubbed** is only the CUDA driver: a ``libcuda.so.1`` of some thirty lines, compiled here, in which every function
returns success. Its ``cuLaunchKernelEx`` counts launches and returns, so nothing is computed. The measurements run in a
separate process.

**Different from a GPU.** Tensors are in CPU memory, since a CPU build of torch supports no other. Small torch
operations (filling a scalar, a square root) therefore run on the CPU and their time is included. They are counted as
`torch_kernels`: on a GPU each of them costs another launch. ``torch.cuda.device`` guards are not entered, and copies
from pinned memory are ordinary copies. The time of the real driver is not included. torch's optimizers launch from C++,
so this method cannot measure them.

Times are medians of the processor time of the calling thread, which never waits, so that other work on the machine has
little influence. Gradients keep their addresses from step to step, except in the rows marked "moved".
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from halfstep.cli.command_line import Parser, complain, run
from halfstep.cli.machine import version_of
from halfstep.cli.numbers import above_zero, whole
from halfstep.cli.terminal import Progress

TENSOR_COUNTS = (1, 10, 100, 1_000, 10_000)
NUMEL = 64  # elements per tensor; few, so that torch's operations on the CPU are short
CAPABILITY = 90
PROCESSORS = 132  # multiprocessors of the simulated H100; some providers compute their grid from it

# All functions succeed. Attributes are large enough for Triton to load any kernel.
STUB = r"""
#include <stdint.h>
#include <string.h>
typedef int R;
static uint64_t launches;
uint64_t halfstep_launches(void) { return launches; }
R cuLaunchKernelEx(const void *c, void *f, void **p, void **e) { launches++; return 0; }
R cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned s, void *t,
                 void **p, void **x) { launches++; return 0; }
R cuGetErrorString(R code, const char **text) { *text = "stub"; return 0; }
R cuInit(unsigned flags) { return 0; }
R cuDriverGetVersion(int *version) { *version = 13000; return 0; }
R cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
R cuDeviceGetAttribute(int *value, int which, int device) { *value = 232448; return 0; }
R cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
R cuCtxSetCurrent(void *context) { return 0; }
R cuCtxGetDevice(int *device) { *device = 0; return 0; }
R cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
R cuCtxGetLimit(size_t *value, int which) { *value = 0; return 0; }
R cuCtxSetLimit(int which, size_t value) { return 0; }
R cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
R cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)1; return 0; }
R cuModuleUnload(void *module) { return 0; }
R cuFuncGetAttribute(int *value, int which, void *function) { *value = which == 0 ? 1024 : 0; return 0; }
R cuFuncSetAttribute(void *function, int which, int value) { return 0; }
R cuFuncSetCacheConfig(void *function, int config) { return 0; }
R cuPointerGetAttribute(void *data, int which, uint64_t address) { memcpy(data, &address, 8); return 0; }
R cuOccupancyMaxActiveClusters(int *count, void *function, const void *config) { *count = 1; return 0; }
R cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
R cuTensorMapEncodeTiled(void) { return 0; }
R cuTensorMapEncodeIm2col(void) { return 0; }
"""


Prepared = tuple[Callable[[], object], Callable[[], object]]  # a call, and what is done before it


@dataclass(frozen=True)
class HostCase:
    """One job of one provider.

    Attributes:
        provider: the library, with its version.
        job: ``"adamw"``, ``"check"``, ``"amp step"``, ``"cast"``, ``"softmax"``; with ``", moved"`` gradients lie at
            other addresses each time.
        make: for a number of tensors, returns the timed call and a function to be called, untimed, before each call.
        most: the largest number of tensors to measure.
    """

    provider: str
    job: str
    make: Callable[[int], Prepared]
    most: int = TENSOR_COUNTS[-1]


@dataclass
class HostCost:
    """The cost of a job for the host.

    Attributes:
        provider, job: those of the `HostCase`.
        tensors: number of tensors.
        host_us: median microseconds per call; `low_us` and `high_us` are the 20th and 80th percentile.
        launches: number of launches of Triton kernels per call.
        torch_kernels: number of torch operations per call that would launch a kernel or a copy on a GPU.
        problem: why the measurement failed; otherwise empty.
    """

    provider: str
    job: str
    tensors: int
    host_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    launches: int | None = None
    torch_kernels: int | None = None
    problem: str = ""


# ------------------------------------------------------------------------------------------- the process with the stub


def _c_compiler() -> str | None:
    chosen = os.environ.get("CC")
    return shutil.which(chosen) if chosen else next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)


def _build_stub(folder: Path) -> Path:
    """Compile the stub driver into `folder`."""
    compiler = _c_compiler()
    if compiler is None:
        raise RuntimeError(
            f"no C compiler found (CC is {os.environ.get('CC')!r}; looked for gcc, clang, cc); Triton's launcher and "
            "the stub driver are compiled with one: install it or point CC at one"
        )
    source, target = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(STUB)
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(target)], check=True
    )
    return target


def use_stubbed_driver(capability: int) -> None:
    """Make Triton's NVIDIA driver work without a GPU, with the ``libcuda.so.1`` in ``TRITON_LIBCUDA_PATH``.

    Args:
        capability: compute capability of the simulated GPU, for example 90.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class StubbedDriver(CudaDriver):  # type: ignore[misc]  # Triton is not typed
        """Triton's driver. Only the questions that it would ask torch about GPUs are answered here."""

        def __init__(self) -> None:
            try:
                super().__init__()
            except (AttributeError, AssertionError):  # a CPU build of torch lacks names that the base class looks up
                pass
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device: 0
            self.get_device_capability = lambda device: divmod(capability, 10)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_benchmarker(self) -> Any:
            """A benchmarker for autotuners: all configurations take the same time, so the first one is chosen."""

            def run_once(call: Callable[[], object], *, quantiles: Sequence[float], **options: Any) -> list[float]:
                call()
                return [1.0 for _ in quantiles]

            return run_once

    triton.runtime.driver.set_active(StubbedDriver())


def _install_stub(path: str) -> Callable[[], int]:
    """Make Triton's driver run on the stub. Returns the counter of launches."""
    stub = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    stub.halfstep_launches.restype = ctypes.c_uint64
    use_stubbed_driver(CAPABILITY)
    counter: Callable[[], int] = stub.halfstep_launches
    return counter


def _take_cpu_tensors() -> None:
    """Make halfstep launch its compiled kernels for CPU tensors, in this process."""
    from halfstep.kernels import backend

    backend.TAKES_CPU_TENSORS = True
    backend.backend("triton")


@contextmanager
def _pretending_cuda() -> Iterator[None]:
    """Make CPU tensors claim to be CUDA tensors, for libraries that create state only for those."""
    import torch

    available = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cuda.is_available = available
        del torch.Tensor.is_cuda


# ---------------------------------------------------------------------------------------------------------- providers


def _nothing() -> None:
    """No preparation."""


def _parameters(count: int, dtype: Any) -> list[Any]:
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(NUMEL, dtype=dtype, device="cpu")) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return parameters


def _moving(parameters: list[Any]) -> Callable[[], None]:
    """Returns a function that assigns each parameter the other one of two gradients at different addresses."""
    import torch

    sets = [[parameter.grad for parameter in parameters], [torch.zeros_like(parameter) for parameter in parameters]]

    def move() -> None:
        sets.reverse()
        for parameter, grad in zip(parameters, sets[0], strict=True):
            parameter.grad = grad

    return move


def _our_adamw(count: int, moved: bool = False) -> Prepared:
    import torch

    import halfstep

    parameters = _parameters(count, torch.bfloat16)
    return halfstep.AdamW(parameters).step, _moving(parameters) if moved else _nothing


def _our_amp_step(count: int, moved: bool = False) -> Prepared:
    import torch

    import halfstep

    parameters = _parameters(count, torch.bfloat16)
    optimizer = halfstep.AdamW(parameters, max_grad_norm=1.0)
    scaler = halfstep.GradScaler("cpu")
    scaler.scale(torch.zeros((), dtype=torch.float32, device="cpu"))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step, _moving(parameters) if moved else _nothing


def _our_check(count: int) -> Prepared:
    import torch

    import halfstep

    grads = [torch.zeros(NUMEL, dtype=torch.bfloat16, device="cpu") for _ in range(count)]
    return lambda: halfstep.foreach_check(grads), _nothing


def _our_cast(count: int) -> Prepared:
    import torch

    import halfstep

    tensors = [torch.zeros(NUMEL, dtype=torch.float32, device="cpu") for _ in range(count)]
    return lambda: halfstep.foreach_cast(tensors, torch.bfloat16), _nothing


def _our_softmax(count: int) -> Prepared:
    import torch

    import halfstep

    inputs = [torch.zeros(4, 256, dtype=torch.bfloat16, device="cpu") for _ in range(count)]
    return lambda: [halfstep.softmax(x) for x in inputs], _nothing


def _liger_softmax(count: int) -> Prepared:
    import torch
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    inputs = [torch.zeros(4, 256, dtype=torch.bfloat16, device="cpu") for _ in range(count)]
    return lambda: [LigerSoftmaxFunction.apply(x) for x in inputs], _nothing


def _optimi_adamw(count: int) -> Prepared:
    import torch
    from optimi import AdamW

    return AdamW(_parameters(count, torch.bfloat16), lr=1e-3, triton=True, foreach=False).step, _nothing


def _flash_adamw(count: int) -> Prepared:
    import torch
    from flashoptim import FlashAdamW, optimizers

    optimizers._get_sm_count = lambda device=None: PROCESSORS
    with _pretending_cuda():
        optimizer = FlashAdamW(_parameters(count, torch.bfloat16), lr=1e-3)
        optimizer.step()
    return optimizer.step, _nothing


def _cases() -> list[HostCase]:
    """All jobs of halfstep and of the installed peers."""
    cases = [
        HostCase("halfstep", "adamw", _our_adamw),
        HostCase("halfstep", "adamw, moved", partial(_our_adamw, moved=True)),
        HostCase("halfstep", "amp step", _our_amp_step),
        HostCase("halfstep", "amp step, moved", partial(_our_amp_step, moved=True)),
        HostCase("halfstep", "check", _our_check),
        HostCase("halfstep", "cast", _our_cast),
        HostCase("halfstep", "softmax", _our_softmax, most=1),
    ]
    peers = [
        HostCase("flashoptim", "adamw", _flash_adamw),
        HostCase("torch-optimi", "adamw", _optimi_adamw),
        HostCase("liger-kernel", "softmax", _liger_softmax, most=1),
    ]
    versions = {case.provider: version_of(case.provider) for case in peers}
    return cases + [
        replace(case, provider=f"{case.provider} {versions[case.provider]}")
        for case in peers
        if versions[case.provider]
    ]


# ---------------------------------------------------------------------------------------------------------- measuring

# Operations that only allocate memory or return a view, and launch nothing on a GPU.
_FREE = ("empty", "new_empty", "detach", "alias", "as_strided", "resize_", "set_", "lift_fresh")


def _torch_kernels(call: Callable[[], object]) -> int:
    """The number of torch operations in one call that would launch a kernel or a copy on a GPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function.overloadpacket.__name__
            if function.namespace == "aten" and not function.is_view and not name.startswith(_FREE):
                self.count += 1
            return function(*args, **(kwargs or {}))

    with Counting() as mode:
        call()
    return mode.count


def _measure(case: HostCase, tensors: int, seconds: float, launches: Callable[[], int]) -> HostCost:
    from halfstep.bench import timing  # after the stub: it imports torch

    row = HostCost(case.provider, case.job, tensors)
    call, prepare = case.make(tensors)
    for _ in range(3):
        prepare()
        call()
    prepare()
    before = launches()
    row.torch_kernels = _torch_kernels(call)
    row.launches = launches() - before
    # One call a sample, since gradients move before each.
    (times,) = timing.rounds(timing.CpuClock(time.thread_time, 0), [call], seconds, 5, 2000, prepare)
    row.low_us, row.host_us, row.high_us = (1e6 * timing.percentile(times, share) for share in (0.2, 0.5, 0.8))
    return row


def _worker(stub: str, counts: Sequence[int], seconds: float, jobs: Sequence[str]) -> None:
    """Measure in this process, which cannot be used for anything else afterwards. Prints one line of JSON per row."""
    launches = _install_stub(stub)
    import torch

    torch.set_num_threads(1)
    _take_cpu_tensors()
    chosen = [case for case in _cases() if not jobs or case.job.partition(",")[0] in jobs]
    work = [(case, tensors) for tensors in counts for case in chosen if tensors <= case.most]
    for case, tensors in work:
        try:
            row = _measure(case, tensors, seconds, launches)
        except Exception as error:  # reported in the row; the others are still measured
            row = HostCost(case.provider, case.job, tensors, problem=f"{type(error).__name__}: {error}")
        print(json.dumps({"of": len(work), "row": asdict(row)}), flush=True)


def measure(
    counts: Sequence[int] = TENSOR_COUNTS,
    seconds: float = 0.5,
    jobs: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[dict[str, Any]]:
    """Measure the host cost of every Triton provider, in a separate process.

    Args:
        counts: numbers of tensors.
        seconds: time for each row. At least 5 calls are measured.
        jobs: ``"adamw"``, ``"amp step"``, ``"check"``, ``"cast"``, ``"softmax"``; all jobs if empty.
        progress: called with the number of rows measured so far and the number of all rows.

    Returns:
        One `HostCost` per job, provider and number of tensors, as a dictionary.

    Raises:
        RuntimeError: Triton or a C compiler is missing, or the measuring process failed.
    """
    from halfstep.kernels import backend

    if backend.triton is None:
        raise RuntimeError("triton is not installed; install it to measure the host cost of its launches")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="halfstep-host-") as folder:
        stub = _build_stub(Path(folder))
        # A separate cache, since processes with a GPU must not find launchers that were linked with the stub.
        cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache") / "halfstep-host"
        environment = {**os.environ, "TRITON_LIBCUDA_PATH": folder, "TRITON_CACHE_DIR": str(cache)}
        for name in ("TRITON_INTERPRET", "HALFSTEP_BACKEND"):
            environment.pop(name, None)
        arguments = ["--worker", str(stub), "--seconds", str(seconds), "--tensors", *map(str, counts)]
        for job in jobs:
            arguments += ["--job", job]
        command = [sys.executable, "-m", "halfstep.bench.host_cost", *arguments]
        with tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("{"):
                        message = json.loads(line)
                        rows.append(message["row"])
                        progress(len(rows), message["of"])
            if process.returncode:
                errors.seek(0)
                raise RuntimeError(f"the measuring process ended with {process.returncode}: {errors.read()[-4000:]}")
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table: µs, and Triton launches + torch kernels, by number of tensors."""
    counts = sorted({row["tensors"] for row in rows})
    by_case: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault((row["job"], row["provider"]), {})[row["tensors"]] = row
    lines = [
        "| job | provider | " + " | ".join(f"{count:,}" for count in counts) + " |",
        "|---" * (2 + len(counts)) + "|",
    ]
    for (job, provider), cells in sorted(by_case.items()):
        shown = []
        for count in counts:
            cell = cells.get(count)
            if cell is None or cell["problem"]:
                shown.append("failed" if cell else "")
            else:
                shown.append(f"{cell['host_us']:,.0f} µs, {cell['launches']:,} + {cell['torch_kernels']:,}")
        lines.append(f"| {job} | {provider} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------- the command


def _parser() -> Parser:
    parser = Parser("bench host", "Measure the time and launches that a step costs the host, without a GPU.")
    jobs = ("adamw", "amp step", "check", "cast", "softmax")
    parser.add_argument(
        *("--tensors",),
        type=whole(1),
        nargs="+",
        default=TENSOR_COUNTS,
        metavar="N",
        help="numbers of tensors (1 ... 10,000)",
    )
    parser.add_argument(
        *("--job",),
        choices=jobs,
        action="append",
        default=[],
        metavar="JOB",
        help=f"measure only this job, one of {', '.join(jobs)}; may be repeated",
    )
    parser.add_argument("--seconds", type=above_zero, default=0.5, metavar="S", help="time per row")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.worker:
        _worker(options.worker, options.tensors, options.seconds, options.job)
        return 0

    try:
        with Progress(0) as progress:

            def tell(done: int, of: int) -> None:
                progress.total = of
                progress.show(done, "host cost")

            rows = measure(options.tensors, options.seconds, options.job, tell)
    except RuntimeError as error:
        complain("halfstep bench host", str(error))
        return 1
    print(json.dumps({"rows": rows}, indent=2) if options.json else markdown(rows))
    failed = [row for row in rows if row["problem"]]
    for row in failed:
        print(f"{row['provider']} {row['job']} at {row['tensors']:,} tensors: {row['problem']}", file=sys.stderr)
    return 1 if failed else 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench host`` with the arguments `argv`. Returns the exit status."""
    return run(_parser(), argv, _run)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
