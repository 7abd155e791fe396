"""Every process that came of a command, also those that left its process group, as launchers' ranks do.

Worker processes that end with the process that started them, however that ends.

A worker of a DataLoader notices the end of its rank only between two batches. One that hangs would outlive a rank that
is killed, and keep the pipes open on which launchers read the output of the rank.

"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_SECONDS = 5.0


def usable_cores() -> tuple[int, ...]:
    """Return the numbers of the CPU cores that this process may use, from its CPU affinity where the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def marked(tag: bytes) -> Iterator[int]:
    """Yield the processes with `tag`, NAME=value, in their environment; none where no /proc tells."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if tag in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def end_all(process: subprocess.Popen[bytes], tag: bytes) -> None:
    """Kill `process`, which leads a session of its own, its group, and every process that has `tag`; wait for it."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + _SECONDS
    while (living := list(marked(tag))) and time.monotonic() < deadline:  # again: they may have started others
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


_PARENT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
# The process that forked last, and whether its main thread did; a forked process has its parent's.
_forking: tuple[int, bool] | None = None
# The process in which `end_with_parent` was called last.
_ends_with_parent: int | None = None


@functools.cache
def end_workers_with_rank() -> None:
    """Let every worker that a DataLoader of this process forks later end with this process, however that ends.

    It covers DataLoaders in loops of the user's own too. Workers that are spawned, not forked, are not reached; those
    of the Trainer call `end_with_parent` themselves.
    """
    if not hasattr(os, "register_at_fork"):
        return
    _libc()

    def before() -> None:
        global _forking
        _forking = os.getpid(), threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if _is_called_by_a_loader(sys._getframe()):
            end_with_parent()

    os.register_at_fork(before=before, after_in_child=in_child)


def end_with_parent() -> None:
    """Kill this process when its parent ends, however that ends. A worker calls it; a second call does nothing."""
    global _ends_with_parent
    if _ends_with_parent == os.getpid():
        return
    _ends_with_parent = os.getpid()
    parents, rank = {os.getppid()}, multiprocessing.parent_process()
    if _forking is not None and _forking[0] == os.getppid():
        # The kernel sends the signal when the thread that forked ends, and the main thread ends with the process.
        if _forking[1] and sys.platform == "linux" and _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0:
            if os.getppid() != _forking[0]:  # it has ended meanwhile
                os.kill(os.getpid(), signal.SIGKILL)
            return
    elif rank is not None and rank.pid is not None:
        parents.add(rank.pid)  # which a fork server stands between
    thread = threading.Thread(target=_follow, args=(parents,), name="unitrain worker", daemon=True)
    thread.start()


def _follow(parents: set[int]) -> None:
    first = os.getppid()
    while os.getppid() == first and all(_lives(parent) for parent in parents):
        time.sleep(_PARENT_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_called_by_a_loader(frame: FrameType | None) -> bool:
    module: Any = sys.modules.get("torch.utils.data.dataloader")
    while module is not None and frame is not None:
        if frame.f_code.co_filename == module.__file__:
            return True
        frame = frame.f_back
    return False


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
