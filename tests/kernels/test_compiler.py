"""The prebuilt libraries of a wheel: which one a CPU loads, and that they need no compiler."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import forks
import pytest

from halfstep.kernels import compiler

SOURCE = compiler.HERE / "loss_scale.cpp"
MACHINE = platform.machine()
needs_levels = pytest.mark.skipif(
    MACHINE not in compiler.LEVELS or not sys.platform.startswith("linux"), reason="no wheel holds libraries for this"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an empty file in place of each library of one source, on a CPU of x86-64-v3."""
    monkeypatch.setattr(compiler, "FOLDER", tmp_path)
    monkeypatch.setattr(compiler.platform, "machine", lambda: "x86_64")
    _, flags = compiler.LEVELS["x86_64"]["v3"]
    monkeypatch.setattr(compiler, "_cpu_flags", lambda: frozenset((*flags, "avx512f")))
    monkeypatch.delenv("HALFSTEP_CPU_LEVEL", raising=False)
    for level in compiler.LEVELS["x86_64"]:
        (tmp_path / compiler.file_name(SOURCE, level)).touch()
    return tmp_path


def levels(source: Path = SOURCE) -> list[str]:
    return [path.stem.split("-")[1] for path in compiler.prebuilt(source)]


def test_the_fastest_that_the_cpu_can_run_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels() == ["v3", "v2"]  # one flag of AVX-512 alone is not v4
    monkeypatch.setenv("HALFSTEP_CPU_LEVEL", "v2")
    assert levels() == ["v2"]
    monkeypatch.setenv("HALFSTEP_CPU_LEVEL", "v4")
    assert levels() == []
    monkeypatch.setenv("HALFSTEP_CPU_LEVEL", "native")
    assert levels() == []
    monkeypatch.setenv("HALFSTEP_CPU_LEVEL", "v5")
    with pytest.raises(ValueError, match="HALFSTEP_CPU_LEVEL to be one of v4, v3, v2, native, but got 'v5'"):
        levels()


def test_libraries_of_other_sources_are_not_loaded(folder: Path, tmp_path: Path) -> None:
    changed = tmp_path / SOURCE.name
    changed.write_bytes(SOURCE.read_bytes() + b"\n")
    assert levels(changed) == []


def test_without_flags_of_the_cpu_there_is_nothing_to_choose(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_cpu_flags", lambda: frozenset())
    assert levels() == []


@needs_levels
@pytest.mark.skipif(compiler.compiler() is None, reason="needs a C++ compiler")
def test_a_library_of_a_wheel_is_loaded_without_a_compiler(tmp_path: Path) -> None:
    """Built as setup.py does; a whole wheel takes a minute (test_packaging.py)."""
    level = list(compiler.LEVELS[MACHINE])[-1]
    target = tmp_path / compiler.file_name(SOURCE, level)
    for arguments in compiler.calls(MACHINE, SOURCE, level, target):
        subprocess.run([*(compiler.compiler() or []), *arguments], check=True)
    code = f"""
from pathlib import Path
from halfstep.kernels import compiler, native
compiler.FOLDER = Path({str(tmp_path)!r})
print(native.library("loss_scale")._name)
print(native.library("cast"))
"""
    environment = {
        **os.environ,
        "CXX": "/nonexistent",
        "HALFSTEP_CPU_LEVEL": "",
        "HALFSTEP_CACHE": str(tmp_path / "cache"),
    }
    done = forks.run(["-c", code], environment)
    assert done.stdout.split() == [str(target), "None"], done.stderr
    assert "compiled CPU kernels for cast are not available: no C++ compiler found" in done.stderr
