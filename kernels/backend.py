"""Choice of the implementation of the kernels. This is the only module that knows whether Triton is installed.

Every kernel family has up to three implementations with the same bits:

* ``reference``: operations of torch, on any device. It is the specification.
* ``native``: C++ for CPU tensors, compiled at first use (``native.py``). ``auto`` chooses it on the CPU, and the
  reference for the families without a C++ file. (Fast softmax is torch's there.)
* ``triton``: Triton for GPU tensors. With ``TRITON_INTERPRET=1`` it also takes CPU tensors, which serves to test
  kernels without a GPU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from halfstep.kernels import native
from halfstep.kernels.formats import TABLE

try:
    import triton
    import triton.language as tl

    # In kernels: whether they are compiled for NVIDIA GPUs of this compute capability and later ones; (8, 9) is sm_89.
    from triton.language.target_info import cuda_capability_geq, is_hip
except ImportError:  # not needed on the CPU; there is no Triton for macOS and Windows
    triton = tl = cuda_capability_geq = is_hip = None

NAMES = ("auto", "reference", "triton")
MOST_THREADS = 1024  # threads that a program may have, on every GPU


def _checked(name: object, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"Expected {source} to be 'auto', 'reference' or 'triton', but got {name!r}")
    return str(name)


_chosen = _checked(os.environ.get("HALFSTEP_BACKEND", "auto"), "environment variable HALFSTEP_BACKEND")


class backend:
    """Choose the implementation of all halfstep functions, permanently or for a block.

    ``halfstep.backend("reference")`` switches from now on; ``with halfstep.backend("reference"):`` switches back at the
    end of the block. The environment variable ``HALFSTEP_BACKEND`` sets the initial choice of a process.

    Args:
        name: ``"auto"`` (Triton on GPUs, compiled C++ on CPUs, the reference elsewhere), ``"reference"``, ``"triton"``.

    Raises:
        ValueError: `name` is not one of these.

    Examples:
        >>> with halfstep.backend("reference"):
        ...     halfstep.softmax(torch.zeros(4))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(self, name: str) -> None:
        self._before, self._name = _chosen, _checked(name, "backend")
        _choose(self._name)

    def __enter__(self) -> backend:
        _choose(self._name)
        return self

    def __exit__(self, *_: object) -> None:
        _choose(self._before)


def _choose(name: str) -> None:
    global _chosen
    _chosen = name
    resolve.cache_clear()


def chosen() -> str:
    """The current choice: ``"auto"``, ``"reference"`` or ``"triton"``."""
    return _chosen


@functools.cache
def resolve(device: torch.device, family: str) -> str:
    """The implementation that runs for tensors on `device`: ``"reference"``, ``"native"`` or ``"triton"``.

    `family` names a C++ file. Raises a RuntimeError if ``"triton"`` was chosen and cannot run on this device.
    """
    if _chosen == "reference":
        return "reference"
    on_gpu = device.type == "cuda"  # ROCm builds of torch say "cuda" too
    if _chosen == "triton":
        if triton is None:
            raise RuntimeError(
                "Expected triton to be installed for backend 'triton', but it is not: install it or use backend('auto')"
            )
        if not on_gpu and not (TAKES_CPU_TENSORS and device.type == "cpu"):
            raise RuntimeError(
                f"Expected GPU tensors for backend 'triton', but got tensors on {str(device)!r}: use backend('auto'), "
                "or set TRITON_INTERPRET=1 before halfstep is imported to run the kernels on CPU tensors"
            )
        return "triton"
    if on_gpu:
        return "triton" if triton is not None and not INTERPRET else "reference"
    if device.type == "cpu" and native.library(family) is not None:
        return "native"
    return "reference"


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """``triton.jit`` if Triton is installed; otherwise the function itself, which is then never called."""
    return function if triton is None else triton.jit(function, **options)


