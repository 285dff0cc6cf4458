"""``halfstep bench gpu --out DIR``: everything that needs a GPU, in one command and within its time.

In this order, each part in a process of its own with a limit of its own, so that none can hang or spoil another:

1. `smoke`: compile one kernel of each family and compare a few numbers with torch's.
2. `steps`: whole AMP steps (check, norm, clip, update, scale), overflows among them: eager, with gradients unscaled in
   place, captured as CUDA graphs and replayed between eager steps, on two streams. All of it under
   ``torch.cuda.set_sync_debug_mode("error")`` and compared bit for bit.
3. `tests`: the tests marked ``gpu``, in several processes; one that hangs or breaks the GPU's context is ended, and the
   others go on.
4. `benchmark`: the cases of ``halfstep bench run``, with CUDA graphs and a cold L2, in the time that is left; the
   largest sizes come first, so that what there is no time for are the small ones.

DIR gets at most eight files: ``results.json`` (what passed, what failed, why), ``environment.json``, ``tests.txt``,
``log.txt`` (all output), and from the benchmark ``benchmark.json``, ``table.md`` and two pictures. Needs torch, triton
and numpy; without pytest, matplotlib or rich it does less and says so. Exit status: 0 if every part passed, 1 if not, 2
without a GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from halfstep.cli import command_line
from halfstep.cli.command_line import Parser, UsageError, make_folder, number

ROOT = Path(__file__).resolve().parents[1]
TEST_SECONDS = 60  # for one test, compiling included
CASE_SECONDS = 0.5  # of timing
# What is measured by one process, and its share of the time that is left when its turn comes.
BENCHMARKS = (("step,adam", 0.45), ("softmax", 0.55), ("cast,unscale", 1.0))
# How gradients are unscaled and clipped before a step.
WAYS = ("step", "unscale_", "clip_grad_norm_", "write_back")
STEP_SIZES = (1, 15, 1000, 4097, 0, 65_536, 300, 1_000_003)


# ----------------------------------------------------------------------------------------------------------- the parts


def environment() -> dict[str, Any]:
    """What the figures were measured on; nothing that names the machine or its user."""
    import numpy

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "numpy": numpy.__version__,
        "devices": [],
    }
    for name in ("triton", "liger_kernel", "optimi", "flashoptim", "torchao", "apex", "transformer_engine"):
        found[name] = _version_of(name)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found["devices"].append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
                "l2_bytes": getattr(properties, "L2_cache_size", None),
            }
        )
    found["driver"] = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    found["clocks"] = _output(["nvidia-smi", "--query-gpu=clocks.max.sm,clocks.max.mem", "--format=csv,noheader"])
    found["commit"] = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    return found


def _version_of(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    try:
        return version(packages_distributions().get(module, [module])[0])
    except PackageNotFoundError:
        return "installed"


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _checks(checks: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """Run named checks, all of them whatever fails; raise at the end if one did."""
    done: dict[str, Any] = {}
    failures = []
    for name, check in checks.items():
        start = time.monotonic()
        try:
            check()
            done[name] = {"status": "passed"}
        except Exception:
            done[name] = {"status": "failed", "error": traceback.format_exc()}
            failures.append(name)
            print(f"{name} failed\n{traceback.format_exc()}", flush=True)
        done[name]["seconds"] = round(time.monotonic() - start, 2)
    done["failed"] = failures
    return done


def _expect(equal: bool, what: str) -> None:
    if not equal:
        raise AssertionError(what)


def smoke(device: torch.device) -> dict[str, Any]:
    """One kernel of each family, against torch."""
    import halfstep

    x = torch.linspace(-3.0, 3.0, 1001, dtype=torch.float32, device=device)

    def cast() -> None:
        with halfstep.backend("triton"):  # left to choose, it is torch's
            _expect(torch.equal(halfstep.cast(x, torch.bfloat16), x.bfloat16()), "cast to bf16 is not torch's")

    def check() -> None:
        found = halfstep.foreach_check([x, x.half()])
        _expect(found.found_inf.item() == 0 and found.flags.tolist() == [0, 0], "found an Inf where there is none")
        squares = x.double().square().sum() + x.half().double().square().sum()
        _expect(abs(found.sum_of_squares.item() / squares.item() - 1) < 1e-6, "sum of squares")

    def softmax() -> None:
        y = halfstep.softmax(x.view(7, 143))
        torch.testing.assert_close(y, x.view(7, 143).softmax(-1), rtol=1e-5, atol=1e-7)

    def adam() -> None:
        def stepped(where: torch.device, backend: str) -> torch.Tensor:
            with halfstep.backend(backend):
                parameter = torch.nn.Parameter(x.to(where).bfloat16())
                parameter.grad = x.to(where).bfloat16().neg()
                halfstep.AdamW([parameter]).step()
            return parameter.detach().cpu()

        mine = stepped(device, "triton")
        _expect(torch.equal(mine, stepped(torch.device("cpu"), "reference")), "AdamW is not the reference's")

    return _checks({"cast": cast, "check": check, "softmax": softmax, "adam": adam})


class _Training:
    """Mixed parameters under AMP with clipping, and gradients for several steps with overflows among them."""

    def __init__(self, device: torch.device, steps: int = 6, way: str = "step") -> None:
        """`way` is one of `WAYS`."""
        import halfstep

        self.way = way

        generator = torch.Generator().manual_seed(0)

        def normal(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(
                device=device, dtype=dtype
            )

        kinds = [(size, dtype) for size in STEP_SIZES for dtype in (torch.bfloat16, torch.float16, torch.float32)]
        self.parameters = [torch.nn.Parameter(normal(size, dtype)) for size, dtype in kinds]
        self.gradients = [[normal(size, dtype) for size, dtype in kinds] for _ in range(steps)]
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
        if self.way == "unscale_":
            self.scaler.unscale_(self.optimizer)
        elif self.way == "clip_grad_norm_":
            self.scaler.clip_grad_norm_(self.optimizer, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def give(self, index: int) -> None:
        """One step's gradients in fresh memory, as after ``zero_grad(set_to_none=True)``."""
        for parameter, gradient in zip(self.parameters, self.gradients[index], strict=True):
            parameter.grad = gradient.clone()

    def captured(self) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        """A step as a graph, and the gradients that it reads."""
        static = [torch.zeros_like(parameter) for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, static, strict=True):
            parameter.grad = gradient
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), _refusing_waits(self.parameters[0].device):
            self.step()
        return graph, static

    def replay(self, graph: torch.cuda.CUDAGraph, static: list[torch.Tensor], index: int) -> None:
        """One step's gradients, copied to where a graph reads them, and its replay."""
        for place, gradient in zip(static, self.gradients[index], strict=True):
            place.copy_(gradient)
        graph.replay()

    @torch.no_grad()
    def load(self, index: int) -> None:
        """Copy one step's gradients into place."""
        for parameter, gradient in zip(self.parameters, self.gradients[index], strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)

    def differences(self, other: _Training) -> list[str]:
        """Where two trainings differ in any bit."""
        found = []
        for index, (mine, theirs) in enumerate(zip(self.parameters, other.parameters, strict=True)):
            if not _same_bits(mine.detach(), theirs.detach()):
                found.append(f"parameter {index} ({mine.dtype}, {mine.numel()} elements)")
        left, right = self.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
        for index, state in left.items():
            found += [
                f"{key} of parameter {index}"
                for key, value in state.items()
                if not _same_bits(value, right[index][key])
            ]
        if self.scaler.get_scale() != other.scaler.get_scale():
            found.append(f"scale {self.scaler.get_scale()} and {other.scaler.get_scale()}")
        return found


