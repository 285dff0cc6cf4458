"""The folder of a checkpoint: its name, its manifest, and detection of damage.

``manifest.json`` lists the size and SHA-256 of every other file, and has its own SHA-256. A checkpoint is written under
another name (atomic.py) and renamed when it is complete, so that nothing with the name of a checkpoint is ever partial.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from halfstep.integrations import interrupts
from halfstep.integrations.checkpoint import atomic
from halfstep.numerics.messages import printable

MANIFEST, STATE, SHARDS = "manifest.json", "state.json", ".safetensors"
FORMAT = "halfstep checkpoint 2"
BEFORE = (
    "halfstep checkpoint 1"  # the folders of torch.distributed.checkpoint that halfstep wrote before: torch_folder.py
)
PART = 16 << 20  # bytes between two checks for an interrupt
LONGEST_MESSAGE = 4000
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found or trusted. The message names the file and what to do, in one line."""

    def __init__(self, message: str) -> None:
        # The message may quote a file, which may contain control characters of a terminal.
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE // 2]} … {message[-LONGEST_MESSAGE // 2 :]}"
        super().__init__(printable(message))


def name_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def checkpoints(folder: str | Path) -> list[tuple[int, Path]]:
    """The checkpoints in `folder` as (step, path), oldest first; none if there is no such folder.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> path = checkpoint.save("run", 10, {"tokens": 1000})
        >>> [(step, path.name) for step, path in checkpoint.checkpoints("run")]
        [(10, 'step-00000010')]
    """
    folder = Path(folder)
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        replaced = atomic.replaced_name(path)
        match = _NAME.fullmatch(replaced or path.name)
        if match and not (replaced and (folder / replaced).exists()) and (path / MANIFEST).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def newest(folder: str | Path) -> Path | None:
    """The newest checkpoint in `folder` whose files are all there in full length, or None. Loading checks the bytes.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> checkpoint.newest("no-such-folder") is None
        True
    """
    return next((path for _, path in reversed(checkpoints(folder)) if complaint(path, parts=0) is None), None)


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove all checkpoints up to `step` except the newest `keep`. Later ones are kept."""
    older = [path for number, path in checkpoints(folder) if number <= step]
    for path in older[:-keep]:
        atomic.remove(path)


def sealed(content: Any) -> bytes:
    """The bytes of a manifest with this content."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({"content": content, "sha256": digest}, indent=1).encode()


def read_manifest(path: Path) -> dict[str, Any]:
    """The content of the manifest of a checkpoint, whose ``files`` are names in the folder.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    try:
        written = (path / MANIFEST).read_bytes() if (path / MANIFEST).is_file() else b""
        content = json.loads(written.decode())["content"]
        intact = written == sealed(content)
    except OSError as error:
        raise CheckpointError(f"its {MANIFEST} cannot be read: {error}") from error
    except (ValueError, TypeError, LookupError, RecursionError):
        intact = False
    if not intact:
        what = "does not have its own checksum: it was changed or damaged"
        raise CheckpointError(f"its {MANIFEST} {what if (path / MANIFEST).exists() else 'is missing'}")
    known = content.get("format") if isinstance(content, dict) else None
    if known not in (FORMAT, BEFORE):
        raise CheckpointError(
            f"expected its format to be {FORMAT!r}, but got {str(known)[:100]!r}: use a later halfstep"
        )
    listed = content.get("files")
    if not isinstance(listed, dict) or not all(map(_is_record, listed, listed.values())):
        raise CheckpointError(f"its {MANIFEST} does not list files of the folder with their sizes and checksums")
    return content


def is_name(name: Any) -> bool:
    """Whether it is the name of a file in a folder, and nowhere else."""
    return type(name) is str and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _is_record(name: str, record: Any) -> bool:
    sizes = isinstance(record, dict) and type(record.get("bytes")) is int and type(record.get("sha256")) is str
    return is_name(name) and sizes


def complaint(path: Path, part: int = 0, parts: int = 1) -> str | None:
    """Why a checkpoint is damaged, or None if it is not.

    Args:
        path: the folder.
        part, parts: the sizes of all files are checked, and the bytes of every `parts`-th, beginning with `part`; 0: of
            none.
    """
    try:
        files = read_manifest(path)["files"]
        unlisted = sorted(one.name for one in path.glob(f"*{SHARDS}") if one.name not in files)
        if unlisted:
            return f"it holds {', '.join(unlisted)}, which its {MANIFEST} does not list: shards of another checkpoint"
        for name, record in sorted(files.items()):
            if not (path / name).is_file():
                return f"its file {name} is missing"
            size = (path / name).stat().st_size
            if size != record["bytes"]:
                what = "cut off" if size < record["bytes"] else "changed"
                return f"its file {name} has {size} of {record['bytes']} bytes: it was {what}"
        for name in sorted(files)[part::parts] if parts else ():
            digest = _digest_of_file(path / name)
            if digest != files[name]["sha256"]:
                return f"its file {name} does not have the checksum in {MANIFEST}: {_origin(path, digest)}"
    except (CheckpointError, OSError, ValueError) as error:  # ValueError: names that no file system has
        return str(error)
    return None


def _digest_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            interrupts.poll()
            digest.update(part)
    return digest.hexdigest()


def _origin(path: Path, digest: str) -> str:
    """The origin of a file with a wrong digest, for a message."""
    for _, other in checkpoints(path.parent):
        try:
            for name, record in read_manifest(other)["files"].items():
                if record["sha256"] == digest:
                    return f"it is {name} of {other.name}"
        except CheckpointError:
            continue
    return "it was changed or damaged, or is of another checkpoint"


def remedy(path: Path) -> str:
    """The remedy for a checkpoint that cannot be used, for a message."""
    for _, other in reversed(checkpoints(path.parent)):
        if other != path and complaint(other) is None:
            return f"{other} is good: continue from that, or delete the damaged one"
    return "no other checkpoint in that folder is good: delete it and start a new run, or restore it from a copy"


def missing(path: Path) -> CheckpointError:
    """The error for a checkpoint that does not exist."""
    if path.is_file():
        return CheckpointError(
            f"{path} is a file, as halfstep wrote checkpoints before, or of other code: make a folder of it with "
            f"python -m halfstep convert {path} FOLDER"
        )
    present = ", ".join(str(other) for _, other in checkpoints(path.parent)) or "none"
    return CheckpointError(f"no checkpoint {path}; in that folder there are: {present}")


class Hashed:
    """A new file that computes its hash while it is written, so that it need not be read again."""

    def __init__(self, path: Path) -> None:
        self._file, self._digest, self._bytes = path.open("xb"), hashlib.sha256(), 0

    def __enter__(self) -> Hashed:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        for begin in range(0, len(data), PART):
            interrupts.poll()
            part = data[begin : begin + PART]
            self._digest.update(part)
            self._file.write(part)
        self._bytes += len(data)

    def finish(self) -> dict[str, Any]:
        """Flush the file to disk, and return its entry in a manifest."""
        atomic.flush(self._file)
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}
