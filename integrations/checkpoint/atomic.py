"""The folder of a checkpoint: its name, its manifest, detection of corruption, and saves that appear all or nothing.

``manifest.json`` lists the size and SHA-256 of every other file, and its own SHA-256. A save writes into a folder with
a unique name, which is moved once complete, and holds a lock on a file next to it until then. The operating system
releases the lock however the process ends, even on another machine: whoever can acquire the lock knows that the save
has ended. On file systems without locks, nothing is removed. Other files in the folder are never touched.

    .halfstep-TOKEN/lock     locked by the process that saves
    .halfstep-TOKEN/new      the checkpoint that is being written
    .halfstep-TOKEN/NAME     the previous checkpoint NAME, which is valid until NAME exists again
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfstep.integrations import interrupts
from halfstep.numerics.messages import printable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST, STATE, SHARDS, LOCK = "manifest.json", "state.json", ".safetensors", "lock"
FORMAT = "halfstep checkpoint 2"
FORMAT_1 = "halfstep checkpoint 1"  # torch.distributed.checkpoint folders, which importing.py reads
CHUNK = 16 << 20  # bytes written between two checks for an interrupt
LONGEST_MESSAGE = 4000
_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.halfstep-[0-9a-f]{16}")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found or trusted. The message names the file and the remedy, on one line."""

    def __init__(self, message: str) -> None:
        # The message may quote a file, which may contain terminal control characters.
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE // 2]} … {message[-LONGEST_MESSAGE // 2 :]}"
        super().__init__(printable(message))


def error_text(error: BaseException) -> str:
    """An error on one line, with its type if its text alone says too little."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    if isinstance(error, Exception) and not isinstance(error, LookupError) and str(error):
        return str(error)
    return f"it was ended by {type(error).__name__}" + (f": {error}" if str(error) else "")


@contextmanager
def explained(subject: str, advice: str = "", errors: Any = CheckpointError) -> Iterator[None]:
    """Turn `errors` into a CheckpointError that begins with what failed and ends with advice."""
    try:
        yield
    except errors as error:
        raise CheckpointError(f"{subject}: {error}{advice}") from error


# -------------------------------------------------------------------------------------------- checkpoints of a folder


def checkpoints(folder: str | Path) -> list[tuple[int, Path]]:
    """The checkpoints in `folder` as (step, path), oldest first; none if there is no such folder.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> path = checkpoint.save("run", 10, {"tokens": 1000})
        >>> [(step, path.name) for step, path in checkpoint.checkpoints("run")]
        [(10, 'step-00000010')]
    """
    folder = Path(folder)
    paths = list(folder.iterdir()) if folder.is_dir() else []
    replaced = map(folder.joinpath, glob.glob(".halfstep-*/step-*", root_dir=folder))
    paths += [path for path in replaced if _folder_of(path) == folder and not (folder / path.name).exists()]
    matches = [(_STEP.fullmatch(path.name), path) for path in paths if (path / MANIFEST).is_file()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def _folder_of(path: Path) -> Path:
    """The folder that a checkpoint is in, or was in before a save that replaces it."""
    return path.parent.parent if _TEMPORARY.fullmatch(path.parent.name) else path.parent


def newest(folder: str | Path) -> Path | None:
    """The newest checkpoint in `folder` whose files all exist with the right size, or None. Only `load` verifies bytes.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> checkpoint.newest("no-such-folder") is None
        True
    """
    return next((path for _, path in reversed(checkpoints(folder)) if is_good(path, shares=0)), None)


def prune(unfinished: Path, step: int, keep: int) -> None:
    """Discard all checkpoints up to `step` except the newest `keep`. Later ones are left alone."""
    temporary = unfinished.parent
    for path in [path for number, path in checkpoints(temporary.parent) if number <= step][:-keep]:
        _discard(path, temporary)


def remedy(path: Path) -> str:
    """What to do about an unusable checkpoint, for its error message."""
    for _, candidate in reversed(checkpoints(_folder_of(path))):
        if candidate != path and is_good(candidate):
            return f"{candidate} is good: continue from that, or delete the damaged one"
    return "no other checkpoint in that folder is good: delete it and start a new run, or restore it from a copy"


def missing(path: Path) -> CheckpointError:
    """The error for a checkpoint that does not exist."""
    if path.is_file():
        return CheckpointError(
            f"{path} is a file, not a folder: if an early version of halfstep wrote it, convert it with "
            f"python -m halfstep convert {path} FOLDER"
        )
    present = ", ".join(str(present) for _, present in checkpoints(_folder_of(path))) or "none"
    return CheckpointError(f"no checkpoint {path}; that folder has: {present}")


# ----------------------------------------------------------------------------------------------------------- manifests


def sealed(content: Any) -> bytes:
    """The bytes of a manifest with this content and its checksum."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({"content": content, "sha256": digest}, indent=1).encode()


