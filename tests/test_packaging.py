"""What users install: the wheel, a regular and an editable install, each in its own environment.

Nothing is downloaded: the new environments see this one's packages, torch among them, through a path file.
"""

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from halfstep.kernels import compiler

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "numerics", "integrations", "bench")
NOT_SOURCES = shutil.ignore_patterns(".git", ".venv*", "out", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")


def run(*command: object, cwd: Path | str = "/") -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that building leaves nothing behind in the checkout."""
    copy = tmp_path_factory.mktemp("sources") / "halfstep"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_SOURCES)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist as `python -m build` does, with the setuptools that is here."""
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, tree, cwd=dist)
    (found,) = dist.glob("*.whl")
    return found


def environment(folder: Path, *install: object) -> Path:
    """A fresh environment with halfstep installed as `install` says. Returns its folder of executables."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    purelib = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    # A path file adds a folder but does not read the path files in it: halfstep's own editable install stays unseen.
    (purelib / "packages-of-the-tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, *install, cwd=folder)
    return folder / "bin"


INSTALLS = ["wheel", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("regular", "editable"))]


@pytest.fixture(scope="module", params=INSTALLS)
def installed(request: pytest.FixtureRequest, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    what = {
        "wheel": lambda: [request.getfixturevalue("wheel")],
        "regular": lambda: [tree],
        "editable": lambda: ["-e", tree],
    }
    return environment(tmp_path_factory.mktemp(request.param), *what[request.param]())


def sources() -> list[Path]:
    """Modules, C++ and parts of pages of the package's folders, by their paths in an installation."""
    homes = {**{folder: ROOT / folder for folder in FOLDERS}, "cli": ROOT / "src" / "halfstep" / "cli"}
    return [
        Path("halfstep") / name / path.relative_to(home)
        for name, home in homes.items()
        for path in home.rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".html", ".css", ".mjs")
    ]


@functools.cache
def version() -> str:
    return run(sys.executable, "-c", "import halfstep; print(halfstep.__version__)")


def test_the_command_works_from_anywhere_and_its_version_is_the_metadatas(
    installed: Path, tree: Path, tmp_path: Path
) -> None:
    code = "import halfstep, importlib.metadata as m; print(m.version('halfstep'), halfstep.__file__)"
    for cwd in (tree, tmp_path):
        assert run(installed / "python", "-m", "halfstep", "--version", cwd=cwd) == f"halfstep {version()}"
        assert run(installed / "halfstep", "--version", cwd=cwd) == f"halfstep {version()}"
        told, file = run(installed / "python", "-c", code, cwd=cwd).split(maxsplit=1)
        assert told == version()
        assert Path(file).is_relative_to(tree if "editable" in str(installed) else installed.parent), file


def test_no_folder_becomes_importable_on_its_own(installed: Path, tmp_path: Path) -> None:
    """A bare `kernels` would shadow Hugging Face's package, which transformers looks for."""
    code = f"import importlib.util as u; print([n for n in {FOLDERS} if u.find_spec(n) is not None])"
    assert run(installed / "python", "-c", code, cwd=tmp_path) == "[]"


def test_every_module_imports_or_is_found(installed: Path, tmp_path: Path) -> None:
    modules = [
        ".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in sources() if file.suffix == ".py"
    ]
    assert "halfstep.kernels.backend" in modules and "halfstep.cli.pages.planner" in modules
    # What the modules do is the same in every installation; whether they are found is not.
    take = "import_module" if "wheel" in str(installed) else "util.find_spec"
    code = f"""
import halfstep, importlib.util
for name in {sorted(modules)}:
    try:
        assert importlib.{take}(name), name
    except ModuleNotFoundError as error:  # the trainers' modules need their own libraries
        assert name.startswith("halfstep.integrations.trainers.") and not error.name.startswith("halfstep"), name
if "{take}" == "import_module":
    for name in halfstep.__all__:
        getattr(halfstep, name)
"""
    run(installed / "python", "-c", code, cwd=tmp_path)


def test_the_wheel_holds_every_source_and_nothing_else(wheel: Path) -> None:
    """Modules, the C++ that is compiled on the user's machine, and the parts of pages."""
    wanted = {file.as_posix() for file in sources()}
    wanted |= {f"halfstep/{name}" for name in ("__init__.py", "__main__.py", "_version.py", "py.typed")}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    assert held == wanted
    assert licences


def test_importing_halfstep_is_cheap() -> None:
    code = "import halfstep, sys; dir(halfstep); print({'torch', 'triton', 'numpy'} & set(sys.modules))"
    assert run(sys.executable, "-c", code) == "set()"


def test_everything_but_triton_works_without_triton() -> None:
    """As on macOS and Windows, where there is no Triton."""
    code = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
sys.modules["triton"] = None
import halfstep, torch
for name in halfstep.__all__:
    getattr(halfstep, name)
weight = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
optimizer = halfstep.AdamW([weight], lr=0.5)
weight.grad = torch.ones_like(weight)
optimizer.step()
assert weight.lt(1).all(), weight
assert halfstep.softmax(torch.zeros(2, 4)).eq(0.25).all()
assert halfstep.cast(torch.ones(3), torch.float16).dtype == torch.float16
assert halfstep.foreach_check([torch.tensor([float("inf")])])[0] == 1
try:
    with halfstep.backend("triton"):
        halfstep.cast(torch.ones(3), torch.float16)
except RuntimeError as error:
    print(error)
from halfstep.bench.audit import command
sys.stderr = sys.stdout
assert command.main([]) == 2
"""
    printed = run(sys.executable, "-c", code)
    assert printed.startswith("Expected triton to be installed for backend 'triton'")
    assert "triton is not installed: pip install triton" in printed


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.machine() not in compiler.LEVELS or sys.platform != "linux", reason="holds no libraries")
def test_a_wheel_with_libraries_needs_no_compiler(tree: Path, tmp_path: Path) -> None:
    """Every family and level gives the golden digests; of the levels, those that this CPU can run."""
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, tree)
    subprocess.run([*map(str, build)], check=True, env={**os.environ, "HALFSTEP_PREBUILT": "required"}, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"halfstep-.*-py3-none-linux_.*\.whl", wheel.name)
    names = [Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    families = {source.stem for source, _ in compiler.libraries(platform.machine())}
    levels = compiler.LEVELS[platform.machine()]
    assert sorted(name.rpartition("-")[0] for name in names) == sorted(
        f"{f}-{level}" for f in families for level in levels
    )
    environment(tmp_path / "fresh", wheel)
    (site,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    for level, (_, needed) in levels.items():
        if compiler._cpu_flags().issuperset(needed):
            variables = {"CXX": "/nonexistent", "HALFSTEP_CPU_LEVEL": level, "PYTHONPATH": str(site)}
            tests = [
                ROOT / "tests" / "test_golden.py",
                "-k",
                "native",
                "-q",
                "-p",
                "no:cacheprovider",
                "--rootdir",
                ROOT,
            ]
            command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", *tests]
            done = subprocess.run(
                [*map(str, command)], env=os.environ | variables, cwd=tmp_path, capture_output=True, text=True
            )
            assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
