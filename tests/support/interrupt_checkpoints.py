"""Interrupt `checkpoint.save` and `load` thousands of times: always KeyboardInterrupt, and a good checkpoint remains.

    python tests/support/interrupt_checkpoints.py --tries 2000 --seed 0

Half of the signals are raised before a random bytecode, by a trace function; the other half are sent after a random
time, by a thread. The checkpoints are whole state dicts, shards, and shards saved in the background. After each
interrupt, the call must have raised KeyboardInterrupt and nothing else, the newest checkpoint must be complete and
load, and the next save must leave only checkpoints. An interrupted load must leave model and optimizer as they were, or
as they were saved. Batches run in separate processes, so that aborts are counted too. The exit status is 1 if there is
any problem.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_attacks as attacks
import forks
import torch

from halfstep.integrations import checkpoint

BATCH = 500
KINDS = ("whole", "shards", "background", "load")


class Moment:
    """One SIGINT to the main thread, at a numbered trace event or after a time."""

    def __init__(self, traced: bool, opcodes: bool) -> None:
        self.traced, self.opcodes = traced, opcodes
        self.seen = 0

    def during(self, call: Callable[[], Any], at: float) -> bool:
        """Whether `call` was interrupted. It may also end before."""
        self.seen = 0
        sent = threading.Event()

        def trace(frame: Any, event: str, argument: Any) -> Any:
            frame.f_trace_opcodes = self.opcodes
            self.seen += 1
            if self.seen == int(at):
                sent.set()
                signal.raise_signal(signal.SIGINT)
            return trace

        def send() -> None:
            time.sleep(at)
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)

        thread = None if self.traced else threading.Thread(target=send)
        inside, tracer = False, sys.gettrace()
        try:
            try:
                if thread is not None:
                    thread.start()
                else:
                    sys._getframe().f_trace_opcodes = self.opcodes  # before settrace: see interrupts.at_bytecode
                    sys.settrace(trace)
                call()
                inside = sent.is_set() and thread is None
            except KeyboardInterrupt:
                return True
            finally:
                sys.settrace(tracer)  # that of coverage, where it is measured
            if thread is not None:
                thread.join()
                time.sleep(0.01)
        except KeyboardInterrupt:  # too late, while it was waited for
            pass
        if inside:
            raise AssertionError("the interrupt was lost")
        return False


class Tries:
    def __init__(self, folder: Path, kind: str, rng: random.Random) -> None:
        self.folder, self.kind, self.rng = folder, kind, rng
        self.step = 0
        self.model = attacks.model_of(1.0)
        self.optimizer = attacks.optimizer_of(self.model)
        self.save()
        if kind == "load":
            self._load(self.model, self.optimizer)
        self.loaded = attacks.state_of(self.model, self.optimizer, None)
        self.moments = []
        for traced in (True, False):
            moment = Moment(traced, opcodes=kind == "whole")
            if traced:
                moment.during(self.call, -1)
                self.moments.append((moment, float(moment.seen)))
            else:
                begun = time.monotonic()
                self.call()
                self.moments.append((moment, time.monotonic() - begun))

    def _fill(self, model: torch.nn.Module, value: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)

    def save(self) -> None:
        self.step += 1
        self._fill(self.model, float(self.step % 128))
        if self.kind == "whole":
            state = {"step": self.step, "weights": torch.full((20_000,), float(self.step))}
            checkpoint.save(self.folder, self.step, state)
            return
        pending = checkpoint.save(
            self.folder,
            self.step,
            {"step": self.step},
            model=self.model,
            optimizer=self.optimizer,
            asynchronous=self.kind == "background",
        )
        if not isinstance(pending, Path):
            pending.result()

    def call(self) -> None:
        if self.kind == "load":
            self._load(self.model, self.optimizer)
        else:
            self.save()

    def _load(self, model: torch.nn.Module, optimizer: Any) -> None:
        path = checkpoint.newest(self.folder)
        assert path is not None
        checkpoint.load(path, model=model, optimizer=optimizer)

    def one(self) -> tuple[bool, str | None]:
        """Whether the call was interrupted, and the problems."""
        moment, most = self.rng.choice(self.moments)
        last = self.step
        before = None
        if self.kind == "load":
            self._fill(self.model, -3.0)
            self.optimizer.state[self.model.weight]["exp_avg"].fill_(7.0)
            before = attacks.state_of(self.model, self.optimizer, None)
        try:
            interrupted = moment.during(self.call, self.rng.uniform(0, most))
        except BaseException as error:
            return True, f"{type(error).__name__}: {error}"
        if self.kind == "load":
            now = attacks.state_of(self.model, self.optimizer, None)
            return interrupted, None if now in (before, self.loaded) else "the state is neither the old nor the new one"
        found = checkpoint.newest(self.folder)
        if found is None or int(found.name.split("-")[-1]) not in (last, self.step):
            return interrupted, f"after step {last} the newest is {found}"
        if self.kind == "whole":
            state = checkpoint.load(found)
            good = bool((state["weights"] == state["step"]).all())
        else:
            model = attacks.model_of()
            state = checkpoint.load(found, model=model, optimizer=attacks.optimizer_of(model))
            good = bool((model.weight == float(state["step"] % 128)).all())  # type: ignore[union-attr,operator]
        if not good:
            return interrupted, f"{found} does not hold what was saved"
        if interrupted:
            self.save()
            left = [name for name in os.listdir(self.folder) if not name.startswith("step-")]
            if left:
                return interrupted, f"it left {left}"
        return interrupted, None


def batch(kind: str, count: int, seed: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs do not have
    with tempfile.TemporaryDirectory() as folder:
        tries = Tries(Path(folder), kind, random.Random(seed))
        done = made = 0
        while done < count and made < 4 * count:
            made += 1
            interrupted, wrong = tries.one()
            done += interrupted
            if wrong is not None:
                print(json.dumps({"complaint": f"{kind}, seed {seed}, try {made}: {wrong}"}), flush=True)
        print(json.dumps({"interrupts": done, "tries": made}), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=2000, help="interrupts of saves, and as many of loads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="only this")
    parser.add_argument("--batch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.batch:
        batch(options.kind, options.tries, options.seed)
        return 0
    counts: collections.Counter[str] = collections.Counter()
    complaints: list[str] = []
    shares = {"whole": 0.5, "shards": 0.35, "background": 0.15, "load": 1.0}
    for kind in [options.kind] if options.kind else KINDS:
        left, number = max(1, round(options.tries * (1 if options.kind else shares[kind]))), 0
        while left > 0:
            number += 1
            words = [__file__, "--batch", "--kind", kind, "--tries", min(BATCH, left)]
            done = forks.run([*words, "--seed", options.seed * 1000 + number], timeout=3600)
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            complaints += [line["complaint"] for line in lines if "complaint" in line]
            counts[kind] += sum(line.get("interrupts", 0) for line in lines)
            left -= BATCH
            if done.returncode:
                complaints.append(f"{kind}: the process ended with {done.returncode}: {done.stderr[-300:]!r}")
            print(f"{kind}: {counts[kind]} interrupts, {len(complaints)} complaints", file=sys.stderr, flush=True)
    for complaint in complaints[:50]:
        print(complaint)
    print(", ".join(f"{number} of {kind}" for kind, number in counts.items()) + f", {len(complaints)} complaints.")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
