"""Damage files of tensors at random and inspect them: the result is an error in one line, or an answer.

    python tests/support/damaged_files.py --tries 2000 --seed 0

There is a small file of each kind: a zip archive of torch, safetensors, and checkpoints of halfstep and of torch, of
which one file is damaged. A try flips, inserts, deletes, copies or overwrites a few bytes of one, changes a digit, or
truncates it. ``halfstep inspect`` must either succeed, or print one line and exit with status 2, in little memory and
time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import resource
import shutil
import tempfile
import time
import tracemalloc
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from halfstep.cli import inspect as command
from halfstep.integrations import checkpoint

SECONDS, MEMORY = 5.0, 1 << 30  # at most, of one try and of the process beyond what it began with
NUMBERS = (0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1)


def content() -> dict[str, object]:
    """A state with every kind of value that the files can contain."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 7, generator=generator)
    return {
        "model": {"a.weight": weight, "a.bias": weight[0].bfloat16(), "tied": weight, "part": weight.T[1:3]},
        "wide": torch.ones(1).expand(30, 40),
        "list": [torch.zeros(3, dtype=torch.float16), (torch.arange(4), 1.5)],
        "step": 3,
        "name": "text",
    }


def files(folder: Path) -> dict[str, Path]:
    """One small file or folder of each kind."""
    made = {kind: folder / name for kind, name in (("zip", "zip.pt"), ("safetensors", "x.safetensors"))}
    torch.save(content(), made["zip"])
    made["ours"] = checkpoint.save(folder / "run", 3, content())
    made["torch"] = folder / "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": content()["model"], "step": 3}, checkpoint_id=made["torch"], no_dist=True)
    save_file({"a.weight": torch.randn(5, 7), "a.bias": torch.arange(7).bfloat16()}, made["safetensors"])
    return made


def damaged(data: bytes, random: random.Random) -> bytes:
    """A file with a few changed bytes, most of them not in values of tensors."""
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        if not made:
            break
        at = random.randrange(len(made))
        way = random.randrange(8)
        if way == 0:
            made[at] ^= 1 << random.randrange(8)
        elif way == 1:
            made[at] = random.randrange(256)
        elif way == 2:
            size = random.choice((1, 2, 4, 8))
            made[at : at + size] = (random.choice(NUMBERS) % 256**size).to_bytes(size, "little")
        elif way == 3:
            made[at:at] = bytes(random.randrange(256) for _ in range(random.randrange(1, 9)))
        elif way == 4:
            del made[at : at + random.randrange(1, 65)]
        elif way == 5:
            size, source = random.randrange(1, 65), random.randrange(len(made))
            made[at : at + size] = made[source : source + size]
        elif way == 6:
            digits = [place for place, byte in enumerate(made) if 48 <= byte < 58]
            if digits:
                made[random.choice(digits)] = random.randrange(48, 58)
        elif random.random() < 0.2:
            del made[at:]
    return bytes(made)


def said(path: Path) -> tuple[int, str, str]:
    """Exit status, output and error of ``halfstep inspect``."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = command.main([str(path)])
    return status, out.getvalue(), errors.getvalue()


def wrong(status: int, out: str, errors: str) -> str | None:
    """The problem with an answer, if there is one."""
    if any(not (sign.isprintable() or sign == "\n") for sign in out + errors):
        return "it prints what is no text"
    if status == 0:
        return None if errors == "" else f"status 0, and it says {errors!r}"
    if status != 2 or out or errors.count("\n") != 1 or not errors.startswith("halfstep inspect: error: "):
        return f"status {status}, and it says {out + errors!r}"
    return None


def campaign(tries: int, seed: int, folder: Path) -> dict[str, int]:
    """Damage and inspect files. Returns the number of refused files of each kind.

    Raises:
        AssertionError: an answer is wrong, takes too long or too much memory. The file stays in `folder`.
    """
    chance = random.Random(seed)
    whole = files(folder)
    for kind, path in whole.items():
        status, _, errors = said(path)
        assert (status, errors) == (0, ""), f"{kind}: {errors}"
    refused = dict.fromkeys(whole, 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(tries):
        kind = list(whole)[number % len(whole)]
        path = folder / f"damaged{whole[kind].suffix}"
        if whole[kind].is_dir():
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(whole[kind], path)
            file = chance.choice(sorted(path.iterdir()))
        else:
            file = path
            shutil.copy(whole[kind], path)
        data = file.read_bytes()
        changed = damaged(data, chance)
        file.write_bytes(changed)
        start = time.process_time()
        tracemalloc.start()
        try:
            answer = said(path)
        except BaseException as error:
            raise AssertionError(f"{kind}, try {number}: {type(error).__name__}: {error}; see {path}") from error
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        problem = wrong(*answer)
        if problem is None and kind == "ours" and answer[0] == 0 and changed != data:
            problem = "a changed checkpoint is shown"
        if peak > MEMORY or time.process_time() - start > SECONDS:
            problem = f"it takes {time.process_time() - start:.1f} s and {peak:,} bytes"
        assert problem is None, f"{kind}, try {number} of seed {seed}: {problem}; see {path}"
        refused[kind] += answer[0] != 0
    used = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert used < MEMORY, f"the tries took {used:,} bytes"
    return refused


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tries", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="damaged-"))
    print(f"{options.tries} tries, refused: {campaign(options.tries, options.seed, folder)}")


if __name__ == "__main__":
    main()
