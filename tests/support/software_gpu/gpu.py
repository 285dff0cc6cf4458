"""A GPU in software: runs kernels that Triton compiled, as PTX for NVIDIA and assembly for AMD, on CPU tensors.

Kernels are launched through Triton's own launch path: it binds and specializes the arguments and compiles, and its
launcher in C packs the arguments and calls the driver. The driver is replaced by ours (driver.cpp), which passes the
launch to `SoftwareGPU`.

    pytest --software-gpu sm_90 tests/kernels        # tests of Triton kernels run them compiled
"""

import ctypes
import gc
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import amd, ptx

HERE = Path(__file__).parent
BUILD = HERE.parents[2] / "build" / "software_gpu"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
# In the order of `Count` in machine.h.
COUNTS = ("threads", "warps", "diverged", "requests", "sectors", "least", "lines", "wavefronts", "fresh", "slow")

_LOAD = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
Program = ptx.Program | amd.Program

_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)


@dataclass
class Launch:
    program: Program
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    counts: NDArray[np.uint64] | None  # per instruction of `program`, a column per name of `COUNTS`


class Settings(ctypes.Structure):
    """Options of launches.

    Attributes:
        inexact: whether approximations (``ex2.approx``, ``div.full``) are rounded correctly (0), to the ends of their
            documented error (1, -1), or anywhere between (2).
        races: whether conflicting accesses of different blocks to a byte of global memory are errors.
        reversed: whether blocks and warps run in reverse order.
        counting: whether to count sectors, lines and bank conflicts in addition to instructions.
        keep: whether to append each launch to `SoftwareGPU.launches`.
    """

    _fields_ = [(name, ctypes.c_int32) for name in ("inexact", "races", "reversed", "counting", "keep")]


def build() -> Path:
    """Compile the machine and the driver. Returns the library, with the name that Triton loads."""
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("the software GPU needs a C++ compiler: install g++ or clang++, or set CXX")
    sources = sorted(HERE.glob("*.cpp"))
    digest = hashlib.sha256(torch.__version__.encode())
    for file in [*sources, *sorted(HERE.glob("*.h"))]:
        digest.update(file.read_bytes())
    folder = BUILD / digest.hexdigest()[:16]
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        root = Path(torch.__file__).parent
        fresh = folder / f"{library.name}.{os.getpid()}"
        options = "-std=c++20 -O3 -march=native -ffp-contract=off -shared -fPIC -Wl,-soname,libcuda.so.1".split()
        command = [compiler, *options, f"-I{root / 'include'}", *map(str, sources), "-o", str(fresh)]
        command += [f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-4000:]}")
        fresh.rename(library)
    return library


