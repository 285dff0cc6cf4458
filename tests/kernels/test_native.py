"""The loader of compiled CPU kernels: what it builds, where it keeps it, and what it does when it cannot."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfstep.kernels import native

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")

SOURCE = '#include "native.h"\nextern "C" int answer() { return 42; }\n'

# Uses a kernel on the CPU and checks it against a value known by hand: 3 and 4, so a norm of 5.
USE = """
import warnings
warnings.simplefilter("always")
import torch, halfstep
found_inf, sum_of_squares, flags = halfstep.foreach_check([torch.tensor([3.0, 4.0])])
print(found_inf.item(), sum_of_squares.item())
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kernel family `toy` of one C++ function, with a cache folder of its own."""
    folder = tmp_path / "sources"
    folder.mkdir()
    source = folder / "toy.cpp"
    source.write_text(SOURCE)
    (folder / "native.h").write_bytes(native._HEADER.read_bytes())
    monkeypatch.setattr(native, "_HERE", folder)
    monkeypatch.setattr(native, "_HEADER", folder / "native.h")
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    native.library.cache_clear()
    yield source
    native.library.cache_clear()


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").glob("*.so"))


def compiler_script(folder: Path, body: str) -> Path:
    """A compiler that runs `body` first, then the real one."""
    script = folder / "c++-for-the-test"
    script.write_text(f'#!/bin/sh\n{body}\nexec "{native.compiler()}" "$@"\n')
    script.chmod(0o755)
    return script


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("CXX", "HALFSTEP_CACHE", "HALFSTEP_BACKEND")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**kept, **environment}, cwd="/"
    )


def test_a_family_is_compiled_once_and_then_loaded(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.library("toy")
    assert library is not None and library.answer() == 42
    assert len(cached(tmp_path)) == 1 and cached(tmp_path)[0].startswith("toy-")
    native.library.cache_clear()
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("compiled a second time"))
    library = native.library("toy")
    assert library is not None and library.answer() == 42


@pytest.mark.parametrize("what", ["source", "header", "flags", "cpu", "compiler"])
def test_what_changes_the_result_makes_another_library(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    native.library("toy")
    native.library.cache_clear()
    if what == "source":
        toy.write_text(SOURCE.replace("42", "43"))
    elif what == "header":
        native._HEADER.write_text(native._HEADER.read_text() + "// changed\n")
    elif what == "flags":
        monkeypatch.setattr(native, "_EXACT", [*native._EXACT, "-g"])
    elif what == "cpu":
        monkeypatch.setattr(native, "_cpu_identity", lambda: "another model")
    else:
        monkeypatch.setenv("CXX", str(compiler_script(tmp_path, '[ "$1" = --version ] && echo version 99 && exit')))
    library = native.library("toy")
    assert library is not None and library.answer() == (43 if what == "source" else 42)
    assert len(cached(tmp_path)) == 2


def test_the_flags_keep_ieee_arithmetic(toy: Path) -> None:
    """Contracting a * b + c would give a last bit that the reference does not have."""
    toy.write_text(
        'extern "C" int contracted() { volatile float a = 0x1.000002p0f, c = -0x1.000004p0f; '
        "float x = a, z = c; return x * x + z != 0.0f; }"
    )
    library = native.library("toy")
    assert library is not None
    assert library.contracted() == 0  # fused, the square keeps its 2^-46
    for flags in native._flag_sets():
        assert not any("fast-math" in flag or "Ofast" in flag for flag in [*native._EXACT, *flags])


def test_a_family_without_c_plus_plus_is_none_in_silence(toy: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library("no_such_family") is None


def test_a_source_that_does_not_compile_warns_once(toy: Path, tmp_path: Path) -> None:
    toy.write_text("this is not C++\n")
    with pytest.warns(RuntimeWarning) as caught:
        assert native.library("toy") is None
        assert native.library("toy") is None
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("halfstep's compiled CPU kernels for toy are not available: ")
    assert "could not compile toy.cpp" in text and "error" in text
    assert "The eager reference runs instead: same bits, slower. Install a C++ compiler or point CXX at one." in text
    assert list((tmp_path / "cache").glob("*.so")) == [], "a failed build left a file behind"


def test_a_damaged_library_is_built_anew(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.library("toy")
    native.library.cache_clear()
    (name,) = cached(tmp_path)
    # In another folder, since the loader of the system would answer the same path from memory.
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / name).write_bytes(b"")
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "second"))
    library = native.library("toy")
    assert library is not None and library.answer() == 42
    assert (tmp_path / "second" / name).stat().st_size > 0


def test_without_openmp_it_compiles_single_threaded(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's clang refuses -fopenmp."""
    refuse = 'for a in "$@"; do [ "$a" = -fopenmp ] && echo "unsupported option -fopenmp" >&2 && exit 1; done'
    monkeypatch.setenv("CXX", str(compiler_script(tmp_path, refuse)))
    library = native.library("toy")
    assert library is not None and library.answer() == 42


