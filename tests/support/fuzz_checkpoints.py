"""Load and inspect thousands of manipulated checkpoints: none runs code, changes anything or costs much.

    python tests/support/fuzz_checkpoints.py --tries 10000 --seed 0

Each try loads one bad checkpoint. The load may succeed, if the change is harmless, or raise a CheckpointError of one
line, also in `load_model` and `load_optimizer`. After an error, model, optimizer and scaler must have the same bits as
before. Nothing may be imported, run, written or sent (checked by an audit hook), nor take 1 GB, or more processor
time than 5 s and 0.1 s per MB. The checksums are valid.

``halfstep inspect`` gets files of torch and of safetensors and folders of halfstep and of torch, of which one file is
damaged. It must either succeed, or print one line and exit with status 2, in the same memory and time.
"""

import codecs
import contextlib
import io
import os
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

from halfstep.cli import inspect
from halfstep.integrations import checkpoint

SECONDS, SECONDS_PER_BYTE, MEMORY = 5.0, 1e-7, 1 << 30
INSPECTED = ("zip.pt", "x.safetensors", "step-00000003", "torch")
KINDS = {"shards": 0.4, "theirs": 0.2, "before": 0.2, "whole": 0.2, **dict.fromkeys(INSPECTED, 0.1)}


class Tries:
    """Successive attacks, in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.guard = folder, attacks.Guard()
        self.bases = [attacks.Bases(folder / name, name) for name in ("ours", "muon")]
        self.setups: dict[str, tuple[Any, Any, Any, Any]] = {}
        for name in attacks.OPTIMIZERS:  # whatever is imported late is imported now
            for base in (self.bases[0].shards, self.bases[0].before):
                with contextlib.suppress(checkpoint.CheckpointError):
                    model, optimizer, scaler, _ = self._setup(name)
                    checkpoint.load(base, model=model, optimizer=optimizer, scaler=scaler)
        self.setups.clear()
        str(checkpoint.CheckpointError("\n"))
        for encoding in ("cp437", "latin_1"):  # of names in archives
            codecs.lookup(encoding)
        for value in attacks.ODD:
            with contextlib.suppress(ValueError):
                repr(value)

    def _setup(self, name: str) -> tuple[Any, Any, Any, Any]:
        if name not in self.setups:
            model, scaler = attacks.model_of(-1.0), attacks.scaler_of()
            optimizer = attacks.optimizer_of(model, name)
            self.setups[name] = model, optimizer, scaler, attacks.state_of(model, optimizer, scaler)
        return self.setups[name]

    def run(self, base: str, seed: int) -> tuple[list[str], str]:
        """The problems of one try, and its outcome."""
        rng = random.Random(seed)
        name = rng.choice(("ours", *attacks.OPTIMIZERS))
        model, optimizer, scaler, before = self._setup(name)
        path = self.folder / "try" / "step-00000009"
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        scaled = None if rng.random() < 0.3 else scaler
        error: BaseException | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            way = attacks.attack(rng.choice(self.bases), base, path, rng)
            begun = time.process_time()  # which a busy machine does not lengthen
            with self.guard.watch() as seen:
                try:
                    if base == "whole":
                        state = checkpoint.load(path)
                        if isinstance(state.get("model"), dict):
                            checkpoint.load_model(model, state["model"])
                            before = attacks.state_of(model, optimizer, scaler)
                        checkpoint.load_optimizer(optimizer, state.get("optimizer"))  # type: ignore[arg-type]
                    else:
                        checkpoint.load(path, model=model, optimizer=optimizer, scaler=scaled)
                except BaseException as raised:
                    error = raised
        problems = [*_costs(begun, path), *(f"it did {event}" for event in seen)]
        if error is not None:
            text, now = str(error), attacks.state_of(model, optimizer, scaler)
            if not isinstance(error, checkpoint.CheckpointError):
                problems.append(f"{type(error).__name__}: {text[:300]!r}")
            if not text.isprintable() or len(text) > 5000 or "alloc" in text or "emory" in text:
                problems.append(f"an error of {len(text)} characters: {text[:300]!r}")
            if now != before:
                problems.append("the state changed: " + ", ".join(key for key in before if before[key] != now[key]))
        if error is None or problems or base == "whole":
            self.setups.pop(name)
        if Path("halfstep_owned").exists():
            problems.append("code was run")
            Path("halfstep_owned").unlink()
        return [f"{way}, {name}: {problem}" for problem in problems], f"{way}: {'refused' if error else 'loaded'}"


def _costs(begun: float, path: Path) -> list[str]:
    size = sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]))
    seconds, peak = time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    costly = seconds > SECONDS + SECONDS_PER_BYTE * size or peak > MEMORY
    return [f"it took {seconds:.1f} s, and the process has {peak:,} bytes"] if costly else []


def write(folder: Path, kind: str) -> Path:
    """A small file or folder to inspect, with every kind of value that it can contain."""
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


def inspected(good: Path, seed: int) -> tuple[list[str], str]:
    """The problems of ``halfstep inspect`` with a damaged copy, and its outcome."""
    rng, path, out, errors = random.Random(seed), good.with_name(f"damaged-{good.name}"), io.StringIO(), io.StringIO()
    if good.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(good, path)
    else:
        shutil.copy(good, path)
    file = rng.choice(sorted(path.iterdir())) if good.is_dir() else path
    data = file.read_bytes()
    file.write_bytes(changed := damaged(data, rng))
    begun = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status = inspect.main([str(path)])
    problems, error = _costs(begun, path), errors.getvalue()
    if any(not (sign.isprintable() or sign == "\n") for sign in out.getvalue() + error):
        problems.append("it prints what is no text")
    refused = status == 2 and not out.getvalue() and error.startswith("halfstep inspect: error: ")
    if not (error.count("\n") == 1 if refused else (status, error) == (0, "")):
        problems.append(f"status {status}, and it says {out.getvalue() + error!r}")
    if good.name.startswith("step-") and status == 0 and changed != data:
        problems.append("a changed checkpoint is shown")
    return problems, "refused" if refused else "shown"


def batch(base: str, first: int, count: int, seed: int) -> Iterator[batches.Try]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if base in INSPECTED:
            good = write(Path(folder), base)
            for number in range(first, first + count):
                yield number, *inspected(good, seed * 10_000_000 + number)
            return
        sys.path.insert(0, folder)
        Path(f"{attacks.CANARY}.py").write_text("open('halfstep_owned', 'w').close()\ndef run(): pass\n")
        tries = Tries(Path(folder))
        virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (virtual + MEMORY, resource.RLIM_INFINITY))
        for number in range(first, first + count):
            yield number, *tries.run(base, seed * 10_000_000 + number)


def main(arguments: list[str] | None = None) -> int:
    return batches.main(__file__, batch, KINDS, 2500, arguments)


if __name__ == "__main__":
    sys.exit(main())