def is_name(name: Any) -> bool:
    """Whether `name` is a file name without a path."""
    return type(name) is str and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def read_manifest(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's manifest, after checking its checksum, its format and the names in ``files``."""
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"its {MANIFEST} is missing")
    content: Any = None
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        data = (path / MANIFEST).read_bytes()
        content = json.loads(data)["content"]
        content = content if data == sealed(content) else None
    if not isinstance(content, dict):
        raise CheckpointError(f"its {MANIFEST} does not match its own checksum: it was changed or damaged")
    if content.get("format") not in (FORMAT, FORMAT_1):
        form = str(content.get("format"))[:100]
        raise CheckpointError(f"expected its format to be {FORMAT!r}, but got {form!r}: upgrade halfstep")
    files = content.get("files")
    if not isinstance(files, dict) or not all(
        is_name(name)
        and isinstance(record, dict)
        and (type(record.get("bytes")), type(record.get("sha256"))) == (int, str)
        for name, record in files.items()
    ):
        raise CheckpointError(f"its {MANIFEST} does not list files of the folder with their sizes and checksums")
    return content


def verify(path: Path, share: int = 0, shares: int = 1) -> dict[str, Any]:
    """The content of a checkpoint's manifest. Raises CheckpointError unless the files match it.

    Checks the sizes of all files, and the bytes of every `shares`-th file from `share` on; of no file if `shares` is 0.
    """
    content = read_manifest(path)
    files = content["files"]
    try:
        if unlisted := sorted({file.name for file in path.glob(f"*{SHARDS}")} - files.keys()):
            raise CheckpointError(
                f"it holds {', '.join(unlisted)}, which its {MANIFEST} does not list: shards of another checkpoint"
            )
        for name, record in sorted(files.items()):
            size = (path / name).stat().st_size if (path / name).is_file() else None
            if size is None:
                raise CheckpointError(f"its file {name} is missing")
            if size != record["bytes"]:
                damage = "cut off" if size < record["bytes"] else "changed"
                raise CheckpointError(f"its file {name} has {size} of {record['bytes']} bytes: it was {damage}")
        for name in sorted(files)[share::shares] if shares else ():
            if _digest_of_file(path / name) != files[name]["sha256"]:
                raise CheckpointError(
                    f"its file {name} does not have the checksum in {MANIFEST}: it was changed or damaged, or belongs "
                    "to another checkpoint"
                )
    except (OSError, ValueError) as error:  # ValueError: a name that is invalid on every file system
        raise CheckpointError(str(error)) from error
    return content


def is_good(path: Path, shares: int = 1) -> bool:
    """Whether `verify` passes; ``shares=0`` checks only the sizes of the files."""
    try:
        verify(path, shares=shares)
    except CheckpointError:
        return False
    return True


def _digest_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            interrupts.poll()
            digest.update(data)
    return digest.hexdigest()


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file to disk. Returns its manifest entry, which is computed while writing."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for piece in pieces:
            for begin in range(0, len(piece), CHUNK):
                interrupts.poll()
                chunk = piece[begin : begin + CHUNK]
                digest.update(chunk)
                size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


# ---------------------------------------------------------------------------------------------------- unfinished saves


@contextmanager
def unfinished_save(folder: Path) -> Iterator[Path]:
    """A new folder for a save, inside a temporary one that is locked, and removed on exit."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".halfstep-*"):
        if _TEMPORARY.fullmatch(leftover.name) and leftover.is_dir() and (lock := _locked(leftover)) is not None:
            with lock:
                _finish(leftover)
    lock = None
    while lock is None:
        temporary = folder / f".halfstep-{uuid.uuid4().hex[:16]}"
        temporary.mkdir()
        lock = _locked(temporary, required=False)
    with lock:
        try:
            unfinished = temporary / "new"
            unfinished.mkdir()
            yield unfinished
        finally:
            _finish(temporary)


def put_in_place(unfinished: Path, path: Path) -> None:
    """Rename a complete save to `path`, which may exist. At any time, either the old or the new save is valid."""
    replaced = unfinished.with_name(path.name)
    _sync_folder(unfinished)
    while True:
        if path.is_dir():
            _discard(replaced, unfinished.parent)
            with contextlib.suppress(FileNotFoundError):
                os.replace(path, replaced)
        try:
            os.replace(unfinished, path)
            break
        except OSError as error:  # another process has created `path` in the meantime
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable. Windows cannot open folders, and does this by itself."""
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _locked(temporary: Path, required: bool = True) -> Any:
    """Acquire the lock of a temporary folder; closing the returned file releases it.

    None if another process holds or has removed it, and on file systems without locks if one is `required`.
    """
    if fcntl is None:
        return None if required else contextlib.nullcontext()
    try:
        file = os.fdopen(os.open(temporary / LOCK, os.O_CREAT | os.O_RDWR, 0o666))
    except OSError as error:  # it belongs to another user
        if required or isinstance(error, FileNotFoundError):
            return None
        raise
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        available = (temporary / LOCK).exists()
    except OSError as error:
        available = not required and not isinstance(error, BlockingIOError)
    if available:
        return file
    file.close()
    return None


def _discard(path: Path, temporary: Path) -> None:
    """Move a folder into a temporary one, under a name that is never taken for that of a checkpoint."""
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        os.replace(path, temporary / uuid.uuid4().hex)


def _finish(temporary: Path) -> None:
    """Remove a temporary folder, and restore the checkpoint that its save was about to replace."""
    for replaced in temporary.glob("step-*"):
        original = temporary.parent / replaced.name
        if original.exists():
            _discard(replaced, temporary)
        else:
            os.replace(replaced, original)
    shutil.rmtree(temporary, ignore_errors=True)
