"""Launches of Triton kernels, recorded instead of run: what Triton would have compiled for each.

A call that launches kernels, ours or a peer's, runs on CPU or meta tensors while Triton's own binder looks at the
arguments for a target that is not there. What it decides, the types of arguments, which of them are constants or
divisible by 16, and every compiler option, is noted, and the launch dropped. Nothing that a launcher decides is written
down a second time, and none of it ages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel: how to launch it, and what its code must do.

    A module that is audited lists its variants in a function ``variants()``.

    Attributes:
        kernel: the ``@triton.jit`` function.
        name: what tells it from the kernel's other variants, e.g. ``"bf16 to fp32"``.
        launch: launches it, on CPU or meta tensors of any contents, and may launch other kernels too.
        bytes_read: per element, at least.
        bytes_written: per element, at least.
        exact: whether the kernel promises the reference's bits and so must contain no fused multiply-add.
        tile: constants of the kernel whose product is the number of elements that the bulk path handles per program,
            or per trip of its loop. Empty, the default, stands for the largest tile that the kernel loads or stores,
            which is wrong only where a tile is moved in parts.
        index: which launch of `kernel` is meant, of those that `launch` makes; from 0, or -1 for the last.
    """

    kernel: Any
    name: str
    launch: Callable[[], object]
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    exact: bool = True
    tile: tuple[str, ...] = ()
    index: int = 0


@dataclass(frozen=True)
class Launch:
    """What Triton compiles for one launch.

    Attributes:
        kernel: the ``@triton.jit`` function.
        key: what tells its compiled forms apart, as in Triton's cache.
        signature: type of each argument, e.g. ``"*i64"``; ``"constexpr"`` for constants.
        constants: their values, by position of the argument.
        attributes: what is known of the others, e.g. ``[["tt.divisibility", 16]]``, by position.
        options: all options of the compiler.
    """

    kernel: Any
    key: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    def constant(self, name: str) -> Any:
        """The value of a constant argument."""
        return self.constants[(self.kernel.arg_names.index(name),)]

    def compile(self, target: str) -> Any:
        """Triton's compiled kernel, not loaded. `target` is the one that the launch was recorded for."""
        import triton
        from triton.compiler import ASTSource

        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=gpu_target(target), options=self.options)


def gpu_target(name: str) -> Any:
    """Triton's description of a target such as ``"sm_90"`` or ``"gfx942"``."""
    from triton.backends.compiler import GPUTarget

    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    # AMD's data center chips (gfx9) run 64 lanes in step, its graphics chips (gfx10 and later) 32.
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target: str) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return gpu_target(self._target)

    def get_current_device(self) -> str:
        return f"recorded for {self._target}"  # no real device, so that nothing was compiled for it before

    def get_current_stream(self, device: object) -> int:
        return 0


@contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Record the launches made inside instead of compiling and running them.

    Inside, halfstep gives CPU tensors to its Triton kernels, which must not have been imported under TRITON_INTERPRET.

    Args:
        target: e.g. ``"sm_90"``, the GPU that is launched on.
    """
    import triton

    from halfstep.kernels import backend

    launches: list[Launch] = []

    def record(*, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        options = json.loads(compile["specialization_data"])["options"]
        launches.append(
            Launch(
                kernel=fn.jit_function,
                key=compile["key"],
                signature=compile["signature"],
                constants=compile["constants"],
                attributes=compile["configs"][0],
                options={name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
            )
        )
        return True  # for Triton: compiled and run by somebody else

    driver, runtime = triton.runtime.driver, triton.knobs.runtime
    before = dict(vars(driver)), runtime.jit_cache_hook, backend.TAKES_CPU_TENSORS
    driver.set_active(_Driver(target))
    runtime.jit_cache_hook = record
    backend.TAKES_CPU_TENSORS = True
    try:
        with backend.backend("triton"):
            yield launches
    finally:
        vars(driver).update(before[0])
        runtime.jit_cache_hook, backend.TAKES_CPU_TENSORS = before[1:]


def recorded(variant: Variant, target: str) -> Launch:
    """The launch of a variant.

    Raises:
        RuntimeError: its call does not launch the kernel.
    """
    with recording(target) as launches:
        variant.launch()
    of_kernel = [launch for launch in launches if launch.kernel is variant.kernel]
    if not -len(of_kernel) <= variant.index < len(of_kernel):
        raise RuntimeError(
            f"Expected the launch of variant {variant.name!r} to reach {variant.kernel.__name__} at least "
            f"{max(variant.index + 1, -variant.index)} times, but it did so {len(of_kernel)} times"
        )
    return of_kernel[variant.index]
