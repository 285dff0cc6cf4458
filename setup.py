"""Builds the C++ of the package for several levels of CPUs, as libraries that kernels/native.py loads by ctypes.

They include no header of Python, so one wheel serves every version of it. HALFSTEP_PREBUILT=1 builds them, and
HALFSTEP_PREBUILT=required fails where one cannot be built. Without it the wheel is pure: who has a compiler at
installation has one at the first use, and an installation from source stays quick. Editable installs build nothing.
"""

import importlib.util
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path(__file__).resolve().parent / "src" / "halfstep" / "kernels"  # in an sdist, links are folders
WISH = os.environ.get("HALFSTEP_PREBUILT", "")
if WISH not in ("", "0", "1", "required"):
    raise ValueError(f"Expected HALFSTEP_PREBUILT to be 0, 1 or required, but got {WISH!r}")


def compiler_module():
    """kernels/compiler.py, which imports nothing but Python's own library."""
    spec = importlib.util.spec_from_file_location("halfstep_compiler", KERNELS / "compiler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cpp = compiler_module()
MACHINE = platform.machine()
BUILDS = WISH in ("1", "required") and sys.platform == "linux" and MACHINE in cpp.LEVELS
if WISH == "required" and (not BUILDS or cpp.compiler() is None):
    raise RuntimeError(f"HALFSTEP_PREBUILT=required needs Linux on {' or '.join(cpp.LEVELS)}, and a C++ compiler")


class Build(build_py):
    """Python's files, and each family of kernels compiled for each level of the CPU."""

    def libraries(self):
        """Source, level and path of each library."""
        folder = Path(self.build_lib, "halfstep", "kernels", cpp.FOLDER.name)
        for source, level in cpp.libraries(MACHINE) if BUILDS and not self.editable_mode else ():
            yield source, level, folder / cpp.file_name(source, level)

    def run(self):
        super().run()
        command, jobs = cpp.compiler(), list(self.libraries())
        if not jobs or command is None:
            return
        jobs[0][2].parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            complaints = list(pool.map(lambda job: self.build_library(command, *job), jobs))
        for complaint in filter(None, complaints):
            if WISH == "required":
                raise RuntimeError(f"HALFSTEP_PREBUILT=required: {complaint}")
            self.warn(f"compiled at first use instead: {complaint}")

    def build_library(self, command, source, level, target):
        """Compile one library. Returns what the compiler complains about, or an empty string."""
        try:
            for arguments in cpp.calls(MACHINE, source, level, target):
                done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=1200)
                if done.returncode:
                    target.unlink(missing_ok=True)
                    return f"{source.name} for {level}: {done.stderr.strip()[-2000:]}"
        finally:
            target.with_suffix(".o").unlink(missing_ok=True)
        return ""

    def get_outputs(self, include_bytecode=True):
        return super().get_outputs(include_bytecode) + [str(path) for *_, path in self.libraries() if path.exists()]


class Wheel(bdist_wheel):
    """py3-none-<platform>, or py3-none-any where nothing is built."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = not BUILDS

    def get_tag(self):
        _, _, platform_tag = super().get_tag()
        return "py3", "none", platform_tag if BUILDS else "any"


class WithLibraries(Distribution):
    """Puts the package into the folder for those of one platform, since auditwheel refuses libraries in the other."""

    def has_ext_modules(self):
        return BUILDS


setup(distclass=WithLibraries, cmdclass={"build_py": Build, "bdist_wheel": Wheel})
