"""Noticing that the machine is about to be taken away, also while the training waits for other ranks."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Self

_SAME_NOTICE_SECONDS = 3.0


class Preemption:
    """Inside it, the first of these signals is only noted, as `received`; a later one ends the process at once.

    Signals within a few seconds of the first are part of the same notice: a scheduler sends one to every process of a
    job, and a launcher that receives it forwards it to its ranks. A handler in Python would not run while the main
    thread waits for other ranks, so a thread of its own is woken through a socket. Signals that the user handles are
    left alone, and all are outside of the main thread, where Python does not let anyone handle them.
    """

    def __init__(self, signals: Sequence[str]) -> None:
        self._signals = [signal.Signals[name] for name in signals]
        self.received: str | None = None
        self._handled: set[signal.Signals] = set()

    def __enter__(self) -> Self:
        self.received = None
        free = [one for one in self._signals if signal.getsignal(one) == signal.SIG_DFL]
        if not free or threading.current_thread() is not threading.main_thread():
            return self
        _let_forks_be()
        self._ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._theirs = theirs
        self._wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._watch, name="unitrain preemption", daemon=True)
        self._thread.start()
        for one in free:
            signal.signal(one, _noted)
            self._handled.add(one)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._handled:
            return
        for one in self._handled:
            signal.signal(one, signal.SIG_DFL)
        self._handled.clear()
        signal.set_wakeup_fd(self._wakeup)
        if os.getpid() != self._process:  # a forked process leaves the connection to its parent
            return
        # Closing a socket does not end the thread while a forked process, such as a worker of a DataLoader, holds a
        # copy of it: shutting the connection down does.
        self._ours.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._ours.close()
        self._theirs.close()

    def _watch(self) -> None:
        """Read the numbers of the signals that arrive, until the connection is shut down."""
        first = 0.0
        while numbers := self._ours.recv(16):
            for number in numbers:
                if number not in self._handled:
                    continue
                if self.received is None:
                    first, self.received = time.monotonic(), signal.Signals(number).name
                elif time.monotonic() - first > _SAME_NOTICE_SECONDS:
                    os._exit(128 + number)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: that there is a handler is what lets the process live, and the thread be woken."""


@functools.cache
def _let_forks_be() -> None:
    """See that a forked process, such as a DataLoader's worker, wakes no thread of this one with its own signals."""

    def forget_socket() -> None:
        if any(signal.getsignal(one) is _noted for one in signal.valid_signals()):
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=forget_socket)
