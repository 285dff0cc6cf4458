"""The checks and measurements of `halfstep bench gpu`, and the process that runs some of them.

python -m halfstep.bench.gpu_checks FILE QUICK NAME...      # append a line of JSON to FILE after each
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.metadata import packages_distributions
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

import halfstep
from halfstep.bench import gpu_instructions, harness, run, run_report, timing
from halfstep.bench.cases import GROUPS, cases, sizes_for
from halfstep.cli.machine import version_of

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
# The statuses of a check. One that does not end with one of the first three is tried again by the next call.
PASSED, FAILED, LEFT_OUT, UNFINISHED, STOPPED = "passed", "failed", "left out", "unfinished", "stopped"
DONE = (PASSED, FAILED, LEFT_OUT)
LIMIT, TEST_MINUTES = 60.0, 4.0  # seconds of a check, compiling included; minutes of the tests
HEADLINE = 8  # times that come before the tests
COMPILED = ", compiled"  # at the end of the names of times that `torch.compile` compiles for
# How gradients are unscaled and clipped before a step.
WAYS = ("step", "unscale_", "clip_grad_norm_", "write_back")
STEP_SIZES = (1, 15, 1000, 4097, 0, 65_536, 300, 1_000_003)
# Rows of whole and of short blocks of 8-bit moments, several chunks per row and several rows per chunk, and a vector.
SHAPES = ((40, 128), (1001,), (32, 144), (63, 65), (5, 0), (3, 2500), (4096, 1), (9, 2048))

Run = Callable[[torch.device], dict[str, Any] | None]  # carries out a check, and returns what is to be recorded


class Check(NamedTuple):
    """A check, or a measurement.

    Attributes:
        stage: "first", "bits", "headline", "tests" or "times". Those of the bits run side by side.
        limit: seconds until it is stopped.
    """

    run: Run
    stage: str
    limit: float = LIMIT


class LeftOut(Exception):
    """A check that this machine or installation cannot run. The message says why."""


class Unfinished(Exception):
    """A check has not come to its end, and the next call continues it. The message says why."""


def _expect(equal: bool, what: str) -> None:
    if not equal:
        raise AssertionError(what)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the bits are equal, or both are NaN."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    left, right = left.detach().cpu().reshape(-1), right.detach().cpu().reshape(-1)
    same = left.view(integers) == right.view(integers)
    if left.is_floating_point():
        same |= left.float().isnan() & right.float().isnan()
    return left.dtype == right.dtype and bool(same.all())


def different(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of tensors that only one side has, or whose bits differ."""
    shared = [name for name in mine if name in theirs]
    return sorted(mine.keys() ^ theirs.keys()) + [name for name in shared if not _same_bits(mine[name], theirs[name])]


def _expect_reference(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], what: str = "") -> None:
    names = different(mine, theirs)
    _expect(not names, f"{what}the GPU's bits are not the reference's: {names}")


def tensors_of(optimizer: halfstep.AdamW) -> dict[str, torch.Tensor]:
    """The parameters of an optimizer and its states, by names."""
    tensors: dict[str, torch.Tensor] = {}
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        values = {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, torch.Tensor)}
        tensors |= {f"{name} of parameter {index}": value for name, value in {"value": parameter, **values}.items()}
    return tensors


def _normal(shape: Sequence[int], dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device=device, dtype=dtype)


# ------------------------------------------------------------------------------------------------------------- machine


def machine(device: torch.device) -> dict[str, Any]:
    """The environment of the measurements, without the names of the machine and its user, and the copy bandwidth."""
    import numpy

    properties = torch.cuda.get_device_properties(device)
    peers = {name: _version_of(name) for name in ("liger_kernel", "optimi", "flashoptim", "torchao", "apex")}
    return {
        **run_report.environment(device),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "ptxas": _ptxas(),
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "clocks": _output(["nvidia-smi", "--query-gpu=clocks.max.sm,clocks.max.mem", "--format=csv,noheader"]),
        "commit": _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "peers": {name: version for name, version in peers.items() if version},
        "copy_gb_per_s": timing.copy_gb_per_s(timing.clock_for(device), run.COPY_BYTES["cuda"]),
    }


