"""Counts of instructions and memory accesses of kernels per element, on the software GPU.

`make bounds` calls ``python -m software_gpu.counts`` in tests/support. Each target is counted in a separate process.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import generated
import torch

from . import gpu, roofline, sass

# Machine instructions that ptxas makes of one of PTX, where it makes several, and those
# that run besides in a warp of which a lane takes the subroutine: on the way of a zero, read from the SASS; a subnormal
# number takes about 25 of a root and 60 of a quotient. sm_80, sm_90 and sm_100 have the same.
MACHINE = {
    "div.rn.f32": (10, 34),
    "sqrt.rn.f32": (10, 7),
    "div.full.f32": (8, 0),
    "ex2.approx.f32": (4, 0),
    "lg2.approx.f32": (4, 0),
    "rsqrt.approx.f32": (4, 0),
    "div.u32": (18, 0),
    "div.s32": (24, 0),
    "rem.u32": (17, 0),
    "add.s64": (2, 0),
    "shl.b64": (2, 0),
    "mul.lo.s64": (4, 0),
}
LOADS = ("ld.global", "global_load", "buffer_load")
MACHINE_CODE = ("sm_90", "sm_100")  # for sm_80, ptxas takes loops apart in ways that sass.py does not tell from copies
SIZE = 2**20
SHOWN, SHOWN_GPUS = "sm_90", ("H100", "B200", "MI300X")  # whose counts, and whose times, docs/performance.md shows
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TABLE = "executed counts"


def machine_instructions(opcode: str) -> tuple[int, int]:
    """The machine instructions of a PTX instruction, and those that its subroutine adds.

    Instructions of AMD's assembly are machine instructions. Scalar ones have a separate unit and are not counted.
    """
    return (0, 0) if opcode.startswith("s_") else MACHINE.get(opcode, (1, 0))


def summary(launches: Sequence[gpu.Launch], elements: int) -> dict[str, Any]:
    """The counts of several launches together: thread instructions per element, and memory.

    Returns:
        ``instructions`` per element; ``issued``, machine instructions issued per element, times the lanes of a warp
        whether all take part or not; ``slow``, of warps in which a lane took the subroutine of a division or root, the
        lanes per element; ``sectors`` of 32 bytes per element, of them ``loaded``, and ``fresh`` ones, which no
        instruction of the launch touched before in the same way; ``least``, how many the same bytes need; ``lines`` per
        element (halves of 64 bytes loaded, 128 bytes stored); ``wavefronts`` of shared memory per element (not counted
        for AMD); ``trips``, how often a warp ran the access to global memory that it ran most; ``elements``; ``blocks``
        of ``threads`` with ``shared_bytes`` of shared memory each.
    """
    summed = ("sectors", "fresh", "least", "lines", "wavefronts")
    sums = dict.fromkeys(("issued", "slow", "sectors", "loaded", "fresh", "least", "lines", "wavefronts"), 0)
    blocks, whole, trips = 0, 0, 0.0
    for launch in launches:
        assert launch.counts is not None
        of_launch = launch.grid[0] * launch.grid[1] * launch.grid[2]
        blocks += of_launch
        lanes = launch.program.lanes
        for opcode, row in zip(launch.program.opcodes, launch.counts.tolist(), strict=True):
            of = dict(zip(gpu.COUNTS, row, strict=True))
            whole += of["threads"]
            for name in summed:
                sums[name] += of[name]
            each, more = machine_instructions(opcode)
            sums["issued"] += lanes * (of["warps"] * each + of["slow"] * more)
            sums["slow"] += lanes * of["slow"]
            sums["loaded"] += of["sectors"] if opcode.startswith(LOADS) else 0
            if of["requests"]:
                trips = max(trips, of["warps"] * lanes / (of_launch * launch.threads))
    return {
        "instructions": round(whole / elements, 2),
        **{name: round(count / elements, 4) for name, count in sums.items()},
        "trips": round(trips, 2),
        "elements": elements,
        "blocks": blocks,
        "threads": launches[0].threads,
        "shared_bytes": launches[0].shared_bytes,
    }


Made = tuple[int, Callable[[], object]]  # elements, and a call that handles them


def _values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    numbers = torch.randn(shape or (SIZE,), generator=torch.Generator().manual_seed(0))
    return numbers.to(FP32 if dtype.itemsize == 1 else dtype).to(dtype)


def _adam(
    dtype: torch.dtype,
    *,
    tensors: int = 1,
    zero: bool = False,
    cls: str = "AdamW",
    state_dtype: Any = FP32,
    columns: int = 1024,
    matrix: bool = False,
    **options: Any,
) -> Made:
    import halfstep

    size = SIZE if tensors == 1 else 1000
    if matrix or state_dtype == "8bit":  # moments of vectors stay in fp32
        size -= size % columns
        shape: tuple[int, ...] = (size // columns, columns)
    else:
        shape = (size,)
    parameters = [torch.nn.Parameter(_values(dtype, *shape)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = _values(dtype, *shape) * (not zero)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "group 0 rounds moments of 8 bits to nearest")
        optimizer = getattr(halfstep, cls)(parameters, state_dtype=state_dtype, **options)
    optimizer.step()
    return tensors * size, optimizer.step


def _muon(dtype: torch.dtype, *, columns: int = 1024, **options: Any) -> Made:
    """Both kernels of elements, without matrix products, which are those of torch."""
    return _adam(dtype, cls="Muon", columns=columns, matrix=True, ns_steps=0, **options)


def _on_values(name: str, dtype: torch.dtype, *arguments: Any, **options: Any) -> Made:
    import halfstep

    x = _values(dtype)
    return SIZE, partial(getattr(halfstep, name), [x] if name.startswith("foreach") else x, *arguments, **options)


def _block_cast(name: str, dtype: torch.dtype = BF16, **options: Any) -> Made:
    import halfstep

    return SIZE, partial(halfstep.cast, _values(dtype, 1024, 1024), name, **options)


def _softmax(
    dtype: torch.dtype, rows: int, columns: int, dim: int = -1, backward: bool = False, **options: Any
) -> Made:
    import halfstep

    x = _values(dtype, rows, columns)
    forward = partial(halfstep.log_softmax if options.pop("log", False) else halfstep.softmax, x, dim, **options)
    if not backward:
        return rows * columns, forward
    x.requires_grad_()
    y, grad = forward(), _values(dtype, rows, columns)
    return rows * columns, lambda: torch.autograd.grad(y, x, grad, retain_graph=True)


def _log_probabilities(dtype: torch.dtype, backward: bool = False, **options: Any) -> Made:
    import halfstep

    logits, targets = _values(dtype, 16, 65536), torch.arange(16)
    if not backward:
        return SIZE, partial(halfstep.log_probabilities, logits, targets, **options)
    selected = halfstep.log_probabilities(logits.requires_grad_(), targets, **options).log_probabilities
    grad = torch.ones_like(selected)
    return SIZE, lambda: torch.autograd.grad(selected, logits, grad, retain_graph=True)


def _count(dtype: torch.dtype, errors: bool, scale: float = 1.0) -> Made:
    from halfstep.kernels.cells import Grid, width
    from halfstep.kernels.statistics import foreach_count_

    counts = torch.zeros(1, width(errors), dtype=torch.int64)
    grid = Grid(dropped=20, emin=-6, emax=8, overflow=7 << 20)
    return SIZE, partial(foreach_count_, [_values(dtype)], counts, grid, scale=torch.tensor([scale]))


def cases() -> dict[str, Callable[[], Made]]:
    """Name to what makes its inputs and gives elements and a call: one tensor of 2^20 if nothing else is said, or rows
    of softmax."""
    random, seeded = {"rounding": "stochastic"}, {"rounding": "stochastic", "seed": 0}
    none: dict[str, Any] = {"master_weights": None}
    unscale = partial(_on_values, "foreach_unscale_")
    cast, many = (partial(_on_values, name) for name in ("cast", "foreach_cast"))
    forward, backward = _softmax, partial(_softmax, backward=True)
    fast = partial(_softmax, precision="fast")
    e4m3 = torch.float8_e4m3fn
    return {
        "foreach_check bf16": partial(_on_values, "foreach_check", BF16),
        "foreach_check fp16": partial(_on_values, "foreach_check", FP16),
        "foreach_check fp32": partial(_on_values, "foreach_check", FP32),
        "foreach_unscale_ bf16": partial(unscale, BF16, 1.0),
        "foreach_unscale_ fp32": partial(unscale, FP32, 1.0),
        "statistics bf16": partial(_count, BF16, errors=False),
        "statistics bf16 with errors": partial(_count, BF16, errors=True),
        "statistics fp32": partial(_count, FP32, errors=False),
        "statistics bf16, scale 0.3": partial(_count, BF16, errors=False, scale=0.3),
        "statistics bf16 with errors, scale 0.3": partial(_count, BF16, errors=True, scale=0.3),
        "AdamW fp32": partial(_adam, FP32),
        "AdamW fp32, zero gradients and moments": partial(_adam, FP32, zero=True),
        "AdamW fp32, amsgrad": partial(_adam, FP32, amsgrad=True),
        "Adam fp32, L2": partial(_adam, FP32, cls="Adam", weight_decay=0.01),
        "AdamW bf16 split": partial(_adam, BF16),
        "AdamW bf16 split, 1,000 tensors of 1,000": partial(_adam, BF16, tensors=1000),
        "AdamW bf16 split, amsgrad": partial(_adam, BF16, amsgrad=True),
        "AdamW bf16 split, bf16 moments": partial(_adam, BF16, state_dtype=BF16),
        "AdamW bf16 split, bf16 moments, zero gradients and moments": partial(_adam, BF16, state_dtype=BF16, zero=True),
        "AdamW bf16 split, bf16 moments, stochastic": partial(_adam, BF16, state_dtype=BF16, **random),
        "AdamW bf16 split24, bf16 moments, stochastic": partial(
            _adam, BF16, state_dtype=BF16, master_weights="split24", **random
        ),
        "AdamW bf16 split, 8-bit moments": partial(_adam, BF16, state_dtype="8bit", rounding="nearest"),
        "AdamW bf16 split, 8-bit moments, stochastic": partial(_adam, BF16, state_dtype="8bit", **random),
        "AdamW bf16 split, 8-bit moments, rows of 1,040": partial(
            _adam, BF16, state_dtype="8bit", rounding="nearest", columns=1040
        ),
        "AdamW bf16 split, 8-bit moments, stochastic, rows of 1,040": partial(
            _adam, BF16, state_dtype="8bit", columns=1040, **random
        ),
        "AdamW bf16 split24, 8-bit moments, stochastic": partial(
            _adam, BF16, state_dtype="8bit", master_weights="split24", **random
        ),
        "AdamW bf16 split, 8-bit moments, stochastic, amsgrad": partial(
            _adam, BF16, state_dtype="8bit", amsgrad=True, **random
        ),
        "Adam bf16 split, 8-bit moments, stochastic, L2": partial(
            _adam, BF16, cls="Adam", state_dtype="8bit", weight_decay=0.01, **random
        ),
        "AdamW bf16 no master, 8-bit moments, stochastic": partial(_adam, BF16, state_dtype="8bit", **none, **random),
        "AdamW fp32, 8-bit moments, stochastic": partial(_adam, FP32, state_dtype="8bit", **random),
        "AdamW bf16 full": partial(_adam, BF16, master_weights="full"),
        "AdamW bf16 no master, fp32 moments": partial(_adam, BF16, **none),
        "AdamW bf16 no master, fp32 moments, stochastic": partial(_adam, BF16, **none, **random),
        "AdamW bf16 no master, bf16 moments": partial(_adam, BF16, state_dtype=BF16, **none),
        "AdamW bf16 no master, stochastic": partial(_adam, BF16, state_dtype=BF16, **none, **random),
        "AdamW fp16 full": partial(_adam, FP16),
        "AdamW fp16 no master, stochastic": partial(_adam, FP16, **none, **random),
        "Muon fp32": partial(_muon, FP32),
        "Muon bf16 split": partial(_muon, BF16),
        "Muon bf16 split24, bf16 momentum, stochastic": partial(
            _muon, BF16, state_dtype=BF16, master_weights="split24", **random
        ),
        "Muon bf16 split, 8-bit momentum, stochastic": partial(_muon, BF16, state_dtype="8bit", **random),
        "Muon bf16 split, 8-bit momentum, stochastic, rows of 1,040": partial(
            _muon, BF16, state_dtype="8bit", columns=1040, **random
        ),
        "foreach_cast fp32 to bf16": partial(many, FP32, BF16),
        "foreach_cast fp32 to fp16": partial(many, FP32, FP16),
        "foreach_cast bf16 to fp32": partial(many, BF16, FP32),
        "foreach_cast fp32 to bf16, stochastic": partial(many, FP32, BF16, **seeded),
        "cast fp32 to e4m3": partial(cast, FP32, e4m3),
        "cast bf16 to e4m3": partial(cast, BF16, e4m3),
        "cast e4m3 to bf16": partial(cast, e4m3, BF16),
        "cast bf16 to e4m3, stochastic": partial(cast, BF16, e4m3, **seeded),
        "cast bf16 to mxfp8": partial(_block_cast, "mxfp8"),
        "cast bf16 to mxfp8, columns": partial(_block_cast, "mxfp8", axis=0),
        "cast bf16 to mxfp8, squares": partial(_block_cast, "mxfp8", axis=(0, 1)),
        "cast bf16 to mxfp8, stochastic": partial(_block_cast, "mxfp8", **seeded),
        "cast fp32 to mxfp8": partial(_block_cast, "mxfp8", FP32),
        "cast bf16 to mxfp6_e2m3": partial(_block_cast, "mxfp6_e2m3"),
        "cast bf16 to mxfp4": partial(_block_cast, "mxfp4"),
        "cast bf16 to mxfp4, columns": partial(_block_cast, "mxfp4", axis=0),
        "cast bf16 to mxfp4, stochastic": partial(_block_cast, "mxfp4", **seeded),
        "cast bf16 to nvfp4": partial(_block_cast, "nvfp4"),
        "log_probabilities bf16, 65,536 columns": partial(_log_probabilities, BF16),
        "log_probabilities bf16, 65,536 columns, entropy": partial(_log_probabilities, BF16, entropy=True),
        "log_probabilities bf16, 65,536 columns, exact": partial(_log_probabilities, BF16, exact=True),
        "log_probabilities bf16 backward, 65,536 columns": partial(_log_probabilities, BF16, True),
        "log_probabilities bf16 backward, 65,536 columns, exact": partial(_log_probabilities, BF16, True, exact=True),
        "softmax bf16, 64 columns": partial(forward, BF16, 16384, 64),
        "softmax bf16, 64 columns, fast": partial(fast, BF16, 16384, 64),
        "softmax bf16, 333 columns": partial(forward, BF16, 3000, 333),
        "softmax bf16, 333 columns, fast": partial(fast, BF16, 3000, 333),
        "softmax bf16, 1,024 columns": partial(forward, BF16, 1024, 1024),
        "softmax bf16, 1,024 columns, fast": partial(fast, BF16, 1024, 1024),
        "softmax bf16, 1,024 columns, causal": partial(forward, BF16, 1024, 1024, causal=True),
        "softmax bf16, 1,024 columns, causal, fast": partial(fast, BF16, 1024, 1024, causal=True),
        "softmax bf16, 4,095 columns": partial(forward, BF16, 256, 4095),
        "softmax bf16, 4,096 columns": partial(forward, BF16, 256, 4096),
        "softmax bf16, 4,096 columns, fast": partial(fast, BF16, 256, 4096),
        "softmax fp32, 4,096 columns": partial(forward, FP32, 256, 4096),
        "softmax fp32, 4,096 columns, fast": partial(fast, FP32, 256, 4096),
        "log_softmax bf16, 4,096 columns": partial(forward, BF16, 256, 4096, log=True),
        "log_softmax bf16, 4,096 columns, fast": partial(fast, BF16, 256, 4096, log=True),
        "softmax bf16, 32,768 columns": partial(forward, BF16, 32, 32768),
        "softmax bf16, 32,768 columns, fast": partial(fast, BF16, 32, 32768),
        "softmax bf16, 50,257 columns": partial(forward, BF16, 20, 50_257),
        "softmax bf16, 50,257 columns, fast": partial(fast, BF16, 20, 50_257),
        "softmax bf16, 16 rows of 262,144": partial(forward, BF16, 16, 262_144),
        "softmax bf16, 16 rows of 262,144, fast": partial(fast, BF16, 16, 262_144),
        "softmax bf16 over rows, 512 of 4,096, fast": partial(fast, BF16, 512, 4096, 0),
        "softmax bf16 backward, 64 columns": partial(backward, BF16, 16384, 64),
        "softmax bf16 backward, 333 columns": partial(backward, BF16, 3000, 333),
        "softmax bf16 backward, 4,096 columns": partial(backward, BF16, 256, 4096),
        "softmax bf16 backward, 4,096 columns, fast": partial(backward, BF16, 256, 4096, precision="fast"),
        "softmax bf16 backward, 50,257 columns": partial(backward, BF16, 20, 50_257),
        "softmax bf16 backward over rows, 512 of 4,096, fast": partial(backward, BF16, 512, 4096, 0, precision="fast"),
    }


def machine_code(machine: gpu.SoftwareGPU, launches: Sequence[gpu.Launch], elements: int) -> float:
    """Machine instructions issued per element, times the lanes of a warp, with the subroutines of divisions and roots.

    AMD's assembly is machine code already.
    """
    issued = 0.0
    for launch in launches:
        assert launch.counts is not None
        program = launch.program
        warps: dict[int, int] = {}
        for opcode, line, row in zip(program.opcodes, program.lines, launch.counts.tolist(), strict=True):
            of = dict(zip(gpu.COUNTS, row, strict=True))
            warps[line] = max(warps.get(line, 0), of["warps"])
            issued += program.lanes * of["slow"] * machine_instructions(opcode)[1]
        listing = sass.assembled(machine.text(program), machine.target)
        issued += program.lanes * sum(sass.issued(listing, warps).values())
    return round(issued / elements, 2)


def counted(machine: gpu.SoftwareGPU, name: str) -> dict[str, dict[str, Any]]:
    """The `summary` and `usage` of each kernel that one case launches."""
    import halfstep

    with halfstep.backend("triton"):
        elements, call = cases()[name]()
        machine.launches.clear()
        with machine.set(keep=True, counting=True, races=False):
            call()
    found: dict[str, list[gpu.Launch]] = {}
    for launch in machine.launches:
        found.setdefault(launch.program.name, []).append(launch)
    kernels = {}
    for kernel, launches in sorted(found.items()):
        kernels[kernel] = summary(launches, elements) | usage(machine.text(launches[0].program), machine.target)
        if machine.target in MACHINE_CODE:
            kernels[kernel]["machine"] = machine_code(machine, launches, elements)
    return kernels


@cache  # of a kernel that spills a lot ptxas takes minutes
def usage(text: str, target: str) -> dict[str, int]:
    """Registers and spilled bytes per thread of a kernel, from ptxas or from AMD's assembly."""
    if target.startswith("gfx"):
        spilled = re.findall(r"\.[sv]gpr_spill_count: +(\d+)", text)
        registers = re.search(r"\.vgpr_count: +(\d+)", text)
        assert registers
        return {"registers": int(registers[1]), "spilled": 4 * sum(map(int, spilled))}
    import triton

    asked = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    assert asked
    tool = triton.knobs.nvidia.ptxas_blackwell if target == "sm_100" else triton.knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(text)
        command = [tool.path, "-v", f"--gpu-name={asked[1]}", str(file), "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert spills and registers, said
    return {"registers": int(registers[1]), "spilled": int(spills[1]) + int(spills[2])}


def markdown(record: dict[str, Any]) -> str:
    """The table of docs/performance.md: the kernel of each case with the most instructions."""
    issue = {(one.gpu, one.case, one.kernel): one.issue for one in roofline.ratios(record)}
    lines = [
        f"| Triton {record['triton']} | instructions | bytes | {' | '.join(SHOWN_GPUS)} |",
        f"|---|{'---:|' * (2 + len(SHOWN_GPUS))}",
    ]
    for case, kernels in record["targets"][SHOWN].items():
        kernel = max(kernels, key=lambda name: kernels[name]["instructions"])
        cells = [f"{kernels[kernel]['machine']:.1f}", f"{32 * kernels[kernel]['sectors']:.1f}"]
        cells += [f"{100 * issue[gpu, case, kernel]:.0f}%" for gpu in SHOWN_GPUS]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def text_of(record: dict[str, Any]) -> str:
    """The record as JSON with one line per kernel, so that a diff shows the changed numbers."""

    def lines(value: Any, depth: int) -> str:
        if not isinstance(value, dict) or "instructions" in value:
            return json.dumps(value)
        inner = ",\n".join(f"{' ' * depth}{json.dumps(key)}: {lines(each, depth + 1)}" for key, each in value.items())
        return f"{{\n{inner}\n{' ' * (depth - 1)}}}"

    return lines(record, 1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Count what the kernels take per element, on the software GPU.")
    parser.add_argument("--record", type=Path, help="JSON file to write")
    parser.add_argument("--markdown", type=Path, help="page whose table to renew")
    parser.add_argument(
        "--case", default="*", metavar="PATTERN", help="count these cases only; the record keeps others"
    )
    parser.add_argument("--target", choices=gpu.TARGETS, help="count for this one and print JSON")
    given = parser.parse_args()
    if given.target:
        machine = gpu.install(given.target)
        torch.set_num_threads(1)
        print(json.dumps({name: counted(machine, name) for name in cases() if fnmatchcase(name, given.case)}))
        return 0
    import triton

    record: dict[str, Any] = {"triton": triton.__version__, "targets": {}}
    if given.record and given.record.exists():
        old = json.loads(given.record.read_text())
        if given.case != "*" and old["triton"] != triton.__version__:
            parser.error(f"{given.record} was recorded with Triton {old['triton']}: count all cases, without --case")
        record["targets"] = old["targets"]
    for target in gpu.TARGETS:
        command = [sys.executable, "-m", "software_gpu.counts", "--target", target, "--case", given.case]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[1])
        known = record["targets"].get(target, {}) | json.loads(done.stdout.splitlines()[-1])
        record["targets"][target] = {name: known[name] for name in cases() if name in known}
    if given.record:
        given.record.write_text(text_of(record))
    if given.markdown:
        generated.write(TABLE, markdown(record), given.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
