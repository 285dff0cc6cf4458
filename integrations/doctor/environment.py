"""What halfstep needs of a machine. The rest is in ``python -m torch.utils.collect_env``."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import suppress

import torch

from halfstep.integrations.doctor.findings import Diagnosis, Finding, find
from halfstep.kernels import compiler, native

OLDEST = {"torch": (2, 11), "triton": (3, 6)}


def facts() -> dict[str, str]:
    """The versions of torch and, if installed, Triton; and the ``kernels`` that run: Triton, C++ or torch."""
    versions = {"torch": str(torch.__version__)}
    with suppress(importlib.metadata.PackageNotFoundError):
        versions["triton"] = importlib.metadata.version("triton")
    if torch.cuda.is_available():
        return versions | {"kernels": "Triton" if "triton" in versions else "torch"}
    return versions | {"kernels": "C++" if compiler.FOLDER.is_dir() or compiler.compiler() else "torch"}


def examine_environment() -> Diagnosis:
    """Examine what halfstep needs of this machine. Nothing is compiled, and no other machine is contacted."""
    return Diagnosis.of("this environment", _findings(facts()))


def _findings(there: dict[str, str]) -> Iterator[Finding]:
    for name, oldest in OLDEST.items():
        parts = there.get(name, "").split("+")[0].split(".")[:2]
        if all(part.isdecimal() for part in parts) and tuple(map(int, parts)) < oldest:
            yield find("version-too-old", f"{name} {there[name]}", name=name, least=".".join(map(str, oldest)))
    if there["kernels"] == "torch":
        yield find("no-triton", "triton") if torch.cuda.is_available() else find("no-compiler", "C++")
    cache = native.cache_folder()
    parent = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if there["kernels"] == "C++" and not compiler.FOLDER.is_dir() and not os.access(parent, os.W_OK):
        yield find("cache-not-writable", str(cache))
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield find("kernels-interpreted", "TRITON_INTERPRET")
