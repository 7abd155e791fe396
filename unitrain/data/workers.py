"""What the workers of a DataLoader do before they begin."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

# What schedulers send to every process of a job before they take its machine.
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
_EXIT_SECONDS, _EXIT_INTERVAL_SECONDS = 5.0, 0.1


@dataclass(frozen=True)
class WorkerStart:
    """A `worker_init_fn`: leaves what a scheduler sends to the whole job to the rank, then calls the user's own.

    Without it such a signal would end the workers, and with them the epoch, before the ranks have agreed on a step to
    stop at. A second SIGTERM ends a worker: the rank sends them to workers that are stuck.
    """

    own: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        _end_workers_at_exit()

    def __call__(self, worker: int) -> None:
        for notice in _NOTICES:
            if signal.getsignal(notice) == signal.SIG_DFL:
                signal.signal(notice, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _first_notice)
        if self.own is not None:
            self.own(worker)


def _first_notice(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


@functools.cache
def _end_workers_at_exit() -> None:
    atexit.register(_end_workers)


def _end_workers() -> None:
    """Send SIGTERM to the daemon processes of this one until they have ended.

    At exit, multiprocessing sends it once and then waits without a limit, which is too little for a worker.
    """
    deadline = time.monotonic() + _EXIT_SECONDS
    while time.monotonic() < deadline:
        living = [process for process in multiprocessing.active_children() if process.daemon]
        if not living:
            return
        for process in living:
            process.terminate()
        time.sleep(_EXIT_INTERVAL_SECONDS)