class SoftwareGPU:
    """Triton's driver in this process. `install` creates the only one.

    Attributes:
        launches: the launches while ``settings.keep`` was set.
        launched: number of launches by kernel.
        edit: called with the assembly of each kernel; returns the text to run. Tests use it to seed faults.
    """

    def __init__(self, target: str, library: Path) -> None:
        self.target = target
        self.settings = Settings(races=True)
        self.launches: list[Launch] = []
        self.launched: dict[str, int] = {}
        self.edit: Callable[[str], str] = lambda text: text
        self._machine = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._machine.run.restype = self._machine.run_waves.restype = ctypes.c_char_p
        self._machine.find_operation.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
        for function in (self._machine.protect, self._machine.adopt):
            function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
        self._foreign: list[int] = []
        self._texts: list[str] = []
        self._programs: dict[tuple[int, str], Program] = {}
        self._failure = ctypes.create_string_buffer(b"")
        self._callbacks = _LOAD(self._load), _LAUNCH(self._launch), _ASK(self._adopt)  # C holds on to these
        self._machine.on_load(self._callbacks[0])
        self._machine.on_launch(self._callbacks[1])
        self._machine.on_foreign(self._callbacks[2])
        self._machine.watch()

    @contextmanager
    def set(self, **settings: Any) -> Iterator[None]:
        """A context in which launches run with other `Settings`."""
        before = self.settings
        self.settings = Settings.from_buffer_copy(before)
        for name, value in settings.items():
            setattr(self.settings, name, value)
        try:
            yield
        finally:
            self.settings = before

    @contextmanager
    def read_only(self, *tensors: torch.Tensor) -> Iterator[None]:
        """A context in which stores to these tensors fail."""
        spans = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors]
        for begin, size in spans:
            self._machine.protect(begin, size, 1)
        try:
            yield
        finally:
            for begin, size in spans:
                self._machine.protect(begin, size, 0)

    def find(self, name: str) -> tuple[int, list[int]] | None:
        """The number of an operation of the machine, and the bytes of its operands."""
        widths, count = (ctypes.c_uint8 * 16)(), ctypes.c_int()
        number = self._machine.find_operation(name.encode(), widths, ctypes.byref(count))
        return None if number < 0 else (number, list(widths[: count.value]))

    def find_wave(self, name: str) -> tuple[int, int] | None:
        """The number of an operation of the machine for AMD, and the number of its operands."""
        count = ctypes.c_int()
        number = self._machine.find_wave_operation(name.encode(), ctypes.byref(count))
        return None if number < 0 else (number, count.value)

    def read(self, text: str) -> Program:
        """Read the assembly of a kernel for the target."""
        return amd.read(text, self.find_wave) if self.target.startswith("gfx") else ptx.read(text, self.find)

    def run_text(
        self, text: str, *arguments: torch.Tensor | int, grid: int = 1, threads: int = 32, shared_bytes: int = 0
    ) -> None:
        """Run a kernel given as the target's assembly on tensors and integers.

        Raises:
            RuntimeError: the kernel violated a rule. The message says which, and where.
            UnknownPTX, UnknownAssembly: the machine does not support an instruction.
        """
        program = self.read(text)
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        packed = [ctypes.c_uint64(value % 2**64) for value in values]
        places = (ctypes.c_void_p * len(packed))(*map(ctypes.addressof, packed))
        if self._run(program, (grid, 1, 1), threads, shared_bytes, ctypes.addressof(places)) is not None:
            raise RuntimeError(self._failure.value.decode())

    def _fail(self, words: str) -> int:
        self._failure = ctypes.create_string_buffer(words.encode())
        return ctypes.addressof(self._failure)

    def _load(self, image: int, why: Any) -> int:
        self._texts.append(ctypes.string_at(image).decode())
        return len(self._texts)

    def program(self, kernel: int) -> Program:
        """The program of a loaded kernel, as `edit` leaves it."""
        text = self.edit(self._texts[kernel - 1])
        key = kernel, "" if text == self._texts[kernel - 1] else hashlib.sha256(text.encode()).hexdigest()
        if key not in self._programs:
            self._programs[key] = self.read(text)
        return self._programs[key]

    def text(self, program: Program) -> str:
        """The assembly that a program of this GPU was read from."""
        return next(self.edit(self._texts[kernel - 1]) for (kernel, _), one in self._programs.items() if one is program)

    def _adopt(self, address: int) -> int:
        """Allow this launch to use a tensor in memory that torch did not allocate. Returns whether one is there."""
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor):
                continue
            try:  # wrappers, lazy and functional tensors have no memory, and say so each in a way of their own
                storage = thing.untyped_storage() if thing.layout == torch.strided else None
                begin = storage.data_ptr() if storage is not None and storage.device.type == "cpu" else 0
            except Exception:
                continue
            if storage is not None and begin <= address < begin + storage.nbytes():
                self._machine.adopt(begin, storage.nbytes(), 1)
                self._foreign.append(begin)
                return 1
        return 0

    def _launch(self, kernel: int, grid: Any, threads: int, shared: int, stream: int, arguments: int) -> int | None:
        try:
            return self._run(self.program(kernel), (grid[0], grid[1], grid[2]), threads, shared, arguments)
        except Exception as error:  # it may not pass through C
            return self._fail(f"{type(error).__name__}: {error}")

    def _run(
        self, program: Program, grid: tuple[int, int, int], threads: int, shared: int, arguments: int
    ) -> int | None:
        counts = None
        if self.settings.keep or self.settings.counting:
            counts = np.zeros((len(program.code), len(COUNTS)), np.uint64)
        where = (ctypes.c_int32 * 3)()
        self._machine.approximate(self.settings.inexact)
        self._machine.approximate_waves(self.settings.inexact)
        failed = program.run(
            self._machine,
            arguments,
            (ctypes.c_uint32 * 3)(*grid),
            threads,
            shared,
            ctypes.byref(self.settings),
            counts.ctypes.data_as(ctypes.c_void_p) if counts is not None else None,
            where,
        )
        while self._foreign:
            self._machine.adopt(self._foreign.pop(), 0, 0)
        if failed is not None:
            place = f"{program.where(where[0])}, block {where[1]}, thread {where[2]}"
            return self._fail(f"{place}: {failed.decode()}")
        self.launched[program.name] = self.launched.get(program.name, 0) + 1
        if self.settings.keep:
            self.launches.append(Launch(program, grid, threads, shared, counts))
        return None


