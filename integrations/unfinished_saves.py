"""Temporary names of saves, and removal of the files that killed saves have left.

A save uses a unique name, ``.halfstep-TOKEN``, and keeps the file ``.halfstep-TOKEN.lock`` locked until it ends. The
system releases the lock when the process ends for any reason. A process that can take the lock therefore knows that the
save has ended, also if it ran on another machine or in another container. If the file system has no locks, nothing is
removed. Other files in the folder are never changed.

    .halfstep-TOKEN                     the checkpoint being written
    .halfstep-TOKEN.lock                locked by the process that writes it
    .halfstep-TOKEN.replaced-NAME       the previous checkpoint NAME, which is valid until NAME exists again
    .halfstep-TOKEN.removed             a folder that is being removed
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_OURS = re.compile(r"\.halfstep-([0-9a-f]{16})(?:\.(lock|removed|replaced-(?P<name>.+)))?")
_LEGACY = re.compile(r"\.replaced-(?P<name>step-\d{8,})")  # of earlier versions


def sync_folder(folder: Path) -> None:
    """Make a rename durable. Windows cannot open folders and does this by itself."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replaced_name(path: Path) -> str | None:
    """The name that a folder had before another one replaced it; None for any other folder."""
    match = _OURS.fullmatch(path.name) or _LEGACY.fullmatch(path.name)
    return match["name"] if match else None


def remove(path: Path) -> None:
    """Remove a file or a folder. A folder is renamed first, so that no partly removed one is read as a checkpoint."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    match = _OURS.fullmatch(path.name)
    if match is None or match["name"]:
        nameless = path.with_name(f".halfstep-{_token()}.removed")
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.replace(path, nameless)
        path = nameless
    shutil.rmtree(path, ignore_errors=True)


def _token() -> str:
    return uuid.uuid4().hex[:16]


def _locked(descriptor: int) -> bool | None:
    """Whether this process now holds the lock of an open file; None if the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another process holds it
        return False
    except OSError:
        return None
    return True


class UnfinishedSave:
    """A save in progress, under a unique temporary name in `folder`: ``path``."""

    def __init__(self, folder: Path) -> None:
        while True:
            self.path = folder / f".halfstep-{_token()}"
            self._lock = self.path.with_name(f"{self.path.name}.lock")
            self._descriptor = os.open(self._lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
            # Another process may have removed the file before it was locked.
            if _locked(self._descriptor) is not False and self._lock.exists():
                return
            os.close(self._descriptor)

    def put_in_place(self, path: Path) -> None:
        """Rename the complete save to `path`, which may exist. At any time, either the old or the new one is valid."""
        replaced = self.path.with_name(f"{self.path.name}.replaced-{path.name}")
        if self.path.is_dir():
            sync_folder(self.path)
        while True:
            if path.is_dir():
                remove(replaced)
                with contextlib.suppress(FileNotFoundError):
                    os.replace(path, replaced)
            try:
                os.replace(self.path, path)
                break
            except OSError as error:  # another process has created `path` since
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        sync_folder(path.parent)
        remove(replaced)

    def end(self) -> None:
        """Remove the lock, and the files of a save that was not put in place."""
        _finish(self.path)
        with contextlib.suppress(OSError):
            self._lock.unlink(missing_ok=True)
        os.close(self._descriptor)


def clear(folder: Path) -> None:
    """Remove the files that killed saves have left in `folder`, and restore checkpoints that they had renamed."""
    for path in sorted(folder.glob(".halfstep-*.lock")):
        match = _OURS.fullmatch(path.name)
        if match is None or match[2] != "lock":
            continue
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:  # the save has ended in the meantime, or belongs to another user
            continue
        try:
            if _locked(descriptor) is True:
                _finish(path.with_name(path.name.removesuffix(".lock")))
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
    for path in [*folder.glob(".halfstep-*.removed"), *folder.glob(".replaced-*")]:
        match = _OURS.fullmatch(path.name)
        if match is not None and match[2] == "removed":
            shutil.rmtree(path, ignore_errors=True)
        elif _LEGACY.fullmatch(path.name):
            _put_back(path)


def _finish(path: Path) -> None:
    """Remove a temporary file or folder, and restore the checkpoint that it was about to replace."""
    for replaced in path.parent.glob(f"{path.name}.replaced-*"):
        _put_back(replaced)
    remove(path)


def _put_back(replaced: Path) -> None:
    name = replaced_name(replaced)
    assert name is not None
    if (replaced.parent / name).exists():
        remove(replaced)
    else:
        os.replace(replaced, replaced.parent / name)
