"""Folders that appear complete or not at all, and removal of what killed saves have left.

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
import stat
import uuid
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_OURS = re.compile(r"\.halfstep-[0-9a-f]{16}(?:\.(?P<what>lock|removed|replaced-(?P<name>.+)))?")


def flush(file: Any) -> None:
    """Make what was written to a file durable."""
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
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
    match = _OURS.fullmatch(path.name)
    return match["name"] if match else None


def remove(path: Path) -> None:
    """Remove a folder. It is renamed first, so that no partly removed one is read as a checkpoint."""
    match = _OURS.fullmatch(path.name)
    if path.is_dir() and (match is None or match["name"]):
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
    """A save in progress, in an empty folder of a unique name: ``path``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        while True:
            self.path = folder / f".halfstep-{_token()}"
            self._lock = self.path.with_name(f"{self.path.name}.lock")
            self._descriptor = os.open(self._lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
            # Another process may have removed the file before it was locked.
            if _locked(self._descriptor) is not False and self._lock.exists():
                break
            os.close(self._descriptor)
        try:
            self.path.mkdir()
        except BaseException:
            self.end()
            raise

    def put_in_place(self, path: Path) -> None:
        """Rename the complete save to `path`, which may exist. At any time, either the old or the new one is valid."""
        replaced = self.path.with_name(f"{self.path.name}.replaced-{path.name}")
        _sync_folder(self.path)
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
        _sync_folder(path.parent)
        remove(replaced)

    def end(self) -> None:
        """Remove the lock, and the files of a save that was not put in place."""
        _finish(self.path)
        with contextlib.suppress(OSError):
            self._lock.unlink(missing_ok=True)
        os.close(self._descriptor)


def _clear(folder: Path) -> None:
    """Remove what killed saves have left in `folder`, and restore checkpoints that they had renamed."""
    for path in folder.glob(".halfstep-*"):
        match = _OURS.fullmatch(path.name)
        if match and match["what"] == "removed":
            shutil.rmtree(path, ignore_errors=True)
        if not match or match["what"] != "lock":
            continue
        try:
            if not stat.S_ISREG(path.lstat().st_mode):  # opening a pipe would wait for its other end
                continue
            descriptor = os.open(path, os.O_RDWR)
        except OSError:  # the save has ended in the meantime, or belongs to another user
            continue
        try:
            if _locked(descriptor) is True:
                _finish(path.with_name(path.name.removesuffix(".lock")))
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _finish(path: Path) -> None:
    """Remove a temporary folder, and restore the checkpoint that it was about to replace."""
    for replaced in path.parent.glob(f"{path.name}.replaced-*"):
        place = path.with_name(replaced_name(replaced) or "")
        if place.exists():
            remove(replaced)
        else:
            os.replace(replaced, place)
    remove(path)
