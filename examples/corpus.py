"""The text that train_gpt.py trains on, and its batches."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from halfstep.cli.command_line import UsageError

Bytes = npt.NDArray[np.uint8]
VALIDATION_SHARE = 0.1  # fraction of the text


class Corpus(NamedTuple):
    """The training and validation bytes of a text read from `files` files.

    A batch is a pure function of ``(seed, step, row)``: a resumed run gets the same batches as an uninterrupted one
    without saving any state, and the ranks of a distributed run get the rows of a single process's batch.
    """

    name: str
    files: int
    train: Bytes
    val: Bytes
    sha256: str
    unigram_entropy: float  # nats per byte: the loss of the best model that ignores context

    def batch(self, seed: int, step: int, rows: range, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of some rows of training step `step`: two int64 tensors of shape (len(rows), context)."""
        of_step = _mix(_mix(np.array([seed], dtype=np.uint64)) ^ np.uint64(step))
        starts = _mix(of_step ^ np.arange(rows.start, rows.stop, dtype=np.uint64))
        return _windows(self.train, (starts % np.uint64(len(self.train) - context)).astype(np.int64), context)

    def validation(self, rows: range, total: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Some rows of the fixed validation set: `total` evenly spaced windows of the validation bytes."""
        starts = np.arange(rows.start, rows.stop, dtype=np.int64) * (len(self.val) - context) // total
        return _windows(self.val, starts, context)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64. Unlike numpy.random, its results do not depend on the version of NumPy."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _windows(data: Bytes, starts: npt.NDArray[np.int64], context: int) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.from_numpy(data[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return table[:, :-1].contiguous(), table[:, 1:].contiguous()


def unigram_entropy(data: Bytes) -> float:
    """−Σ p·ln p over the byte frequencies of `data`, in nats."""
    counts = np.bincount(data, minlength=256)
    p = counts[counts > 0] / len(data)
    return float(-(p * np.log(p)).sum())


def read_corpus(path: Path | None, context: int) -> Corpus:
    """Read a file, a folder, or, for None, the .py files of this Python's standard library without its tests.

    Files are ordered by a hash of their name; otherwise the last tenth, which is for validation, would come from a few
    packages. Raises a UsageError if there are no files, or fewer than `context` + 1 bytes for each part.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    if not root.exists():
        raise UsageError(f"--data {root} does not exist; pass a file, or a folder with files, of any kind")
    files = [root] if root.is_file() else [file for file in root.rglob("*" if path else "*.py") if file.is_file()]
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"} if path is None else ()
    names = {file: file.relative_to(root if root.is_dir() else root.parent) for file in files}
    files = [file for file in files if not any(part in left_out or part[0] == "." for part in names[file].parts)]
    files.sort(key=lambda file: hashlib.sha256(os.fsencode(names[file].as_posix())).digest())
    parts = [part for file in files if len(part := np.fromfile(file, dtype=np.uint8))]
    data = np.concatenate([*parts, np.empty(0, np.uint8)])
    if len(data) < 2 * (context + 1):
        raise UsageError(
            f"expected at least {2 * (context + 1)} bytes (a window of {context} + 1 bytes to train on and one to "
            f"validate on), but got {len(data)} in {root}: pass more text with --data, or a smaller --size"
        )
    kept = max(int(len(data) * VALIDATION_SHARE), context + 1)
    name = "Python standard library" if path is None else str(path)
    digest = hashlib.sha256(data.tobytes()).hexdigest()
    return Corpus(name, len(parts), data[:-kept], data[-kept:], digest, unigram_entropy(data))
