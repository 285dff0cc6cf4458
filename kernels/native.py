"""Compile and load the C++ twins of the kernels for the CPU.

Each kernel family, the module or package `name`, may have a `name.cpp` beside or in it with a plain C interface:
pointers, sizes, numbers. It is compiled once, at first use, with the machine's own compiler (2 to 6 s), kept in the
user's cache folder and loaded with ctypes. Without a compiler the library is None, the reference runs instead: the same
bits, slower.

What is loaded is run, so it must be what was compiled: a folder or file that others may write to is not looked at, and
the name of a library ends in a digest of its bytes, which a truncated or damaged one has not.

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
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_EXACT = ["-std=c++17", "-O3", "-fno-fast-math", "-fPIC", "-shared", "-ffp-contract=off"]
_EXACT += ["-fno-math-errno", "-fno-trapping-math"]
_logger = logging.getLogger("halfstep")


def _flag_sets() -> list[list[str]]:
    """Compiler flags, best first; a compiler that refuses one set is given the next."""
    tuned = ["-mcpu=native"] if platform.machine() in ("arm64", "aarch64") else ["-march=native"]
    if platform.machine() in ("x86_64", "AMD64"):
        wide = [[*tuned, "-mprefer-vector-width=512", "-fopenmp"]]  # a no-op on CPUs without AVX-512
    else:
        wide = []
    return [*wide, [*tuned, "-fopenmp"], tuned, ["-fopenmp"], []]


def compiler() -> list[str] | None:
    """The C++ compiler and the arguments it is always given, None if there is none.

    ``$CXX`` if set, split as a shell would (``g++ -O2``, ``ccache g++``); else the first of g++, clang++, c++ found.
    """
    wished = os.environ.get("CXX")
    try:
        candidates = [shlex.split(wished)] if wished else [["g++"], ["clang++"], ["c++"]]
    except ValueError:  # a quotation without an end
        return None
    return next(([found, *rest] for name, *rest in filter(None, candidates) if (found := shutil.which(name))), None)


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


def _writable_by_others(info: os.stat_result) -> bool:
    """Whether somebody other than root and this user may write it."""
    return info.st_uid not in (0, os.geteuid()) or bool(info.st_mode & 0o022)


def _is_private_group(group: int) -> bool:
    """Whether a group is this user's own, as many systems give everybody one and let it write."""
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid())
        return user.pw_gid == group and set(grp.getgrgid(group).gr_mem) <= {user.pw_name}
    except KeyError:
        return False


def _danger(folder: Path) -> str:
    """Why a library in a folder might be somebody else's, and what to do about it; "" if it cannot be."""
    real = folder.resolve()
    for place in (real, *real.parents):
        info = place.stat()
        if info.st_uid not in (0, os.geteuid(), Path("/").stat().st_uid):
            return f"{place} belongs to user {info.st_uid}"
        others = info.st_mode & 0o022
        if place != real:  # whoever may rename it may put another in its place
            own_group = not others & 0o002 and _is_private_group(info.st_gid)
            others = 0 if info.st_mode & stat.S_ISVTX or own_group else others
        if others:
            return f"others may write to {place}; use `chmod go-w {shlex.quote(str(place))}`"
    return ""


_refused: set[Path] = set()


def _is_private(folder: Path) -> bool:
    """Whether only this user and root can have written what is in a folder; one warning if not."""
    danger = _danger(folder)
    if danger and folder not in _refused:
        _refused.add(folder)
        warnings.warn(
            f"halfstep neither loads compiled CPU kernels from {folder} nor keeps them there, as others could have put "
            f"code of theirs there, and compiles them for this process alone: {danger}, or set HALFSTEP_CACHE to a "
            "folder that is yours alone.",
            RuntimeWarning,
            stacklevel=6,
        )
    return not danger


_own: Path | None = None


