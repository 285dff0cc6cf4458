"""``halfstep bench gpu --out DIR``: check and measure halfstep on this machine's GPU.

The command first compares one kernel of each family with torch (`gpu_checks.smoke`). It then compares whole AMP steps
(check, norm, clip, update, scale), some of which overflow, with the reference, bit for bit: eager steps, steps that
unscale in place, CUDA graphs replayed between eager steps, and steps on two streams, all under
``torch.cuda.set_sync_debug_mode("error")`` (`gpu_checks.steps`). Finally it runs the cases of ``halfstep bench run``.

It writes ``checks.json`` (the outcome of each check, and the environment) and the files of ``halfstep bench run --out``
to DIR: ``results.json``, ``table.md`` and, if matplotlib is installed, two pictures. Exit status: 0 if all checks
passed, including the check before each time; 1 if one failed; 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import torch

from halfstep.bench import gpu_checks, run
from halfstep.cli import command_line
from halfstep.cli.command_line import Parser, UsageError, a_path, make_folder
from halfstep.cli.machine import version_of
from halfstep.cli.numbers import above_zero

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, Any]:
    """The environment of the measurements, without the names of the machine and its user."""
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
    return version_of(packages_distributions().get(module, [module])[0]) or "installed"


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _parser() -> Parser:
    parser = Parser("bench gpu", "Check and measure halfstep on this machine's GPU.")
    parser.add_argument("--out", type=a_path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, nothing that compiles slowly")
    parser.add_argument(
        "--minutes", type=above_zero, metavar="M", help="start no further case after so long (default: no limit)"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise UsageError(
            "no GPU: torch.cuda.is_available() is False. Use halfstep bench run to measure on the CPU, halfstep bench "
            "host for the host's time of a step, or halfstep bench audit to audit the compiled kernels"
        )
    make_folder(options.out)
    failed = check(torch.device("cuda", torch.cuda.current_device()), options.out / "checks.json")
    chosen = ["--quick"] * options.quick + (["--minutes", str(options.minutes)] if options.minutes else [])
    status = run.main(["--out", str(options.out), *chosen])
    return 1 if failed else status


def check(device: torch.device, file: Path) -> list[str]:
    """Run all checks, print their outcome and write `file`. Returns the names of those that failed."""
    found: dict[str, Any] = {"environment": environment(), "failed": []}
    for part in (gpu_checks.smoke, gpu_checks.steps):
        found[part.__name__] = done = part(device)
        found["failed"] += done.pop("failed")
        for name, outcome in done.items():
            print(f"{name:40} {outcome['status']:8} {outcome['seconds']:6.1f} s", flush=True)
        # After each part, so that an interrupted run leaves its results.
        file.write_text(json.dumps(found, indent=1) + "\n")
    failed: list[str] = found["failed"]
    return failed


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench gpu`` with the arguments `argv`. Returns the exit status."""
    return command_line.run(_parser(), argv, _run)
