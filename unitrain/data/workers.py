"""What the workers of a DataLoader do before they begin."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

# What schedulers send to every process of a job before they take its machine.
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class WorkerStart:
    """A `worker_init_fn`: leaves what a scheduler sends to the whole job to the rank, then calls the user's own.

    Without it such a signal would end the workers, and with them the epoch, before the ranks have agreed on a step to
    stop at. A second SIGTERM ends a worker: the rank sends them to workers that are stuck.
    """

    own: Callable[[int], None] | None = None

    def __call__(self, worker: int) -> None:
        for notice in _NOTICES:
            if signal.getsignal(notice) == signal.SIG_DFL:
                signal.signal(notice, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _first_notice)
        if self.own is not None:
            self.own(worker)


def _first_notice(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
