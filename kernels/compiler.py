"""The C++ compiler of the machine, and the libraries that wheels bring along.

A wheel for x86-64 holds each family for three levels of CPUs (the psABI's x86-64-v2, v3 and v4), one for aarch64 for
all of its CPUs. setup.py builds them, importing this module before anything is installed; native.py loads the best one
that the CPU can run. ``HALFSTEP_CPU_LEVEL`` chooses another, or with "native" what is compiled at first use.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "prebuilt"
# IEEE semantics, so that the bits are those of the reference: no contraction to FMA, no reassociation, correctly
# rounded division and square root. The last two only affect errno and the floating-point exception flags.
EXACT = ["-std=c++17", "-O3", "-fno-fast-math", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
_V2 = ("ssse3", "sse4_1", "sse4_2", "popcnt")
_V3 = (*_V2, "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# Per machine the levels, the fastest code first: options of the compiler, and the flags of /proc/cpuinfo that it needs.
LEVELS: dict[str, dict[str, tuple[list[str], tuple[str, ...]]]] = {
    "x86_64": {
        "v4": (["-march=x86-64-v4", "-mprefer-vector-width=512"], _V4),
        "v3": (["-march=x86-64-v3"], _V3),
        "v2": (["-march=x86-64-v2"], _V2),
    },
    "aarch64": {"v8": (["-march=armv8-a"], ())},
}


def compiler() -> list[str] | None:
    """The command of the C++ compiler as a list of words; None if there is none.

    It is ``$CXX``, split as a shell would split it (``g++ -O2``, ``ccache g++``), or the first of g++, clang++ and c++
    that is installed.
    """
    wished = os.environ.get("CXX")
    try:
        candidates = [shlex.split(wished)] if wished else [["g++"], ["clang++"], ["c++"]]
    except ValueError:  # a quotation mark is missing
        return None
    return next(([path, *rest] for name, *rest in filter(None, candidates) if (path := shutil.which(name))), None)


def libraries(machine: str) -> Iterator[tuple[Path, str]]:
    """The source and the level of each library that a wheel for a machine holds."""
    for source in sorted(HERE.rglob("*.cpp")):
        for level in LEVELS.get(machine, ()):
            yield source, level


def file_name(source: Path, level: str) -> str:
    """The file of a library. It ends in a digest of the sources, so that one of other sources is not loaded."""
    parts = [source.read_bytes(), *(header.read_bytes() for header in sorted(HERE.glob("*.h")))]
    return f"{source.stem}-{level}-{hashlib.sha256(bytes(1).join(parts)).hexdigest()[:12]}.so"


def calls(machine: str, source: Path, level: str, target: Path) -> list[list[str]]:
    """The arguments of the two calls of the compiler that make a library.

    OpenMP's functions stay undefined, and are found in torch's OpenMP when the library is loaded: linked with -fopenmp,
    it would name libgomp.so.1, which slim images lack, or which is a second OpenMP beside torch's.
    """
    options, _ = LEVELS[machine][level]
    compiled = str(target.with_suffix(".o"))
    link = ["-shared", "-Wl,-O1", "-Wl,--as-needed", "-Wl,--build-id=none", "-s"]
    return [
        [*EXACT, *options, "-fopenmp", "-c", str(source), "-o", compiled],
        [*link, compiled, "-o", str(target)],
    ]


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return frozenset(next(line for line in lines if line.startswith("flags")).partition(":")[2].split())
    except (OSError, StopIteration):
        return frozenset()


def prebuilt(source: Path) -> list[Path]:
    """The libraries of a source that came with the wheel and that this CPU can run, the fastest first."""
    wished = os.environ.get("HALFSTEP_CPU_LEVEL", "")
    levels = LEVELS.get(platform.machine(), {})
    if wished not in ("", "native", *levels):
        raise ValueError(
            f"Expected HALFSTEP_CPU_LEVEL to be one of {', '.join([*levels, 'native'])}, but got {wished!r}: "
            "unset it for the best that this CPU can run"
        )
    if wished == "native" or not FOLDER.is_dir():
        return []
    flags = _cpu_flags()
    fitting = [level for level, (_, required) in levels.items() if wished in ("", level) and flags.issuperset(required)]
    return [path for level in fitting if (path := FOLDER / file_name(source, level)).is_file()]