def test_every_family_compiles_without_openmp_and_without_native_tuning(tmp_path: Path) -> None:
    """The last resort of `_flag_sets`, for compilers that know neither."""
    for source in sorted(Path(native.__file__).parent.glob("*.cpp")):
        done = subprocess.run(
            [str(native.compiler()), *native._EXACT, "-O0", str(source), "-o", str(tmp_path / "out.so")],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{source.name}: {done.stderr}"


def test_no_compiler_means_the_reference_and_a_warning(tmp_path: Path) -> None:
    done = run(USE, CXX="/nonexistent/compiler", HALFSTEP_CACHE=str(tmp_path))
    assert done.stdout.split() == ["0.0", "25.0"], done.stderr
    assert "RuntimeWarning: halfstep's compiled CPU kernels for unscale are not available" in done.stderr
    assert "no C++ compiler found (CXX is '/nonexistent/compiler'; looked for g++, clang++, c++)" in done.stderr


def test_with_a_compiler_there_is_no_warning(tmp_path: Path) -> None:
    done = run(USE, HALFSTEP_CACHE=str(tmp_path / "new" / "folder"))
    assert done.stdout.split() == ["0.0", "25.0"]
    assert done.stderr == ""
    assert [path.name for path in (tmp_path / "new" / "folder").glob("unscale-*.so")]
    assert stat.S_IMODE((tmp_path / "new" / "folder").stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["a file in the way", "read-only"])
def test_an_unusable_cache_folder_costs_a_compilation_and_nothing_else(tmp_path: Path, kind: str) -> None:
    if kind == "read-only":
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        tmp_path.chmod(0o500)
        cache = tmp_path
    else:
        (tmp_path / "file").write_text("")
        cache = tmp_path / "file" / "cache"
    scratch = tmp_path.parent / f"{tmp_path.name}-scratch"
    scratch.mkdir()
    done = run(USE, HALFSTEP_CACHE=str(cache), TMPDIR=str(scratch))
    assert done.stdout.split() == ["0.0", "25.0"], done.stderr
    assert done.stderr == ""
    assert list(scratch.glob("halfstep-*")) == [], "the private folder was left behind"


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    """The ranks of a job: one compiles, the others wait and load what it made."""
    log = tmp_path / "log"
    slow = compiler_script(tmp_path, f'[ "$1" = --version ] || {{ echo compiling >> "{log}"; sleep 1; }}')
    code = "from halfstep.kernels import native; print(native.library('unscale') is not None)"
    environment = {**os.environ, "CXX": str(slow), "HALFSTEP_CACHE": str(tmp_path / "cache")}
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment, cwd="/")
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in started] == ["True", "True"]
    assert log.read_text().splitlines() == ["compiling"]


def test_a_compiler_that_dies_is_a_warning(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler_script(tmp_path, '[ "$1" = --version ] || kill -9 $$')))
    with pytest.warns(RuntimeWarning, match="could not compile toy.cpp: no message"):
        assert native.library("toy") is None


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_CACHE", "/a/b")
    assert native.cache_folder() == Path("/a/b")
    monkeypatch.setenv("HALFSTEP_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert native.cache_folder() == Path("/c/halfstep")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert native.cache_folder() == Path.home() / ".cache" / "halfstep"
