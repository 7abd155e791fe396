"""One logger at work in a thread of its own, so that nobody has to wait for a disk or a network."""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
from typing import Any

from unitrain.loggers.logger import Logger, Start, Status

# How many calls may wait for a logger that is slow, how long one may take, and how long the end of a run waits for all.
_MOST_WAITING = 10_000
_CALL_SECONDS = 120.0
_END_SECONDS: dict[Status, float] = {"finished": 120.0, "stopped": 30.0, "failed": 30.0}

_log = logging.getLogger(__name__)


class Background:
    """Starts a logger and passes calls on to it, in their order; after the first that fails, no more.

    A logger that fails, hangs or cannot keep up is named in a warning and `left_out`: the run goes on without it. If
    nobody finishes it before, the end of the program does.
    """

    def __init__(self, logger: Logger, start: Start) -> None:
        self.logger, self.left_out, self._ending = logger, False, False
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._calls.put(("start", (start,)))
        self._doing: tuple[str, float] | None = None
        self._started = threading.Event()
        # A daemon: where a service never answers, the process ends all the same.
        self._thread = threading.Thread(target=self._work, name=type(logger).__name__, daemon=True)
        self._thread.start()

    def wait_until_started(self) -> None:
        """Wait until `start` is done, has failed, or takes too long."""
        self._started.wait(_END_SECONDS["finished"])

    def call(self, method: str, *arguments: Any) -> None:
        """Let the logger do this when it comes to it."""
        if self.left_out:
            return
        method_now, since = self._doing or ("", float("inf"))
        if time.monotonic() - since > _CALL_SECONDS:
            self._leave_out(f"has been busy with {method_now!r} for more than {_CALL_SECONDS:g} s")
        elif self._calls.qsize() >= _MOST_WAITING:
            self._leave_out(f"has {_MOST_WAITING} calls to catch up with")
        else:
            self._calls.put((method, arguments))

    def finish(self, status: Status) -> float:
        """Let the logger end when it has logged everything; return the time.monotonic() to which to `wait` for it."""
        self._ending = True
        atexit.unregister(self._finish_at_exit)
        self.call("finish", status)
        self._calls.put(None)
        return time.monotonic() + _END_SECONDS[status]

    def wait(self, deadline: float) -> None:
        """Wait until everything is logged, but not for ever. What is missing then may still be logged later."""
        if not self.left_out:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._leave_out("did not come to an end with the run")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            method, arguments = call
            self._doing = method, time.monotonic()
            try:
                getattr(self.logger, method)(*arguments)
            except BaseException as error:  # a SystemExit too: it is the logger that ends here, not the run
                self._leave_out(f"failed in {method!r}: {type(error).__name__}: {error}")
                if method != "finish":
                    with contextlib.suppress(BaseException):
                        self.logger.finish("failed")
                break
            finally:
                self._doing = None
                if method == "start":
                    # Only now, to come before what the logger's package does at the end of the program.
                    atexit.register(self._finish_at_exit)
                    self._started.set()

    def _finish_at_exit(self) -> None:
        if not self._ending:
            self.wait(self.finish("finished"))

    def _leave_out(self, why: str) -> None:
        self.left_out = True
        _log.warning("%s %s. The run goes on without it.", type(self.logger).__name__, why)
        self._calls.put(None)
