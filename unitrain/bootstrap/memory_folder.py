"""The folder in shared memory in which rank 0 of a supervised job keeps checkpoints of the latest steps.

`unitrain launch` creates it, passes its path to the ranks, and removes it when the job ends. If `unitrain launch` is
killed, the ranks remove it. If all processes of the job are killed at once, the next `unitrain launch` of the same user
removes the folder. The command recognizes an abandoned folder by the missing `flock`: `unitrain launch` locks its
folder, and the kernel releases the lock when the process terminates.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from unitrain.bootstrap import environment

_ROOT = Path("/dev/shm")
# Maximum time between the closing of the supervisor's connections and the release of its lock.
_LOCK_RELEASE_SECONDS = 2.0
_POLL_SECONDS = 0.02


class MemoryFolder:
    """A new folder in shared memory that only this user can read. It is locked until it is closed.

    If this system has no writable /dev/shm, `path` is None and `error` is the reason. The constructor also removes this
    user's folders of jobs that were killed.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self.path: Path | None = None
        self.error: str | None = None
        self._descriptor: int | None = None
        prefix = f"unitrain-{os.getuid()}-"
        try:
            _remove_abandoned_folders(root, prefix)
            while self.path is None:
                path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
                self._descriptor = _lock(path)
                if self._descriptor is not None:  # otherwise another command has just removed the folder as abandoned
                    self.path = path
        except OSError as error:
            self.close()
            self.error = error.strerror or str(error)

    def close(self) -> None:
        """Remove the folder."""
        if self.path is not None:
            _remove(self.path)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self.path = self._descriptor = None


def remove_abandoned_folder() -> None:
    """Remove the memory folder of this process's job if the supervisor has terminated without removing it.

    A rank calls it when its connection to the supervisor is closed, which may be shortly before the supervisor's lock
    is released. The function therefore waits for the lock, for at most 2 s.
    """
    path = environment.get_variable(environment.SHARED_MEMORY_FOLDER_VARIABLE)
    deadline = time.monotonic() + _LOCK_RELEASE_SECONDS
    while path is not None and Path(path).exists() and time.monotonic() < deadline:
        if (descriptor := _lock(Path(path))) is not None:
            _remove(Path(path))
            os.close(descriptor)
        time.sleep(_POLL_SECONDS)


def _remove(path: Path) -> None:
    """Remove a folder into which other processes may still write. It is renamed first, so that their writes fail."""
    removed = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        path.rename(removed)
    for folder in (removed, path):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned_folders(root: Path, prefix: str) -> None:
    """Remove this user's folders that no process has locked."""
    for path in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process has removed the folder in the meantime
            if path.is_symlink() or not path.is_dir() or path.lstat().st_uid != os.getuid():
                continue
            descriptor = _lock(path)
            if descriptor is not None:
                _remove(path)
                os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Lock a folder and return its file descriptor, or None if another process has locked or removed it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
