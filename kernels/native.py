"""Compile and load the C++ implementations of the kernels for the CPU.

The module or package `name` may have a file `name.cpp`. A wheel brings it compiled (compiler.py); otherwise it is
compiled at its first use (2 to 6 s), stored in the user's cache folder and loaded with ctypes. Without a compiler the
reference runs: the same bits, but moments of 8 bits take 260 times as long, and exact softmax hundreds of times.

Loading a library runs its code: a folder that others can write to is not used, and the name of a library ends in a
digest of its content, which detects truncated and damaged files.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from halfstep.kernels.compiler import EXACT, compiler, prebuilt

_HERE = Path(__file__).resolve().parent
_SHARED = [*EXACT, "-shared"]
_LONGEST = 300  # seconds that a compilation may take
_logger = logging.getLogger("halfstep")


def _flag_sets() -> list[list[str]]:
    """Sets of compiler flags, the fastest code first. The first set that the compiler accepts is used."""
    tuned = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    wide = "-mprefer-vector-width=512"  # no effect on CPUs without AVX-512, and refused where it is not known
    return [[tuned, wide, "-fopenmp"], [tuned, "-fopenmp"], [tuned], ["-fopenmp"], []]


def cache_folder() -> Path:
    """Where compiled libraries are stored: ``$HALFSTEP_CACHE``, or ``halfstep`` in the user's cache folder."""
    if wished := os.environ.get("HALFSTEP_CACHE"):
        return Path(wished)
    from platformdirs import user_cache_path  # imported here, because most processes load no library

    return user_cache_path("halfstep", appauthor=False)


