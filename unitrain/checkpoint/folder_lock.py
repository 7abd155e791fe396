"""Lock on an output folder, so that only one job at a time writes to it.

The lock is a `flock` on the file `.lock` in the folder. The kernel releases it when the process terminates, so a killed
job does not block the next one. Linux NFS clients forward the lock to the server, which releases the locks of an
unreachable host when its lease expires (90 seconds by default). The content of the file identifies the holder.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import socket
import stat
import threading
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from unitrain.bootstrap import environment
from unitrain.checkpoint import files
from unitrain.errors import CheckpointError
from unitrain.output import get_logger
from unitrain.regular_files import read_regular_file

LOCK_FILE = ".lock"
_MAX_BYTES = 1 << 16
# Timeouts for a lock that is held by another job (which may be about to finish), or by an earlier attempt of the same
# job (whose host may be unreachable).
_OTHER_JOB_TIMEOUT_SECONDS, _SAME_JOB_TIMEOUT_SECONDS = 5.0, 150.0
_POLL_SECONDS = 0.1
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)

_log = get_logger(__name__)
# Locks held by this process: the file descriptor, and the number of calls of `FolderLock.acquire` that `release` has
# not undone yet.
_held_locks: dict[Path, tuple[int, int]] = {}
_held_locks_mutex = threading.Lock()


class FolderLock:
    """Lock on one folder, used on rank 0. Several objects in one process may hold it at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = files.real_path(folder) / LOCK_FILE
        self._hold_count = 0
        self._deadline: float | None = None

    def acquire(self, timeout_seconds: float) -> bool:
        """Wait for the lock for at most `timeout_seconds`, and return whether this process holds it.

        Call it repeatedly until it returns True. When the total timeout of all calls expires (5 s, or 150 s if the
        holder is an earlier attempt of the same job), it raises a CheckpointError that identifies the holder.
        """
        _close_in_forks()
        end = time.monotonic() + timeout_seconds
        while not self._try_acquire():
            now, holder = time.monotonic(), _read_holder(self._path)
            if self._deadline is None:
                is_same_job = holder.get("job") is not None and holder.get("job") == environment.job_description()
                self._deadline = now + (_SAME_JOB_TIMEOUT_SECONDS if is_same_job else _OTHER_JOB_TIMEOUT_SECONDS)
                _log.warning("Waiting for output folder '%s', which %s uses.", self._folder, _describe_holder(holder))
            if now > self._deadline:
                self._deadline = None
                raise CheckpointError(
                    f"Output folder '{self._folder}' is in use by another job: {_describe_holder(holder)}. Wait until "
                    "that job has ended, or choose another folder. If its host no longer exists, release it "
                    f"with: rm '{self._path}'"
                )
            if now > end:
                return False
            time.sleep(_POLL_SECONDS)
        self._deadline = None
        return True

    def release(self) -> None:
        """Undo one successful call of `acquire`. The lock is released when all successful calls in this process are
        undone. Does nothing if this object does not hold the lock."""
        with _held_locks_mutex:
            # A forked process does not hold the locks of its parent.
            if not self._hold_count or self._path not in _held_locks:
                return
            self._hold_count -= 1
            descriptor, holders = _held_locks.pop(self._path)
            if holders > 1:
                _held_locks[self._path] = (descriptor, holders - 1)
                return
            # Remove the file while it is locked. A process that locks the removed file afterwards detects that it is no
            # longer in the folder.
            with suppress(OSError):
                if _is_same_file(descriptor, self._path):
                    self._path.unlink()
            os.close(descriptor)

    def _try_acquire(self) -> bool:
        with _held_locks_mutex:
            if self._path in _held_locks:
                descriptor, holders = _held_locks[self._path]
                _held_locks[self._path] = (descriptor, holders + 1)
            elif not self._lock_file():
                return False
            self._hold_count += 1
            return True

    def _open_lock_file(self) -> int:
        """Open the lock file, which is overwritten later. Raises CheckpointError for a symbolic link."""
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise CheckpointError(
                f"'{self._path}', the lock of the output folder, is a symbolic link, and its target would be "
                f"overwritten. Remove the link: rm '{self._path}'"
            ) from None

    def _lock_file(self) -> bool:
        while True:
            descriptor = self._open_lock_file()
            try:
                is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            except OSError as error:
                os.close(descriptor)
                if error.errno == errno.ESTALE:  # on NFS, another host has just removed the file
                    continue
                raise
            if not is_regular:
                os.close(descriptor)
                raise CheckpointError(
                    f"'{self._path}', the lock of the output folder, is not a regular file. Remove it: "
                    f"rm '{self._path}'"
                )
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    os.close(descriptor)
                    if error.errno == errno.ESTALE:  # on NFS, the holder on another host has just removed the file
                        continue
                    if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                        return False
                    raise
                _log.warning(
                    "The file system of output folder '%s' does not support locks (%s), so a second job that writes "
                    "to it is not detected.",
                    self._folder,
                    error,
                )
            if _is_same_file(descriptor, self._path):
                break
            os.close(descriptor)  # the holder has just removed the file
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_describe_this_job()).encode(), 0)
            os.fsync(descriptor)
        except BaseException:  # for example, because the file system is full
            os.close(descriptor)  # releases the lock
            raise
        _held_locks[self._path] = (descriptor, 1)
        return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ESTALE:  # on NFS, another host has removed the file
            return False
        raise


def _describe_this_job() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "job": environment.job_description(),
    }


def _read_holder(path: Path) -> dict[str, Any]:
    """Return the description that the holder has written, or an empty dictionary if it is missing or unreadable."""
    try:
        read = json.loads(read_regular_file(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _describe_holder(holder: dict[str, Any]) -> str:
    if not holder:
        return "a job that has not identified itself yet"
    job = "" if holder.get("job") is None else f", {holder['job']}"
    return f"process {holder.get('pid')} on host {holder.get('host')}, started {holder.get('started')}{job}"


@functools.cache
def _close_in_forks() -> None:
    """Make forked processes, such as DataLoader workers, close the lock files. Otherwise, a forked process that
    outlives this process would hold the lock."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    global _held_locks_mutex
    _held_locks_mutex = threading.Lock()  # another thread may have held it during the fork
    for descriptor, _ in _held_locks.values():
        with suppress(OSError):
            os.close(descriptor)
    _held_locks.clear()
