"""What kernels take per element, counted on the software GPU.

``python -m software_gpu.counts`` in tests/support, as `make bounds` calls it. Each target in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import gpu

# What an instruction occupies, by how its name begins; the rest is arithmetic.
CLASSES = {
    "special": ("ex2", "lg2", "div", "sqrt", "rcp", "rem"),
    "popc": ("popc",),
    "shuffle": ("shfl", "vote", "redux"),
    "shared": ("ld.shared", "st.shared", "atom.shared", "ldmatrix", "stmatrix"),
    "global": ("ld.global", "st.global", "atom.global"),
    "control": ("bra", "bar", "ret"),
}
SIZE = 2**20
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TABLE = "executed counts"


def class_of(opcode: str) -> str:
    """The class of an instruction."""
    return next((name for name, begins in CLASSES.items() if opcode.startswith(begins)), "arithmetic")


def summary(launches: Sequence[gpu.Launch], elements: int) -> dict[str, Any]:
    """What some launches took together: thread instructions per element by class, and memory.

    Returns:
        ``instructions`` per element, and by class; ``sectors`` of 32 bytes per element and ``least``, how many the
        same bytes need; ``lines`` per element (halves of 64 bytes loaded, 128 bytes stored); ``wavefronts`` of shared
        memory per element; ``beyond``, loads past the end of an allocation; ``barriers``, ``atomics`` and ``diverged``
        branches per block of threads.
    """
    classes = dict.fromkeys([*CLASSES, "arithmetic"], 0)
    sums = dict.fromkeys(("sectors", "least", "lines", "wavefronts", "beyond", "barriers", "atomics", "diverged"), 0)
    blocks = 0
    for launch in launches:
        assert launch.counts is not None
        blocks += launch.grid[0] * launch.grid[1] * launch.grid[2]
        for opcode, row in zip(launch.program.opcodes, launch.counts.tolist(), strict=True):
            of = dict(zip(gpu.COUNTS, row, strict=True))
            classes[class_of(opcode)] += of["threads"]
            for name in ("sectors", "least", "lines", "wavefronts", "beyond", "diverged"):
                sums[name] += of[name]
            sums["barriers"] += of["warps"] if opcode.startswith("bar") else 0
            sums["atomics"] += of["threads"] if opcode.startswith("atom") else 0
    per_element = {name: round(sums[name] / elements, 4) for name in ("sectors", "least", "lines", "wavefronts")}
    per_block = {name: round(sums[name] / blocks, 2) for name in ("barriers", "atomics", "diverged")}
    by_class = {name: round(count / elements, 3) for name, count in classes.items() if count}
    whole = round(sum(classes.values()) / elements, 2)
    return {"instructions": whole, "classes": by_class, **per_element, "beyond": sums["beyond"], **per_block}


def cases() -> dict[str, Callable[[], tuple[int, Callable[[], object]]]]:
    """Name to what makes its inputs and gives elements and a call: one tensor of 2^20, or rows of softmax."""
    import halfstep
    from halfstep.kernels.statistics import Grid, foreach_count_, width

    def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(shape or (SIZE,), generator=torch.Generator().manual_seed(0)).to(dtype)

    Made = tuple[int, Callable[[], object]]

    def adam(dtype: torch.dtype, **options: Any) -> Made:
        parameter = torch.nn.Parameter(values(dtype))
        parameter.grad = values(dtype)
        optimizer = halfstep.AdamW([parameter], **options)
        optimizer.step()
        return SIZE, optimizer.step

    def on_values(function: Callable[..., object], dtype: torch.dtype, *arguments: Any, **options: Any) -> Made:
        x = values(dtype)
        listed = function.__name__.startswith("foreach")
        return SIZE, partial(function, [x] if listed else x, *arguments, **options)

    def softmax(rows: int, columns: int) -> Made:
        return rows * columns, partial(halfstep.softmax, values(BF16, rows, columns))

    def backward(rows: int, columns: int) -> Made:
        x, grad = values(BF16, rows, columns).requires_grad_(), values(BF16, rows, columns)
        y = halfstep.softmax(x)
        return rows * columns, lambda: torch.autograd.grad(y, x, grad, retain_graph=True)

    def count(errors: bool) -> Made:
        counts = torch.zeros(1, width(errors), dtype=torch.int64)
        return on_values(foreach_count_, BF16, counts, Grid(dropped=20, emin=-6, emax=8, overflow=7 << 20))

    stochastic = {"master_weights": None, "state_dtype": BF16, "rounding": "stochastic", "seed": 0}
    cast = {"rounding": "stochastic", "seed": 0}
    return {
        "foreach_check bf16": partial(on_values, halfstep.foreach_check, BF16),
        "foreach_check fp16": partial(on_values, halfstep.foreach_check, FP16),
        "foreach_check fp32": partial(on_values, halfstep.foreach_check, FP32),
        "foreach_unscale_ bf16": partial(on_values, halfstep.foreach_unscale_, BF16, 1.0),
        "statistics bf16": partial(count, errors=False),
        "statistics bf16 with errors": partial(count, errors=True),
        "AdamW fp32": partial(adam, FP32),
        "AdamW bf16 split": partial(adam, BF16),
        "AdamW bf16 split, bf16 moments": partial(adam, BF16, state_dtype=BF16),
        "AdamW bf16 no master, stochastic": partial(adam, BF16, **stochastic),
        "AdamW fp16 full": partial(adam, FP16),
        "foreach_cast fp32 to bf16": partial(on_values, halfstep.foreach_cast, FP32, BF16),
        "cast bf16 to e4m3, stochastic": partial(on_values, halfstep.cast, BF16, torch.float8_e4m3fn, **cast),
        "softmax bf16, 4,096 columns": partial(softmax, 256, 4096),
        "softmax bf16, 333 columns": partial(softmax, 3000, 333),
        "softmax bf16, 50,257 columns": partial(softmax, 20, 50_257),
        "softmax bf16 backward, 4,096 columns": partial(backward, 256, 4096),
    }


def counted(machine: gpu.SoftwareGPU, name: str) -> dict[str, dict[str, Any]]:
    """Kernel to its `summary`, for the launches of one case."""
    import halfstep

    with halfstep.backend("triton"):
        elements, call = cases()[name]()
        machine.launches.clear()
        with machine.set(keep=True, counting=True, races=False):
            call()
    kernels = {launch.program.name for launch in machine.launches}
    return {
        kernel: summary([launch for launch in machine.launches if launch.program.name == kernel], elements)
        for kernel in sorted(kernels)
    }


def markdown(record: dict[str, Any], target: str) -> str:
    """The table of the docs: the kernel of each case that takes most."""
    lines = [
        f"Per element on {target}, Triton {record['triton']}: thread instructions (PTX), 32-byte sectors of global",
        "memory and the least for the same bytes, wavefronts of shared memory (128 bytes at a time).",
        "",
        "| case | kernel | instructions | of them special, popc, shuffle | sectors | least | wavefronts |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, kernels in record["targets"][target].items():
        kernel = max(kernels, key=lambda name: kernels[name]["instructions"])
        row = kernels[kernel]
        parts = ", ".join(f"{row['classes'].get(name, 0):.2g}" for name in ("special", "popc", "shuffle"))
        figures = f"{row['instructions']:.1f} | {parts} | {row['sectors']:.3f} | {row['least']:.3f}"
        lines.append(f"| {case} | `{kernel}` | {figures} | {row['wavefronts']:.3f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Count what the kernels take per element, on the software GPU.")
    parser.add_argument("--record", type=Path, help="JSON file to write")
    parser.add_argument("--markdown", type=Path, help="page whose table to renew, for sm_90")
    parser.add_argument("--target", choices=gpu.TARGETS, help="count for this one and print JSON")
    given = parser.parse_args()
    if given.target:
        machine = gpu.install(given.target)
        torch.set_num_threads(1)
        print(json.dumps({name: counted(machine, name) for name in cases()}))
        return 0
    import triton

    record: dict[str, Any] = {"triton": triton.__version__, "targets": {}}
    for target in gpu.TARGETS:
        command = [sys.executable, "-m", "software_gpu.counts", "--target", target]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[1])
        record["targets"][target] = json.loads(done.stdout.splitlines()[-1])
    if given.record:
        given.record.write_text(json.dumps(record, indent=1) + "\n")
    if given.markdown:
        from halfstep.bench.audit.markdown import write

        write(TABLE, markdown(record, "sm_90"), given.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