def _cpu_identity() -> str:
    """What -march=native depends on. Machines with different CPUs that share a home folder get different libraries."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    except OSError:
        return platform.processor() + platform.machine()


@functools.cache
def _is_private(folder: Path) -> bool:
    """Whether a folder, which is created if it is missing, is there and others cannot write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except OSError:
        return False
    if info.st_uid in (0, os.geteuid()) and not info.st_mode & 0o022:
        return True
    warnings.warn(
        f"halfstep does not use {folder} for compiled CPU kernels, because another user could put code there, and "
        f"compiles them for this process only: use `chmod go-w {shlex.quote(str(folder))}` if it is yours, or set "
        "HALFSTEP_CACHE to a folder that only you can write to.",
        RuntimeWarning,
        stacklevel=4,
    )
    return False


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one of several processes, such as the ranks of a job, compile while the others wait for its result."""
    from filelock import FileLock  # imported here, because it takes 70 ms

    lock = FileLock(folder / "lock")
    with suppress(OSError, NotImplementedError):  # as on some network file systems: two may compile the same
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(source: Path, target: Path, command: list[str]) -> str:
    """Compile `source` to `target`. Returns "", or the last error of the compiler."""
    complaint = ""
    for flags in _flag_sets():
        done = subprocess.run(
            [*command, *_SHARED, *flags, str(source), "-o", str(target)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST,
            env={**os.environ, "TMPDIR": str(target.parent)},
        )
        if done.returncode == 0:
            return ""
        complaint = done.stderr.strip() or f"exit status {done.returncode}"
    return complaint


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _loaded(paths: Iterable[Path]) -> ctypes.CDLL | None:
    """The first of some libraries that loads."""
    for path in paths:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:  # a library that it depends on is gone
            _logger.info("%s does not load: %s", path, error)
    return None


def _stored(folder: Path, name: str) -> ctypes.CDLL | None:
    files = filter(Path.is_file, sorted(folder.glob(f"{name}-*.so")))
    return _loaded(file for file in files if _digest(file.read_bytes()) == file.stem.rpartition("-")[2])


def _add(folder: Path | None, name: str, source: Path, command: list[str]) -> ctypes.CDLL | str:
    """Compile a library and load it. With a folder, it is stored there. Returns the reason if that fails."""
    _logger.info("compiling %s with %s into %s", source.name, shlex.join(command), folder or "a temporary folder")
    with tempfile.TemporaryDirectory(prefix="compilation-", dir=folder, ignore_cleanup_errors=True) as workplace:
        library = Path(workplace, f"{name}.so")
        complaint = _build(source, library, command)
        if complaint:
            return f"{shlex.join(command)} could not compile {source.name}: {complaint}"
        if folder is not None:
            library = library.replace(folder / f"{name}-{_digest(library.read_bytes())}.so")
        return _loaded([library]) or f"{library} does not load"


def _compiled(family: str, source: Path) -> ctypes.CDLL | str:
    if (library := _loaded(prebuilt(source))) is not None:  # with the functions of OpenMP that torch has brought
        return library
    if sys.platform == "win32":
        return "compiled CPU kernels are not supported on Windows"
    command = compiler()
    if command is None:
        return f"no C++ compiler found (CXX is {os.environ.get('CXX')!r}; looked for g++, clang++, c++)"
    version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    options = (_SHARED, _flag_sets(), command[1:], version, _cpu_identity())
    headers = [header.read_bytes() for header in sorted(_HERE.glob("*.h"))]  # the source includes some of them
    key = hashlib.sha256(b"\0".join([source.read_bytes(), *headers, repr(options).encode()])).hexdigest()[:20]
    name, cache = f"{family}-{key}", cache_folder()
    private = _is_private(cache)
    if private and (library := _stored(cache, name)) is not None:
        return library
    if not (private and os.access(cache, os.W_OK)):
        return _add(None, name, source, command)
    with _one_at_a_time(cache):
        # Another process may have compiled it meanwhile.
        return _stored(cache, name) or _add(cache, name, source, command)


_TYPES = {f"{name}_t": getattr(ctypes, f"c_{name}") for name in ("int32", "int64", "uint64")}
_TYPES |= {"float": ctypes.c_float, "double": ctypes.c_double}
_DECLARATION = re.compile(r"^(?:extern \"C\" )?void (halfstep_\w+)\(([^)]*)\) \{", re.MULTILINE)


def declare(loaded: ctypes.CDLL, source: str) -> ctypes.CDLL:
    """Set the argument types of the functions ``void halfstep_...`` of a library from their declarations in its source.

    Arguments are then numbers of Python and, for pointers, an address or None.

    Raises:
        KeyError: an argument is neither a pointer nor of a type in `_TYPES`.
    """
    for name, arguments in _DECLARATION.findall(source):
        function = getattr(loaded, name)
        types = [argument.rpartition(" ")[0].strip() for argument in arguments.split(",")]
        function.argtypes = [ctypes.c_void_p if name.endswith("*") else _TYPES[name] for name in types]
        function.restype = None
    return loaded


@functools.cache
def library(family: str) -> Any:
    """The compiled `family.cpp` with its functions declared. None if there is none, with a warning that says why."""
    source = next(_HERE.rglob(f"{family}.cpp"), None)
    if source is None:
        return None
    try:
        result = _compiled(family, source)
    except (OSError, subprocess.SubprocessError) as error:
        result = str(error)
    except ImportError as error:  # a checkout that is not installed, as `halfstep bench gpu` may run in
        result = f"{error}; pip install filelock platformdirs"
    if isinstance(result, str):
        warnings.warn(
            f"halfstep's compiled CPU kernels for {family} are not available: {result}. The eager reference runs "
            "instead: same bits, but exact softmax and steps with moments of 8 bits take hundreds of times as long. "
            "Install a C++ compiler or point CXX at one.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return declare(result, source.read_text())


threads: Callable[[], int] = torch.get_num_threads  # for kernels


def _after_fork() -> None:
    """In a process that was forked after kernels had run, use one thread: OpenMP would wait forever for threads that
    only the parent process has. This concerns our kernels and torch, whose operations build the tables.
    """
    global threads
    if library.cache_info().currsize:
        threads = functools.partial(int, 1)
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
