"""What makes a checkpoint on disk complete, and how a damaged one is told from a good one.

Two kinds stand side by side in a run's folder:

- ``step-00000120.pt``: one file, a ``torch.save`` archive and a last line with the SHA-256 of all bytes before it;
- ``step-00000120/``: one folder that many ranks wrote with torch.distributed.checkpoint, and its ``manifest.json`` with
  the size and SHA-256 of every other file in it.

Either is written under a name that begins with a dot, flushed to disk, and renamed when it is complete. Nothing under a
checkpoint's name is ever half written, nor half removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

MANIFEST = "manifest.json"
FORMAT = "halfstep checkpoint 1"
TRAILER = b"\nhalfstep sha256 %s\n"
TRAILER_LENGTH = len(TRAILER % (b"0" * 64))
TEMPORARY = ".checkpoint-"
# The folder that a new one is about to replace: it counts until the new one has the name.
REPLACED = ".replaced-"
SHARDS = ".distcp"

_NAME = re.compile(r"step-(\d{8,})(\.pt)?")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found or trusted. The message names the file and what to do."""


def name_of(step: int) -> str:
    """The name of a step's checkpoint: of its folder, and of its file before ``.pt``."""
    return f"step-{step:08d}"


def checkpoints(folder: str | Path) -> list[tuple[int, Path]]:
    """The checkpoints in `folder` as (step, path), oldest first; none if there is no such folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        replaced = path.name.startswith(REPLACED)
        name = path.name.removeprefix(REPLACED)
        match = _NAME.fullmatch(name)
        if not match or (replaced and (folder / name).exists()):
            continue
        if path.is_file() if match[2] else (path / MANIFEST).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def newest(folder: str | Path) -> Path | None:
    """The newest checkpoint in `folder` whose files are all there in full length, or None. Loading checks the bytes."""
    return next((path for _, path in reversed(checkpoints(folder)) if _has_its_length(path)), None)


def _has_its_length(path: Path) -> bool:
    if path.is_file():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TRAILER_LENGTH))
            return file.read().startswith(TRAILER[:17])
    try:
        listed = read_manifest(path)["files"].items()
    except CheckpointError:
        return False
    return all((path / name).is_file() and (path / name).stat().st_size == known["bytes"] for name, known in listed)


# ----------------------------------------------------------------------------------------------------------- writing


def sync_folder(folder: Path) -> None:
    """Make a rename durable. Windows cannot open folders and does this by itself."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, step: int, world_size: int, files: dict[str, dict[str, Any]]) -> None:
    """Write down, and flush to disk, what `folder` must hold: by file name its ``bytes`` and ``sha256``."""
    content = {"format": FORMAT, "step": step, "world_size": world_size, "files": dict(sorted(files.items()))}
    with (folder / MANIFEST).open("w") as file:
        json.dump({"content": content, "sha256": _digest_of(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def put_in_place(temporary: Path, path: Path) -> None:
    """Give a complete folder its name, in place of one that may have it already, at no moment without either."""
    replaced = path.with_name(REPLACED + path.name)
    sync_folder(temporary)
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(path, replaced)
    os.replace(temporary, path)
    sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def clear(folder: Path) -> None:
    """Remove what a process killed while saving has left, and finish what it had begun."""
    for left in folder.glob(f"{TEMPORARY}*"):
        remove(left)
    for replaced in folder.glob(f"{REPLACED}*"):
        name = replaced.name.removeprefix(REPLACED)
        if (folder / name).exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.replace(replaced, folder / name)


def remove(path: Path) -> None:
    """Remove a file or a folder; a folder loses its name first, so that no part of it is taken for a checkpoint."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not path.name.startswith(TEMPORARY):
        nameless = path.with_name(f"{TEMPORARY}removed-{path.name}")
        os.replace(path, nameless)
        path = nameless
    shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, step: int, keep: int) -> None:
    """Leave the newest `keep` checkpoints up to `step`, and all after it."""
    older = [path for number, path in checkpoints(folder) if number <= step]
    for path in older[:-keep]:
        remove(path)


# ---------------------------------------------------------------------------------------------------------- checking


def _file_complaint(path: Path) -> str | None:
    size = path.stat().st_size
    if size <= TRAILER_LENGTH:
        return f"it has {size} bytes, which is too short: it was cut off"
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = size - TRAILER_LENGTH
        while left:
            part = file.read(min(left, 1 << 20))
            if not part:
                return "it became shorter while it was read"
            digest.update(part)
            left -= len(part)
        trailer = file.read()
    if not (trailer.startswith(TRAILER[:17]) and trailer.endswith(b"\n")):
        return "its last line is not a checksum: it was cut off, or halfstep did not write it"
    if trailer != TRAILER % digest.hexdigest().encode():
        return "its bytes do not have the checksum on its last line: it was changed or damaged"
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of a folder's manifest.

    Raises:
        CheckpointError: it is missing, or not as it was written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"its {MANIFEST} is missing")
    try:
        written = json.loads(path.read_bytes())
        content: dict[str, Any] = written["content"]
        intact = written["sha256"] == _digest_of(content)
    except (ValueError, TypeError, KeyError):
        intact = False
    if not intact:
        raise CheckpointError(f"its {MANIFEST} does not have its own checksum: it was changed or damaged")
    if content["format"] != FORMAT:
        raise CheckpointError(f"its format is {content['format']!r}; allowed is {FORMAT!r}: use a later halfstep")
    return content


def folder_complaint(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Why the folder is not what was saved, or None if every byte is; of its files, every `parts`-th from `part` on."""
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
        if not path.is_file():
            return f"its file {name} is missing"
        size = path.stat().st_size
        if size < expected["bytes"]:
            return f"its file {name} has {size} of {expected['bytes']} bytes: it was cut off"
        digest = _digest_of_file(path)
        if digest != expected["sha256"]:
            return f"its file {name} does not have the checksum in {MANIFEST}: {_origin(folder, digest)}"
    return None


def _digest_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _origin(folder: Path, digest: str) -> str:
    """Where bytes that do not belong into a folder came from."""
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
    """Why a checkpoint is not what was saved, or None if every byte is."""
    try:
        return folder_complaint(path) if path.is_dir() else _file_complaint(path)
    except OSError as error:
        return str(error)


def remedy(path: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    good = [old for _, old in checkpoints(path.parent) if old != path and complaint(old) is None]
    if good:
        return f"{good[-1]} is good: continue from that, or delete the damaged one"
    return "no other checkpoint in that folder is good: delete it and start anew, or restore it from a copy"


def missing(path: Path) -> CheckpointError:
    """The error for a checkpoint that is not there."""
    present = ", ".join(str(old) for _, old in checkpoints(path.parent)) or "none"
    return CheckpointError(f"no checkpoint {path}; in that folder there are: {present}")


def read_archive(path: Path) -> dict[str, Any]:
    """A dict that ``torch.save`` wrote, on the CPU, running no code that is in it.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"it holds a {type(state).__name__}, not a dict")
    return state


class Hashed:
    """A file that hashes what is written to it, so that it is never read back or held in memory."""

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
        """Its entry in a manifest."""
        return {"bytes": self.bytes, "sha256": self.digest.hexdigest()}


def merged(records: Iterable[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The files of all ranks in one dict."""
    return {name: record for one in records for name, record in one.items()}
