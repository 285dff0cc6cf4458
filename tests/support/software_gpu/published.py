"""Count what kernels take whose times others published, as those were called: Liger-Kernel's, on the software GPU.

``python -m software_gpu.published --releases DIR --record FILE`` in tests/support. DIR holds one folder per release,
``pip install --no-deps --target DIR/0.8.5 liger-kernel==0.8.5``, for each of `RELEASES`. A call is made with few rows,
twice, and what it takes with all of them follows, since every count grows in proportion to the rows. Beside the Triton
kernels a call may run torch's own, of which only the bytes are taken: those of its operands and results.

The sizes and calls are those of the benchmarks in Liger-Kernel's repository (benchmark/scripts, BSD 2-Clause), at the
commits that added the measurements. A row there names the release before its commit; what was measured is in the next.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import gpu
from .counts import as_cuda, summary, usage

FP32, BF16 = torch.float32, torch.bfloat16
# Elements of an operand that are run, about: the rows that this makes, and twice as many.
SAMPLE = 1 << 17
MULTIPROCESSORS = {"A100": 108, "H100": 132, "H100 PCIe": 114, "B200": 148}
TARGETS = {"A100": "sm_80", "H100": "sm_90", "H100 PCIe": "sm_90", "B200": "sm_100"}

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One line of published times.

    Attributes:
        kernel, provider, mode: as the published rows call them.
        gpu: one of `TARGETS`.
        release: of liger-kernel, which has the kernel that was measured.
        sizes: the published ``x_value``, each.
        rows: of a size: how many there are, and elements in each.
        make: of a size and a number of rows: the call that was measured.
    """

    kernel: str
    mode: str
    gpu: str
    release: str
    sizes: tuple[int, ...]
    rows: Callable[[int], tuple[int, int]]
    make: Callable[[int, int], Call]
    provider: str = "liger"


