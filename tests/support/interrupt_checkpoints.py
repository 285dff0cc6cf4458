"""Interrupt `checkpoint.save` and `load` thousands of times: always KeyboardInterrupt, and a good checkpoint remains.

    python tests/support/interrupt_checkpoints.py --tries 2000 --seed 0

Half of the signals are raised before a random bytecode, by a trace function; the other half are sent after a random
time, by a thread. The checkpoints are whole state dicts, shards, and shards saved in the background. After each
interrupt, the call must have raised KeyboardInterrupt and nothing else, the newest checkpoint must be complete and
load, and the next save must leave only checkpoints. An interrupted load must leave model and optimizer as they were, or
as they were saved.
"""

import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import batches
import checkpoint_attacks as attacks
import torch
from interrupts import at_bytecode, at_time

from halfstep.integrations import checkpoint

KINDS = {"whole": 0.5, "shards": 0.35, "background": 0.15, "load": 1.0}


class Tries:
    def __init__(self, folder: Path, kind: str, rng: random.Random) -> None:
        self.folder, self.kind, self.rng, self.step = folder, kind, rng, 0
        self.model = attacks.model_of(1.0)
        self.optimizer = attacks.optimizer_of(self.model)
        self.save()
        self.call = self.load if kind == "load" else self.save
        self.call()
        self.loaded = attacks.state_of(self.model, self.optimizer, None)
        self.events = self._traced(-1)
        begun = time.monotonic()
        self.call()
        self.seconds = time.monotonic() - begun

    def _traced(self, number: int) -> int:
        """Send SIGINT before the `number`-th bytecode or line. Returns how many there were, or raises."""
        ended = []
        send = partial(signal.raise_signal, signal.SIGINT)
        count = at_bytecode(number, lambda: ended.append(self.call()), send, files="", opcodes=self.kind == "whole")
        assert not ended or count != number, "the interrupt was lost"
        return count

    def _interrupted(self) -> bool:
        """Interrupt the call at a random moment. It may also end before."""
        if self.rng.random() < 0.5:
            return at_time(self.rng.uniform(0, self.seconds), self.call)
        number = self.rng.randint(1, self.events)
        return self._traced(number) == number

    def save(self) -> None:
        self.step += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float(self.step % 128))
        if self.kind == "whole":
            state = {"step": self.step, "weights": torch.full((20_000,), float(self.step))}
            checkpoint.save(self.folder, self.step, state)
            return
        pending: Any = checkpoint.save(
            self.folder,
            self.step,
            {"step": self.step},
            model=self.model,
            optimizer=self.optimizer,
            asynchronous=self.kind == "background",
        )
        if self.kind == "background":
            pending.result()

    def load(self) -> None:
        path = checkpoint.newest(self.folder)
        assert path is not None
        checkpoint.load(path, model=self.model, optimizer=self.optimizer)

    def run(self) -> tuple[list[str], str]:
        """The problems of one try, and whether it was interrupted."""
        last, before = self.step, None
        if self.kind == "load":
            with torch.no_grad():
                for tensor in (*self.model.parameters(), self.optimizer.state[self.model.weight]["exp_avg"]):
                    tensor.fill_(-3.0)
            before = attacks.state_of(self.model, self.optimizer, None)
        try:
            interrupted = self._interrupted()
            problem = self._problem(last, before, interrupted)
        except BaseException as error:
            return [f"{type(error).__name__}: {error}"], "interrupted"
        return [problem] * bool(problem), "interrupted" if interrupted else "too late"

    def _problem(self, last: int, before: Any, interrupted: bool) -> str:
        if self.kind == "load":
            now = attacks.state_of(self.model, self.optimizer, None)
            return "" if now in (before, self.loaded) else "the state is neither the old nor the new one"
        newest = checkpoint.newest(self.folder)
        if newest is None or int(newest.name.split("-")[-1]) not in (last, self.step):
            return f"after step {last} the newest is {newest}"
        if self.kind == "whole":
            state = checkpoint.load(newest)
            good = bool((state["weights"] == state["step"]).all())
        else:
            model = attacks.model_of()
            state = checkpoint.load(newest, model=model, optimizer=attacks.optimizer_of(model))
            good = bool((model.weight == float(state["step"] % 128)).all())  # type: ignore[union-attr,operator]
        if not good:
            return f"{newest} does not hold what was saved"
        if interrupted:
            self.save()
        left = [name for name in os.listdir(self.folder) if not name.startswith("step-")]
        return f"it left {left}" if left else ""


def batch(kind: str, first: int, count: int, seed: int) -> Iterator[batches.Try]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs do not have
    with tempfile.TemporaryDirectory() as folder:
        tries = Tries(Path(folder), kind, random.Random(seed * 1000 + first))
        for number in range(first, first + count):
            yield number, *tries.run()


def main(arguments: list[str] | None = None) -> int:
    return batches.main(__file__, batch, KINDS, 500, arguments)


if __name__ == "__main__":
    sys.exit(main())
