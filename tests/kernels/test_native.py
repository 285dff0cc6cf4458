"""The loader of compiled CPU kernels: what it builds, its cache, and what happens when it cannot build."""

import os
import shlex
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest

from halfstep.kernels import native

pytestmark = [pytest.mark.sample(3), pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")]

# The header would take most of the compilation; every family of the package includes it.
SOURCE = 'extern "C" int answer() { return 42; }\n'

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
    for header in native._HERE.glob("*.h"):
        (folder / header.name).write_bytes(header.read_bytes())
    monkeypatch.setattr(native, "_HERE", folder)
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    native.library.cache_clear()
    yield source
    native.library.cache_clear()


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").glob("*.so"))


def answer() -> int:
    """What the toy answers, loaded or compiled anew."""
    native.library.cache_clear()
    library = native.library("toy")
    assert library is not None
    return library.answer()  # type: ignore[no-any-return]


def compiler_script(folder: Path, body: str) -> Path:
    """A compiler that runs `body` first, then the real one."""
    script = folder / "c++-for-the-test"
    script.write_text(f'#!/bin/sh\n{body}\nexec {shlex.join(native.compiler() or [])} "$@"\n')
    script.chmod(0o755)
    return script


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("CXX", "HALFSTEP_CACHE", "HALFSTEP_BACKEND")}
    return forks.run(["-c", code], {**kept, **environment}, cwd="/")


def test_a_family_is_compiled_once_and_then_loaded(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer() == 42
    assert len(cached(tmp_path)) == 1 and cached(tmp_path)[0].startswith("toy-")
    native.library.cache_clear()
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("compiled a second time"))
    assert answer() == 42


