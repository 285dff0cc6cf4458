"""Load thousands of manipulated checkpoints with valid checksums: none runs code, changes anything or costs much.

    python tests/support/fuzz_checkpoints.py --tries 10000 --seed 0

Each try loads one bad checkpoint. The load may succeed, if the change is harmless, or raise a CheckpointError of one
line, also in `load_model` and `load_optimizer`. After an error, model, optimizer and scaler must have the same bits as
before. Nothing may be imported, run, written or sent (checked by an audit hook), nor take 1 GB or 5 s of processor
time. Batches run in separate processes, so that crashes are counted too. The exit status is 1 if there is any problem.
"""

from __future__ import annotations

import argparse
import codecs
import collections
import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import checkpoint_attacks as attacks
import torch

from halfstep.integrations import checkpoint

BATCH = 2500
SECONDS, MEMORY = 5.0, 1 << 30


class Tries:
    """Successive attacks, in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bases = attacks.Bases(folder)
        self.guard = attacks.Guard()
        self.setups: dict[str, tuple[Any, Any, Any, Any]] = {}
        self.outcomes: collections.Counter[str] = collections.Counter()
        for kind in ("ours", "sgd", "adamw"):  # whatever is imported late is imported now
            model, optimizer, scaler, _ = self._setup(kind)
            for base in (self.bases.shards, self.bases.before):
                with contextlib.suppress(checkpoint.CheckpointError):
                    checkpoint.load(base, model=model, optimizer=optimizer, scaler=scaler)
            self.setups.pop(kind)
        str(checkpoint.CheckpointError("\n"))
        for encoding in ("cp437", "latin_1"):  # of names in archives
            codecs.lookup(encoding)
        for one in attacks.ODD:
            with contextlib.suppress(ValueError):
                repr(one)

    def _setup(self, kind: str) -> tuple[Any, Any, Any, Any]:
        if kind not in self.setups:
            model = attacks.model_of(-1.0)
            optimizer = attacks.optimizer_of(model, kind)
            scaler = attacks.scaler_of()
            self.setups[kind] = model, optimizer, scaler, attacks.state_of(model, optimizer, scaler)
        return self.setups[kind]

    def one(self, seed: int) -> list[str]:
        """The problems of one try."""
        rng = random.Random(seed)
        kind = rng.choice(("ours", "ours", "sgd", "adamw"))
        model, optimizer, scaler, before = self._setup(kind)
        place = self.folder / "try"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        torch.manual_seed(0)
        whole = rng.random() < 0.25
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = place / "step-00000009"
            way = (attacks.attack_whole if whole else attacks.attack)(self.bases, path, rng)
        scaled = None if rng.random() < 0.3 else scaler
        error: BaseException | None = None
        begun = time.process_time()  # which a busy machine does not lengthen
        with self.guard.watch() as seen, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if whole:
                    state = checkpoint.load(path)
                    if isinstance(state.get("model"), dict):
                        checkpoint.load_model(model, state["model"])
                        before = attacks.state_of(model, optimizer, scaler)
                    checkpoint.load_optimizer(optimizer, state.get("optimizer"))  # type: ignore[arg-type]
                else:
                    checkpoint.load(path, model=model, optimizer=optimizer, scaler=scaled)
            except BaseException as raised:
                error = raised
        seconds = time.process_time() - begun
        wrong = [f"it did {one}" for one in seen]
        if error is not None:
            text = str(error)
            if not isinstance(error, checkpoint.CheckpointError):
                wrong.append(f"{type(error).__name__}: {text[:300]!r}")
            if not text.isprintable() or len(text) > 5000:
                wrong.append(f"an error of {len(text)} characters: {text[:300]!r}")
            if "alloc" in text or "emory" in text:
                wrong.append(f"it asked for too much: {text[:300]!r}")
            now = attacks.state_of(model, optimizer, scaler)
            if now != before:
                wrong.append("the state changed: " + ", ".join(key for key in before if before[key] != now[key]))
        if error is None or wrong or whole:
            self.setups.pop(kind)
        if seconds > SECONDS:
            wrong.append(f"it took {seconds:.1f} s")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if peak > MEMORY:
            wrong.append(f"the process has {peak:,} bytes")
        self.outcomes[f"{way}: {'refused' if error is not None else 'loaded'}"] += 1
        return [f"try {seed}, {way}, {kind}: {one}" for one in wrong]


def batch(first: int, count: int, seed: int) -> None:
    """A process of its own: `count` tries from `first` on; one line of JSON for each complaint, and one at the end."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        Path(f"{attacks.CANARY}.py").write_text("open('halfstep_owned', 'w').close()\ndef run(): pass\n")
        tries = Tries(Path(folder))
        resource.setrlimit(resource.RLIMIT_AS, (_virtual() + MEMORY, resource.RLIM_INFINITY))
        for number in range(first, first + count):
            print(json.dumps({"begun": number}), flush=True)
            for complaint in tries.one(seed * 10_000_000 + number):
                print(json.dumps({"complaint": complaint}), flush=True)
            if Path("halfstep_owned").exists():
                print(json.dumps({"complaint": f"try {number}: code was run"}), flush=True)
                Path("halfstep_owned").unlink()
        print(json.dumps({"outcomes": tries.outcomes}), flush=True)


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, nargs=2, metavar=("FIRST", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.batch:
        batch(*options.batch, options.seed)
        return 0
    complaints: list[str] = []
    outcomes: collections.Counter[str] = collections.Counter()
    begun = time.monotonic()
    number = 0
    while number < options.tries:
        count = min(BATCH, options.tries - number)
        command = [sys.executable, __file__, "--seed", str(options.seed), "--batch", str(number), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 5 * count)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        complaints += [line["complaint"] for line in lines if "complaint" in line]
        last = max((line["begun"] for line in lines if "begun" in line), default=number)
        ended = [line["outcomes"] for line in lines if "outcomes" in line]
        if ended:
            outcomes.update(ended[0])
            number += count
        else:
            complaints.append(f"try {last}: the process ended with {done.returncode}: {done.stderr[-300:]!r}")
            number = last + 1
        print(
            f"{number} of {options.tries}, {len(complaints)} complaints: {complaints[-3:]}", file=sys.stderr, flush=True
        )
    for complaint in complaints[:50]:
        print(complaint)
    for way, times in sorted(outcomes.items()):
        print(f"{times:6} {way}")
    print(f"{options.tries} tries in {time.monotonic() - begun:.0f} s, {len(complaints)} complaints.")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