def _own_folder() -> Path:
    """A fresh folder that nobody else can write to, for this process, removed when it ends."""
    global _own
    if _own is None or not _own.is_dir():  # machines tidy up
        _own = Path(tempfile.mkdtemp(prefix="halfstep-"))
        atexit.register(_remove, _own, os.getpid())
    return _own


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process of several (the ranks of a job) compile while the others wait for its result."""
    import fcntl

    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks: two may compile the same, which is harmless
            _logger.info("%s cannot be locked: %s", folder, error)
        yield


def _build(source: Path, target: Path, command: list[str]) -> str:
    """Compile `source` to `target` in one step visible to others. Returns "" or the compiler's last complaint."""
    complaint = ""
    for flags in _flag_sets():
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
        os.close(handle)
        try:
            done = subprocess.run(
                [*command, *_EXACT, *flags, str(source), "-o", name], capture_output=True, text=True, timeout=300
            )
            if done.returncode == 0:
                os.chmod(name, 0o755)
                with open(name, "rb+") as written:
                    os.fsync(written.fileno())  # or a power cut could leave an empty file under the final name
                os.replace(name, target)
                return ""
        finally:
            Path(name).unlink(missing_ok=True)
        complaint = done.stderr.strip()
    return complaint or "no message"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _holds_what_it_says(path: Path) -> bool:
    """Whether a library is a file of this user or root that has the digest in its name."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            info = os.fstat(handle)
            if not stat.S_ISREG(info.st_mode) or _writable_by_others(info):
                return False
            return _digest(file.read()) == path.stem.rpartition("-")[2]
    except OSError:
        return False


def _kept(folder: Path, name: str) -> ctypes.CDLL | None:
    """The library of this name in a private folder, None if there is none that is whole and loads."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        if not _holds_what_it_says(path):
            _logger.info("%s is damaged or not ours", path)
            continue
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:  # a library that it was linked against is gone
            _logger.info("%s does not load: %s", path, error)
    return None


def _compiled(family: str, source: Path) -> ctypes.CDLL | str:
    """The loaded library, or in words why there is none."""
    if sys.platform == "win32":
        return "compiled CPU kernels are not supported on Windows"
    command = compiler()
    if command is None:
        return f"no C++ compiler found (CXX is {os.environ.get('CXX')!r}; looked for g++, clang++, c++)"
    version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    made_by = (_EXACT, _flag_sets(), command[1:], version, _cpu_identity())
    headers = [header.read_bytes() for header in sorted(_HERE.glob("*.h"))]  # whichever of them it includes
    parts = [source.read_bytes(), *headers, repr(made_by).encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    name = f"{family}-{key}"
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        private = _is_private(folder)
    except OSError:
        private = False
    found = _kept(folder, name) if private else None
    if found is not None:
        return found
    if not private or not os.access(folder, os.W_OK):
        folder = _own_folder()
    with _one_at_a_time(folder):
        found = _kept(folder, name)  # what another process has made meanwhile
        if found is not None:
            return found
        _logger.info("compiling %s with %s into %s", source.name, shlex.join(command), folder)
        fresh = folder / f"{name}.{os.getpid()}"
        complaint = _build(source, fresh, command)
        if complaint:
            return f"{shlex.join(command)} could not compile {source.name}: {complaint}"
        target = folder / f"{name}-{_digest(fresh.read_bytes())}.so"
        os.replace(fresh, target)
        try:
            return ctypes.CDLL(str(target))
        except OSError as error:
            return f"{target} does not load: {error}"


_in_parallel = False  # whether OpenMP may have started threads here
_without_threads = False  # whether this process was forked from one where it had


def threads(wished: int | None = None) -> int:
    """How many threads a kernel may use: those wished for, else as many as torch uses.

    One in a process that was forked after kernels had run in parallel.
    """
    global _in_parallel
    if _without_threads:
        return 1
    if not wished:
        import torch  # not before: encoding numbers does without it

        wished = torch.get_num_threads()
    _in_parallel = _in_parallel or wished > 1
    return wished


def _after_fork() -> None:
    """OpenMP would wait for ever for threads that only the parent has: ours does, and torch's, which builds the tables.

    torch's workers that load data are told the same.
    """
    global _without_threads
    if _in_parallel:
        _without_threads = True
        import torch

        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


_TYPES = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_DECLARATION = re.compile(r"^(?:extern \"C\" )?void (halfstep_\w+)\(([^)]*)\) \{", re.MULTILINE)


def declare(loaded: ctypes.CDLL, source: str) -> ctypes.CDLL:
    """Tell the functions of a library, ``void halfstep_...``, the types that its source declares for their arguments.

    A call then takes Python's numbers, and an address or None for a pointer.

    Raises:
        KeyError: an argument is neither a pointer nor of one of the types above.
    """
    for name, arguments in _DECLARATION.findall(source):
        function = getattr(loaded, name)
        kinds = [argument.rpartition(" ")[0].strip() for argument in arguments.split(",")]
        function.argtypes = [ctypes.c_void_p if kind.endswith("*") else _TYPES[kind] for kind in kinds]
        function.restype = None
    return loaded


def functions(family: str) -> ctypes.CDLL:
    """`library` of a family that has one, as who asked `backend.resolve` knows."""
    found = library(family)
    assert found is not None
    return found


@functools.cache
def library(family: str) -> ctypes.CDLL | None:
    """The compiled `family.cpp`, its functions declared, or None, with one warning that says why and what to do."""
    source = next(_HERE.rglob(f"{family}.cpp"), None)
    if source is None:
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
    return declare(result, source.read_text())
