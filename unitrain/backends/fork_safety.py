"""Prevent torch.distributed's threads from causing deadlocks in forked processes, such as DataLoader workers.

With Python before 3.11.10, a forked process hangs if another thread held an internal lock of the interpreter during the
fork (HEAD_LOCK, https://github.com/python/cpython/issues/112275). A thread of C++ code holds this lock for a moment
before it waits for the GIL, and torch's threads do so when they release the tensors of a completed collective. A fork
is therefore delayed until no other thread runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_POLL_SECONDS = 0.0005
_MAX_WAIT_SECONDS = 0.05


@functools.cache
def make_forks_safe() -> None:
    """Delay every later fork of this process, by at most 50 ms, until no other thread runs. Do nothing if this Python
    version is not affected."""
    if sys.version_info < (3, 11, 10) and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_wait_for_threads)


def _wait_for_threads() -> None:
    deadline = time.monotonic() + _MAX_WAIT_SECONDS
    while True:
        time.sleep(_POLL_SECONDS)  # releases the GIL, so that threads that wait for it can continue
        if not _is_another_thread_running() or time.monotonic() > deadline:
            return


def _is_another_thread_running() -> bool:
    """Return whether another thread of this process is running or runnable, or False without Linux's /proc.

    A thread that waits for the GIL does not count: it does not hold the lock, and cannot continue during the fork.
    """
    own = str(threading.get_native_id())
    with contextlib.suppress(OSError):
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # the thread has exited
                # The state follows the name, which is in parentheses and may contain any character.
                if thread.name != own and thread.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "R":
                    return True
    return False