@contextmanager
def _refusing_waits(device: torch.device) -> Iterator[None]:
    """Whatever has the host wait for the GPU is an error."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    return torch.equal(left.cpu().reshape(-1).view(integers), right.cpu().reshape(-1).view(integers))


def steps(device: torch.device) -> dict[str, Any]:
    """Whole AMP steps: none waits, and a captured one replays the bits of eager ones and of the reference."""
    import halfstep

    kept: dict[str, _Training] = {}

    def eager() -> None:
        kept["eager"] = training = _Training(device)
        for index in range(len(training.gradients)):
            training.load(index)
            training.step()

    def against_the_reference() -> None:
        with halfstep.backend("reference"):
            training = _Training(torch.device("cpu"))
            for index in range(len(training.gradients)):
                training.load(index)
                training.step()
        different = kept["eager"].differences(training)
        _expect(not different, f"the GPU's bits are not the reference's: {different}")

    def expect_eager_bits(training: _Training, what: str) -> None:
        different = kept["eager"].differences(training)
        _expect(not different, f"{what} differ from eager steps: {different}")

    def no_waiting() -> None:
        training = _Training(device)
        torch.cuda.synchronize()
        with _refusing_waits(device):
            for index in range(len(training.gradients)):
                (training.load if index % 2 else training.give)(index)
                training.step()
        expect_eager_bits(training, "steps with moving gradients")

    def no_way_waits() -> None:
        for way in WAYS:
            training = _Training(device, way=way)
            torch.cuda.synchronize()
            with _refusing_waits(device):
                for index in range(len(training.gradients)):
                    training.give(index)
                    training.step()
            with halfstep.backend("reference"):
                other = _Training(torch.device("cpu"), way=way)
                for index in range(len(other.gradients)):
                    other.give(index)
                    other.step()
            different = training.differences(other)
            _expect(not different, f"{way}: the GPU's bits are not the reference's: {different}")

    def graph() -> None:
        training = _Training(device)
        torch.cuda.synchronize()
        captured = training.captured()
        with _refusing_waits(device):
            for index in range(len(training.gradients)):
                training.replay(*captured, index)
        torch.cuda.synchronize()
        expect_eager_bits(training, "replayed steps")

    def graphs_between() -> None:
        """Eager steps before, between and after captures and replays, with another lr at the second capture."""
        training = _Training(device)
        torch.cuda.synchronize()
        group = training.optimizer.param_groups[0]
        first = training.captured()
        with _refusing_waits(device):
            training.give(0)
            training.step()
            training.replay(*first, 1)
            training.give(2)
            training.step()
        usual, group["lr"] = group["lr"], 1.0
        second = training.captured()  # and never replayed
        group["lr"] = usual
        with _refusing_waits(device):
            training.give(3)
            training.step()
            training.replay(*first, 4)
            training.give(5)
            training.step()
        torch.cuda.synchronize()
        expect_eager_bits(training, "eager and replayed steps in turn")
        del second

    def two_streams() -> None:
        """Steps on two streams in turn, and checks of other tensors of the same sizes on a third at any time."""
        training = _Training(device)
        others = [torch.ones_like(parameter) for parameter in training.parameters]
        expected = float(sum(one.numel() for one in others))
        streams, aside = [torch.cuda.Stream(device), torch.cuda.Stream(device)], torch.cuda.Stream(device)
        torch.cuda.synchronize()
        found = []
        try:
            with _refusing_waits(device):
                for index in range(len(training.gradients)):
                    here, before = streams[index % 2], streams[1 - index % 2]
                    here.wait_stream(before)
                    with torch.cuda.stream(here):
                        training.give(index)
                        training.step()
                    with torch.cuda.stream(aside):
                        found.append(halfstep.foreach_check(others).sum_of_squares)
        finally:
            torch.cuda.synchronize()  # before memory that other streams use is freed
        _expect([one.item() for one in found] == [expected] * len(found), "checks on another stream")
        expect_eager_bits(training, "steps on two streams")

    checks: dict[str, Callable[[], object]] = {
        "eager steps": eager,
        "same bits as the reference": against_the_reference,
    }
    if device.type == "cuda":
        checks |= {
            "no step waits for the device": no_waiting,
            "no way of unscaling and clipping waits": no_way_waits,
            "CUDA graph replays the same bits": graph,
            "CUDA graphs between eager steps": graphs_between,
            "steps on two streams": two_streams,
        }
    return _checks(checks)


def run_tests(seconds: float, folder: Path, tests: Path, processes: int, marker: str = "gpu") -> dict[str, Any]:
    """Run the tests marked `marker` in files ``test_gpu.py``, whatever hangs or breaks, for at most `seconds`.

    Args:
        seconds: for all of them.
        folder: for the records.
        tests: the folder that holds them.
        processes: how many run at once, each its share.
        marker: what pytest's ``-m`` selects.

    Returns:
        ``counts`` by outcome, ``failed`` (list of test, outcome, message) and ``failed`` is empty if all is well.
    """
    from halfstep.bench import watchdog

    files = sorted(map(str, tests.rglob("test_gpu.py")))
    if not files:
        return {"skipped": f"no tests in this installation: they are in the repository, under {tests.name}/"}
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed: the tests were not run"}
    end = time.monotonic() + seconds
    command = [sys.executable, "-m", "pytest", "-p", "halfstep.bench.watchdog", "-p", "no:cacheprovider", "-q"]
    command += ["-m", marker, "--tb=short", *files]
    records = [folder / f"tests-{share}.jsonl" for share in range(processes)]
    running: dict[int, subprocess.Popen[bytes]] = {}
    turns: dict[int, int] = {}
    ended: list[int] = []

    def start(share: int) -> None:
        settings = {"RECORD": str(records[share]), "LIMIT": str(TEST_SECONDS), "SHARE": f"{share}/{processes}"}
        variables = {**_variables(), **{watchdog.PREFIX + name: value for name, value in settings.items()}}
        turns[share] = len(watchdog.entries(records[share]))
        running[share] = subprocess.Popen(command, env=variables, cwd=tests.parent)

    for share in range(processes):
        start(share)
    while running:
        time.sleep(0.2)
        for share, process in list(running.items()):
            status = process.poll()
            if status is None and time.monotonic() > end:
                process.kill()
                process.wait()
                ended.append(share)
                del running[share]
            elif status is not None:
                del running[share]
                begun = [
                    entry for entry in watchdog.entries(records[share])[turns[share] :] if entry["event"] == "start"
                ]
                # Ended in the middle of a test: the others get their turn in a fresh process.
                if status not in (0, 1, 2, 3, 4, 5) or (status == 1 and _unfinished(records[share])):
                    if begun and time.monotonic() < end:
                        start(share)
    return _outcomes(records, ended)


def _unfinished(record: Path) -> set[str]:
    from halfstep.bench import watchdog

    entries = watchdog.entries(record)
    over = {entry["test"] for entry in entries if entry["event"] == "end"}
    return {entry["test"] for entry in entries if entry["event"] == "start"} - over


def _outcomes(records: Sequence[Path], ended: Sequence[int]) -> dict[str, Any]:
    """Counts and failures from the records of all processes."""
    from halfstep.bench import watchdog

    outcome: dict[str, dict[str, Any]] = {}
    collected = 0
    for share, record in enumerate(records):
        entries = watchdog.entries(record)
        collected += next((entry["tests"] for entry in entries if entry["event"] == "collected"), 0)
        for entry in entries:
            if entry["event"] == "start":
                reason = "the time for all tests was over" if share in ended else "it hung or ended the process"
                outcome[entry["test"]] = {"outcome": "unfinished", "seconds": 0.0, "message": reason}
            elif entry["event"] == "end":
                known = outcome.get(entry["test"], {})
                if known.get("outcome") != "failed":  # a failing teardown must not hide behind a passing call
                    outcome[entry["test"]] = {key: entry[key] for key in ("outcome", "seconds", "message")}
            elif entry["event"] == "lost":
                outcome[entry["test"]]["message"] += f"\nThe GPU's context was lost: {entry['message']}"
    counts: dict[str, int] = {}
    for entry in outcome.values():
        counts[entry["outcome"]] = counts.get(entry["outcome"], 0) + 1
    failed = [
        {"test": test, **entry} for test, entry in outcome.items() if entry["outcome"] in ("failed", "unfinished")
    ]
    not_run = collected - len(outcome)
    result: dict[str, Any] = {"counts": counts, "collected": collected, "not_run": not_run, "failed": failed}
    result["tests"] = {test: [entry["outcome"], entry["seconds"]] for test, entry in outcome.items()}
    if collected == 0:
        result["failed"] = [{"test": "", "outcome": "failed", "message": "no test was collected: see log.txt"}]
    elif not_run:
        message = f"{not_run} tests were not run: out of time, or their process could not go on"
        result["failed"].append({"test": "", "outcome": "not run", "message": message})
    return result


def _largest_first(cases: Sequence[Any]) -> list[int]:
    """The order in which to measure: the largest case of each operation and dtype, then the next one of each ..."""
    lines: dict[tuple[str, str], list[int]] = {}
    for index, case in enumerate(cases):
        lines.setdefault((case.operation, case.dtype), []).insert(0, index)
    turns = zip_longest(*lines.values())
    return [index for turn in turns for index in turn if index is not None]


def benchmark(device: torch.device, groups: Sequence[str], seconds: float, file: Path, quick: bool) -> dict[str, Any]:
    """Measure cases until `seconds` are over, writing `file` after each, so that nothing is lost if it is ended."""
    from halfstep.bench import report
    from halfstep.bench.cases.catalogue import cases
    from halfstep.bench.cases.grid import grid_for
    from halfstep.bench.harness import FAILED, WRONG, clock_for, copy_gb_per_s, measure, ours

    end = time.monotonic() + seconds
    clock = clock_for(device)
    every = cases(groups, grid_for(device, quick))
    about = {**report.environment(device), "quick": quick, "left_out": len(every)}
    about["copy_gb_per_s"] = copy_gb_per_s(clock, 2**31 if device.type == "cuda" else 2**26)
    results: dict[int, list[Any]] = {}
    for index in _largest_first(every):
        if time.monotonic() > end:
            break
        print(f"{max(0.0, end - time.monotonic()):5.0f} s left: {every[index].name}", flush=True)
        results[index] = measure(every[index], device, seconds=CASE_SECONDS, clock=clock)
        about["left_out"] -= 1
        report.write_json(file, about, [result for _, found in sorted(results.items()) for result in found])
    bad = [
        f"{result.operation}, {result.dtype}, {result.size}: {result.provider} {result.status}: {result.reason}"
        for found in results.values()
        for result in found
        if ours(result.provider) and result.status in (WRONG, FAILED)
    ]
    return {"cases": len(results), "left_out": about["left_out"], "failed": bad}


def draw_report(folder: Path, out: Path) -> dict[str, Any]:
    """Join what the benchmark's processes wrote: ``benchmark.json``, ``table.md`` and, with matplotlib, pictures."""
    from halfstep.bench import report
    from halfstep.bench.harness import Result

    written = [json.loads(file.read_text()) for file in sorted(folder.glob("benchmark-*.json"))]
    if not written:
        raise RuntimeError("the benchmark measured nothing: see log.txt")
    results = [Result(**row) for one in written for row in one.pop("results")]
    about = {**written[0], "left_out": sum(one["left_out"] for one in written)}
    report.write_json(out / "benchmark.json", about, results)
    (out / "table.md").write_text(report.markdown(about, results))
    try:
        drawn = report.draw(out, about, results)
    except ImportError as error:
        return {"pictures": f"none: {error}"}
    return {"pictures": [path.name for path in drawn]}