def constant(value: Any) -> Any:
    """A global value that kernels may read; the plain value where Triton is not installed."""
    return value if tl is None else tl.constexpr(value)


def constexpr_function(function: Callable[..., Any]) -> Any:
    """``triton.constexpr_function`` if Triton is installed; otherwise the function itself."""
    return function if triton is None else triton.constexpr_function(function)


EXACT = {"enable_fp_fusion": False}  # option of kernels that give the bits of the reference
_HERE = nullcontext()
_compiled: dict[tuple[Any, ...], Any] = {}  # forms of kernels, by what `launch_kernel` knows of them


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which `device` is the current GPU. Triton launches kernels on the current GPU only."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _HERE if here else torch.cuda.device(device)


def launch_kernel(
    kernel: Any, device: torch.device, programs: int, operands: Sequence[Any], constants: dict[str, Any], *form: Any
) -> None:
    """Launch so many programs of a ``@triton.jit`` function on a device.

    Triton's own launch takes 10 to 35 us of the host, of which 3 to 5 remain here: it derives from all arguments which
    form of the kernel to run.

    Args:
        operands, constants: its first and its last arguments; `constants` with the compiler's options, in the same
            order in all launches.
        form: all else that Triton compiles forms of their own for: dtypes of tensors, whether 16 divides addresses,
            whether integers need 64 bits.
    """
    key = id(kernel), device, form, *constants.values()
    compiled = _compiled.get(key)
    with on_device(device):
        if compiled is None:  # so it stays if the interpreter runs the kernel, or the launch is only recorded
            _compiled[key] = kernel[(programs,)](*operands, **constants)
        else:  # the constants are compiled in: their arguments must be there and are not read
            compiled[programs, 1, 1](*operands, *[None] * (len(kernel.arg_names) - len(operands)))


@functools.cache
def _lanes(device: torch.device) -> int:
    """The number of threads in a warp: 32, or 64 on AMD's data center GPUs."""
    return torch.cuda.get_device_properties(device).warp_size


def most_warps(device: torch.device) -> int:
    """The largest number of warps of a program, which may have `MOST_THREADS` threads."""
    on_gpu = device.type == "cuda"
    return MOST_THREADS // (_lanes(device) if on_gpu else 32 if INTERPRET else _stand_in().warp_size)


def _stand_in() -> Any:
    """Triton's description of the simulated GPU that runs compiled kernels on CPU tensors."""
    return triton.runtime.driver.active.get_current_target()


def by_address(tensor: torch.Tensor) -> Any:
    """A tensor as an argument of which Triton's compiler for AMD learns only the address.

    Otherwise the compiler learns that a tensor is smaller than 2 GB and uses buffer instructions. Triton 3.7 then
    ignores ``tl.multiple_of`` for pointers, and reads and writes one element per access.
    """
    if tensor.device.type == "cuda":
        amd = torch.version.hip is not None
    else:
        amd = not INTERPRET and _stand_in().backend == "hip"
    return triton.reinterpret(tensor, tensor.dtype) if amd else tensor


TRITON_NAMES = {form.dtype: form.name for form in TABLE if form.bits >= 16}


def triton_version() -> tuple[int, int]:
    """Triton's major and minor version; (0, 0) without Triton."""
    if triton is None:
        return 0, 0
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


# Triton reads the variable when a kernel is decorated, at import. Later changes have no effect.
INTERPRET = triton is not None and bool(triton.knobs.runtime.interpret)
if INTERPRET:  # the interpreter compiles for no GPU, and Triton's functions ask a driver that need not be there

    def cuda_capability_geq(major: int, minor: int = 0) -> bool:
        return False

    def is_hip() -> bool:
        return False


# Whether Triton kernels accept CPU tensors, as interpreted kernels do. Processes that replace the GPU's driver, such as
# the software GPU of the tests, also set it for compiled kernels; `INTERPRET` keeps its value from the import.
TAKES_CPU_TENSORS = INTERPRET