def _version_of(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    return version_of(packages_distributions().get(module, [module])[0]) or "installed"


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _ptxas() -> dict[str, str | None]:
    """The last line of what each ptxas of Triton, or of the system, says of its version."""
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin or "").parent / "backends" / "nvidia" / "bin" if spec else Path()
    paths = sorted(folder.glob("ptxas*")) or [Path(path) for path in [shutil.which("ptxas")] if path]
    return {path.name: (_output([str(path), "--version"]) or "").rpartition("\n")[2] or None for path in paths}


# -------------------------------------------------------------------------------------------------------- instructions


def _on_nvidia(check: Callable[[torch.device, bool], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    if torch.version.hip is not None:
        raise LeftOut("our PTX runs on NVIDIA GPUs only")
    pairings = gpu_instructions.pairings(device)
    return {"f32x2" if paired else "f32": check(device, paired) for paired in pairings}


def _quotients(device: torch.device, paired: bool) -> dict[str, Any]:
    """The quick way, then the other one."""
    gpu_instructions.root_and_quotient(device, paired, moments=1, least=float("inf"))
    return gpu_instructions.root_and_quotient(device, paired)


# ------------------------------------------------------------------------------------------------------------- kernels


def other_kernels(device: torch.device) -> dict[str, Any]:
    """Casts, check, unscale and statistics against the reference, and softmax within its error."""
    from halfstep.kernels.cells import Grid, width
    from halfstep.kernels.statistics import foreach_count_

    bits = torch.randint(-(2**31), 2**31, (100_003,), generator=torch.Generator().manual_seed(0), device="cpu")
    patterns = bits.to(torch.int32).view(torch.float32)
    dtypes = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

    def results(where: torch.device) -> dict[str, torch.Tensor]:
        x = patterns.to(where)
        tensors = {}
        for dtype, rounding in product(dtypes, ("nearest", "toward_zero", "stochastic")):
            name = f"{dtype}, {rounding}"
            options: dict[str, Any] = {"seed": 7} if rounding == "stochastic" else {}
            tensors[f"cast to {name}"] = halfstep.foreach_cast([x], dtype, rounding=rounding, **options)[0]
            tensors[f"cast from {name}"] = halfstep.foreach_cast([tensors[f"cast to {name}"]], torch.float32)[0]
        tensors["statistics"] = torch.zeros(1, width(True), dtype=torch.int64, device=where)
        foreach_count_([x], tensors["statistics"], Grid(dropped=20, emin=-6, emax=8, overflow=7 << 20))
        sizes_and_dtypes = product(STEP_SIZES, (torch.bfloat16, torch.float32))
        grads = [_normal((size,), dtype, size, where) for size, dtype in sizes_and_dtypes]
        tensors |= dict(halfstep.foreach_check(grads, 0.125)._asdict())
        tensors["found_inf after unscaling"], tensors["norm"] = halfstep.foreach_unscale_(grads, 0.125)
        return tensors | {f"unscaled {index}": grad for index, grad in enumerate(grads)}

    with halfstep.backend("triton" if device.type == "cuda" else "auto"):  # the default is torch's cast
        mine = results(device)
        x = _normal((7, 40_003), torch.float32, 0, device)
        torch.testing.assert_close(halfstep.softmax(x), x.softmax(-1), rtol=1e-5, atol=1e-7)
    with halfstep.backend("reference"):
        theirs = results(CPU)
    _expect_reference(mine, theirs)
    return {"compared": len(theirs)}


MASTERS: tuple[tuple[torch.dtype, str | None], ...] = (
    (torch.float32, "auto"),
    (torch.bfloat16, "split"),
    (torch.bfloat16, "split24"),
    (torch.bfloat16, "full"),
    (torch.bfloat16, None),
    (torch.float16, "full"),
    (torch.float16, None),
)
# Dtype of the moments, rounding, and whether the largest second moments are kept.
STATES: tuple[tuple[Any, str, bool], ...] = (
    (torch.float32, "nearest", False),
    (torch.bfloat16, "nearest", True),
    (torch.bfloat16, "stochastic", False),
    ("8bit", "nearest", True),
    ("8bit", "stochastic", False),
)


def layouts(master: str | None) -> list[dict[str, Any]]:
    """Options of the optimizer: every state with these masters."""
    states = [*STATES, (torch.float32, "stochastic", False)] if master in (None, "split24") else STATES
    return [
        {"master_weights": master, "state_dtype": state, "rounding": rounding, "amsgrad": amsgrad}
        for state, rounding, amsgrad in states
    ]


def _trained(device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Parameters and states after three steps, of which one has Infs and NaNs."""
    parameters = [torch.nn.Parameter(_normal(shape, dtype, index, device)) for index, shape in enumerate(SHAPES)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "group 0 rounds moments of 8 bits to nearest")
        seed: dict[str, Any] = {"seed": 5} if options["rounding"] == "stochastic" else {}
        optimizer = halfstep.AdamW(parameters, lr=1e-2, weight_decay=0.1, **options, **seed)
    for step in range(3):
        for index, parameter in enumerate(parameters):
            # On the CPU, whose exponential has other bits than a GPU's.
            spread = torch.exp2(-8 * _normal(parameter.shape, torch.float32, 50 + index, CPU).abs())
            grad = _normal(parameter.shape, torch.float32, 100 * step + index, CPU) * spread
            parameter.grad = grad.to(dtype).to(device)
        if step == 1:
            parameters[3].grad[2, 3], parameters[5].grad[1, 300] = torch.inf, torch.nan  # type: ignore[index]
        optimizer.step()
    return tensors_of(optimizer)


def adam(dtype: torch.dtype, master: str | None, device: torch.device) -> dict[str, Any]:
    """Steps of every layout with these masters, against the reference."""
    wrong = []
    for options in layouts(master):
        mine = _trained(device, dtype, options)
        with halfstep.backend("reference"):
            if names := different(mine, _trained(CPU, dtype, options)):
                wrong.append(f"{options}: {names}")
    _expect(not wrong, f"the GPU's bits are not the reference's: {wrong}")
    return {"layouts": len(layouts(master))}


# ----------------------------------------------------------------------------------------------------------- AMP steps


class Training:
    """Mixed parameters under AMP with clipping, and gradients for several steps with overflows among them.

    `way`, one of `WAYS`, is how gradients are unscaled and clipped.
    """

    def __init__(self, device: torch.device, way: str = "step", steps: int = 6) -> None:
        self.device, self.way = device, way
        tensors = list(product(STEP_SIZES, (torch.bfloat16, torch.float16, torch.float32)))
        values = [
            [_normal((size,), dtype, 100 * step + index, device) for index, (size, dtype) in enumerate(tensors)]
            for step in range(steps + 1)
        ]
        self.parameters, self.gradients = list(map(torch.nn.Parameter, values[0])), values[1:]
        self.gradients[1][0][0] = torch.inf
        self.gradients[3][6][-1] = torch.nan
        self.optimizer = halfstep.AdamW(self.parameters, lr=1e-2, max_grad_norm=1.0)
        self.scaler = halfstep.GradScaler(
            device.type, init_scale=1024.0, growth_interval=2, write_back=way == "write_back"
        )
        self.scaler.scale(torch.zeros((), dtype=torch.float32, device=device))
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        for _ in range(3):
            self.step()

    def step(self) -> None:
        """A step with the present gradients."""
        if self.way == "unscale_":
            self.scaler.unscale_(self.optimizer)
        elif self.way == "clip_grad_norm_":
            self.scaler.clip_grad_norm_(self.optimizer, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def give(self, index: int) -> None:
        """Assign the gradients of a step, in new memory, as after ``zero_grad(set_to_none=True)``."""
        for parameter, gradient in zip(self.parameters, self.gradients[index], strict=True):
            parameter.grad = gradient.clone()

    @torch.no_grad()
    def load(self, index: int) -> None:
        """Copy the gradients of a step into the present gradients."""
        for parameter, gradient in zip(self.parameters, self.gradients[index], strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)

    def captured(self) -> Callable[[int], None]:
        """A step as a CUDA graph. The result replays it with the gradients of a step."""
        torch.cuda.synchronize()
        static = [torch.zeros_like(parameter) for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, static, strict=True):
            parameter.grad = gradient
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), _refusing_waits(self.device):
            self.step()

        def replay(index: int) -> None:
            for read, gradient in zip(static, self.gradients[index], strict=True):
                read.copy_(gradient)
            graph.replay()

        return replay

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors, and the scale."""
        return tensors_of(self.optimizer) | {"scale": torch.tensor(self.scaler.get_scale())}

    def expect_reference(self) -> None:
        """Check that all steps were taken, with the bits of the reference."""
        with halfstep.backend("reference"):
            reference = Training(CPU, self.way)
            for index in range(len(reference.gradients)):
                reference.load(index)
                reference.step()
        _expect_reference(self.state(), reference.state(), f"{self.way}: ")


@contextmanager
def _refusing_waits(device: torch.device) -> Iterator[None]:
    """Make every synchronization with the GPU an error."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def eager(device: torch.device, ways: Sequence[str] = ("step",), moved: bool = False) -> None:
    """Eager steps, none of which waits; with `moved`, every other step has its gradients in new memory."""
    for way in ways:
        training = Training(device, way)
        torch.cuda.synchronize()
        with _refusing_waits(device):
            for index in range(len(training.gradients)):
                (training.give if moved and index % 2 == 0 else training.load)(index)
                training.step()
        training.expect_reference()


def captured(device: torch.device) -> None:
    """Replays of a CUDA graph; then eager steps before and after replays, and after a capture that is not replayed."""
    for actions in (["replay"] * 6, ["step", "replay", "step", "capture", "step", "replay", "step"]):
        training, unused = Training(device), []
        replay, index = training.captured(), 0
        for action in actions:
            if action == "capture":
                group = training.optimizer.param_groups[0]
                usual, group["lr"] = group["lr"], 1.0
                unused.append(training.captured())
                group["lr"] = usual
                continue
            with _refusing_waits(device):
                if action == "replay":
                    replay(index)
                else:
                    training.give(index)
                    training.step()
            index += 1
        torch.cuda.synchronize()
        training.expect_reference()


def two_streams(device: torch.device) -> None:
    """Steps alternately on two streams, and concurrent checks of tensors of the same sizes on a third stream."""
    training = Training(device)
    others = [torch.ones_like(parameter) for parameter in training.parameters]
    expected = float(sum(other.numel() for other in others))
    *streams, aside = (torch.cuda.Stream(device) for _ in range(3))
    torch.cuda.synchronize()
    sums = []
    try:
        with _refusing_waits(device):
            for index in range(len(training.gradients)):
                here, before = streams[index % 2], streams[1 - index % 2]
                here.wait_stream(before)
                with torch.cuda.stream(here):
                    training.give(index)
                    training.step()
                with torch.cuda.stream(aside):
                    sums.append(halfstep.foreach_check(others).sum_of_squares)
    finally:
        torch.cuda.synchronize()  # before memory that other streams use is freed
    _expect([value.item() for value in sums] == [expected] * len(sums), "checks on another stream")
    training.expect_reference()


# --------------------------------------------------------------------------------------------------- tests and timings


def gpu_tests(folder: Path, device: torch.device) -> dict[str, Any]:
    """The tests marked gpu, of a checkout. What a call leaves to do, the next one does."""
    program = ROOT / "tests" / "support" / "run_gpu_tests.py"
    if importlib.util.find_spec("pytest") is None:
        raise LeftOut("pytest is not installed")
    if not program.exists():
        raise LeftOut("this is no checkout: there are no tests")
    folder = folder / f"tests-{fingerprint()}"
    subprocess.run([sys.executable, str(program), "--out", str(folder), "--minutes", str(TEST_MINUTES)])
    report = json.loads((folder / "tests.json").read_text())
    detail = {"counts": report["counts"], "collected": report["collected"], "failed": report["failed"]}
    failed = [test["test"] for test in report["failed"] if test["outcome"] == "failed"]
    _expect(not failed, f"failed: {failed}; {folder / 'tests.txt'} has their messages")
    if report["not_run"] or report["failed"]:
        raise Unfinished(f"{report['counts']}, {report['not_run']} not run")
    return detail


def _measured(case: harness.Case, device: torch.device) -> dict[str, Any]:
    results = harness.measure(case, device, seconds=run.SECONDS[False], clock=timing.clock_for(device))
    return {"results": [asdict(result) for result in results]}


def _compile(group: str, quick: bool, device: torch.device) -> None:
    """Do every job of a group once, so that the process that measures finds the kernels in Triton's cache."""
    for name, case in timings(quick).items():
        if case.group == group and not name.endswith(COMPILED):
            inputs = case.prepare(device)
            for provider in case.providers:
                harness.check(case, inputs, provider)


def compiles(provider: str) -> bool:
    """Whether ``torch.compile`` has to compile a provider."""
    return provider == "torch.compile" or provider.startswith("torchao")


def timings(quick: bool) -> dict[str, harness.Case]:
    """The cases of ``halfstep bench run`` by name, the largest of each operation first; last, what compiles."""
    every = cases(("adam", "step", "unscale", "softmax", "cast"), sizes_for("cuda", quick))
    every = [every[index] for index in run.largest_first(every)]
    plain, compiled = {}, {}
    for case in every:
        slow = {name for name in case.providers if compiles(name)}
        plain[f"time of {case.name}"] = _with_providers(case, case.providers.keys() - slow)
        if slow:
            ours = {name for name in case.providers if harness.ours(name)}
            compiled[f"time of {case.name}{COMPILED}"] = _with_providers(case, slow | ours)
    return plain | compiled


def _with_providers(case: harness.Case, names: set[str]) -> harness.Case:
    return replace(case, providers={name: make for name, make in case.providers.items() if name in names})


# ----------------------------------------------------------------------------------------------------------- a process


def checks(folder: Path, quick: bool) -> dict[str, Check]:
    """All checks by name, in their order."""
    bits: dict[str, Run] = {
        "NaN patterns": partial(_on_nvidia, gpu_instructions.nan_patterns),
        "root and quotient": partial(_on_nvidia, _quotients),
        **{
            f"bits of Adam, {str(dtype).removeprefix('torch.')}, master {master}": partial(adam, dtype, master)
            for dtype, master in MASTERS
        },
        "bits of other kernels": other_kernels,
        "AMP steps": eager,
        "AMP steps, gradients moved": partial(eager, ways=WAYS, moved=True),
        "AMP steps, captured": captured,
        "AMP steps on two streams": two_streams,
        **{f"kernels for the times of {group}": partial(_compile, group, quick) for group in GROUPS},
    }
    times = [(name, partial(_measured, case)) for name, case in timings(quick).items()]
    return {
        "machine": Check(machine, "first"),
        **{name: Check(run, "bits") for name, run in bits.items()},
        **{name: Check(run, "headline") for name, run in times[:HEADLINE]},
        "tests marked gpu": Check(partial(gpu_tests, folder), "tests", 60 * TEST_MINUTES + 30),
        **{name: Check(run, "times") for name, run in times[HEADLINE:]},
    }


@cache
def fingerprint() -> str:
    """Of the code and the versions that results belong to."""
    digest = hashlib.sha256(f"{torch.__version__} {version_of('triton')}".encode())
    for room in ("kernels", "numerics", "integrations", "bench"):
        for file in sorted((ROOT / room).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def append(file: Path, record: dict[str, Any]) -> None:
    """Append a line of JSON, which is on the disk when this returns."""
    before = file.read_bytes() if file.exists() else b""
    with open(file, "ab") as output:
        if before and not before.endswith(b"\n"):  # a process was killed while it wrote
            output.write(b"\n")
        output.write(json.dumps({**record, "code": fingerprint()}).encode() + b"\n")
        output.flush()
        os.fsync(output.fileno())


def records(file: Path, offset: int = 0) -> dict[str, dict[str, Any]]:
    """The last record of each check of the present code, of those from a byte of the file on."""
    last: dict[str, dict[str, Any]] = {}
    for line in file.read_bytes()[offset:].splitlines() if file.exists() else []:
        with suppress(ValueError):  # a line can be cut off
            record = json.loads(line)
            if record["code"] == fingerprint():
                last[record["check"]] = record
    return last


def main(argv: Sequence[str], device: torch.device | None = None) -> None:
    """Run the checks and measurements of some names, and append the outcome of each to a file."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: no check goes on when the command was killed
    file, quick, *names = argv
    device = device or torch.device("cuda", torch.cuda.current_device())
    table = checks(Path(file).parent, bool(int(quick)))
    for name in names:
        print(f"{name} ...", flush=True)
        start = time.monotonic()
        record: dict[str, Any] = {"check": name, "status": PASSED}
        try:
            record["detail"] = table[name].run(device)
        except (LeftOut, Unfinished) as error:
            record |= {"status": LEFT_OUT if isinstance(error, LeftOut) else UNFINISHED, "error": str(error)}
        except Exception:
            record |= {"status": FAILED, "error": traceback.format_exc()}
        record["seconds"] = round(time.monotonic() - start, 2)
        append(Path(file), record)
        print(f"{name}: {record['status']}, {record['seconds']:.1f} s", flush=True)
        if "error" in record:
            print(record["error"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
