"""Compile and load the C++ twins of the kernels for the CPU.

Each kernel family `name.py` may have a `name.cpp` beside it with a plain C interface: pointers, sizes, numbers. It is
compiled once, at first use, with the machine's own compiler (2 to 6 s), kept in the user's cache folder and loaded
with ctypes. Without a compiler the library is None, the reference runs instead: the same bits, slower.

The flags keep IEEE semantics, which is what makes the bits equal: no contraction to FMA, no reassociation, correctly
rounded division and square root. ``-fno-math-errno -fno-trapping-math`` give up errno and the exception flags only.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_HEADER = _HERE / "native.h"
_EXACT = ["-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
_logger = logging.getLogger("halfstep")


def _flag_sets() -> list[list[str]]:
    """Compiler flags, best first; a compiler that refuses one set is given the next."""
    tuned = ["-mcpu=native"] if platform.machine() in ("arm64", "aarch64") else ["-march=native"]
    if platform.machine() in ("x86_64", "AMD64"):
        wide = [[*tuned, "-mprefer-vector-width=512", "-fopenmp"]]  # a no-op on CPUs without AVX-512
    else:
        wide = []
    return [*wide, [*tuned, "-fopenmp"], tuned, ["-fopenmp"], []]


def compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX`` if set, else the first of g++, clang++, c++ found; None if there is none."""
    wished = os.environ.get("CXX")
    return shutil.which(wished) if wished else next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def cache_folder() -> Path:
    """Where compiled libraries are kept: ``$HALFSTEP_CACHE``, else ``halfstep`` in the user's cache folder."""
    if os.environ.get("HALFSTEP_CACHE"):
        return Path(os.environ["HALFSTEP_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfstep"


def _cpu_identity() -> str:
    """What -march=native depends on, so that a home folder shared between unlike machines holds a library for each."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    except OSError:
        return platform.processor() + platform.machine()


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process of several (the ranks of a job) compile while the others wait for its result."""
    try:
        import fcntl
    except ImportError:  # Windows: two may compile the same thing; the rename below keeps that harmless
        yield
        return
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(source: Path, target: Path, command: str) -> str:
    """Compile `source` to `target` in one step visible to others. Returns "" or the compiler's last complaint."""
    complaint = ""
    for flags in _flag_sets():
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
        os.close(handle)
        done = subprocess.run(
            [command, *_EXACT, *flags, str(source), "-o", name], capture_output=True, text=True, timeout=300
        )
        if done.returncode == 0:
            os.chmod(name, 0o755)
            with open(name, "rb+") as written:
                os.fsync(written.fileno())  # or a power cut could leave an empty file under the final name
            os.replace(name, target)
            return ""
        os.unlink(name)
        complaint = done.stderr.strip()
    return complaint or "no message"


def _compiled(family: str, source: Path) -> ctypes.CDLL | str:
    """The loaded library, or in words why there is none."""
    if sys.platform == "win32":
        return "compiled CPU kernels are not supported on Windows"
    command = compiler()
    if command is None:
        return f"no C++ compiler found (CXX is {os.environ.get('CXX')!r}; looked for g++, clang++, c++)"
    version = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    parts = [source.read_bytes(), _HEADER.read_bytes(), repr((_EXACT, _flag_sets(), version, _cpu_identity())).encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        folder = Path(tempfile.mkdtemp(prefix="halfstep-"))  # a fresh, private folder: nobody else's library is loaded
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / f"{family}-{key}.so"
    with _one_at_a_time(folder):
        if target.exists():
            try:
                return ctypes.CDLL(str(target))
            except OSError as error:  # damaged, or a library it was linked against is gone: make it anew
                _logger.info("%s does not load: %s", target, error)
        _logger.info("compiling %s with %s into %s", source.name, command, target)
        complaint = _build(source, target, command)
        if complaint:
            return f"{command} could not compile {source.name}: {complaint}"
        try:
            return ctypes.CDLL(str(target))
        except OSError as error:
            return f"{target} does not load: {error}"


@functools.cache
def library(family: str) -> ctypes.CDLL | None:
    """The compiled `family.cpp`, or None, with one warning that says why and what to do."""
    source = _HERE / f"{family}.cpp"
    if not source.exists():
        return None
    try:
        result = _compiled(family, source)
    except (OSError, subprocess.SubprocessError) as error:
        result = str(error)
    if isinstance(result, str):
        warnings.warn(
            f"halfstep's compiled CPU kernels for {family} are not available: {result}. The eager reference runs "
            "instead: same bits, slower. Install a C++ compiler or point CXX at one.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return result
