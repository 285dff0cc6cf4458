"""Compile C++ code that exposes inline functions of the package's headers."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from halfstep.kernels import native

KERNELS = Path(native.__file__).resolve().parent
PORTABLE: list[str] = []  # the flags for the oldest machine of this kind: no F16C, no AVX-512


def compiled(factory: pytest.TempPathFactory, source: str | Path, flags: list[str] | None = None) -> Path:
    """The library of a source, as the package builds it or with other flags. Skips the test without a compiler."""
    command = native.compiler()
    if command is None:
        pytest.skip("needs a C++ compiler")
    folder = factory.mktemp("cpp")
    file, target = source if isinstance(source, Path) else folder / "wrapper.cpp", folder / "wrapper.so"
    if isinstance(source, str):
        file.write_text(source)
    if flags is None:
        complaint = native._build(file, target, command)
        assert not complaint, complaint
    else:
        subprocess.run([*command, *native._SHARED, *flags, str(file), "-o", str(target)], check=True)
    return target


def library(factory: pytest.TempPathFactory, source: str, flags: list[str] | None = None) -> ctypes.CDLL:
    """`compiled`, loaded."""
    return ctypes.CDLL(str(compiled(factory, source, flags)))