def _random(*shape: int, dtype: torch.dtype = FP32, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_(grad)


def _module(name: str) -> Any:
    return importlib.import_module(f"liger_kernel.{name}")


def _backward(forward: Callable[[], Any], *inputs: torch.Tensor, scalar: bool = False) -> Call:
    """Backward of what a forward gives, as do_bench repeats it: the gradients of `inputs` are dropped in between, those
    of everything else are added to."""
    results = forward()
    results = results if isinstance(results, tuple) else (results,)
    grads = None if scalar else tuple(torch.randn_like(result) for result in results)

    def call() -> None:
        for tensor in inputs:
            if tensor.is_leaf:
                tensor.grad = None
        torch.autograd.backward(results, grads, retain_graph=True)

    return call


def _norm(name: str, dtype: torch.dtype, mode: str, **options: Any) -> Callable[[int, int], Call]:
    def make(size: int, rows: int) -> Call:
        layer = getattr(_module(f"transformers.{name}"), _CLASSES[name])(size, **options)
        x = _random(rows, size, dtype=dtype, grad=True)
        forward = lambda: layer(x)  # noqa: E731
        return forward if mode == "forward" else _backward(forward, x)

    return make


_CLASSES = {"rms_norm": "LigerRMSNorm", "layer_norm": "LigerLayerNorm"}


def _group_norm(mode: str) -> Callable[[int, int], Call]:
    def make(size: int, rows: int) -> Call:
        layer = _module("transformers.group_norm").LigerGroupNorm(num_channels=size, num_groups=size // 4, eps=1e-6)
        x = _random(rows, size, 512, grad=True)
        return (lambda: layer(x)) if mode == "forward" else _backward(lambda: layer(x), x)

    return make


def _fused_add(mode: str) -> Callable[[int, int], Call]:
    def make(size: int, rows: int) -> Call:
        layer = _module("transformers.fused_add_rms_norm").LigerFusedAddRMSNorm(hidden_size=size, eps=1e-6)
        x, residual = (_random(rows, size, grad=True) for _ in range(2))
        forward = lambda: layer(x, residual)  # noqa: E731
        return forward if mode == "forward" else _backward(forward, x, residual)

    return make


def _add_then_norm(mode: str) -> Callable[[int, int], Call]:
    """The benchmark's own module: an addition, Liger's norm, and a weight of its own."""

    def make(size: int, rows: int) -> Call:
        norm = _module("transformers.rms_norm").LigerRMSNorm(size, 1e-6, in_place=False)
        weight = torch.nn.Parameter(torch.ones(size))
        x, residual = (_random(rows, size, grad=True) for _ in range(2))

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            total = x + residual
            return weight * norm(total), total

        return forward if mode == "forward" else _backward(forward, x, residual)

    return make


def _distance(module: str, name: str, mode: str, log: tuple[bool, bool]) -> Callable[[int, int], Call]:
    """Losses between two distributions, of which the first is a softmax in the graph."""

    def make(size: int, rows: int) -> Call:
        loss = getattr(_module(f"transformers.{module}"), name)()
        leaf = _random(rows, size, grad=True)
        x, target = (
            (t.log_softmax(-1) if as_log else t.softmax(-1))
            for t, as_log in zip((leaf, _random(rows, size)), log, strict=True)
        )
        forward = lambda: loss(x, target)  # noqa: E731
        return forward if mode == "forward" else _backward(forward, x, scalar=True)

    return make


def _cross_entropy(size: int, rows: int) -> Call:
    loss = _module("transformers.cross_entropy").LigerCrossEntropyLoss()
    x, target = _random(rows, size, grad=True), torch.randint(size, (rows,))
    return lambda: loss(x, target)


def _rope(head: Callable[[int], int]) -> Callable[[str], Callable[[int, int], Call]]:
    def of_mode(mode: str) -> Callable[[int, int], Call]:
        def make(size: int, rows: int) -> Call:
            rope = _module("transformers.rope").liger_rotary_pos_emb
            q, k = (_random(1, rows, heads, head(size), dtype=BF16, grad=True).transpose(1, 2) for heads in (32, 8))
            cos, sin = (_random(1, rows, head(size), dtype=BF16) for _ in range(2))
            forward = lambda: rope(q, k, cos, sin, None)  # noqa: E731
            if mode == "forward":
                return forward
            results, grads = forward(), (torch.randn_like(q), torch.randn_like(k))
            return lambda: torch.autograd.grad(results, (q, k), grads, retain_graph=True)

        return make

    return of_mode


def _relu_squared(mode: str) -> Callable[[int, int], Call]:
    def make(size: int, rows: int) -> Call:
        layer = _module("transformers.relu_squared").LigerReLUSquared()
        x = _random(rows, size, dtype=BF16, grad=True)
        return (lambda: layer(x)) if mode == "forward" else _backward(lambda: layer(x), x)

    return make


def _with_sum(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Call:
    """Forward and backward from a sum, which the benchmarks of Megatron's modules call "backward"."""

    def call() -> None:
        x.grad = None
        forward(x).sum().backward()

    return call


def _megatron_norm(mode: str) -> Callable[[int, int], Call]:
    def make(size: int, rows: int) -> Call:
        norm = _module("transformers.rms_norm").LigerRMSNorm(size, eps=1e-5).to(BF16)
        x = _random(rows, 1, size, dtype=BF16, grad=True)
        return (lambda: norm(x)) if mode == "forward" else _with_sum(norm, x)

    return make


def _megatron_loss(mode: str) -> Callable[[int, int], Call]:
    def make(size: int, rows: int) -> Call:
        loss = _module("megatron.cross_entropy").LigerMegatronCrossEntropy()
        x, target = _random(rows, 1, size, dtype=BF16, grad=True), torch.randint(size, (rows, 1))
        return (lambda: loss(x, target)) if mode == "forward" else _with_sum(lambda x: loss(x, target), x)

    return make


def _megatron_swiglu(mode: str, in_place: bool) -> Callable[[int, int], Call]:
    def make(size: int, rows: int) -> Call:
        module = _module("megatron.swiglu").LigerMegatronSwiGLU(in_place=in_place)
        x = _random(rows, 1, 2 * size, dtype=BF16, grad=True)
        forward = lambda x: module(x, None, False, False)  # noqa: E731
        return (lambda: forward(x)) if mode == "forward" else _with_sum(forward, x)

    return make


def _powers(first: int, last: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(first, last + 1))


def cases() -> Iterator[Case]:
    """All cases, by kernel."""
    yield Case("cross_entropy", "forward", "A100", "0.3.0", _powers(12, 17), lambda v: (16384, v), _cross_entropy)
    yield Case(
        "layer_norm",
        "forward",
        "A100",
        "0.3.0",
        _powers(10, 14),
        lambda n: (4096, n),
        _norm("layer_norm", FP32, "forward"),
    )
    rope_length, rope_width = _rope(lambda t: 256), _rope(lambda h: h // 32)
    for mode in ("forward", "backward"):
        yield Case(
            "rms_norm", mode, "A100", "0.3.0", _powers(10, 15), lambda n: (2048, n), _norm("rms_norm", BF16, mode)
        )
        yield Case("rope T", mode, "A100", "0.3.0", _powers(10, 14), lambda t: (t, 10240), rope_length(mode))
        yield Case("rope H", mode, "A100", "0.3.0", (512, 2048, 8192), lambda h: (2048, h * 5 // 4), rope_width(mode))
        yield Case(
            "layer_norm", mode, "H100", "0.6.1", _powers(10, 14), lambda n: (4096, n), _norm("layer_norm", FP32, mode)
        )
        yield Case(
            "fused_add_rms_norm", mode, "H100", "0.8.0", _powers(10, 15), lambda n: (2048, n), _fused_add(mode),
            "liger_fused_add_rms_norm",
        )  # fmt: skip
        yield Case(
            "fused_add_rms_norm", mode, "H100", "0.8.0", _powers(10, 15), lambda n: (2048, n), _add_then_norm(mode),
            "liger_rms_norm",
        )  # fmt: skip
        yield Case("relu_squared", mode, "H100", "0.8.0", _powers(7, 14), lambda n: (4096, n), _relu_squared(mode))
        yield Case(
            "megatron_rms_norm", mode, "H100", "0.8.1", _powers(10, 14), lambda n: (4096, n), _megatron_norm(mode)
        )
        yield Case(
            "megatron_cross_entropy", mode, "H100", "0.8.1", _powers(12, 17), lambda v: (8192, v), _megatron_loss(mode)
        )
        for in_place in (False, True):
            yield Case(
                "megatron_swiglu", mode, "H100", "0.8.5", _powers(10, 15), lambda n: (8192, 2 * n),
                _megatron_swiglu(mode, in_place), "liger_in_place" if in_place else "liger",
            )  # fmt: skip
        yield Case(
            "tvd", mode, "H100", "0.8.0", _powers(12, 17), lambda v: (16384, v),
            _distance("tvd", "LigerTVDLoss", mode, (False, False)),
        )  # fmt: skip
        yield Case("group_norm", mode, "B200", "0.8.0", _powers(5, 11), lambda c: (128, 512 * c), _group_norm(mode))
        yield Case(
            "jsd", mode, "B200", "0.8.1", _powers(10, 13), lambda bt: (bt, 128256),
            lambda bt, rows, mode=mode: _distance("jsd", "LigerJSD", mode, (True, True))(128256, rows),
        )  # fmt: skip
    yield Case(
        "jsd", "forward", "H100 PCIe", "0.4.0", _powers(12, 17), lambda v: (8192, v),
        _distance("jsd", "LigerJSD", "forward", (True, True)),
    )  # fmt: skip
    yield Case(
        "kl_div", "forward", "H100 PCIe", "0.3.0", _powers(12, 17), lambda v: (16384, v),
        _distance("kl_div", "LigerKLDIVLoss", "forward", (True, False)),
    )  # fmt: skip


def _without_transformers(release: Path) -> None:
    """Make the modules of a release importable without the package transformers, which its ``__init__`` imports."""
    for name in ("transformers", "megatron"):
        package = types.ModuleType(f"liger_kernel.{name}")
        package.__path__ = [str(release / "liger_kernel" / name)]
        sys.modules[package.__name__] = package


class _Torch(TorchDispatchMode):
    """Records torch operations: the bytes of operands and results of each operation that moves any."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = _tensors((args, kwargs or {}))
        made = _tensors(result)
        held = {tensor.untyped_storage().data_ptr() for tensor in given}
        changes = function._schema.is_mutable
        if function.__name__.startswith(("empty", "new_empty")) or (
            not changes and all(tensor.untyped_storage().data_ptr() in held for tensor in made) and made
        ):
            return result
        moved = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in [*given, *made])
        self.operations.append((function.__name__, moved))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [tensor for each in tree for tensor in _tensors(each)] if isinstance(tree, (list, tuple)) else []


def _measured(
    machine: gpu.SoftwareGPU, call: Call
) -> tuple[list[tuple[gpu.Launch, dict[str, Any]]], list[tuple[str, int]]]:
    with machine.set(races=False):  # Liger's store the same tensor from several blocks
        call()  # what is made at first use, and gradients that later ones are added to
    machine.launches.clear()
    with machine.set(keep=True, counting=True, races=False), _Torch() as torch_kernels:
        call()
    return [(launch, summary([launch], 1)) for launch in machine.launches], torch_kernels.operations


def _grown(few: float, twice: float, factor: float) -> float:
    """A count for `factor` times as many rows, extrapolated from a number of rows and twice as many."""
    return twice + (twice - few) * (factor - 2)


SUMS = ("issued", "sectors", "fresh", "wavefronts")


def counted(machine: gpu.SoftwareGPU, case: Case, size: int) -> dict[str, Any]:
    """The counts of a published call: its launches in order, and torch's operations."""
    rows, wide = case.rows(size)
    multiprocessors = MULTIPROCESSORS[case.gpu]
    # Kernels that keep to one block per multiprocessor give each a share of the rows.
    few = max(1, SAMPLE // wide)
    share = math.ceil(rows / multiprocessors)
    few = min(rows // 2, share * max(1, few // share)) if case.mode != "forward" else min(rows // 2, few)
    found = []
    for sample in (few, 2 * few):
        scaled = max(1, round(multiprocessors * sample / rows))
        with as_cuda(scaled):
            found.append(_measured(machine, case.make(size, sample)))
    factor = rows / few
    (launches, operations), (more, of_more) = found
    assert len(launches) == len(more) and len(operations) == len(of_more), (case, size)
    result = []
    for (one, few_counts), (two, twice) in zip(launches, more, strict=True):
        text = machine.text(two.program)
        blocks = _grown(math.prod(one.grid), math.prod(two.grid), factor)
        row = {name: round(_grown(few_counts[name], twice[name], factor)) for name in SUMS}
        result.append(
            {
                "kernel": two.program.name,
                "blocks": round(blocks),
                "threads": two.threads,
                "shared_bytes": two.shared_bytes,
            }
            | usage(text, machine.target)
            | row
            | {"barriers": twice["barriers"], "trips": twice["trips"]}
        )
    torch_bytes = [
        [name, round(_grown(few_bytes, twice_bytes, factor))]
        for (name, few_bytes), (_, twice_bytes) in zip(operations, of_more, strict=True)
    ]
    return {"launches": result, "torch": torch_bytes}


def main() -> int:
    parser = argparse.ArgumentParser(description="Count what kernels of published times take, on the software GPU.")
    parser.add_argument("--releases", type=Path, required=True, help="folder with one of each release of liger-kernel")
    parser.add_argument("--record", type=Path, help="JSON file to write")
    parser.add_argument("--only", nargs=2, metavar=("RELEASE", "TARGET"), help="count these and print JSON")
    parser.add_argument("--kernel", help="of these only this one")
    given = parser.parse_args()
    if given.only:
        release, target = given.only
        folder = (given.releases / release).resolve()
        sys.path.insert(0, str(folder))
        _without_transformers(folder)
        machine = gpu.install(target)
        torch.set_num_threads(1)
        for case in cases():
            if (case.release, TARGETS[case.gpu]) != (release, target) or given.kernel not in (None, case.kernel):
                continue
            for size in case.sizes:
                key = {
                    "kernel": case.kernel,
                    "provider": case.provider,
                    "mode": case.mode,
                    "gpu": case.gpu,
                    "size": size,
                }
                try:
                    print(json.dumps(key | counted(machine, case, size)), flush=True)
                except Exception as error:
                    print(json.dumps(key | {"error": f"{type(error).__name__}: {error}"}), flush=True)
        return 0
    rows = []
    for release, target in sorted({(case.release, TARGETS[case.gpu]) for case in cases()}):
        command = [sys.executable, "-m", "software_gpu.published", "--releases", str(given.releases.resolve())]
        done = subprocess.run([*command, "--only", release, target], stdout=subprocess.PIPE, text=True, check=True)
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    given.record.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