def _put_under_hip(target: str, library: Path) -> None:
    """Make Triton's driver for AMD use the machine."""
    import triton
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.amd.driver import HIPDriver, HIPLauncher, HIPUtils
    from triton.backends.compiler import GPUTarget

    hip = library.with_name("libamdhip64.so")
    if not hip.exists():
        hip.symlink_to(library.name)
    os.environ["TRITON_LIBHIP_PATH"] = str(hip)
    # The machine runs the assembly: what comes after it is left out.
    HIPBackend.make_hsaco = staticmethod(lambda source, metadata, options: source.encode() + b"\0")

    class SoftwareLauncher(HIPLauncher):
        """Triton's launcher without the hook after a launch, which Triton 3.7 calls even after a failed launch."""

        def __call__(self, *args: Any) -> None:
            HIPLauncher.__call__(self, *args[:8], None, *args[9:])

    class SoftwareDriver(HIPDriver):
        """Triton's driver. Only the questions that it would ask torch and the device about GPUs are answered here."""

        def __init__(self) -> None:
            self.utils = HIPUtils()
            self.utils.get_device_properties = lambda device: {"max_shared_mem": 64 << 10, "warpSize": 64}
            self.launcher_cls = SoftwareLauncher
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device: 0

        def get_current_target(self) -> Any:
            return GPUTarget("hip", target, 64)

    triton.runtime.driver.set_active(SoftwareDriver())


_installed: SoftwareGPU | None = None


def _use_driver_without_torch(capability: int) -> None:
    """Make Triton's NVIDIA driver answer itself what it would ask a torch with CUDA; `capability` is 90 for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class Driver(CudaDriver):  # type: ignore[misc]  # Triton is not typed
        def __init__(self) -> None:
            try:
                super().__init__()
            except (AttributeError, AssertionError):  # a CPU build of torch lacks names that the base class looks up
                pass
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device: 0
            self.get_device_capability = lambda device: divmod(capability, 10)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

    triton.runtime.driver.set_active(Driver())


def install(target: str) -> SoftwareGPU:
    """Make Triton use the software GPU, permanently. Call it before halfstep is imported, without ``TRITON_INTERPRET``.

    Args:
        target: one of `TARGETS`.
    """
    global _installed
    if target not in TARGETS:
        raise ValueError(f"Expected target to be one of {', '.join(TARGETS)}, but got {target!r}")
    library = build()
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    # What is linked against this driver and compiled without ptxas must not be found by a process that has a GPU.
    os.environ["TRITON_CACHE_DIR"] = str(BUILD / "triton")
    gpu = _installed = SoftwareGPU(target, library)

    if target.startswith("gfx"):
        _put_under_hip(target, library)
    else:
        from triton.backends.nvidia.compiler import CUDABackend

        # The machine runs PTX: what comes after it is left out.
        CUDABackend.make_cubin = lambda self, source, metadata, options, capability: source.encode() + b"\0"
        _use_driver_without_torch(int(target.removeprefix("sm_")))

    from halfstep.kernels import adam, backend, cast, loss_scale, rounding, statistics, unscale  # noqa: F401
    from halfstep.kernels.softmax import dispatch  # noqa: F401

    assert not rounding.INTERPRETED, "halfstep was imported under TRITON_INTERPRET=1; the software GPU comes first"
    backend.TAKES_CPU_TENSORS = True
    gc.collect()
    gc.freeze()  # what is here by now holds no tensor of a test, and `_adopt` need not look at it
    return gpu


def installed() -> SoftwareGPU:
    """The software GPU of this process."""
    if _installed is None:
        raise RuntimeError("no software GPU in this process: call install first, or run pytest with --software-gpu")
    return _installed
