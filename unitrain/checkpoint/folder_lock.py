"""A lock on an output folder: one job at a time writes to it.

The lock is `flock` on the file `.lock` in the folder. The kernel releases it when the process ends, however it ends, so
a job that was killed never blocks the next one. Linux NFS clients pass the lock to the server, which also releases it
for a host that has gone, after the lease (90 seconds by default). The content of the file names the holder.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unitrain.bootstrap import environment
from unitrain.errors import CheckpointError

FILE = ".lock"
# How long to wait for the holder: a process that is about to end, or an earlier attempt at the same job, whose host may
# have gone.
_WAIT_SECONDS, _SAME_JOB_SECONDS = 5.0, 150.0
_POLL_SECONDS = 0.1
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)

_log = logging.getLogger(__name__)
# The open files of the locks that this process holds, and how many times each is held.
_held: dict[Path, tuple[int, int]] = {}
_changing = threading.Lock()


class FolderLock:
    """The lock on one folder, for rank 0 alone. Within a process any number of them may hold it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder.resolve() / FILE
        self._holds = 0
        self._deadline: float | None = None

    def take(self, seconds: float) -> bool:
        """Wait for the lock, for `seconds` at most, and return whether this process holds it, until as many `release`.

        Call it until it returns True. Raises CheckpointError, which names the holder, after too long in
        total.
        """
        _close_in_forks()
        end = time.monotonic() + seconds
        while not self._try():
            now, holder = time.monotonic(), _read(self._path)
            if self._deadline is None:
                same = holder.get("job") is not None and holder.get("job") == environment.job_description()
                self._deadline = now + (_SAME_JOB_SECONDS if same else _WAIT_SECONDS)
                _log.warning("Waiting for output folder '%s', which %s uses.", self._folder, _described(holder))
            if now > self._deadline:
                self._deadline = None
                raise CheckpointError(
                    f"Output folder '{self._folder}' is in use by another job: {_described(holder)}. Wait until that "
                    "job has ended, or choose another output_dir. If its host no longer exists, release the folder "
                    f"with: rm '{self._path}'"
                )
            if now > end:
                return False
            time.sleep(_POLL_SECONDS)
        self._deadline = None
        return True

    def release(self) -> None:
        """Let other processes take the lock once nothing in this one holds it. Does nothing if not held."""
        with _changing:
            if not self._holds or self._path not in _held:  # a forked process does not hold what its parent does
                return
            self._holds -= 1
            descriptor, holders = _held.pop(self._path)
            if holders > 1:
                _held[self._path] = (descriptor, holders - 1)
                return
            # Removed while it is locked: a process that locks it afterwards finds another file, or none, in the folder.
            with suppress(OSError):
                if _is_at(descriptor, self._path):
                    self._path.unlink()
            os.close(descriptor)

    def _try(self) -> bool:
        with _changing:
            if self._path in _held:
                descriptor, holders = _held[self._path]
                _held[self._path] = (descriptor, holders + 1)
            elif not self._lock_file():
                return False
            self._holds += 1
            return True

    def _open(self) -> int:
        """Open the file of the lock, which is about to be overwritten. Raises CheckpointError for a symbolic link."""
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
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    os.close(descriptor)
                    if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                        return False
                    raise
                _log.warning(
                    "The file system of output folder '%s' has no locks (%s), so a second job that writes to it is not "
                    "detected.",
                    self._folder,
                    error,
                )
            if _is_at(descriptor, self._path):
                break
            os.close(descriptor)  # its holder has just removed it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_this_job()).encode(), 0)
        os.fsync(descriptor)
        _held[self._path] = (descriptor, 1)
        return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _this_job() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "job": environment.job_description(),
    }


def _read(path: Path) -> dict[str, Any]:
    """Return what the holder of the lock has written; empty while it is about to."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _described(holder: dict[str, Any]) -> str:
    if not holder:
        return "a job that has not named itself yet"
    job = "" if holder.get("job") is None else f", {holder['job']}"
    return f"process {holder.get('pid')} on host {holder.get('host')}, started {holder.get('started')}{job}"


@functools.cache
def _close_in_forks() -> None:
    """Close copies of the locks in forked processes, such as workers of a DataLoader, which may outlive this one."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    global _changing
    _changing = threading.Lock()  # another thread may have held it at the fork
    for descriptor, _ in _held.values():
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()
