"""Format of checkpoints on disk, and detection of damaged ones.

There are two kinds, which may be in the same folder:

- ``step-00000120.pt``: a file with a ``torch.save`` archive and a last line with the SHA-256 of all bytes before it;
- ``step-00000120/``: a folder written by several ranks with torch.distributed.checkpoint, with a ``manifest.json`` that
  lists the size and SHA-256 of every other file in it.

Both are written under another name (unfinished_saves.py), flushed to disk, and renamed when they are complete. Nothing
with the name of a checkpoint is ever partially written or partially removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from halfstep.integrations import archive, interrupts, unfinished_saves
from halfstep.numerics.messages import printable

MANIFEST = "manifest.json"
FORMAT = "halfstep checkpoint 1"
TRAILER = b"\nhalfstep sha256 %s\n"
TRAILER_LENGTH = len(TRAILER % (b"0" * 64))
SHARDS = ".distcp"

LONGEST_MESSAGE = 4000
_NAME = re.compile(r"step-(\d{8,})(\.pt)?")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found or trusted. The message names the file and what to do, in one line."""

    def __init__(self, message: str) -> None:
        # The message may quote a file, which may contain control characters of a terminal.
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE // 2]} … {message[-LONGEST_MESSAGE // 2 :]}"
        super().__init__(printable(message))


def name_of(step: int) -> str:
    """The name of the checkpoint of a step, without the suffix ``.pt`` of a file."""
    return f"step-{step:08d}"


def checkpoints(folder: str | Path) -> list[tuple[int, Path]]:
    """The checkpoints in `folder` as (step, path), oldest first; none if there is no such folder.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> path = checkpoint.save("run", 10, {"tokens": 1000})
        >>> [(step, path.name) for step, path in checkpoint.checkpoints("run")]
        [(10, 'step-00000010.pt')]
    """
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        replaced = unfinished_saves.replaced_name(path)
        match = _NAME.fullmatch(replaced or path.name)
        if not match or (replaced is not None and (folder / replaced).exists()):
            continue
        if os.path.isfile(path if match[2] else path / MANIFEST):  # False where `Path.is_file` may raise
            found.append((int(match[1]), path))
    return sorted(found)


def newest(folder: str | Path) -> Path | None:
    """The newest checkpoint in `folder` whose files are all there in full length, or None. Loading checks the bytes.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> checkpoint.newest("no-such-folder") is None
        True
    """
    return next((path for _, path in reversed(checkpoints(folder)) if _has_its_length(path)), None)


def _has_its_length(path: Path) -> bool:
    try:
        if path.is_file():
            return _trailer(path).startswith(TRAILER[:17])
        listed = read_manifest(path)["files"].items()
        return all((path / name).is_file() and (path / name).stat().st_size == known["bytes"] for name, known in listed)
    except (CheckpointError, OSError):
        return False


# ----------------------------------------------------------------------------------------------------------- writing


