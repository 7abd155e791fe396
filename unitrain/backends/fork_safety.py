"""Forks, such as those of a DataLoader's workers, beside the threads of torch.distributed.

Python before 3.11.10 hangs in the new process when another thread was just about to enter the interpreter
(https://github.com/python/cpython/issues/112275). torch's threads do so when they let go of the tensors of a collective
that is over, so they are given the moment that this takes.
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
_REST_SECONDS = 0.0005
_PATIENCE_SECONDS = 0.05


@functools.cache
def make_forks_safe() -> None:
    """Let every later fork of this process wait until no other thread runs, for at most 50 ms, where that is needed."""
    if sys.version_info < (3, 11, 10) and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_await_rest)


def _await_rest() -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        # Whoever waits for the interpreter gets in and out again meanwhile.
        time.sleep(_REST_SECONDS)
        if not _others_run() or time.monotonic() > deadline:
            return


def _others_run() -> bool:
    """Whether any other thread of this process is running, or would if it had a core; False where Linux does not tell.

    A thread that waits for the interpreter does not count: it has begun to enter, and goes no further during the fork.
    """
    own = str(threading.get_native_id())
    with contextlib.suppress(OSError):
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                # The state follows the name, which stands in brackets and may hold anything.
                if thread.name != own and thread.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "R":
                    return True
    return False
