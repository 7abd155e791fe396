"""Handle preemption signals of schedulers, even while the main thread is blocked in a collective."""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from typing_extensions import Self

from unitrain.output import get_logger
from unitrain.processes import preemption_signals
from unitrain.threads import start_thread

_DUPLICATE_SIGNAL_SECONDS = 3.0

_log = get_logger(__name__)


class PreemptionHandler:
    """Context manager that records the first of `signals` in `received_signal`; a later signal terminates the process.

    Signals within three seconds of the first are ignored as duplicates: the scheduler signals every process of a job,
    and the launcher also forwards the signal to its ranks. Python signal handlers do not run while the main thread is
    blocked in a collective, so a background thread, which `signal.set_wakeup_fd` wakes, records the signal. A handler
    that the program has installed, for example the handler of submitit, is called at the end of the context, when the
    checkpoint has been saved, because it may end the process or the job. Ignored signals are left unchanged. DataLoader
    workers that start later ignore these signals, but a second SIGTERM terminates them. Outside the main thread, where
    Python does not allow handlers, the context manager does nothing.
    """

    def __init__(self, signals: Sequence[str]) -> None:
        self._signals = [signal.Signals[name] for name in signals]
        preemption_signals.update(self._signals)
        self.received_signal: str | None = None
        # The handlers that this object replaces, and the received signals, in the order of their arrival.
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._received_signals: dict[signal.Signals, None] = {}

    def __enter__(self) -> Self:
        self.received_signal = None
        self._received_signals.clear()
        handlers = {signum: signal.getsignal(signum) for signum in self._signals}
        # A C library has installed a handler of None. An enclosing context has installed `_ignore_signal`.
        unchanged = (signal.SIG_IGN, None, _ignore_signal)
        replaced = {signum: handler for signum, handler in handlers.items() if handler not in unchanged}
        for signum in [signum for signum, handler in handlers.items() if handler is None]:
            _log.warning("A C library handles %s, so this signal does not cause a checkpoint.", signum.name)
        if not replaced or threading.current_thread() is not threading.main_thread():
            return self
        _detach_wakeup_socket_in_forks()
        self._receiver, sender = socket.socketpair()
        sender.setblocking(False)
        self._sender = sender
        self._previous_wakeup_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._pid = os.getpid()
        self._thread = start_thread(self._receive_signals, name="unitrain preemption", restarts=True)
        self._previous_handlers = replaced
        for signum in replaced:
            signal.signal(signum, _ignore_signal)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._previous_handlers:
            return
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        previous_handlers, self._previous_handlers = self._previous_handlers, {}
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        if os.getpid() != self._pid:  # a forked process; the parent closes the connection
            return
        # Shut the connection down instead of closing it: while a forked process, such as a DataLoader worker, holds a
        # copy of the socket, closing it would not stop the thread.
        self._receiver.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._receiver.close()
        self._sender.close()
        for signum in self._received_signals:
            handler = previous_handlers.get(signum)
            if callable(handler) and handler is not signal.default_int_handler:
                handler(signum, sys._getframe())

    def _receive_signals(self) -> None:
        """Read the numbers of received signals until the connection is shut down."""
        first_time = 0.0
        while numbers := self._receiver.recv(16):
            for signum in numbers:
                if signum not in self._previous_handlers:
                    continue
                self._received_signals[signal.Signals(signum)] = None
                if self.received_signal is None:
                    first_time, self.received_signal = time.monotonic(), signal.Signals(signum).name
                elif time.monotonic() - first_time > _DUPLICATE_SIGNAL_SECONDS:
                    os._exit(128 + signum)


class CommitGuard:
    """Context manager whose block Ctrl-C (SIGINT) does not interrupt, so that changes of the run that belong together
    are complete. KeyboardInterrupt is raised at the end of the block. A second Ctrl-C interrupts the block.

    It has an effect between `install` and `remove`, in the main thread, and if SIGINT has Python's default handler.
    """

    def __init__(self) -> None:
        self._is_installed = self._is_entered = self._is_pending = False

    def install(self) -> None:
        """Handle SIGINT."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._is_installed = True

    def remove(self) -> None:
        """Restore Python's default handler of SIGINT."""
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_installed = False

    def __enter__(self) -> None:
        self._is_entered, self._is_pending = True, False

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_entered = False
        if self._is_pending and error is None:
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._is_entered and not self._is_pending:
            self._is_pending = True
            return
        signal.default_int_handler(signum, frame)


def _ignore_signal(signum: int, frame: FrameType | None) -> None:
    """Do nothing. Without a Python handler, the signal would terminate the process instead of waking the thread."""


@functools.cache
def _detach_wakeup_socket_in_forks() -> None:
    """Prevent signals to forked processes, such as DataLoader workers, from waking this process's thread."""

    def detach_wakeup_socket() -> None:
        if any(signal.getsignal(signum) is _ignore_signal for signum in signal.valid_signals()):
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=detach_wakeup_socket)
