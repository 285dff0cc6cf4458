"""The checks and measurements of `halfstep bench gpu`, and the worker process that runs some of them.

python -m halfstep.bench.gpu_checks FILE QUICK NAME...      # appends a line of JSON to FILE after each check
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import halfstep
from halfstep.bench import harness, run, run_report, timing
from halfstep.bench.cases import GROUPS, Sizes, cases, sizes_for
from halfstep.cli.machine import version_of

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
GPU_TESTS = ROOT / "tests" / "support" / "run_gpu_tests.py"
# The statuses of a check. The next call repeats a check unless it passed or failed.
PASSED, FAILED, UNFINISHED, STOPPED = "passed", "failed", "unfinished", "stopped"
DONE = (PASSED, FAILED)
TOO_LONG = 1  # the exit status of a worker whose check exceeded its limit, set by `faulthandler`
LIMIT, TEST_MINUTES = 60.0, 4.0  # seconds per check, including compilation; minutes for the tests
PEERS = ("liger-kernel", "quack-kernels", "torch-optimi", "flashoptim", "torchao", "bitsandbytes")
HEADLINE = 8  # number of times to measure before the tests
COMPILED = ", compiled"  # suffix of the names of measurements that involve `torch.compile`
CHECKED = Sizes(2**15, (1000, 40_003), (4099,), (1, 7), 0, slow=False)  # sizes of the cases whose bits are compared

Run = Callable[[torch.device], dict[str, Any] | None]  # runs a check, and returns the details to record


class Check(NamedTuple):
    run: Run
    stage: str  # "first", "bits", "headline", "tests" or "times". Checks of "bits" run concurrently
    limit: float = LIMIT  # seconds until it is stopped


class Unfinished(Exception):
    """A check is incomplete, and the next call continues it. The message says why."""


# ------------------------------------------------------------------------------------------------------------- machine


def machine(device: torch.device) -> dict[str, Any]:
    """The environment of the measurements, without the names of machine and user, and the copy bandwidth."""
    properties = torch.cuda.get_device_properties(device)
    peers = {name: version_of(name) for name in PEERS}
    return {
        **run_report.environment(device),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": _output(["nvidia-smi", "--format=csv,noheader", "--query-gpu=driver_version"]),
        "commit": _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "peers": {name: version for name, version in peers.items() if version},
        "copy_gb_per_s": timing.copy_gb_per_s(timing.clock_for(device), run.COPY_BYTES["cuda"]),
    }


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


# ---------------------------------------------------------------------------------------------------------------- bits


def _same_bits(left: Any, right: Any) -> bool:
    """Whether two values of a job are bit-identical, except that any NaN equals any other."""
    if not isinstance(left, torch.Tensor):
        return bool(left == right)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    equal = left.reshape(-1).view(integers) == right.reshape(-1).view(integers)
    if left.is_floating_point():
        equal |= (left.float().isnan() & right.float().isnan()).reshape(-1)
    return bool(equal.all())


def bits(group: str, device: torch.device) -> dict[str, Any]:
    """Run every halfstep provider of a group.

    Values must be bit-identical to the reference on the CPU; those of fast softmax, of inexact log-probabilities and of
    Muon must be within their bound.
    """
    compared = 0
    for case in cases((group,), CHECKED):
        for provider in filter(harness.ours, case.providers):
            name = f"{case.name}: {provider}"
            with halfstep.backend("triton" if device.type == "cuda" else "auto"):  # "auto" leaves casts to torch
                ours = _values(case, provider, device)
            with halfstep.backend("reference"):
                reference = _values(case, provider, CPU)
            # Results of these differ between types of devices.
            inexact = ("softmax", "halfstep fast"), ("log_probabilities", "halfstep")
            if case.group == "muon" or (case.group, provider) in inexact:
                error = case.error(case.prepare(CPU), ours)
                if not error <= case.bound:
                    raise AssertionError(f"{name}: error {error:.3g} {case.error_unit}")
            else:
                pairs = zip(tree_leaves(ours), tree_leaves(reference), strict=True)
                if wrong := [index for index, pair in enumerate(pairs) if not _same_bits(*pair)]:
                    raise AssertionError(f"{name}: the GPU's bits differ from the reference's: values {wrong}")
            compared += 1
    return {"compared": compared}


def _values(case: harness.Case, provider: str, device: torch.device) -> Any:
    job = case.providers[provider](case.prepare(device))
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), (job.values or job.call)())


# --------------------------------------------------------------------------------------------------- tests and timings


def gpu_tests(folder: Path, device: torch.device) -> dict[str, Any]:
    """Run the tests marked gpu of a checkout. The next call runs those that this one does not reach."""
    folder = folder / f"tests-{fingerprint()}"
    subprocess.run([sys.executable, str(GPU_TESTS), "--out", str(folder), "--minutes", str(TEST_MINUTES)])
    report = json.loads((folder / "tests.json").read_text())
    if failed := [test["test"] for test in report["failed"] if test["outcome"] == "failed"]:
        raise AssertionError(f"failed: {failed}; {folder / 'tests.txt'} has their messages")
    if report["not_run"] or report["failed"]:
        raise Unfinished(f"{report['counts']}, {report['not_run']} not run")
    return {"counts": report["counts"], "collected": report["collected"]}


def _measured(case: harness.Case, device: torch.device) -> dict[str, Any]:
    results = harness.measure(case, device, seconds=run.SECONDS[False], clock=timing.clock_for(device))
    return {"results": [asdict(result) for result in results]}


def _compile(group: str, quick: bool, device: torch.device) -> None:
    """Run every provider of a group once, so that measurements find the kernels in Triton's cache."""
    for name, case in timings(quick).items():
        if case.group == group and not name.endswith(COMPILED):
            inputs = case.prepare(device)
            for provider in case.providers:
                harness.check(case, inputs, provider)