@pytest.mark.parametrize("what", ["source", "native.h", "lanes.h", "flags", "cpu", "compiler"])
def test_what_changes_the_result_makes_another_library(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what.endswith(".h"):
        toy.write_text(f'#include "{what}"\n' + SOURCE)
    native.library("toy")
    native.library.cache_clear()
    if what == "source":
        toy.write_text(SOURCE.replace("42", "43"))
    elif what.endswith(".h"):
        header = toy.parent / what
        header.write_text(header.read_text() + "// changed\n")
    elif what == "flags":
        monkeypatch.setattr(native, "_SHARED", [*native._SHARED, "-g"])
    elif what == "cpu":
        monkeypatch.setattr(native, "_cpu_identity", lambda: "another model")
    else:
        monkeypatch.setenv("CXX", str(compiler_script(tmp_path, '[ "$1" = --version ] && echo version 99 && exit')))
    assert answer() == (43 if what == "source" else 42)
    assert len(cached(tmp_path)) == 2


def test_a_source_that_does_not_compile_warns_once(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.write_text("this is not C++\n")
    with pytest.warns(RuntimeWarning) as caught:
        assert native.library("toy") is None
        assert native.library("toy") is None
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("halfstep's compiled CPU kernels for toy are not available: ")
    assert "could not compile toy.cpp" in text and "error" in text
    assert (
        "The eager reference runs instead: same bits, but" in text
        and "Install a C++ compiler or point CXX at one." in text
    )
    assert list((tmp_path / "cache").glob("*.so")) == [], "a failed build left a file behind"
    monkeypatch.setenv("CXX", str(compiler_script(tmp_path, '[ "$1" = --version ] || kill -9 $$')))
    native.library.cache_clear()
    with pytest.warns(RuntimeWarning, match="could not compile toy.cpp: exit status -9"):
        assert native.library("toy") is None


def other_library(folder: Path) -> bytes:
    """A library that loads, and answers wrongly."""
    source, target = folder / "other.cpp", folder / "other.so"
    source.write_text('extern "C" int answer() { return 666; }\n')
    assert native._build(source, target, native.compiler() or []) == ""
    return target.read_bytes()


def put_library(folder: Path, name: str, content: bytes) -> Path:
    """A file of the name that a library of this content would have."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name.rpartition('-')[0]}-{native._digest(content)}.so"
    path.write_bytes(content)
    return path


def in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """The name of the toy's library and another cache folder, still empty.

    In another, since the loader of the system would answer the same path from memory.
    """
    native.library("toy")
    native.library.cache_clear()
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "second"))
    return cached(tmp_path)[0], tmp_path / "second"


@pytest.mark.parametrize("damage", ["bit", "cut", "another library", "a FIFO"])
def test_a_damaged_library_is_rebuilt(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """A cut one would be SIGBUS, one with another content SIGSEGV, AttributeError or wrong results."""
    name, folder = in_a_new_folder(tmp_path, monkeypatch)
    content = (tmp_path / "cache" / name).read_bytes()
    folder.mkdir(mode=0o700)
    bad = {"cut": content[:-4096], "bit": content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]}
    if damage == "a FIFO":
        os.mkfifo(folder / name)
    else:
        (folder / name).write_bytes(bad[damage] if damage in bad else other_library(tmp_path))
    assert answer() == 42
    assert (folder / name).read_bytes() == content
    assert sorted(path.name for path in folder.iterdir()) == ["lock", name], "something was left behind"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, "another user's"])
def test_a_library_planted_where_others_may_write_is_not_run(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | str
) -> None:
    name, folder = in_a_new_folder(tmp_path, monkeypatch)
    planted = put_library(folder, name, other_library(tmp_path))
    if isinstance(mode, int):
        folder.chmod(mode)
    elif os.geteuid() == 0:
        folder.chmod(0o755)
        os.chown(folder, 54321, -1)
    else:
        pytest.skip("only root may give a folder away")
    monkeypatch.setattr(native.tempfile, "tempdir", str(tmp_path))
    with pytest.warns(RuntimeWarning) as caught:
        assert answer() == answer() == 42
    assert [str(warning.message) for warning in caught] == [
        f"halfstep does not use {folder} for compiled CPU kernels, because another user could put code there, and "
        f"compiles them for this process only: use `chmod go-w {folder}` if it is yours, or set "
        "HALFSTEP_CACHE to a folder that only you can write to."
    ]
    assert list(folder.iterdir()) == [planted] and not list(tmp_path.glob("compilation-*"))


def test_a_cache_that_cannot_be_written_is_read(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an image, say, whose libraries root has put there."""
    name, folder = in_a_new_folder(tmp_path, monkeypatch)
    put_library(folder, name, (tmp_path / "cache" / name).read_bytes())
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("compiled a second time"))
    assert answer() == 42
    assert [path.name for path in folder.iterdir()] == [name]


def test_a_compiler_may_come_with_arguments(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.write_text('extern "C" int answer() { return ANSWER; }\n')
    plain = shlex.join(native.compiler() or [])
    for number in (7, 8):
        monkeypatch.setenv("CXX", f"{plain} -O2 -DANSWER={number} -DTEXT='\"a b\"'")
        assert answer() == number
    assert len(cached(tmp_path)) == 2, "arguments change the result"
    wrapper = compiler_script(tmp_path, "[ -x ] && shift")  # as ccache: the compiler is its first argument
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    monkeypatch.setenv("CXX", f"'{wrapper}' {plain} -DANSWER=9")
    assert answer() == 9
    for nonsense in ("g++ 'unclosed", "/nonexistent/g++ -O2", " "):
        monkeypatch.setenv("CXX", nonsense)
        assert native.compiler() is None


FORK = """
import os, sys, torch, halfstep
from halfstep.kernels import native
torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
xs = [torch.randn(20000, generator=generator) for _ in range(6)]  # fewer than torch hands to a second thread
ps = [torch.nn.Parameter(x.bfloat16()) for x in xs]
optimizer = halfstep.AdamW(ps, max_grad_norm=1.0)
rows = torch.randn(160, 160, generator=generator)

def work():
    out = []
    for p, x in zip(ps, xs):
        p.grad = (x * 0.1).bfloat16()
    optimizer.step()
    out += [p.detach().float().sum().item() for p in ps]
    out.append(halfstep.foreach_check(xs).sum_of_squares.item())
    out += [y.float().sum().item() for y in halfstep.foreach_cast(xs, torch.float8_e4m3fn)]
    out.append(halfstep.cast(rows.reshape(-1), torch.bfloat16).float().sum().item())
    x = rows.clone().requires_grad_()
    halfstep.softmax(x).square().sum().backward()
    out.append(x.grad.double().sum().item())
    return out

start = [p.detach().clone() for p in ps]
def again():
    with torch.no_grad():
        for p, s in zip(ps, start):
            p.copy_(s)
    optimizer.state.clear()
    return work()

before = again()
child = os.fork()
if child == 0:
    same = again() == before and native.threads() == 1
    os._exit(0 if same else 3)
assert os.waitpid(child, 0)[1] == 0, "the child differs"
assert again() == before and native.threads() == 2
print("done")
"""


def test_a_fork_of_a_process_that_has_run_in_parallel_works_alone() -> None:
    """OpenMP's threads are not in the child; waiting for them never ended."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }  # with a GPU, autograd refuses forks
    done = forks.run(["-c", FORK], environment, timeout=120)
    assert done.stdout == "done\n", done.stderr


def test_every_family_compiles_without_openmp_and_without_native_tuning() -> None:
    """The last resort of `_flag_sets`, for compilers that know neither."""
    for source in sorted(Path(native.__file__).parent.rglob("*.cpp")):
        command = [*(native.compiler() or []), *native._SHARED, "-fsyntax-only", str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{source.name}: {done.stderr}"


UNAVAILABLE = "RuntimeWarning: halfstep's compiled CPU kernels for unscale are not available"


@pytest.mark.parametrize(
    ("before", "environment", "said"),
    [
        (
            "import sys; sys.modules['platformdirs'] = None",
            {"HALFSTEP_CACHE": ""},
            "; pip install filelock platformdirs. ",
        ),
        ("", {"CXX": "/none"}, "no C++ compiler found (CXX is '/none'; looked for g++, clang++, c++)"),
        ("", {}, ""),
    ],
    ids=["no dependencies", "no compiler", "a compiler"],
)
def test_what_is_missing_is_named_and_the_reference_runs(
    tmp_path: Path, before: str, environment: dict[str, str], said: str
) -> None:
    cache = tmp_path / "new" / "folder"
    done = run(f"{before}\n{USE}", **{"HALFSTEP_CACHE": str(cache), "HOME": str(tmp_path), **environment})
    assert done.stdout.split() == ["0.0", "25.0"], done.stderr
    if said:
        assert UNAVAILABLE in done.stderr and said in done.stderr
    else:
        assert done.stderr == "" and list(cache.glob("unscale-*.so"))
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    """The ranks of a job: one compiles, the others wait and load what it made."""
    log = tmp_path / "log"
    slow = compiler_script(tmp_path, f'[ "$1" = --version ] || {{ echo compiling >> "{log}"; sleep 1; }}')
    code = "from halfstep.kernels import native; print(native.library('loss_scale') is not None)"
    environment = {**os.environ, "CXX": str(slow), "HALFSTEP_CACHE": str(tmp_path / "cache")}
    started = [forks.Program(["-c", code], environment, cwd="/") for _ in range(2)]
    assert [process.stdout.read().strip() for process in started] == ["True", "True"]
    assert log.read_text().splitlines() == ["compiling"]
