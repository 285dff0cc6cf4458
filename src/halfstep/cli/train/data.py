"""The text: the files that are read, their split into training and validation, and the batch of each step.

The model reads bytes, so any file can be used and nothing is tokenized. A batch is a pure function of
``(seed, step, row)``. A resumed run therefore uses the same batches as an uninterrupted one, with no state to save, and
the ranks of a distributed run use the rows of the same batch as a single process.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

VALIDATION_SHARE = 0.1

Bytes = npt.NDArray[np.uint8]


class DataError(ValueError):
    """The data cannot be used. The message names the path, the reason and a remedy."""


@dataclass(frozen=True)
class Corpus:
    """The bytes for training and for validation.

    Args:
        name: a name of the text for the report.
        files: number of files.
        train: nine tenths of the bytes, for training.
        val: the others, for validation.
        sha256: hash of all bytes in order. A run can be resumed only with the same text.
        unigram_entropy: entropy in nats per byte, the loss of the best model that ignores context.
    """

    name: str
    files: int
    train: Bytes
    val: Bytes
    sha256: str
    unigram_entropy: float

    @property
    def size(self) -> int:
        return len(self.train) + len(self.val)

    def batch(self, seed: int, step: int, rows: range, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the given rows of training step `step`: two int64 tensors of len(rows) × context."""
        places = len(self.train) - context
        of_step = _mix(_mix(np.array([seed], dtype=np.uint64)) ^ np.uint64(step))
        starts = _mix(of_step ^ np.arange(rows.start, rows.stop, dtype=np.uint64))
        return _windows(self.train, (starts % np.uint64(places)).astype(np.int64), context)

    def validation(self, rows: range, total: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The given rows of the fixed validation set: `total` windows at equal distances in the validation bytes."""
        places = len(self.val) - context
        return _windows(self.val, np.arange(rows.start, rows.stop, dtype=np.int64) * places // total, context)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64. Unlike numpy.random, it gives the same numbers with every version of NumPy."""
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


def _standard_library() -> tuple[Path, list[Path]]:
    """The .py files of this Python's standard library, without its tests, which some distributions do not include."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [f for f in root.rglob("*.py") if left_out.isdisjoint(f.relative_to(root).parts[:-1])]
    if not files:
        raise DataError(f"no .py files found in {root}, where this Python keeps its standard library; pass --data PATH")
    return root, files


def _listed(path: Path) -> tuple[Path, list[Path]]:
    if path.is_file():
        return path.parent, [path]
    if not path.is_dir():
        kind = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise DataError(f"--data {path} {kind}; pass a file, or a folder with files, of any kind")
    files = [
        f
        for f in path.rglob("*")
        if f.is_file() and not any(part.startswith(".") for part in f.relative_to(path).parts)
    ]
    if not files:
        raise DataError(f"--data {path} is a folder without files (hidden ones are not read); pass one with text in it")
    return path, files


def _joined(root: Path, files: list[Path]) -> tuple[Bytes, int]:
    """The bytes of all files, and the number of non-empty files.

    The files are in the order of the hashes of their relative names. In the order of names, the validation bytes would
    be those of a few packages.
    """

    def key(file: Path) -> bytes:
        return hashlib.sha256(file.relative_to(root).as_posix().encode("utf-8", "surrogateescape")).digest()

    parts = []
    for file in sorted(files, key=key):
        try:
            part = np.fromfile(file, dtype=np.uint8)
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}; fix its permissions or leave it out") from error
        if len(part):
            parts.append(part)
    return (np.concatenate(parts) if parts else np.empty(0, np.uint8)), len(parts)


def read_corpus(path: str | Path | None, context: int) -> Corpus:
    """Read the text and split it.

    Args:
        path: a file, a folder (all files in it), or None for the Python standard library on this machine.
        context: length of the windows.

    Raises:
        DataError: the path does not exist, or has too few bytes for a window in each part.
    """
    root, files = _standard_library() if path is None else _listed(Path(path))
    data, count = _joined(root, files)
    wanted = f"--data {path}" if path is not None else str(root)
    if not len(data):
        raise DataError(f"{wanted} holds no bytes: {len(files)} empty file(s); pass a file or folder with text in it")
    least = 2 * (context + 1)
    if len(data) < least:
        raise DataError(
            f"expected at least {least} bytes (one window of {context} + 1 bytes to train on and one to validate on), "
            f"but got {len(data)} in {wanted}: pass more text, or a smaller --size"
        )
    kept = max(int(len(data) * VALIDATION_SHARE), context + 1)
    name = "Python standard library" if path is None else str(path)
    return Corpus(
        name=name,
        files=count,
        train=data[:-kept],
        val=data[-kept:],
        sha256=hashlib.sha256(data.tobytes()).hexdigest(),
        unigram_entropy=unigram_entropy(data),
    )