# ------------------------------------------------------------------------------------------------ parts as processes


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, with its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _variables() -> dict[str, str]:
    """The environment of a part. Where the package is not installed, this process found it on the path it was given."""
    import halfstep

    path = os.pathsep.join([str(Path(halfstep.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}


def run_part(command: Sequence[str], limit: float, log: Path) -> tuple[int | None, float]:
    """Run a command for at most `limit` seconds with its output appended to `log`.

    Returns:
        (exit status, or None if it was ended at its limit; seconds).
    """
    start = time.monotonic()
    with open(log, "ab") as output:
        output.write(f"\n===== {' '.join(command[1:])} (at most {limit:.0f} s)\n".encode())
        output.flush()
        process = subprocess.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, env=_variables(), start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout=max(1.0, limit))
        except subprocess.TimeoutExpired:
            _kill(process)
            status = None
        except BaseException:
            _kill(process)
            raise
    return status, time.monotonic() - start


def _stage(name: str, folder: Path, seconds: float, argument: str) -> int:
    """What a part does inside its own process: write ``NAME.json`` and return the exit status."""
    cuda = torch.device("cuda", torch.cuda.current_device())
    # If the GPU hangs, the log shows where, before the parent ends this process.
    faulthandler.dump_traceback_later(max(1.0, seconds - 3.0), exit=False)
    try:
        if name == "environment":
            result = environment()
        elif name == "tests":
            processes = max(1, min(4, (os.cpu_count() or 1) // 2))
            result = run_tests(seconds - 5.0, folder, ROOT / "tests", processes)
        elif name == "benchmark":
            file = folder / f"benchmark-{argument.replace(',', '-')}.json"
            result = benchmark(cuda, argument.split(","), 0.9 * seconds - 20.0, file, quick=False)
        elif name == "report":
            result = draw_report(folder, Path(argument))
        else:
            result = {"smoke": smoke, "steps": steps}[name](cuda)
    except Exception:
        result = {"failed": ["exception"], "error": traceback.format_exc()}
        print(result["error"], flush=True)
    (folder / f"{name}.json").write_text(json.dumps(result))
    return 1 if result.get("failed") else 0


def _part(name: str, limit: float, scratch: Path, log: Path, argument: str = "") -> dict[str, Any]:
    """Run one of this module's parts in its own process and say how it went."""
    command = [sys.executable, "-m", "halfstep", "bench", "gpu", "--stage", name, "--argument", argument]
    command += ["--out", str(scratch), "--minutes", f"{limit / 60:.4f}"]
    written = scratch / f"{name}.json"
    written.unlink(missing_ok=True)
    status, seconds = run_part(command, limit, log)
    detail = json.loads(written.read_text()) if written.exists() else {}
    return _verdict(f"{name} {argument}" if name == "benchmark" else name, status, seconds, limit, detail, log)


def _verdict(
    name: str, status: int | None, seconds: float, limit: float, detail: dict[str, Any], log: Path
) -> dict[str, Any]:
    part: dict[str, Any] = {"part": name, "status": "passed", "seconds": round(seconds, 1), "limit_s": round(limit, 1)}
    if status != 0:
        part["status"] = "failed"
        part["why"] = "it was ended at its time limit" if status is None else f"exit status {status}"
        part["output_tail"] = log.read_text(errors="replace")[-4000:]
    elif "skipped" in detail:
        part["status"] = "skipped"
        part["why"] = detail["skipped"]
    part["detail"] = detail
    return part


def _tests_text(detail: dict[str, Any]) -> str:
    """The outcome of every test, failures with their messages first."""
    if "tests" not in detail:
        return str(detail.get("skipped") or detail.get("error") or "the tests did not end: see log.txt") + "\n"
    lines = [", ".join(f"{count} {outcome}" for outcome, count in sorted(detail["counts"].items()))]
    for failure in detail["failed"]:
        lines += ["", f"{failure['outcome'].upper()} {failure['test']}".rstrip(), failure["message"]]
    lines += ["", *(f"{outcome:10} {seconds:8.2f} s  {test}" for test, (outcome, seconds) in detail["tests"].items())]
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------------------- the command


def _parser() -> Parser:
    parser = Parser("bench gpu", "Test and measure, in minutes, everything that needs a GPU.")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the results, at most eight files"
    )
    minutes = number(float, lambda value: 0 < value <= 600, "numbers of minutes above 0, up to 600")
    parser.add_argument("--minutes", type=minutes, default=7.5, metavar="M", help="for everything together")
    stages = ("environment", "smoke", "steps", "tests", "benchmark", "report")
    parser.add_argument("--stage", choices=stages, help=argparse.SUPPRESS)
    parser.add_argument("--argument", default="", help=argparse.SUPPRESS)
    return parser


def _main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise UsageError(
            "no GPU: torch.cuda.is_available() is False. Use halfstep bench run for what this machine's CPU does, "
            "halfstep bench host for what a step costs the host, halfstep bench audit for what compiled kernels move"
        )
    if options.stage:
        return _stage(options.stage, options.out, 60 * options.minutes, options.argument)
    make_folder(options.out)
    return _run(options.out, 60 * options.minutes)


def _run(out: Path, seconds: float) -> int:
    """All parts, within `seconds`."""
    start = time.monotonic()
    log = out / "log.txt"
    log.write_bytes(b"")
    parts: list[dict[str, Any]] = []

    def left() -> float:
        return start + seconds - time.monotonic()

    def done(part: dict[str, Any]) -> dict[str, Any]:
        parts.append(part)
        failed = [p["part"] for p in parts if p["status"] == "failed"]
        report = {
            "status": "failed" if failed else "passed",
            "failed": failed,
            "seconds": round(time.monotonic() - start, 1),
            "parts": parts,
        }
        # After every part, so that a run that is ended from outside leaves what it had.
        (out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
        why = f": {part['why']}" if "why" in part else ""
        print(f"{part['part']:22} {part['status']:8} {part['seconds']:6.1f} s{why}", flush=True)
        return part

    with tempfile.TemporaryDirectory(prefix="halfstep-gpu-") as folder:
        scratch = Path(folder)
        machine = done(_part("environment", min(60.0, seconds / 6), scratch, log))
        (out / "environment.json").write_text(json.dumps(machine["detail"], indent=1) + "\n")
        done(_part("smoke", min(90.0, seconds / 4), scratch, log))
        done(_part("steps", min(90.0, seconds / 4), scratch, log))
        tests = done(_part("tests", max(10.0, min(0.4 * seconds, left() / 2)), scratch, log))
        (out / "tests.txt").write_text(_tests_text(tests["detail"]))
        for groups, share in BENCHMARKS:
            done(_part("benchmark", max(1.0, share * (left() - 25.0)), scratch, log, groups))
        done(_part("report", max(5.0, left() - 2.0), scratch, log, str(out.resolve())))
    failed = [part["part"] for part in parts if part["status"] == "failed"]
    print(
        f"{'failed: ' + ', '.join(failed) if failed else 'all passed'}, in {time.monotonic() - start:.0f} s; see {out}"
    )
    return 1 if failed else 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench gpu`` with the arguments `argv`. Returns the exit status."""
    return command_line.run(_parser(), argv, _main)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