def write_manifest(folder: Path, step: int, world_size: int, files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of `folder` and flush it to disk. `files` has ``bytes`` and ``sha256`` by file name."""
    content = {"format": FORMAT, "step": step, "world_size": world_size, "files": dict(sorted(files.items()))}
    with (folder / MANIFEST).open("w") as file:
        json.dump({"content": content, "sha256": _digest_of(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove all checkpoints up to `step` except the newest `keep`. Later ones are kept."""
    older = [path for number, path in checkpoints(folder) if number <= step]
    for path in older[:-keep]:
        unfinished_saves.remove(path)


# ---------------------------------------------------------------------------------------------------------- checking


def _digest_of_file(path: Path, length: int) -> str | None:
    """The SHA-256 of the first `length` bytes of a file; None if it is shorter."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while length and (part := file.read(min(length, 1 << 20))):
            interrupts.poll()
            digest.update(part)
            length -= len(part)
    return None if length else digest.hexdigest()


def _file_complaint(path: Path) -> str | None:
    size = path.stat().st_size
    if size <= TRAILER_LENGTH:
        return f"it has {size} bytes, which is too short: it was cut off"
    digest = _digest_of_file(path, size - TRAILER_LENGTH)
    if digest is None:
        return "it became shorter while it was read"
    trailer = _trailer(path)
    if not (trailer.startswith(TRAILER[:17]) and trailer.endswith(b"\n")):
        return "its last line is not a checksum: it was cut off, or halfstep did not write it"
    if trailer != TRAILER % digest.encode():
        return "its bytes do not have the checksum on its last line: it was changed or damaged"
    return None


def _trailer(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TRAILER_LENGTH))
        return file.read(TRAILER_LENGTH)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of a folder's manifest.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"its {MANIFEST} is missing")
    try:
        written = json.loads(path.read_bytes())
        content: dict[str, Any] = written["content"]
        intact = written["sha256"] == _digest_of(content)
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"its {MANIFEST} does not have its own checksum: it was changed or damaged")
    known = content.get("format") if isinstance(content, dict) else None
    if known != FORMAT:
        raise CheckpointError(
            f"expected its format to be {FORMAT!r}, but got {str(known)[:100]!r}: use a later halfstep"
        )
    listed = content.get("files")
    if not isinstance(listed, dict) or not all(map(_is_record, listed, listed.values())):
        raise CheckpointError(f"its {MANIFEST} does not list files of the folder with their sizes and checksums")
    return content


def _is_record(name: str, record: Any) -> bool:
    plain = name not in ("", ".", "..") and not set(name) & set("/\\\0")
    return plain and isinstance(record, dict) and type(record.get("bytes")) is int and type(record.get("sha256")) is str


def folder_complaint(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Why a folder is damaged, or None if it is not. Only every `parts`-th file, starting with `part`, is checked."""
    try:
        files = read_manifest(folder)["files"]
    except CheckpointError as error:
        return str(error)
    if part == 0:
        unlisted = sorted(path.name for path in folder.glob(f"*{SHARDS}") if path.name not in files)
        if unlisted:
            return f"it holds {', '.join(unlisted)}, which its {MANIFEST} does not list: shards of another checkpoint"
    for name in sorted(files)[part::parts]:
        path, expected = folder / name, files[name]
        if not os.path.isfile(path):
            return f"its file {name} is missing"
        size = path.stat().st_size
        if size < expected["bytes"]:
            return f"its file {name} has {size} of {expected['bytes']} bytes: it was cut off"
        digest = _digest_of_file(path, size)
        if digest != expected["sha256"]:
            return f"its file {name} does not have the checksum in {MANIFEST}: {_origin(folder, digest)}"
    return None


def _origin(folder: Path, digest: str | None) -> str:
    """The origin of a file with a wrong digest, for a message."""
    for _, other in checkpoints(folder.parent):
        try:
            files = read_manifest(other)["files"] if other.is_dir() else {}
        except CheckpointError:
            continue
        for name, known in files.items():
            if known["sha256"] == digest:
                return f"it is {name} of {other.name}"
    return "it was changed or damaged, or is of another checkpoint"


def complaint(path: Path) -> str | None:
    """Why a checkpoint is damaged, or None if every byte is as it was saved."""
    try:
        return folder_complaint(path) if path.is_dir() else _file_complaint(path)
    except OSError as error:
        return str(error)


def remedy(path: Path) -> str:
    """The remedy for a checkpoint that cannot be used, for a message."""
    good = [old for _, old in checkpoints(path.parent) if old != path and complaint(old) is None]
    if good:
        return f"{good[-1]} is good: continue from that, or delete the damaged one"
    return "no other checkpoint in that folder is good: delete it and start a new run, or restore it from a copy"


def has_our_name(path: Path) -> bool:
    """Whether `save` gives this name to a folder."""
    return bool(_NAME.fullmatch(path.name)) and not path.suffix


def missing(path: Path) -> CheckpointError:
    """The error for a checkpoint that does not exist."""
    present = ", ".join(str(old) for _, old in checkpoints(path.parent)) or "none"
    return CheckpointError(f"no checkpoint {path}; in that folder there are: {present}")


def read_archive(path: Path, length: int | None = None) -> dict[str, Any]:
    """The dict in an archive, on the CPU, read without executing code from the file.

    Raises:
        CheckpointError: the archive cannot be read.
    """
    try:
        with path.open("rb") as file:
            state = archive.read(file, length=length)
    except (OSError, archive.ArchiveError) as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"it holds a {type(state).__name__}, not a dict")
    return state


class Hashed:
    """A file that computes the hash of what is written, which then need not be read again or held in memory."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.bytes += memoryview(data).nbytes
        return int(self._file.write(data))

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return int(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def record(self) -> dict[str, Any]:
        """The file's entry in a manifest."""
        return {"bytes": self.bytes, "sha256": self.digest.hexdigest()}


def merged(records: Iterable[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The files of all ranks in one dict."""
    return {name: record for one in records for name, record in one.items()}
