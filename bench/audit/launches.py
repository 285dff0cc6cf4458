"""Record launches of Triton kernels, and what Triton would compile for each, instead of running them.

Launchers run on CPU or meta tensors. Triton's binder specializes their arguments for any target, whether or not such a
GPU is present, and the result is recorded, so that the audit does not have to replicate what a launcher decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel: how to launch it, and the minimum bytes that it must move.

    A module to audit lists its variants in a function ``variants()``.
    """

    kernel: Any  # the ``@triton.jit`` function
    name: str  # unique among the variants of the kernel, for example "bf16 to fp32"
    launch: Callable[[], object]  # launches it on CPU or meta tensors with any contents; may launch other kernels too
    bytes_read: float = 0.0  # the minimum per element
    bytes_written: float = 0.0
    exact: bool = True  # whether it must be bit-identical to the reference, and so contain no fused multiply-adds
    fused: bool = False  # whether it has fused multiply-adds of its own, those of kernels/exponential.py
    # Constants of the kernel, or fields of them ("form.TILE"), whose product is the number of elements that the bulk
    # path handles per program, or per iteration of its loop. If empty, the size of the largest tile that the kernel
    # loads or stores, which is wrong only if a tile is moved in parts.
    tile: tuple[str, ...] = ()
    copies: int = 1  # number of copies of the bulk path in the code, one of which runs; all have the same accesses
    copies_on: Mapping[str, int] = field(default_factory=dict)  # the same, for targets where it differs
    index: int = 0  # which of the launches of `kernel` by `launch`; -1 is the last


@dataclass(frozen=True)
class Launch:
    """The input of Triton's compiler for one launch."""

    kernel: Any  # the ``@triton.jit`` function
    key: str  # the key of the compiled kernel in Triton's cache
    signature: dict[str, str]  # type of each argument, for example "*i64"; "constexpr" for constants
    constants: dict[tuple[int, ...], Any]  # values of constants, by position of the argument
    attributes: dict[tuple[int, ...], Any]  # those of other arguments, for example [["tt.divisibility", 16]]
    options: dict[str, Any]  # all compiler options

    def constant(self, name: str) -> Any:
        """The value of a constant, or of a field of it: "form.TILE"."""
        name, *field = name.split(".")
        value = self.constants[(self.kernel.arg_names.index(name),)]
        return getattr(value, *field) if field else value

    def compile(self, target: str) -> Any:
        """Compile the kernel without loading it. `target` must be the one that it was recorded for."""
        import triton
        from triton.compiler import ASTSource

        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        with _active(target):
            return triton.compile(source, target=gpu_target(target), options=self.options)


def gpu_target(name: str) -> Any:
    """Triton's description of a target such as ``"sm_90"`` or ``"gfx942"``."""
    from triton.backends.compiler import GPUTarget

    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    # A wavefront has 64 lanes on AMD's data center GPUs (gfx9), and 32 on its consumer GPUs (gfx10 and later).
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


@contextmanager
def _active(target: str) -> Iterator[None]:
    """A context in which Triton, and kernels that query it, take `target` for the GPU of this machine."""
    import triton

    methods = {  # the driver methods that Triton calls before it compiles
        "get_current_target": lambda: gpu_target(target),
        "get_current_device": lambda: f"recorded for {target}",  # not a real device, so no kernels are cached for it
        "get_current_stream": lambda device: 0,
    }
    driver = triton.runtime.driver
    before = dict(vars(driver))
    driver.set_active(SimpleNamespace(**methods))
    try:
        yield
    finally:
        vars(driver).update(before)


@contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """A context in which kernel launches, even on CPU tensors, are recorded instead of compiled and run.

    The kernels must not have been imported under TRITON_INTERPRET. `target` is an architecture, such as ``"sm_90"``.
    """
    import triton

    from halfstep.kernels import backend

    launches: list[Launch] = []

    def record(*, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        options = json.loads(compile["specialization_data"])["options"]
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        arguments = compile["signature"], compile["constants"], compile["configs"][0]
        launches.append(Launch(fn.jit_function, compile["key"], *arguments, options))
        return True  # tells Triton not to compile or run the kernel

    runtime = triton.knobs.runtime
    before = runtime.jit_cache_hook, backend.TAKES_CPU_TENSORS
    runtime.jit_cache_hook = record
    backend.TAKES_CPU_TENSORS = True
    try:
        with _active(target), backend.backend("triton"):
            yield launches
    finally:
        runtime.jit_cache_hook, backend.TAKES_CPU_TENSORS = before


def recorded(variant: Variant, target: str) -> Launch:
    """The recorded launch of a variant. Raises a RuntimeError if `variant.launch` does not launch the kernel."""
    with recording(target) as launches:
        variant.launch()
    of_kernel = [launch for launch in launches if launch.kernel is variant.kernel]
    if not -len(of_kernel) <= variant.index < len(of_kernel):
        raise RuntimeError(
            f"Expected the launch of variant {variant.name!r} to reach {variant.kernel.__name__} at least "
            f"{max(variant.index + 1, -variant.index)} times, but it did so {len(of_kernel)} times"
        )
    return of_kernel[variant.index]