def compiles(provider: str) -> bool:
    return provider == "torch.compile" or provider.startswith("torchao")


def largest_first(listed: Sequence[harness.Case]) -> list[harness.Case]:
    """The largest case of each operation and dtype, then the second largest of each, and so on."""
    lines: dict[tuple[str, str], list[harness.Case]] = {}
    for case in listed:
        lines.setdefault((case.operation, case.dtype), []).insert(0, case)
    return [case for turn in zip_longest(*lines.values()) for case in turn if case is not None]


def timings(quick: bool) -> dict[str, harness.Case]:
    """The cases of ``halfstep bench run`` by name, the largest of each operation first, `torch.compile` last."""
    plain, compiled = {}, {}
    groups = ("adam", "sgd", "muon", "step", "unscale", "softmax", "log_probabilities", "cast")
    for case in largest_first(cases(groups, sizes_for("cuda", quick))):
        slow = {name: make for name, make in case.providers.items() if compiles(name)}
        quickly = {name: make for name, make in case.providers.items() if name not in slow}
        plain[f"time of {case.name}"] = replace(case, providers=quickly)
        if slow:
            ours = {name: make for name, make in quickly.items() if harness.ours(name)}
            compiled[f"time of {case.name}{COMPILED}"] = replace(case, providers=ours | slow)
    return plain | compiled


# ----------------------------------------------------------------------------------------------------------- a process


def checks(folder: Path, quick: bool) -> dict[str, Check]:
    """All checks by name, in the order in which they run."""
    before: dict[str, Run] = {
        **{f"bits of {group}": partial(bits, group) for group in GROUPS},
        **{f"kernels for the times of {group}": partial(_compile, group, quick) for group in GROUPS},
    }
    times = [(name, partial(_measured, case)) for name, case in timings(quick).items()]
    tests = Check(partial(gpu_tests, folder), "tests", 60 * TEST_MINUTES + 30)
    runnable = GPU_TESTS.exists() and importlib.util.find_spec("pytest") is not None
    return {
        "machine": Check(machine, "first"),
        **{name: Check(run, "bits") for name, run in before.items()},
        **{name: Check(run, "headline") for name, run in times[:HEADLINE]},
        **({"tests marked gpu": tests} if runnable else {}),
        **{name: Check(run, "times") for name, run in times[HEADLINE:]},
    }


@cache
def fingerprint() -> str:
    """A hash of the code and the versions that results belong to."""
    digest = hashlib.sha256(f"{torch.__version__} {version_of('triton')}".encode())
    for room in ("kernels", "numerics", "integrations", "bench"):
        for file in sorted((ROOT / room).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def append(file: Path, record: dict[str, Any]) -> None:
    """Append a line of JSON, and wait until it is on disk."""
    with open(file, "ab") as output:
        # The previous line may be incomplete if a worker was killed while writing.
        output.write(b"\n" + json.dumps({**record, "code": fingerprint()}).encode() + b"\n")
        output.flush()
        os.fsync(output.fileno())


def records(file: Path, offset: int = 0) -> dict[str, dict[str, Any]]:
    """The last record of each check of the current code, from byte `offset` of the file on."""
    last: dict[str, dict[str, Any]] = {}
    for line in file.read_bytes()[offset:].splitlines() if file.exists() else []:
        with suppress(ValueError):  # a line may be cut off
            record = json.loads(line)
            if record["code"] == fingerprint():
                last[record["check"]] = record
    return last


def main(argv: Sequence[str], device: torch.device | None = None) -> None:
    """Run checks and measurements by name, and append the outcome of each to a file."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: ends this worker if the command is killed
    file, quick, *names = argv
    device = device or torch.device("cuda", torch.cuda.current_device())
    table = checks(Path(file).parent, bool(int(quick)))
    for name in names:
        print(f"{name} ...", flush=True)
        faulthandler.dump_traceback_later(table[name].limit, exit=True)
        start = time.monotonic()
        record: dict[str, Any] = {"check": name, "status": PASSED}
        try:
            record["detail"] = table[name].run(device)
        except Unfinished as error:
            record |= {"status": UNFINISHED, "error": str(error)}
        except Exception:
            record |= {"status": FAILED, "error": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        record["seconds"] = round(time.monotonic() - start, 2)
        append(Path(file), record)
        print(f"{name}: {record['status']}, {record['seconds']:.1f} s", flush=True)
        if "error" in record:
            print(record["error"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
