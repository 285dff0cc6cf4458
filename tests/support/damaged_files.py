"""Damage files of tensors at random and inspect them: the result is an error in one line, or an answer.

    python tests/support/damaged_files.py --tries 2000 --seed 0

There is a small file of each kind: a zip archive of torch, safetensors, and checkpoints of halfstep and of torch, of
which one file is damaged. ``halfstep inspect`` must either succeed, or print one line and exit with status 2, in little
memory and time.
"""

from __future__ import annotations

import contextlib
import io
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import batches
import checkpoint_attacks as attacks
import torch
from safetensors.torch import save_file

from halfstep.cli import inspect as command
from halfstep.integrations import checkpoint

SECONDS, MEMORY = 5.0, 1 << 30  # at most, of one try and of the process beyond what it began with
KINDS = dict.fromkeys(("zip.pt", "x.safetensors", "step-00000003", "torch"), 0.25)


def write(folder: Path, kind: str) -> Path:
    """A small file or folder, with every kind of value that it can contain."""
    weight, path = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), folder / kind
    content: dict[str, Any] = {
        "model": {"a.weight": weight, "a.bias": weight[0].bfloat16(), "tied": weight, "part": weight.T[1:3]},
        "wide": torch.ones(1).expand(30, 40),
        "list": [torch.zeros(3, dtype=torch.float16), (torch.arange(4), 1.5)],
        "step": 3,
    }
    if kind == "zip.pt":
        torch.save(content, path)
    elif kind == "torch":
        attacks.write_by_torch({"model": content["model"], "step": 3}, path)
    elif kind == "x.safetensors":
        save_file({"a.weight": weight, "a.bias": torch.arange(7).bfloat16()}, path)
    else:
        checkpoint.save(folder, 3, content)
    return path


def damaged(data: bytes, rng: random.Random) -> bytes:
    digits = [index for index, byte in enumerate(data) if 48 <= byte < 58]
    if digits and rng.random() < 0.2:
        index = rng.choice(digits)
        return data[:index] + bytes([rng.randrange(48, 58)]) + data[index + 1 :]
    return attacks.mutated_bytes(data, rng)


def inspected(path: Path) -> tuple[int, str, str]:
    """Exit status, output and error of ``halfstep inspect``."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status = command.main([str(path)])
    return status, out.getvalue(), errors.getvalue()


def batch(kind: str, first: int, count: int, seed: int) -> Iterator[batches.Try]:
    with tempfile.TemporaryDirectory() as folder:
        good, path = write(Path(folder), kind), Path(folder) / f"damaged-{kind}"
        status, _, errors = inspected(good)
        assert (status, errors) == (0, ""), errors
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(first, first + count):
            rng = random.Random(seed * 10_000_000 + number)
            if good.is_dir():
                shutil.rmtree(path, ignore_errors=True)
                shutil.copytree(good, path)
            file = rng.choice(sorted(path.iterdir())) if good.is_dir() else path
            data = file.read_bytes() if good.is_dir() else good.read_bytes()
            file.write_bytes(changed := damaged(data, rng))
            begun = time.process_time()
            status, out, errors = inspected(path)
            problems = []
            if any(not (sign.isprintable() or sign == "\n") for sign in out + errors):
                problems.append("it prints what is no text")
            refused = status == 2 and not out and errors.startswith("halfstep inspect: error: ")
            if not (errors.count("\n") == 1 if refused else (status, errors) == (0, "")):
                problems.append(f"status {status}, and it says {out + errors!r}")
            if kind.startswith("step-") and status == 0 and changed != data:
                problems.append("a changed checkpoint is shown")
            seconds = time.process_time() - begun
            used = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
            if seconds > SECONDS or used > MEMORY:
                problems.append(f"it takes {seconds:.1f} s and {used:,} bytes")
            yield number, problems, "refused" if refused else "shown"


def main(arguments: list[str] | None = None) -> int:
    return batches.main(__file__, batch, KINDS, 2000, arguments)


if __name__ == "__main__":
    sys.exit(main())
